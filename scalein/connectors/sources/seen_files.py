"""SeenFiles: the files of a followed directory that were read, by name, as an offset holds them.

A name is 8 bytes of a hash, so that an offset takes 11 bytes a file; there is no collision among a million names in a
hundred thousand runs. Names of files that are gone are forgotten when there are many: `forget`.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable
from hashlib import blake2b

from scalein.errors import BadData
from scalein.storage.checked_json import Json

_BYTES = 8
_CHUNK = 512  # names in a text of an offset: complete texts are shared by all offsets that follow
MAX_GONE = 1 << 16


class SeenFiles:
    """A set of names that grows; `to_json` takes time in proportion to its last chunk."""

    def __init__(self, stored: Json = None) -> None:
        self._names: set[str] = set()  # those that were looked up, or added
        self._hashes: set[bytes] = set()
        self._complete: list[Json] = []
        self._last = bytearray()
        for text in stored if isinstance(stored, list) else []:
            try:
                data = base64.b64decode(str(text), validate=True)
            except ValueError as error:
                raise BadData("this is no offset in files", found=error) from error
            self._append(data[k : k + _BYTES] for k in range(0, len(data), _BYTES))

    def __contains__(self, name: str) -> bool:
        if name in self._names:
            return True
        if _hash(name) not in self._hashes:
            return False
        self._names.add(name)
        return True

    def add(self, *names: str) -> None:
        """These were read."""
        self._names.update(names)
        self._append(map(_hash, names))

    def forget(self, present: Collection[str]) -> None:
        """Keep only names of files that there are, once those of very many others are remembered.

        A few more are never forgotten: a directory may be seen without one of its files for a moment.
        """
        if len(self._hashes) - len(present) > MAX_GONE:
            left = [name for name in present if name in self]
            self._names, self._hashes, self._complete, self._last = set(), set(), [], bytearray()
            self.add(*left)

    def to_json(self) -> list[Json]:
        return [*self._complete, _text(self._last)] if self._last else list(self._complete)

    def _append(self, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            if each not in self._hashes:
                self._hashes.add(each)
                self._last += each
                if len(self._last) == _CHUNK * _BYTES:
                    self._complete.append(_text(self._last))
                    self._last = bytearray()


def _text(data: bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _hash(name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=_BYTES).digest()
