"""Seconds from SIGINT to the end of a run: each case in processes of its own, interrupted at several points.

`python -m bench.stop_latency [--thread] [--memory none] [case ...]` takes the cases of `bench.peak_memory`. With
`--thread`, the run is in a thread that is not the main one. Cases that begin with "job:" are jobs without a checkpoint,
in whose `wait` the signal comes; with `--checkpoint` they have one, and the last epoch takes as long as the state is
large.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext

from bench.peak_memory import FOLDER, _cases, write_files

POINTS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def child(name: str, memory: str | None, in_thread: bool, workers: int | None, has_checkpoint: bool) -> None:
    import scalein as si

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background processes
    file, make = _cases()[name]
    flow = make(si.read_parquet(str(FOLDER / f"{file}.parquet")))
    ended: list[float] = []

    def run() -> None:
        try:
            print("started", time.monotonic(), flush=True)
            if name.startswith("job:"):
                with tempfile.TemporaryDirectory() if has_checkpoint else nullcontext() as folder:
                    flow.start(sink=si.to_callback(lambda batch: None), checkpoint=folder, memory=memory,
                               workers=workers).wait()
            else:
                for _ in flow.batches(memory=memory, workers=workers):
                    pass
            print("finished", time.monotonic(), flush=True)
        except KeyboardInterrupt:
            ended.append(time.monotonic())

    try:
        if in_thread:
            done = threading.Event()

            def run_and_say() -> None:
                run()
                done.set()

            threading.Thread(target=run_and_say).start()
            try:
                done.wait()
            finally:
                done.wait()
        else:
            run()
    except KeyboardInterrupt:
        pass
    print("interrupted", *ended, flush=True)


def one(command: list[str], after_s: float | None) -> tuple[str, float]:
    """What ended the run, and the seconds it took, or those since the signal."""
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    started = float(process.stdout.readline().split()[1])
    if after_s is not None:
        time.sleep(max(0.0, started + after_s - time.monotonic()))
        started = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    words = out.split()
    if process.returncode or len(words) < 2:
        return f"returned {process.returncode}: {(err.strip().splitlines() or [out])[-1]}", time.monotonic() - started
    return words[0], float(words[1]) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--memory", default="none")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--thread", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.cases[0], None if given.memory == "none" else given.memory, given.thread, given.workers,
              given.checkpoint)
        return
    write_files()
    for name in given.cases or _cases():
        command = [sys.executable, "-m", "bench.stop_latency", "--child", "--memory", given.memory, name]
        command += ["--thread"] * given.thread + ["--checkpoint"] * given.checkpoint
        command += ["--workers", str(given.workers)] if given.workers else []
        one(command, None)
        _, whole = one(command, None)
        found = [one(command, whole * point) for point in POINTS]
        worst = max((took for how, took in found if how == "interrupted"), default=0.0)
        bad = ", ".join(f"{how} after {took:.1f} s" for how, took in found if how not in ("interrupted", "finished"))
        print(f"{name:24} {whole:6.1f} s  stops within {worst:6.3f} s"
              f"   {' '.join(f'{took:.2f}' for _, took in found)}   {bad}", flush=True)


if __name__ == "__main__":
    main()
