"""A short slice of the campaigns of kills and of damages, each in a process of its own, which only forks."""

from __future__ import annotations

import subprocess
import sys

SLICES = [["kills", "--kills", "4", "--seconds", "3"], ["damage", "--damages", "8", "--each", "2"]]


def test_a_slice_of_kills_and_damages_finds_nothing() -> None:
    running = [subprocess.Popen([sys.executable, "-m", f"tests.campaign.{name}", "--seed", "1", *options], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for name, *options in SLICES]
    try:
        found = [process.communicate(timeout=600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for text, process in zip(found, running, strict=True):
        assert process.returncode == 0, text
    assert " kills of " in found[0]
    assert "8 damages" in found[1]
    assert {"JobVictim", "StreamVictim", "StoreVictim"} <= {word.strip(":") for word in found[1].split()}
