"""Compiled kernels, in memory and on disk, by digest of stage, CPU and versions.

The disk cache holds machine code, so it must be as private as the user's own programs: its folder
belongs to the user and only the user may write to it, else it is not used at all. It never raises: an
unwritable home, a read-only container, a full disk or a damaged file all mean compiling again.
Many processes may use it at once: a file appears whole under its final name or not at all, and its
content is checked before it is linked. The folder is trimmed to 256 MB by the time of last use.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import llvmlite

import scalein
from scalein.ir.stages import FLOW_SINKS, FromBatches, FromRows, Stage
from scalein.layout import Frame
from scalein.llvm_backend.object_loader import Image, Kernel, flatten, load_image
from scalein.llvm_backend.target import LLVM_LOCK, Target, target_for
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

_MAGIC = b"scalein kernel 2\n"
_TEMPORARY = "unfinished-"
_NATIVE = "native.target"  # the CPU, as found by LLVM since the machine was started
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

# Packages below scalein/ that shape code, with all that is in them; the modules right in scalein/ do as well.
_SHAPES_CODE = ("ir", "kernels", "llvm_backend")

# Of the folder: more is trimmed to three quarters of it, what has not been used for longest first.
MAX_BYTES = 256 << 20
TRIM_EVERY = 32  # files written, on average: looking at all of them takes as long as compiling a kernel
USED_S = 24 * 3600  # the time of a file's last use is right within this
LEFT_OVER_S = 3600  # the age at which a file that is not whole was left by a process that ended


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A kernel with what its caller must know: error texts, columns that are never null, cost."""

    kernel: Kernel
    errors: tuple[str, ...]
    never_null: tuple[bool, ...]
    checks: tuple[str, ...]
    origin: str  # "disk" or "compiled"
    seconds: float
    row_bytes: float = 0.0  # of Arrow columns that it reads
    stage: Stage | None = None  # of which it is the kernel
    is_divisible: bool = False  # whether its rows may be divided among several calls


def _is_divisible(stage: Stage) -> bool:
    """Whether the rows from `row` to `end` may be divided; those of pieces are not numbered through."""
    return isinstance(stage.sink, FLOW_SINKS) and not isinstance(stage.reader, FromRows)


# Most recently used kernels; an evicted one is unloaded when it no longer runs.
MAX_KERNELS = 512
_known: OrderedDict[str, Compiled] = OrderedDict()
_lock = threading.Lock()


@cache
def _code_version() -> str:
    """That of the compiler when this process began."""
    return _version_now()


def _version_now() -> str:
    """Changes whenever the compiler does: the release, and the state of each file that shapes code or stages."""
    release = scalein.__version__
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.isdir(root):  # in a zip: scalein.spark.ship, or --py-files
        with open(os.path.dirname(root), "rb") as file:
            return f"{release}|{hashlib.sha256(file.read()).hexdigest()}"
    found = [("", root), *((name, os.path.join(root, name)) for name in _SHAPES_CODE)]
    facts: list[str] = []
    for name, folder in found:  # grows on the way
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    state = entry.stat()
                    facts.append(f"{name}/{entry.name}:{state.st_size}:{state.st_mtime_ns}")
                elif name and entry.is_dir() and entry.name != "__pycache__":
                    found.append((f"{name}/{entry.name}", entry.path))
    return "|".join((release, *sorted(facts)))


_code_version()  # at once: files may change before the first kernel


def digest(stage: Stage | str, target: Target, safe: bool) -> str:
    """The name of a stage's kernel in the cache; those without a stage have a name of their own."""
    text = "\n".join((repr(stage), repr(target), target.version, _code_version(), str(safe)))
    return hashlib.sha256(text.encode()).hexdigest()


def load_kernel(stage: Stage, options: Options) -> Compiled:
    """The stage's kernel: from memory, from disk, or compiled now."""

    def lower(target: Target) -> Lowered:
        from scalein.llvm_backend.stage import lower_stage  # half of all imports, and kernels are mostly on disk

        return lower_stage(stage, target, options.safe)

    return load_lowered(stage, lower, options, stage.brief)


def load_lowered(name: Stage | str, lower: Callable[[Target], Lowered], options: Options,
                 brief: bool = False) -> Compiled:
    """A kernel: from memory, from disk, or lowered and compiled now."""
    target = _target(options.cpu, options.cache)
    key = digest(name, target, options.safe)
    found = _from_memory(key)
    if found is not None:
        return found
    with LLVM_LOCK:  # LLVM compiles one module at a time; another thread may have compiled it meanwhile
        found = _from_memory(key)
        if found is None:
            started = time.perf_counter()
            found = _from_disk(key, options.cache, started)
            if found is None:
                found = _compile(lower(target), target, options.cache, key, brief, started)
            if isinstance(name, Stage):
                row_bytes = name.reader.row_bytes if isinstance(name.reader, FromBatches) else 0.0
                found = replace(found, row_bytes=row_bytes, stage=name,
                                is_divisible=_is_divisible(name))
            with _lock:
                _known[key] = found
                if len(_known) > MAX_KERNELS:
                    _known.popitem(last=False)
    return found


def has_kernel(name: str, options: Options) -> bool:
    """Whether a kernel without a stage is in memory or on disk: to load it takes a millisecond, not a hundred."""
    key = digest(name, _target(options.cpu, options.cache), options.safe)
    home = private_folder(options.cache, create=False)
    return _from_memory(key) is not None or (home is not None and os.path.exists(os.path.join(home, f"{key}.kernel")))


def _from_memory(key: str) -> Compiled | None:
    with _lock:
        found = _known.get(key)
        if found is not None:
            _known.move_to_end(key)
        return found


def _compile(lowered: Lowered, target: Target, folder: str, key: str, brief: bool, started: float) -> Compiled:
    from scalein.llvm_backend.jit import emit

    code = emit(lowered.text, target, brief)
    image = flatten(code, lowered.name) or code
    kernel = _linked(lowered.name, image, lowered.frame)
    if _version_now() == _code_version():  # else what was imported to lower it may be another than the key says
        _to_disk(key, folder, lowered, image)
    took = time.perf_counter() - started
    return Compiled(kernel, lowered.errors, lowered.never_null, lowered.checks, "compiled", took)


def _linked(name: str, image: Image | bytes, frame: Frame) -> Kernel:
    """A kernel from an image, or from object code that LLVM has to link."""
    if isinstance(image, Image):
        return load_image(name, image, frame)
    from scalein.llvm_backend.jit import link

    return link(name, image, frame)


@cache
def _target(cpu: str, folder: str) -> Target:
    """The target of a CPU name. What "native" means is remembered until the machine is started again: to find it out
    takes all of LLVM.
    """
    machine = _machine_id() if cpu == "native" else None
    if machine is None:
        return target_for(cpu)
    known = _read(folder, _NATIVE)
    if known is not None:
        name, *target = json.loads(known)
        if name == machine:
            return Target(*target)
    found = target_for(cpu)
    _write(folder, _NATIVE, json.dumps([machine, found.triple, found.cpu, found.features]).encode())
    return found


def _machine_id() -> str | None:
    """Tells this machine from others and from itself before its last start, after which its CPU may be another one."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return " ".join((file.read().strip(), *os.uname(), llvmlite.__version__))
    except OSError:
        return None


# --- disk


def private_folder(path: str, create: bool = True) -> str | None:
    """The folder if it is ours alone to write; None if it cannot be used."""
    if not path or not hasattr(os, "getuid"):
        return None
    try:
        if create:
            os.makedirs(path, mode=0o700, exist_ok=True)
        facts = os.stat(path)
    except OSError:
        return None
    is_ours = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_ours and stat.S_ISDIR(facts.st_mode) else None


def _from_disk(key: str, folder: str, started: float) -> Compiled | None:
    body = _read(folder, f"{key}.kernel")
    if body is None:
        return None
    try:
        head, code = body.split(b"\n", 1)
        about = json.loads(head)
        errors, never_null, checks, slots = (tuple(about[name]) for name in ("errors", "never_null", "checks", "slots"))
        image = code if about["image"] is None else Image(code, *about["image"])
        kernel = _linked(about["name"], image, Frame(slots))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    return Compiled(kernel, errors, never_null, checks, "disk", time.perf_counter() - started)


def _to_disk(key: str, folder: str, lowered: Lowered, image: Image | bytes) -> None:
    about: dict[str, object] = {"name": lowered.name, "slots": lowered.frame.slots, "errors": lowered.errors,
                                "never_null": lowered.never_null, "checks": lowered.checks, "image": None}
    if isinstance(image, Image):
        about["image"], code = (image.entry, image.imports, image.pointers), image.content
    else:
        code = image
    _write(folder, f"{key}.kernel", json.dumps(about).encode() + b"\n" + code)
    home = private_folder(folder, create=False)
    if home is not None and int(key[:8], 16) % TRIM_EVERY == 0:  # digests are as good as random
        trim(home)


def _read(folder: str, name: str) -> bytes | None:
    """The content of a file; None if it is not there, not whole, or if others may write it."""
    home = private_folder(folder, create=False)
    if home is None:
        return None
    try:
        descriptor = os.open(os.path.join(home, name), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "rb") as file:
            facts = os.fstat(file.fileno())
            if time.time() - facts.st_mtime > USED_S:
                with suppress(OSError):  # it only gets trimmed earlier
                    os.utime(file.fileno())
            if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            content = file.read()
    except OSError:
        return None
    start = len(_MAGIC) + 64
    body = content[start:]
    check = content[len(_MAGIC) : start]
    return body if content.startswith(_MAGIC) and hashlib.sha256(body).hexdigest().encode() == check else None


def _write(folder: str, name: str, body: bytes) -> None:
    """Write a file that appears whole or not at all, and that only its owner may read; gives up on errors."""
    import tempfile  # with what it imports it takes 10 ms, and kernels are mostly on disk

    home = private_folder(folder)
    if home is None:
        return
    with suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=home, prefix=_TEMPORARY)  # mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).hexdigest().encode() + body)
            os.replace(temporary, os.path.join(home, name))
        except OSError:
            os.unlink(temporary)


def trim(home: str) -> None:
    """Remove the files used longest ago while the folder is too large, and what dead processes left half-written.

    Other processes may trim, write and read at the same time: a file that is gone is compiled again.
    """
    files: list[tuple[float, int, str]] = []
    now = time.time()
    try:
        with os.scandir(home) as entries:
            for entry in entries:
                with suppress(OSError):  # just removed by another process
                    facts = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".kernel"):
                        files.append((facts.st_mtime, facts.st_size, entry.path))
                    elif entry.name.startswith(_TEMPORARY) and now - facts.st_mtime > LEFT_OVER_S:
                        os.unlink(entry.path)
    except OSError:
        return
    total = sum(size for _, size, _ in files)
    if total > MAX_BYTES:
        for _, size, path in sorted(files):
            if total <= MAX_BYTES * 3 // 4:
                break
            with suppress(OSError):
                os.unlink(path)
            total -= size
