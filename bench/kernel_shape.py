"""The shape of the compiled loops of W1 to W4 and of a store's merge: instructions, vector width, loads, stores, calls.

    python -m bench.kernel_shape             a table, and what differs from bench/baseline.json: exit code 1 if anything
    python -m bench.kernel_shape --json      the same facts as JSON
    python -m bench.kernel_shape --update    the emitted code is as it should be: write its shape to bench/baseline.json

Each workload runs once over seeded rows, so that its kernels are those of its data (direct groups, radix partitions);
the ones that saw many rows are then compiled for x86-64-v3 and x86-64-v4, whatever this machine is, and the assembly is
read. Nothing is timed, and the same LLVM gives the same shape everywhere. A loop is an innermost one, in the order of
the code; the rows that a vectorized loop leaves over have a loop of their own after it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite

import scalein as si
from bench import data, workloads
from scalein.ir.stages import Stage
from scalein.kernels.kernel_metrics import profiling
from scalein.llvm_backend.jit import assembly
from scalein.llvm_backend.stage import lower_stage
from scalein.llvm_backend.target import target_for
from scalein.state import LogStore

BASELINE = Path(__file__).parent / "baseline.json"
CPUS = ("x86-64-v3", "x86-64-v4")
ROWS = 1 << 19  # radix partitions are chosen after a trial of half of them; 20 million rows give the same kernels
HOT_ROWS = 1 << 15  # of a kernel whose loops matter

Shape = dict[str, object]
Shapes = dict[str, Shape]


# --- the kernels of each workload


def _store_merge() -> None:
    """By one worker, and by two, which have a kernel of their own. There are fewer keys than hot rows, so that the
    kernels of snapshots stay out."""
    updates = data.Updates(HOT_ROWS // 2, "uniform", HOT_ROWS)
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder, closing(
                LogStore.open(folder, key=workloads.KEY, value=workloads.VALUE, workers=workers)) as store:
            store.merge(updates.take(HOT_ROWS), **workloads.FUNCTIONS)


RUNS: Mapping[str, Callable[[], object]] = {
    "W1": lambda: workloads.views(si.from_arrow(data.ad_events(ROWS))).collect(workers=1),
    "W2": lambda: workloads.hot_bids(si.from_arrow(data.bids(ROWS))).collect(workers=1),
    "W3": lambda: workloads.totals(si.from_arrow(data.keyed_values(ROWS))).collect(workers=1),
    "W4": lambda: workloads.some_bids(si.from_arrow(data.bids(ROWS))).collect(workers=1),
    "store": _store_merge,
}


def kernels(workload: str) -> dict[str, Stage]:
    """The kernels of a workload that see many rows, numbered as it meets them: a renamed one is the same kernel."""
    with profiling() as profile:
        RUNS[workload]()
    hot = [metrics.stage for metrics in profile.kernels.values() if metrics.rows >= HOT_ROWS]
    return {f"{workload} {number}": stage for number, stage in enumerate(hot, 1)}


def shapes(cpu: str, names: Sequence[str] = tuple(RUNS)) -> Shapes:
    """The shapes of all kernels of some workloads, compiled for a CPU."""
    target = target_for(cpu)
    return {name: {"kernel": stage.name, **shape(assembly(lower_stage(stage, target).text, target, stage.brief))}
            for workload in names for name, stage in kernels(workload).items()}  # fmt: skip


# --- the shape of assembly


@dataclass(slots=True)
class Block:
    """Instructions without a jump but for the last, and where it goes."""

    instructions: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def shape(text: str) -> Shape:
    """The loops of a module, and what they are in all."""
    functions = [_blocks(body) for body in re.findall(r"^[^\s.][^\s]*:\n(.*?)^\.Lfunc_end", text, re.M | re.S)]
    loops = [loop_shape([line for label in loop for line in blocks[label].instructions])
             for blocks in functions for loop in innermost_loops({name: b.next for name, b in blocks.items()})]
    everything = [line for blocks in functions for block in blocks.values() for line in block.instructions]
    return {"instructions": len(everything), "widest_bits": max(map(_bits, everything)),
            "calls": sum(map(_is_call, everything)), "loops": loops}  # fmt: skip


def loop_shape(instructions: Sequence[str]) -> str:
    """One line: comparing two of them in a diff says what changed."""
    counts = {"loads": sum(map(_is_load, instructions)), "stores": sum(map(_is_store, instructions)),
              "prefetches": sum(line.startswith("prefetch") for line in instructions),
              "calls": sum(map(_is_call, instructions))}  # fmt: skip
    bits = max(map(_bits, instructions))
    facts = [f"{len(instructions)} instructions", f"{bits} bits"]
    return ", ".join(facts + [f"{count} {what}" for what, count in counts.items() if count])


def _blocks(body: str) -> dict[str, Block]:
    """The blocks of a function by label; one that begins after a jump and has no label gets a number."""
    blocks = {"": Block()}
    label = ""

    def begin(name: str) -> None:
        nonlocal label
        if not _ends(blocks[label].instructions):
            blocks[label].next.append(name)
        label, blocks[name] = name, Block()

    for line in body.splitlines():
        if found := re.match(r"(\.L\w+):", line):
            begin(found[1])
        elif re.match(r"\t[a-z]", line):
            if blocks[label].next:
                begin(str(len(blocks)))
            instruction = line.strip().replace("\t", " ")
            blocks[label].instructions.append(instruction)
            if instruction.startswith("j"):
                blocks[label].next.append(instruction.split()[-1])
    return blocks


def _ends(instructions: Sequence[str]) -> bool:
    """Whether no way leads from the last of them to what follows."""
    return bool(instructions) and instructions[-1].startswith(("jmp", "ret", "ud2"))


def innermost_loops(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Cycles of a flow graph that contain no smaller one, each as its labels in the order of the code.

    >>> innermost_loops({"a": ["b"], "b": ["c"], "c": ["c", "d"], "d": ["b", "e"], "e": []})
    [['c']]
    """
    found = []
    for cycle in _cycles(graph):
        entered = {label for name, ways in graph.items() if name not in cycle for label in ways if label in cycle}
        header = next(label for label in cycle if label in entered or not entered)
        inside = {label: [way for way in graph[label] if way in cycle and way != header]
                  for label in cycle if label != header}  # fmt: skip
        found += innermost_loops(inside) or [cycle]
    return found


def _cycles(graph: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Largest sets of labels that reach one another."""
    reached = {label: _reached(graph, label) for label in graph}
    done: set[str] = set()
    for label in graph:
        if label not in done and label in reached[label]:
            cycle = [other for other in graph if other in reached[label] and label in reached[other]]
            done.update(cycle)
            yield cycle


def _reached(graph: Mapping[str, Sequence[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        label = waiting.pop()
        if label in graph and label not in found:
            found.add(label)
            waiting.extend(graph[label])
    return found


def _bits(instruction: str) -> int:
    """The width of what it computes: 64 where that is one number."""
    name = instruction.split()[0]
    if not name.startswith("v") or name.endswith(("sd", "ss")) or name in ("vmovd", "vmovq"):
        return 64
    return max((bits for letter, bits in (("x", 128), ("y", 256), ("z", 512)) if f"%{letter}mm" in instruction),
               default=64)


def _is_call(instruction: str) -> bool:
    return instruction.startswith("call")


def _is_store(instruction: str) -> bool:
    """The last of its operands, or the only one, is in memory, and is not merely read."""
    name, _, operands = instruction.partition(" ")
    is_last = re.search(r"\)( \{%k\d\})?$", operands) is not None
    return is_last and not name.startswith(_READ_LAST)


def _is_load(instruction: str) -> bool:
    """An operand is in memory and read; what changes a number in memory is a load and a store."""
    name, _, operands = instruction.partition(" ")
    if "(" not in operands or name.startswith(_NO_LOADS):
        return False
    return not (_is_store(instruction) and name.startswith(_PLAIN_STORES))


_NO_LOADS = ("lea", "prefetch", "nop", "set", "j", "call")
_READ_LAST = ("cmp", "test", "bt", "lea", "prefetch", "nop", "j", "call", "push", "mul", "imul", "div", "idiv")
_PLAIN_STORES = ("mov", "vmov", "vpmov", "vextract", "vpextr", "vpcompress", "vpscatter")


# --- the baseline


def differences(cpu: str, found: Shapes, names: Sequence[str] = tuple(RUNS)) -> list[str]:
    """What has changed in some workloads; with another LLVM than the baseline's, of vector widths and calls only."""
    baseline = json.loads(BASELINE.read_text())["kernel_shape"]
    is_same_llvm = baseline["llvmlite"] == llvmlite.__version__
    before: Shapes = {name: facts for name, facts in baseline[cpu].items() if name.split()[0] in names}
    lines = [f"{cpu}: {name} is {'new' if name in found else 'gone'}" for name in sorted({*before} ^ {*found})]
    for name in before:
        for fact in before[name] if name in found else ():
            old, new = before[name][fact], found[name][fact]
            if old != new and fact != "kernel" and (is_same_llvm or fact in ("widest_bits", "calls")):
                lines += [f"{cpu}: {name}: {fact}", *_changes(old, new)]
    return lines


def _changes(old: object, new: object) -> Iterator[str]:
    if not isinstance(old, list) or not isinstance(new, list):
        yield f"  {old} -> {new}"
        return
    for number in range(max(len(old), len(new))):
        was, now = (each[number] if number < len(each) else "none" for each in (old, new))
        if was != now:
            yield f"  loop {number}: {was} -> {now}"


def update(found: Mapping[str, Shapes]) -> None:
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    baseline["kernel_shape"] = {"llvmlite": llvmlite.__version__, **found}
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="The shape of the hot loops, as compiled.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--update", action="store_true", help="make these shapes the baseline")
    asked = parser.parse_args()
    found = {cpu: shapes(cpu) for cpu in CPUS}
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        for cpu, of in found.items():
            for name, facts in of.items():
                title = f"{name}, {facts['kernel']}"
                print(f"{cpu:<12}{title:<20}{facts['instructions']:>6} instructions, {facts['calls']} calls")
                loops = facts["loops"]
                assert isinstance(loops, list)
                for loop in loops:
                    print(f"{'':<32}  loop of {loop}")
    if asked.update:
        update(found)
        return 0
    changed = [line for cpu, of in found.items() for line in differences(cpu, of)]
    print("\n".join(changed) or "as in the baseline", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
