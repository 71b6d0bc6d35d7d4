"""Damaged checkpoints and stores: whoever opens them has the right rows, or a clear error; never a crash or a hang.

    python -m tests.campaign.damage --damages 3000 --seed 1
    python -m tests.campaign.damage --seed 1 --only 17        # its 17th damage again

What is damaged: checkpoints of jobs that were killed (`kills.py`), local and remote ones; checkpoints of Spark streams,
without Spark; stores. How: bytes that are flipped, replaced or zeroed, files that are cut, extended, exchanged, removed
or emptied. Some damages get right checksums: rows may be wrong after those, and all else holds. Each is opened in a
process of its own, and used to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np
import pyarrow as pa

import scalein as si
import scalein.spark as sis
from scalein.cli.main import main as command
from scalein.state import format, manifest
from scalein.storage.local import LocalFileSystem
from scalein.storage.publish import seal, unseal
from tests.campaign.kills import KilledJob
from tests.conformance.matrix import of_readme
from tests.conformance.shapes import SCHEMA, SHAPES, rows
from tests.conformance.ways import check_stream, closing_row, deal
from tests.jobs.dying import life, status_of
from tests.jobs.streams import cut
from tests.jobs.test_damage import ODD, changed
from tests.spark.simulated import start_stream, tasks_over
from tests.state.sample_store import KIND, Built, opened
from tests.state.store_model import content_of

RIGHT, CLEAR = 0, 3  # exit codes: right rows, a clear error


class Victim(Protocol):
    """What is damaged: everything below `folder / damaged`."""

    damaged: str

    def build(self) -> None:
        """Write the files."""

    def use(self, random: Random) -> None:
        """In a process of its own: open what is there and use it; AssertionError if rows are wrong."""


class JobVictim:
    """A job that was killed some times."""

    def __init__(self, seed: str, folder: Path) -> None:
        self._job = KilledJob(seed, folder)
        self._folder, self._kills = folder, Random(seed).randint(1, 3)
        self.damaged = "far" if self._job.is_remote else "checkpoint"

    def __str__(self) -> str:
        return f"a job: {self._job}"

    def build(self) -> None:
        (self._folder / self.damaged).mkdir()
        for _ in range(self._kills):
            self._job.live(is_killed=True)

    def use(self, random: Random) -> None:
        if random.random() < 0.3:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                command(["state", str(self._folder / self.damaged)])
        self._job.finish(random, os.dup(0))


class StreamVictim:
    """A Spark stream that ended between two batches."""

    damaged = "c"

    def __init__(self, seed: str, folder: Path) -> None:
        random, self._folder = Random(seed), folder
        self._emit = random.choice(["final", "changes"])
        way = 3 if self._emit == "final" else 4
        self._shape = random.choice([shape for shape in SHAPES if of_readme()[shape.name][way] is None])
        self._table = rows(random.randrange(1 << 30), random.choice([40, 200]))
        self._batches = [deal(pa.Table.from_batches([batch]), random.randint(1, 3), random)
                         for batch in cut(self._table, [random.randint(5, 30)])] + [[closing_row(self._table)]]
        self._done = random.randrange(1, len(self._batches))

    def __str__(self) -> str:
        return f'a stream: {self._shape.name} (emit="{self._emit}", {self._done} of {len(self._batches)} batches)'

    def build(self) -> None:
        assert status_of(life(lambda: self._run(range(self._done), Random(0)))) == 0

    def use(self, random: Random) -> None:
        if random.random() < 0.3:
            with contextlib.suppress(si.ScaleinError):
                sis.read_state(self._folder / "c")
        first = self._done - random.randint(0, 1)  # Spark may ask for the last batch again
        self._run(range(first, len(self._batches)), random)
        parts = [pa.ipc.open_file(path).read_all() for path in sorted((self._folder / "out").glob("part-*"))]
        if parts:
            check_stream(self._shape, pa.concat_tables(parts), self._table)

    def _run(self, numbers: range, random: Random) -> None:
        coordinator = start_stream(self._shape.flow(si.flow(SCHEMA)), self._folder / "c",
                                   si.to_ipc(self._folder / "out"), emit=self._emit)
        for number in numbers:
            coordinator.partitions = random.choice([1, 2, 3])
            coordinator.run_batch(number, "query", tasks_over(self._batches[number]), None)
        coordinator.close()


class StoreVictim:
    """A store with runs, images and snapshots."""

    damaged = "store"

    def __init__(self, seed: str, folder: Path) -> None:
        self._path, self._contents = folder / "store", folder / "contents"

    def __str__(self) -> str:
        return "a store"

    def build(self) -> None:
        import pickle

        def build() -> None:
            self._path.mkdir()
            self._contents.write_bytes(pickle.dumps(Built(self._path).contents))

        assert status_of(life(build)) == 0

    def use(self, random: Random) -> None:
        import pickle

        contents = pickle.loads(self._contents.read_bytes())
        with opened(self._path, readonly=random.random() < 0.5) as store:
            if random.random() < 0.5:
                store.verify()
            if random.random() < 0.5:
                store.get(KIND.key_table(random, 500))
            found = store.scan().read_all()
            assert content_of(found, KIND.key) in contents, "wrong content"


VICTIMS: list[Callable[[str, Path], Victim]] = [JobVictim, JobVictim, StreamVictim, StoreVictim]


# --- damages


def damage(folder: Path, random: Random) -> str:
    """Damage one file below a folder; gives what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return "nothing"
    kinds = sorted({path.name.split("-")[0] for path in files})
    kind = random.choice(kinds)
    path = random.choice([path for path in files if path.name.split("-")[0] == kind])
    how = random.choice([flip, flip, replace, zero, cut_off, extend, empty, remove, exchange, copy])
    how(path, random, files)
    return f"{how.__name__} {path.relative_to(folder)}"


def flip(path: Path, random: Random, files: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[_place(len(data), random)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def replace(path: Path, random: Random, files: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(random.choice([1, 8, 100]) if data else 0):
        data[_place(len(data), random)] = random.choice([0, 1, 127, 255, random.randrange(256)])
    path.write_bytes(data)


def zero(path: Path, random: Random, files: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    at = random.choice([0, random.randrange(len(data) + 1) // 512 * 512])
    size = random.choice([512, 4096, len(data)])
    data[at : at + size] = bytes(len(data[at : at + size]))
    path.write_bytes(data)


def cut_off(path: Path, random: Random, files: list[Path]) -> None:
    size = path.stat().st_size
    os.truncate(path, max(0, random.choice([size - 1, size - 4096, random.randrange(size + 1)])))


def extend(path: Path, random: Random, files: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(random.choice([1, 8, 4096])))


def empty(path: Path, random: Random, files: list[Path]) -> None:
    os.truncate(path, 0)


def remove(path: Path, random: Random, files: list[Path]) -> None:
    path.unlink()


def exchange(path: Path, random: Random, files: list[Path]) -> None:
    other = random.choice(files)
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def copy(path: Path, random: Random, files: list[Path]) -> None:
    path.write_bytes(random.choice(files).read_bytes())


def _place(size: int, random: Random) -> int:
    return random.choice([random.randrange(size), min(random.randrange(64), size - 1),
                          max(0, size - 1 - random.randrange(64))])


# --- damages with right checksums


def forge(folder: Path, random: Random) -> str:
    """Change the content of a sealed file, and seal it again; gives what was done."""
    entries = [path for path in folder.rglob("*") if path.is_file() and _is_sealed(path)]
    snapshots = sorted(folder.rglob("snapshot-*.manifest"))
    buffered = sorted(folder.rglob("*rows-*.arrow"))
    how = random.choice([forge_entry] * bool(entries) + [forge_snapshot] * bool(snapshots)
                        + [forge_rows] * bool(buffered and entries) or [lambda *_: ""])
    return how(sorted(entries), snapshots, buffered, random)


def _is_sealed(path: Path) -> bool:
    with contextlib.suppress(ValueError):
        unseal(path.read_bytes())
        return True
    return False


def forge_entry(entries: list[Path], snapshots: list[Path], buffered: list[Path], random: Random) -> str:
    path = random.choice([entries[-1], random.choice(entries)])
    found = unseal(path.read_bytes())
    route = [random.randrange(21) for _ in range(random.randint(1, 6))]
    content = changed(found, route, random.choice(ODD))
    path.write_bytes(seal(content))
    return f"forge {path.name} {route}"


def forge_snapshot(entries: list[Path], snapshots: list[Path], buffered: list[Path], random: Random) -> str:
    path = random.choice(snapshots)
    found = manifest.read(LocalFileSystem(path.parent, readonly=True), format.ids([path.name], "snapshot")[0])
    if random.random() < 0.5 and found.tables:
        name = random.choice(sorted(found.tables))
        table = np.array(found.tables[name])
        if table.size:
            value = random.choice([0, 1, 4096, 1 << 40, (1 << 63) - 1])
            table[random.randrange(len(table))] = value & int(np.iinfo(table.dtype).max)
        found.tables[name] = table
    else:
        name = "meta"
        found.meta.update(changed(found.meta, [random.randrange(21) for _ in range(3)], random.choice(ODD)))
    path.write_bytes(manifest.encode(found).tobytes())
    return f"forge {path.name} {name}"


def forge_rows(entries: list[Path], snapshots: list[Path], buffered: list[Path], random: Random) -> str:
    path = random.choice(buffered)
    before = b'"%d"' % zlib.crc32(path.read_bytes()), b"%d" % zlib.crc32(path.read_bytes())
    replace(path, random, buffered)
    after = zlib.crc32(path.read_bytes())
    for entry in entries:
        text = entry.read_bytes().partition(b"\n")[0].replace(before[1], b"%d" % after)
        entry.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
    return f"forge {path.name}"


# --- the campaign


def outcome(victim: Victim, seed: str, is_forged: bool, seen: Path) -> int:
    """Exit code of a process that uses a damaged victim; what it printed is in `seen`."""

    def use() -> None:
        log = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        warnings.simplefilter("ignore")
        threading.excepthook = lambda args: (traceback.print_exception(args.exc_value), os._exit(1))  # type: ignore[assignment]
        try:
            victim.use(Random(seed))
        except si.ScaleinError as error:
            print(type(error).__name__, error, flush=True)
            os._exit(CLEAR)
        except AssertionError:
            if not is_forged:
                raise

    return status_of(life(use))


def campaign(seed: int, damages: int, each: int, only: int | None, seconds: float, folder: Path) -> int:
    """So many damages within some time, `each` of a victim, or one of them; gives how many went wrong."""
    found, wrong, errors = Counter[str](), 0, Counter[str]()
    start = time.monotonic()
    for number in range(damages) if only is None else [only]:
        if time.monotonic() > start + seconds:
            break
        of = number // each
        place, base = folder / "victim", folder / "base"
        victim = VICTIMS[of % len(VICTIMS)](f"{seed} {of}", place)
        if number % each == 0 or only is not None:
            shutil.rmtree(base, ignore_errors=True)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            victim.build()
            shutil.copytree(place, base)
        shutil.rmtree(place)
        shutil.copytree(base, place)
        random = Random(f"{seed} damage {number}")
        is_forged = random.random() < 0.25
        done = [forge(place / victim.damaged, random)] if is_forged else [
            damage(place / victim.damaged, random) for _ in range(random.choice([1, 1, 1, 2, 5]))]
        try:
            status = outcome(victim, f"{seed} {number}", is_forged, folder / "seen")
            code = os.waitstatus_to_exitcode(status)
        except SystemExit:
            code = -6
        kind = type(victim).__name__
        found[f"{kind}: {'forged' if is_forged else 'damaged'}, {_MEANING.get(code, 'WRONG')}"] += 1
        text = (folder / "seen").read_text(errors="replace")
        if code == CLEAR:
            errors[f"{kind}: {text.splitlines()[0][:70]}"] += 1
        if code not in _MEANING:
            wrong += 1
            shutil.copytree(place, folder / f"wrong-{number}", dirs_exist_ok=True)
            print(f"WRONG ({code}): --seed {seed} --only {number}: {victim}; {'; '.join(done)}\n{text[-3000:]}",
                  flush=True)
    print(f"seed {seed}: {found.total()} damages in {time.monotonic() - start:.0f} s; {wrong} wrong")
    for kind, count in sorted(found.items()) + errors.most_common(40):
        print(f"{count:6} {kind}")
    return wrong


_MEANING = {RIGHT: "right rows", CLEAR: "a clear error"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.damage", description=__doc__)
    parser.add_argument("--damages", type=int, default=3_000)
    parser.add_argument("--each", type=int, default=40, help="damages of a victim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one damage")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new damage after that time")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="scalein-damage-"))
    return 1 if campaign(given.seed, given.damages, given.each, given.only, given.seconds, folder) else 0


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    sys.exit(main())
