"""Images: object code linked ahead of time, to be mapped and called without LLVM.

`flatten` lays the sections of an ELF object out side by side and resolves what lies within it. What remains for
`load_image` are the addresses of functions of the C library, in slots at the end of the image. Loading LLVM takes
longer than a small query, and kernels are mostly in the cache.

Objects for other CPUs, or with a relocation that is not known here, are not flattened: LLVM's JIT links them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from scalein.layout import Frame

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_X86_64 = 62
_SYMTAB, _RELA, _NOBITS, _UNWIND = 2, 4, 8, 0x70000001
_WRITE, _ALLOC = 1, 2
_UNDEFINED, _FIRST_RESERVED = 0, 0xFF00
_PC32, _PLT32, _PC64, _GOT = 2, 4, 24, (9, 41, 42)  # R_X86_64_*; those of the GOT with and without relaxation
_STUB = b"\xff\x25\0\0\0\0"  # jmp through the address that follows it
_SLOT = 8
_READ_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Image:
    """Code and constants that may be mapped anywhere, and the addresses that have to be filled in."""

    content: bytes
    entry: int  # offset of the kernel
    imports: tuple[tuple[int, str], ...]  # offset of a slot, and the function whose address it takes
    pointers: tuple[tuple[int, int], ...]  # offset of a slot, and the offset whose address it takes


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Machine code of one stage: call it with a frame's address; a ctypes call releases the GIL."""

    name: str
    frame: Frame
    call: Callable[[int], int]
    keep: object  # the memory of the code: code lives as long as this


class _Unsupported(Exception):
    """The object has something that only LLVM's linker knows."""


def flatten(image: bytes, name: str) -> Image | None:
    """The object code of a kernel as an image; None if only LLVM can link it."""
    try:
        return _Object(image).flatten(name)
    except _Unsupported:
        return None


class _Object:
    """An ELF object and the layout of its image."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        if image[:6] != _ELF64_LITTLE:
            raise _Unsupported
        _, _, machine, _, _, _, start, _, _, _, _, size, count, _ = _HEADER.unpack_from(image)
        if machine != _X86_64:
            raise _Unsupported
        self._sections = [_SECTION.unpack_from(image, start + size * number) for number in range(count)]
        self._content = bytearray()
        self._places: dict[int, int] = {}  # section -> its offset in the image
        self._slots: dict[tuple[str, int], int] = {}  # GOT slots and stubs, by kind and symbol
        self._imports: list[tuple[int, str]] = []
        self._pointers: list[tuple[int, int]] = []

    def flatten(self, name: str) -> Image:
        symtab = next(section for section in self._sections if section[1] == _SYMTAB)
        self._symbols = list(_SYMBOL.iter_unpack(self._bytes(symtab)))
        self._names = self._bytes(self._sections[symtab[6]])
        tables = [section for section in self._sections if section[1] == _RELA and self._is_placed(section[7])]
        for number in range(len(self._sections)):
            if self._is_placed(number):
                self._place(number)
        for table in tables:
            for offset, info, addend in _RELOCATION.iter_unpack(self._bytes(table)):
                self._relocate(self._places[table[7]] + offset, info & 0xFFFFFFFF, info >> 32, addend)
        entry = next(number for number in range(len(self._symbols)) if self._name(number) == name)
        return Image(bytes(self._content), self._address(entry), tuple(self._imports), tuple(self._pointers))

    def _is_placed(self, number: int) -> bool:
        """Whether kernels need the section: code and constants, but not the tables of exceptions that none throws."""
        _, kind, flags, _, _, size, *_ = self._sections[number]
        return bool(flags & _ALLOC and size and kind != _UNWIND)

    def _bytes(self, section: tuple[int, ...]) -> bytes:
        return self._image[section[4] : section[4] + section[5]]

    def _place(self, number: int) -> None:
        section = self._sections[number]
        if section[2] & _WRITE or section[1] == _NOBITS:
            raise _Unsupported  # memory of its own, which an image does not have
        self._places[number] = self._append(self._bytes(section), max(1, section[8]))

    def _append(self, content: bytes, alignment: int) -> int:
        self._content += bytes(-len(self._content) % alignment)
        place = len(self._content)
        self._content += content
        return place

    def _name(self, symbol: int) -> str:
        start = self._symbols[symbol][0]
        return self._names[start : self._names.index(b"\0", start)].decode()

    def _address(self, symbol: int) -> int:
        section, value = self._symbols[symbol][3:5]
        if section >= _FIRST_RESERVED or section not in self._places:
            raise _Unsupported
        return self._places[section] + int(value)

    def _relocate(self, place: int, kind: int, symbol: int, addend: int) -> None:
        is_import = self._symbols[symbol][3] == _UNDEFINED
        if kind in _GOT:
            target = self._got(symbol, is_import)
        elif kind == _PLT32 and is_import:
            target = self._stub(symbol)
        elif kind in (_PC32, _PLT32, _PC64) and not is_import:
            target = self._address(symbol)
        else:
            raise _Unsupported
        struct.pack_into("<q" if kind == _PC64 else "<i", self._content, place, target + addend - place)

    def _got(self, symbol: int, is_import: bool) -> int:
        """A slot with the symbol's address."""
        if ("slot", symbol) not in self._slots:
            slot = self._slots["slot", symbol] = self._append(bytes(_SLOT), _SLOT)
            if is_import:
                self._imports.append((slot, self._name(symbol)))
            else:
                self._pointers.append((slot, self._address(symbol)))
        return self._slots["slot", symbol]

    def _stub(self, symbol: int) -> int:
        """Code that jumps to a function anywhere in memory: a call reaches only 2 GiB."""
        if ("stub", symbol) not in self._slots:
            stub = self._slots["stub", symbol] = self._append(_STUB + bytes(_SLOT), 16)
            self._imports.append((stub + len(_STUB), self._name(symbol)))
        return self._slots["stub", symbol]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def load_image(name: str, image: Image, frame: Frame) -> Kernel:
    """A kernel from an image. Its memory is unmapped when the kernel is dropped.

    Raises OSError where the system refuses, and AttributeError for a function that the process does not have.
    """
    memory = mmap.mmap(-1, len(image.content))
    memory.write(image.content)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for slot, function in image.imports:
        struct.pack_into("<Q", memory, slot, ctypes.cast(getattr(_libc(), function), ctypes.c_void_p).value)
    for slot, target in image.pointers:
        struct.pack_into("<Q", memory, slot, base + target)
    if _libc().mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(image.content)), _READ_EXECUTE):
        raise OSError("memory cannot be made executable")
    return Kernel(name, frame, SIGNATURE(base + image.entry), memory)
