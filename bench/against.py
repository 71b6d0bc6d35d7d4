"""Two commits in turns: how much faster or slower is each workload of `bench.workloads`?

    python bench/against.py OLD NEW                       all groups but Spark's
    python bench/against.py OLD NEW --only w1,store.get   some groups, and some workloads of groups
    python bench/against.py OLD NEW --spark --runs 5      with Spark, five turns
    python bench/against.py OLD .                         the working tree, committed or not
    python bench/against.py OLD OLD                       what this machine's noise makes of no change
    python bench/against.py OLD NEW --update              OLD's best seconds go to bench/baseline.json

Each commit's files are written to a temporary folder. For each turn both start a process anew, with an empty folder of
their own for compiled kernels in the first turn; the two time a workload in alternation, one waiting, suspended with
its threads, while the other runs, and the one that begins changes with the turn. A turn's ratio is OLD's best time by
NEW's: above 1 NEW is faster. The table has the median over the turns; a workload whose median is below --least gets as
many turns again, and the median is that of all. The ratio of CPU seconds stands beside it: where others use the machine
it is the steadier one, but it does not see time that is waited. Before the first turn both results must be equal. The
exit code is 1 if a ratio is below --least, and 2 if results differ.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
BASELINE = BENCH / "baseline.json"
MIN_REPEATS, MAX_REPEATS, TURN_S = 3, 15, 0.4  # of a workload in a turn, on each side
LASTING = ("spark",)  # groups that are prepared once, and not once a turn


class Different(Exception):
    """Both commits give different results."""


class Side:
    """One commit: its code, and the folders that its children use."""

    def __init__(self, commit: str, place: Path) -> None:
        self._place, self._code = place, place / "code"
        if commit == ".":
            self.commit = "the working tree"
            shutil.copytree(BENCH.parent / "scalein", self._code / "scalein")
        else:
            self.commit = _git("rev-parse", "--short", f"{commit}^{{commit}}").decode().strip()
            with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
                archive.extractall(self._code, filter="data")

    def run(self, *args: str) -> subprocess.Popen[str]:
        """This commit's scalein under the bench of the present code: it stands first on the path."""
        run = self._place / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(BENCH, run / "bench", ignore=shutil.ignore_patterns("__pycache__"))
        env = {**os.environ, "PYTHONPATH": str(self._code), "SCALEIN_CACHE_DIR": str(self._place / "kernels")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are timed
        return subprocess.Popen([sys.executable, "-m", "bench.workloads", *args], cwd=run, env=env, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @contextmanager
    def child(self, group: str, inputs: Path) -> Iterator[Child]:
        child = Child(self.run(group, str(inputs)))
        try:
            assert child.code.is_relative_to(self._code), f"{child.code} is not of {self.commit}"
            yield child
        finally:
            child.end()


class Child:
    """A process that has a group prepared; suspended unless it is asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self._answer()
        self.names: list[str] = said["names"]
        self.code = Path(said["code"])
        process.send_signal(signal.SIGSTOP)

    def ask(self, request: str, name: str) -> Any:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{request} {name}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a child ended with code {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(slots=True)
class Best:
    """The least seconds, and CPU seconds, of one side in one turn."""

    wall_s: float = float("inf")
    cpu_s: float = float("inf")

    def add(self, wall_s: float, cpu_s: float) -> None:
        self.wall_s, self.cpu_s = min(self.wall_s, wall_s), min(self.cpu_s, cpu_s)


def turn(sides: Sequence[Child], name: str) -> list[Best]:
    """The best times of each side, in the order of `sides`; both have run it once before."""
    best = [Best(), Best()]
    start, repeats = time.perf_counter(), 0
    while repeats < MIN_REPEATS or (repeats < MAX_REPEATS and time.perf_counter() - start < 2 * TURN_S):
        for mine, side in zip(best, sides, strict=True):
            mine.add(*side.ask("time", name))
        repeats += 1
    return best


Turn = tuple[Best, Best]  # old, new


def compare(old: Side, new: Side, group: str, only: Sequence[str], inputs: Path,
            runs: int) -> dict[str, list[Turn]]:
    """The times of both sides, turn by turn, of a group's workloads."""
    found: dict[str, list[Turn]] = {}
    with ExitStack() as lasting:
        children: list[Child] = []
        for number in range(runs):
            with ExitStack() as here:
                if not children or group not in LASTING:
                    stack = lasting if group in LASTING else here
                    children = [stack.enter_context(side.child(group, inputs)) for side in (old, new)]
                known = {group, *(f"{group}.{name}" for name in children[0].names)}
                if unknown := {name for name in only if name.split(".")[0] == group} - known:
                    raise SystemExit(f"no workloads {', '.join(unknown)}; there are {', '.join(sorted(known))}")
                for name in children[0].names:
                    if only and not {group, f"{group}.{name}"} & set(only):
                        continue
                    if number == 0:
                        results = [child.ask("check", name) for child in children]
                        if results[0] != results[1]:
                            raise Different(f"{group}.{name} gives {results[0]} and {results[1]}")
                    else:
                        for child in children:
                            child.ask("time", name)
                    if number % 2:
                        last, first = turn(children[::-1], name)
                    else:
                        first, last = turn(children, name)
                    found.setdefault(f"{group}.{name}", []).append((first, last))  # old, new
    return found


def _git(*args: str) -> bytes:
    return subprocess.run(["git", *args], cwd=BENCH.parent, check=True, stdout=subprocess.PIPE).stdout


def groups_of(side: Side) -> list[str]:
    said, _ = side.run("groups").communicate()
    return list(json.loads(said))


def row(name: str, turns: Sequence[Turn]) -> tuple[float, str]:
    """A workload's ratio, and its line of the table."""
    ratios = sorted(old.wall_s / new.wall_s for old, new in turns)
    ratio, cpu = statistics.median(ratios), statistics.median(old.cpu_s / new.cpu_s for old, new in turns)
    old_ms, new_ms = (1e3 * statistics.median(each.wall_s for each in side) for side in zip(*turns, strict=True))
    facts = f"{old_ms:>12,.3f}{new_ms:>12,.3f}{ratio:>9.3f}{cpu:>9.3f}"
    return ratio, f"{name:<28}{facts}   {ratios[0]:.3f} to {ratios[-1]:.3f}"


def update_baseline(commit: str, seconds: dict[str, float]) -> None:
    """Write a commit's best seconds; they replace those of another commit, and of its own those that are worse."""
    baseline = json.loads(BASELINE.read_text())
    figures = baseline["seconds"]
    if figures["commit"] != commit:
        figures.update(commit=commit, best={})
    best = figures["best"]
    best.update({name: float(f"{min(best.get(name, value), value):.4g}") for name, value in seconds.items()})
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="How much faster or slower a commit is than another one.")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", default="", help="groups or workloads, separated by commas")
    parser.add_argument("--runs", type=int, default=7, help="turns of each workload")
    parser.add_argument("--least", type=float, default=0.97, help="the exit code is 1 if a ratio is below it")
    parser.add_argument("--spark", action="store_true", help="with the group of Spark, whose sessions start slowly")
    parser.add_argument("--update", action="store_true", help="write OLD's best seconds to bench/baseline.json")
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    slow: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are suspended: they would stay
    with tempfile.TemporaryDirectory(prefix="scalein-against-") as place:
        sides = [Side(commit, Path(place) / name) for name, commit in (("old", asked.old), ("new", asked.new))]
        inputs = Path(place) / "inputs"
        inputs.mkdir()
        print(f"{sides[0].commit} against {sides[1].commit}, {asked.runs} turns")
        print(f"{'':<28}{'old ms':>12}{'new ms':>12}{'ratio':>9}{'CPU':>9}   ratios of the turns", flush=True)
        groups = groups_of(sides[1])
        if unknown := {name.split(".")[0] for name in only} - {*groups}:
            parser.error(f"no groups {', '.join(unknown)}; there are {', '.join(groups)}")
        for group in groups:
            if only and group not in {name.split(".")[0] for name in only}:
                continue
            if group == "spark" and not (asked.spark or only):
                continue
            try:
                found = compare(sides[0], sides[1], group, only, inputs, asked.runs)
                again = [name for name, turns in found.items() if row(name, turns)[0] < asked.least]
                if again:
                    for name, turns in compare(sides[0], sides[1], group, again, inputs, asked.runs).items():
                        found[name] += turns
            except Different as different:
                print(f"results differ: {different}")
                return 2
            for name, turns in found.items():
                ratio, line = row(name, turns)
                slow += [name] * (ratio < asked.least)
                print(line + ("   BELOW" if ratio < asked.least else ""), flush=True)
            if asked.update:
                best = {name: min(old.wall_s for old, _ in turns) for name, turns in found.items()}
                update_baseline(sides[0].commit, best)
    print(f"below {asked.least}: {', '.join(slow)}" if slow else f"none below {asked.least}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
