"""Claims: the numbers of the runs that share a folder of a file system without locks; the greatest may publish.

A claim is a small file that has the run's number in its name, and an id, so that two runs never write one file. A run
that finds its number claimed twice gives it up and tries the next: no two runs have the same number. A run that was
taken for dead and continues finds a greater number, before or after what it publishes, and ends (`Fenced`).
"""

from __future__ import annotations

import re
import uuid

from scalein.errors import Fenced
from scalein.storage.object_store import Location


class Claims:
    """The claims `<folder>/<prefix><number>-<id>`; after `take`, this run has one."""

    def __init__(self, location: Location, folder: str, prefix: str = "") -> None:
        self._location, self._folder, self._prefix = location, folder, prefix
        self._form = re.compile(rf"{re.escape(prefix)}(\d{{10}})-\w+")
        self.number = -1

    def take(self, least: int) -> int:
        """Claim a number that no other run has: `least`, or one more than the greatest that is claimed."""
        while True:
            self.number = least = max([least, *(number + 1 for number in self._numbers())])
            own = f"{self._folder}/{self._prefix}{least:010}-{uuid.uuid4().hex}"
            self._location.put(own, b"1")
            if self._numbers().count(least) == 1:
                return least
            self._location.remove(own)
            least += 1

    def check(self, run: str) -> None:
        """Raise if there is a later run; `run` is what it is called."""
        if max(self._numbers(), default=self.number) > self.number:
            raise Fenced(f"another {run} has taken over this checkpoint", file=self._location,
                         hint="one of the two must end; this one has")

    def remove_earlier(self) -> None:
        """Remove the claims of earlier runs."""
        for name in self._location.names(self._folder):
            if (match := self._form.fullmatch(name)) and int(match[1]) < self.number:
                self._location.remove(f"{self._folder}/{name}")

    def _numbers(self) -> list[int]:
        found = map(self._form.fullmatch, self._location.names(self._folder))
        return [int(match[1]) for match in found if match]
