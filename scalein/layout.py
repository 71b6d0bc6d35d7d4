"""Memory that Python, kernels and the store share, described once. No llvmlite here.

Frame    the one argument of a kernel: named 8-byte words.
Record   hash, null bits, keys, accumulators: what the arena of a table holds.
Index    256 key groups by the hash's top byte. A group's table is an array of buckets, a bucket is
         a cache line of 8 words, a word is tag (24 bits) | address (40 bits, in 8-byte units); 0 is
         empty. The bucket is chosen by the tag's top bits, so a table doubles by splitting on stored
         hash bits and never looks at a record.

    hash   | group 8 | tag 24 | rest 32 |
                     | bucket number ... (top bits of the tag)

A record's address is relative to the arena's base, so address -> pointer is one add; the state
store replaces the arena and keeps the index, the words and the records.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from scalein.dtypes import DType, Kind
from scalein.errors import InternalError

# --- statuses a kernel returns; anything but DONE leaves `row` where it goes on
DONE = 0
ERROR = 1  # slot `errors` has a bit for each expression that failed in a live row
OUTPUT_FULL = 2  # the output chunk has no room for one more block
# Slot `full` says which table wants room: 0 the keyed one, k its side table number k - 1.
ARENA_FULL = 3  # the record arena or the string heap has no room for one more block
INDEX_FULL = 4  # a key group's table must double before the next record
OUT_OF_DOMAIN = 5  # a key or slice lies outside the direct-addressed domain
RING_ADVANCE = 6  # slots `ring.least` and `ring.greatest` are the block's slices; some lie outside the ring
CHUNKS_FULL = 7  # the partitioner has too few free chunks for one more block
OUT_OF_BOUNDS = 8  # safe mode only: slot `unsafe` is the number of the check that failed
PAUSED = 9  # nothing is wanted: a kernel that multiplies rows gives its caller a chance to stop
HEAP_FULL = 10  # the heap that accumulators keep bytes in has less room than slot `heap.need`
# Of a stored table, slot `full.group` says whose chunk or index wants room, and `full.need` how much text.
UNDO_FULL = 11  # the undo log of segment `full.segment` has no room for one more record

BLOCK_ROWS = 1024  # rows a kernel works on at once, at most: selection vectors and scratch stay in L1
# Behind a join or into groups, columns are picked row by row and fetched ahead a block at a time: smaller bursts
# overlap better with the work (W1: 0.92 of C against 0.82), while a plain filter runs 8 % faster on whole ones.
PROBING_BLOCK_ROWS = 256
GROUPS = 256
BUCKET_WORDS = 8
TAG_BITS = 24
ADDRESS_BITS = 40
ADDRESS_UNIT = 8  # bytes
# A table doubles when it is this full (in sixteenths): longer probes cost more than room.
LOAD_SIXTEENTHS = 11


# --- slots of a frame, by name. Kernels use those they need; a name that is not declared here is a mistake.

# Before the name of an input column in the names of its slots: whatever a user calls a column ("out0"), it
# is not taken for another slot.
COLUMN = "$"
# Before the names of the slots of a `distinct`'s table.
DEDUP = "dedup"

_OF_FLOWS = """
    row end errors unsafe stop progress first_row source base one piece piece.count pieces
    picked due until once
    text.at text.end text.chunk bad.error bad.text bad.size
    full full.group full.need full.segment owner.worker owner.workers time.least time.greatest
    out out.capacity out.count direct.arena direct.size direct.first_slice direct.slices direct.slice_stride
    strays free ring.open ring.limit ring.least ring.greatest window.first slide.back range.first range.last
    chain.next chain.longer owners pairs pairs.count spare log log.used
    part.heads part.free part.left part.taken part.log part.chunk_bytes
"""
_OF_THE_STORE = """
    copying segment.shift segment.dirty segment.copying undo.at undo.end undo.batch
    pool.chunks pool.groups pool.left pool.size out.hashes out.pointers
    pointers hashes counts found.records found.hashes found.counts moves count
    extents words least greatest drop leaving target size first seeds id offset per block shift lists
"""
_OF_PARQUET = """
    data left optional compressed room rows file pages pages.count values entries most_width done
    page at number next values_left width
"""
_OF_FRAMES = """
    in bits mask places valid times ties width out.valid stack0 stack1 stack2
"""
SLOTS = frozenset((_OF_FLOWS + _OF_THE_STORE + _OF_PARQUET + _OF_FRAMES).split())

_COLUMN_PARTS = "data|data_bit|data_last|bits|bit|last|offsets|bytes|codes|values|buffers|sizes|buffer_count"
_SLOT_FAMILIES = re.compile("|".join((
    rf"\$.*\.({_COLUMN_PARTS})",  # an Arrow column of the input
    r"out\d+\.(data|valid|offsets|used|room)",  # a column of the output
    rf"(table|{DEDUP}|bag\d+|join\d+)\.(groups|arena|arena_size|used|heap|heap_left|heap_need)",  # a hash table
    rf"{DEDUP}\.blocks",
    r"join\d+\.(least|span|rows|next|at|cursor|marks|mark_count|times|time_count|ends)",
    rf"join\d+\..*\.({_COLUMN_PARTS}|rows|known)",  # a column of a joined table
    r"log\d+\.(arena|arena_size|used)",
    r"(log\d+\.)?heap\.(at|left|need)",
    r"direct\.(least|span|stride)\d+",
    r"window\.slice\d+",
)), re.DOTALL)


@lru_cache(1 << 14)
def check_slot(name: str) -> None:
    """Raise InternalError unless a slot of this name is declared."""
    if name not in SLOTS and _SLOT_FAMILIES.fullmatch(name) is None:
        raise InternalError(f"no slot of a frame is called {name!r}", hint="declare it in layout.py")


@dataclass(frozen=True)
class Frame:
    """Slot names of a kernel's frame, in order."""

    slots: tuple[str, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.slots)}

    @cached_property
    def words(self) -> type[ctypes.Array[ctypes.c_int64]]:
        return ctypes.c_int64 * max(1, len(self.slots))

    def new(self) -> FrameData:
        return FrameData(self)


class FrameData:
    """A frame's words; `address` is what a kernel is called with. Keeps what it points to alive."""

    __slots__ = ("_index", "_words", "address", "keep", "rows")

    def __init__(self, frame: Frame) -> None:
        # Words of ctypes: made, set and read in a third of the time that an array of numpy takes.
        self._words = frame.words()
        self.address = ctypes.addressof(self._words)
        self._index = frame.places
        self.keep: dict[str, object] = {}
        if _TEXT in self._index:
            self.keep[_TEXT] = _MadeText(self._words, self._index[_TEXT])
        self.rows = 0  # of all pieces, for the metrics of a kernel that runs over pieces

    def __setitem__(self, name: str, value: int) -> None:
        k = self._index.get(name)
        if k is not None:
            self._words[k] = int(value)  # modulo 2^64
        else:  # a kernel that never reads a slot has none
            check_slot(name)

    def __getitem__(self, name: str) -> int:
        try:
            return self._words[self._index[name]]
        except KeyError:
            raise InternalError(f"a kernel has no slot {name!r}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def get(self, name: str, default: int) -> int:
        """A slot's word; `default` if the kernel has no such slot."""
        if name in self._index:
            return self[name]
        check_slot(name)
        return default

    def point(self, name: str, array: np.ndarray) -> None:
        """Set a slot to an array's address and keep the array."""
        self.keep[name] = array
        self[name] = int(array.ctypes.data)


_TEXT = "text.chunk"
_free = ctypes.CDLL(None).free
_free.argtypes, _free.restype = [ctypes.c_void_p], None


class _MadeText:
    """Frees the text that a kernel made, when nothing that could point to it is left (`llvm_backend/text_arena.py`)."""

    __slots__ = ("_place", "_words")

    def __init__(self, words: ctypes.Array[ctypes.c_int64], place: int) -> None:
        self._words, self._place = words, place

    def __del__(self) -> None:
        chunk = self._words[self._place]
        while chunk:
            before = ctypes.c_int64.from_address(chunk).value
            _free(chunk)
            chunk = before


# --- Parquet (see `scalein/connectors/formats/parquet_decode.py`)

HEADER_FIELDS = 16  # numbers of fields in a page's header, below which they are looked at
PAGE_WORDS = 8  # of a page: its start after the header, and the fields of the header
PAGE_START, PAGE_SIZE, PAGE_RAW_SIZE, PAGE_VALUES, PAGE_PLAIN, PAGE_LEVELS, PAGE_COMPRESSED, PAGE_KIND = range(8)
# For PAGE_LEVELS: levels are stored with the values; else the number of bytes before them, never compressed.
WITHIN = -1
OPEN_WORDS = 4  # of a page that is open: address, bytes, values, whether there are levels before these
SLOP = 16  # bytes after a decompressed page that may be overwritten
MAX_BITS = 24  # of a dictionary index, in whole bytes: larger dictionaries are unsupported

# --- stored tables (see `scalein/state`)

# Words of a key group's header: bucket array, shift, mask, room (as of any index); then where its next record and
# its next text go, the ends of their chunks, the flags of a record that is inserted, and whether the next chunk of
# records may come from the pool (slots `pool.chunks`, `pool.groups`: the owner of each, `pool.left`, `pool.size`).
# One word of all groups, then the next word: every row reads two words of its group, which then take 4 KiB of L1 and
# not a line a group.
GROUP_WORDS = 10
(BUCKETS, SHIFT, MASK, ROOM, RECORD_AT, RECORD_END, TEXT_AT, TEXT_END, NEW_FLAGS, POOLED) = range(10)
# What a row, or a newer record, may do to a value. All of them are associative, so records of rows that came later
# (partials) can be merged into older ones at any time.
FUNCTIONS = ("sum", "count", "min", "max", "first", "last", "replace")
UNCHANGED = ""  # the value stays as it is
# The first word of a stored record:
#   | nulls of keys 16 | nulls of values 32 | accesses 8 | flags 8 |
TOMB = 1  # deleted; hides whatever older record there is
PARTIAL = 2  # of rows since the group left memory: older records of the key count as well
FRESH = 4  # just inserted by a kernel that merges records, and empty
ACCESSES_SHIFT, VALUE_NULLS, KEY_NULLS = 8, 16, 48
MAX_ACCESSES = 255
MAX_VALUES, MAX_KEYS = 32, 16  # columns of a stored table
UNDO_BATCH_SHIFT = 40  # of the number of the call, above a record's offset, in an entry of an undo log
PAGE_BYTES = 4096  # what files and their checksums are made of


class SortedRecords(NamedTuple):
    """Pointers to stored records in the order of their hashes, and of their ages where these are equal."""

    hashes: np.ndarray
    pointers: np.ndarray


# --- records

NULL_BITS = 64  # of a record: one word
STRING_BYTES = 16  # length (4), then 12 bytes of text, or 4 bytes of it and a pointer (8)
INLINE_BYTES = 12
SKETCH_BITS = 9  # of a hash that choose a register: 512 of them estimate within 5 % (one standard deviation)
SKETCH_REGISTERS = 1 << SKETCH_BITS
COARSE_BITS = 45  # of a float's 52 that an approximate quantile leaves away: values are right within 0.4 %


def size_of(dtype: DType) -> int:
    """Bytes of one value in a record."""
    if dtype.is_bytes:
        return STRING_BYTES
    return 1 if dtype.kind is Kind.BOOL else dtype.bits // 8


@dataclass(frozen=True, slots=True)
class Slot:
    """A field of a record: name, size and alignment in bytes, and its value in a new record."""

    name: str
    size: int
    init: bytes = b""


@dataclass(frozen=True)
class RecordLayout:
    """Offsets of a record's fields: fixed ones first, then `ring` copies of the ring's fields.

    Fields are placed largest first, so nothing is padded but the end. Every record is a multiple of
    8 bytes: its address fits the index's 40-bit word.
    """

    fixed: tuple[Slot, ...]
    ringed: tuple[Slot, ...] = ()
    ring: int = 0

    @cached_property
    def _placed(self) -> tuple[dict[str, int], int, int]:
        offsets: dict[str, int] = {}
        at = 0
        for slot in sorted(self.fixed, key=lambda s: -min(s.size, 8)):
            offsets[slot.name] = at
            at += slot.size
        start = at = (at + 7) // 8 * 8
        for slot in sorted(self.ringed, key=lambda s: -min(s.size, 8)):
            offsets[slot.name] = at
            at += slot.size
        step = ((at + 7) // 8 * 8) - start
        return offsets, start, step

    def offset(self, name: str) -> int:
        return self._placed[0][name]

    @property
    def ring_start(self) -> int:
        return self._placed[1]

    @property
    def ring_step(self) -> int:
        """Bytes of one slice's accumulators."""
        return self._placed[2]

    @property
    def size(self) -> int:
        return max(8, self._placed[1] + self._placed[2] * self.ring)

    @cached_property
    def template(self) -> bytes:
        """The bytes of a new record before its keys are written."""
        record = bytearray(self.size)
        for slot in self.fixed:
            at = self.offset(slot.name)
            record[at : at + len(slot.init)] = slot.init
        for slot in self.ringed:
            for k in range(self.ring):
                at = self.offset(slot.name) + k * self.ring_step
                record[at : at + len(slot.init)] = slot.init
        return bytes(record)
