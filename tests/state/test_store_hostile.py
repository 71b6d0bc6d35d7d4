"""Files with right checksums and contents that no store writes: errors, and never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa

from scalein.errors import ScaleinError
from scalein.state import LogStore, format, manifest
from scalein.state.manifest import Manifest
from scalein.storage.local import LocalFileSystem
from tests.state.sample_store import BUDGET, KIND, Built, copied
from tests.state.store_pair import kernels_of

Change = Callable[[Manifest], None]


def _changed(meta: Callable[[dict[str, object]], object] | None = None,
             tables: Callable[[dict[str, np.ndarray]], object] | None = None) -> Change:
    def change(found: Manifest) -> None:
        if meta is not None:
            meta(found.meta)  # type: ignore[arg-type]
        if tables is not None:
            tables(found.tables)

    return change


def _set(name: str, value: object) -> Callable[[Manifest], None]:
    return _changed(meta=lambda meta: meta.__setitem__(name, value))


def _fill(name: str, value: int) -> Callable[[Manifest], None]:
    return _changed(tables=lambda tables: tables[name].fill(value))


def _schema(**fields: pa.DataType) -> str:
    return bytes(pa.schema(fields).serialize()).hex()


HOSTILE: dict[str, Callable[[Manifest], None]] = {
    "no runs": _changed(meta=lambda meta: meta.pop("runs")),
    "few runs": _set("runs", [[]]),
    "runs of text": _set("runs", [["x"]] * 16),
    "runs of lists": _set("runs", [[[1]]] * 16),
    "runs that are a number": _set("runs", 7),
    "negative runs": _set("runs", [[-1]] * 16),
    "no pieces": _changed(meta=lambda meta: meta.pop("pieces")),
    "pieces of nothing": _set("pieces", [None]),
    "more pieces": _set("pieces", [{"base": 4096, "shift": 16}] * 2),
    "negative shift": _set("pieces", [{"base": 4096, "shift": -1}]),
    "huge shift": _set("pieces", [{"base": 4096, "shift": 70}]),
    "small shift": _set("pieces", [{"base": 4096, "shift": 3}]),
    "text shift": _set("pieces", [{"base": 4096, "shift": "16"}]),
    "huge base": _set("pieces", [{"base": 1 << 70, "shift": 16}]),
    "negative base": _set("pieces", [{"base": -5, "shift": 16}]),
    "other base": _set("pieces", [{"base": 4096, "shift": 16}]),
    "text base": _set("pieces", [{"base": "here", "shift": 16}]),
    "few functions": _set("functions", ["sum"]),
    "unknown functions": _set("functions", ["evil"] * 3),
    "functions that do not fit": _set("functions", ["sum"] * 3),
    "no functions": _set("functions", None),
    "few bounds": _set("bounds", ["0"]),
    "bounds of text": _set("bounds", ["x"] * 3),
    "bounds of nothing": _set("bounds", None),
    "huge next": _set("next", 1 << 80),
    "text next": _set("next", "a"),
    "no files": _changed(meta=lambda meta: meta.pop("files")),
    "files of numbers": _set("files", 3),
    "bad key": _set("key", "zz"),
    "no key": _changed(meta=lambda meta: meta.pop("key")),
    "key of garbage": _set("key", "00" * 100),
    "nested key": _set("key", _schema(a=pa.list_(pa.int64()))),
    "null key": _set("key", _schema(a=pa.null())),
    "empty key": _set("key", _schema()),
    "other key": _set("key", _schema(user=pa.int64())),
    "many values": _set("value", _schema(**{f"v{k}": pa.int64() for k in range(60)})),
    "other value": _set("value", _schema(n=pa.int64())),
    "value like a key": _set("value", _schema(user=pa.int64(), seen=pa.string(), raw=pa.binary())),
    "group 999": _fill("0.group", 999),
    "group 0": _fill("0.group", 0),
    "all texts": _fill("0.kind", 1),
    "all records": _fill("0.kind", 0),
    "kind 7": _fill("0.kind", 7),
    "offset 0": _fill("0.offset", 0),
    "offset 8": _fill("0.offset", 8),
    "huge offset": _fill("0.offset", (1 << 63) + 4096),
    "used 0": _fill("0.used", 0),
    "used 1": _fill("0.used", 1),
    "huge used": _fill("0.used", (1 << 62)),
    "segment 0": _fill("0.segment", 0),
    "image 0": _fill("0.image", 0),
    "image 10^12": _fill("0.image", 10**12),
    "at 0": _fill("0.at", 0),
    "odd at": _fill("0.at", 4097),
    "huge at": _fill("0.at", (1 << 63)),
    "size 0": _fill("0.size", 0),
    "huge size": _fill("0.size", (1 << 63)),
    "size 2^40": _fill("0.size", (1 << 40)),
    "no index": _changed(tables=lambda tables: tables.pop("0.index")),
    "index 0": _fill("0.index", 0),
    "huge index": _fill("0.index", 1 << 63),
    "many indexes": _changed(tables=lambda tables: tables.__setitem__("0.index", np.repeat(tables["0.index"], 9))),
    "float index": _changed(tables=lambda tables: tables.__setitem__("0.index", tables["0.index"] * 0.5)),
    "no table": _changed(tables=lambda tables: tables.pop("0.group")),
    "short table": _changed(tables=lambda tables: tables.__setitem__("0.used", tables["0.used"][:3])),
    "short segments": _changed(tables=lambda tables: tables.__setitem__("0.segment", tables["0.segment"][:1])),
    "signed table": _changed(tables=lambda tables: tables.__setitem__("0.group", -tables["0.group"].astype("<i8") - 1)),
    "float table": _changed(tables=lambda tables: tables.__setitem__("0.offset", tables["0.offset"] * 1.5)),
}  # fmt: skip
# Everything is tried in one process, which prints what it tries: if it ends early, it crashed.
PROGRAM = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from scalein.state import piece_lookups
piece_lookups.BYTES_PER_READ = 0
from tests.state.test_store_hostile import attempt
for line in sys.stdin:
    name, path = line.rstrip().split(chr(9))
    print(name + chr(9) + attempt(Path(path)), flush=True)
"""


def attempt(path: Path) -> str:
    """The result of using a store with a hostile file: "" if it opens, else the class and first line of the error."""
    try:
        with LogStore.open_on(LocalFileSystem(path), key=None, value=None, budget=BUDGET) as store:
            with suppress(ScaleinError, UnicodeDecodeError):
                store.get(KIND.key_table(Random(0), 500))
            with suppress(ScaleinError):
                store.verify()
            keys = store.scan().read_all().select(store._key.names)
            store.get(keys)
            len(store)
            store.delete(keys.slice(0, 10))
    except ScaleinError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    except UnicodeDecodeError as error:
        return f"fine: {error}"
    except BaseException as error:
        return f"!{type(error).__name__}: {' '.join(str(error).split())} {error.__traceback__ and _where(error)}"
    return "fine: it opens"


def _where(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at is not None else ""


def null_on_error(places: dict[str, Path]) -> dict[str, str]:
    given = "".join(f"{name}\t{path}\n" for name, path in places.items())
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", PROGRAM], input=given, capture_output=True,
                          text=True, cwd=Path(__file__).parents[2], timeout=300, check=False)  # fmt: skip
    found = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    if len(found) < len(places):
        culprit = next(name for name in places if name not in found)
        raise AssertionError(f"{culprit!r} ended the process ({done.returncode}): {done.stderr[-3000:]}")
    return found


def test_hostile_manifests_do_no_harm(built: Built, tmp_path: Path) -> None:
    places = {}
    for number, (name, change) in enumerate(HOSTILE.items()):
        path = tmp_path / str(number)
        path.mkdir()
        for file in built.names:
            if not file.startswith("snapshot"):
                os.link(built.path / file, path / file)
        found = manifest.read(LocalFileSystem(built.path, readonly=True), built.ids[-1])
        change(found)
        (path / format.manifest_name(found.id)).write_bytes(manifest.encode(found).tobytes())
        places[name] = path
    found_errors = null_on_error(places)
    wrong = {name: text for name, text in found_errors.items() if text.startswith("!")}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    for name, text in found_errors.items():
        said = text.startswith("fine") or any(end in text for end in (".manifest", ".seg", ".run", ".idx"))
        assert said, (name, text)


def test_hostile_records_do_no_harm(built: Built, tmp_path: Path) -> None:
    """Images and runs with right checksums and random records: heads, lengths, offsets of texts."""
    random = np.random.default_rng(3)
    kernels = kernels_of("text", 1)
    places = {}
    for number in range(4):
        path = copied(built, tmp_path / str(number))
        found = manifest.read(LocalFileSystem(path, readonly=True), built.ids[-1])
        for id, at, size in zip(*(found.tables[f"0.{name}"].tolist() for name in ("image", "at", "size")), strict=True):
            file = path / format.image_name(id)
            raw = np.frombuffer(bytearray(file.read_bytes()), np.uint8)
            area = raw[at : at + size]
            if number % 4 == 0:
                area[:] = random.integers(0, 256, size, dtype=np.uint8)
            elif number % 4 == 1:
                area[random.integers(0, size, size // 50)] = 255
            elif number % 4 == 2:
                words = area.view("<u4")
                words[random.integers(0, len(words), size // 100)] = random.integers(13, 1 << 31)
            else:
                area[random.integers(0, size, 3)] ^= 64
            sums = raw[at + size :][: size // 4096 * 8].view("<u8")
            seeds = np.uint64(id) ^ (np.uint64(at) + np.arange(len(sums), dtype=np.uint64) * np.uint64(4096))
            sums[:] = kernels.checksums(np.ascontiguousarray(area.reshape(-1, 4096)), seeds)
            file.write_bytes(raw.tobytes())
        places[str(number)] = path
    wrong = {name: text for name, text in null_on_error(places).items() if text.startswith("!")}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_hostile_indexes_do_no_harm(built: Built, tmp_path: Path) -> None:
    """Indexes with right checksums: entries that point to no chunk, into records, into texts; a random directory."""
    random = np.random.default_rng(4)
    kernels = kernels_of("text", 1)
    places = {}
    for number in range(4):
        path = copied(built, tmp_path / str(number))
        for name in built.names:
            if not name.startswith("index"):
                continue
            raw = np.frombuffer(bytearray((path / name).read_bytes()), np.uint8)
            id = int(raw[16:24].view("<u8")[0])
            blocks = -(-int(raw[24 + 8 * 256 :][:8].view("<u8")[0]) // 511)
            first = 1 + blocks if number == 3 else 1
            area = raw[4096 * first :][: 4096 * (-(-blocks // 511) if number == 3 else blocks)].reshape(-1, 4096)
            words = area.view("<u8")[:, 1:]
            noise = random.integers(0, (1 << 35) if number == 0 else (1 << 14), words.shape, np.uint64)
            words[:] = words >> np.uint64(35) << np.uint64(35) | (words + np.uint64(1) if number == 2 else noise) % (
                np.uint64(1 << 35))  # fmt: skip
            if number == 3:
                words[:] = random.integers(0, (1 << 64) - 1, words.shape, np.uint64)
            area[:, :8] = 0
            seeds = np.uint64(id) ^ (np.arange(first, first + len(area), dtype=np.uint64) * np.uint64(4096))
            area.view("<u8")[:, 0] = kernels.checksums(np.ascontiguousarray(area), seeds)
            (path / name).write_bytes(raw.tobytes())
        places[str(number)] = path
    wrong = {name: text for name, text in null_on_error(places).items() if text.startswith("!")}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


# --- other directories, other processes
