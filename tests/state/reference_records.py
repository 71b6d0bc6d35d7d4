"""Reference implementations of checksums and records, in plain Python."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from scalein.state.run_file import Records
from scalein.state.run_writer import RunInfo, RunWriter
from scalein.storage.filesystem import FileSystem

M64 = (1 << 64) - 1
Row = tuple[int, tuple[bytes, ...]]  # a number and the strings of a record
Texts = list["ctypes.Array[ctypes.c_char]"]


def reference_checksum(data: bytes, seed: int) -> int:
    lanes = [(seed ^ lane * 0x9E3779B97F4A7C15) & M64 for lane in range(8)]
    for i in range(len(data) // 8):
        acc = (lanes[i % 8] ^ int.from_bytes(data[8 * i : 8 * i + 8], "little")) * 0xD6E8FEB86659FD93 & M64
        lanes[i % 8] = acc ^ acc >> 32
    folded = 0
    for acc in lanes:
        folded = (folded ^ acc) * 0xA0761D6478BD642F & M64
        folded ^= folded >> 29
    return folded


def encoded(rows: list[Row], stride: int, cells: tuple[int, ...], keep: Texts) -> np.ndarray:
    """Records as the store holds them in memory: a number of 8 bytes, and cells that hold strings or point to them."""
    records = np.zeros((len(rows), stride), np.uint8)
    for record, (number, texts) in zip(records, rows, strict=True):
        record[:8].view("<u8")[0] = number
        for cell, text in zip(cells, texts, strict=True):
            if len(text) <= 12:
                raw = struct.pack("<I12s", len(text), text)
            else:
                keep.append(ctypes.create_string_buffer(text, len(text)))
                raw = struct.pack("<I4sQ", len(text), text[:4], ctypes.addressof(keep[-1]))
            record[cell : cell + 16] = np.frombuffer(raw, np.uint8)
    return records


def decoded(found: Records, cells: tuple[int, ...]) -> list[Row]:
    rows = []
    for record in found.records:
        texts = []
        for cell in cells:
            length, prefix, address = struct.unpack("<I4sQ", record[cell : cell + 16].tobytes())
            if length <= 12:
                texts.append(record[cell + 4 : cell + 4 + length].tobytes())
            else:
                texts.append(ctypes.string_at(address, length))
                assert texts[-1][:4] == prefix
        rows.append((int(record[:8].view("<u8")[0]), tuple(texts)))
    return rows


def write_run(fs: FileSystem, rows: list[Row], hashes: np.ndarray, stride: int, cells: tuple[int, ...],
              step: int = 1000, id: int = 5) -> RunInfo:
    writer = RunWriter(fs, id, stride, '{"how": "sum"}', cells)
    for start in range(0, len(rows), step):
        keep: Texts = []
        writer.add(encoded(rows[start : start + step], stride, cells, keep), hashes[start : start + step])
    return writer.finish()
