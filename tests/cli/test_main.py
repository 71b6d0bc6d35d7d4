"""The command line: commands, help, exit codes, and the answers to wrong arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalein.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent.parent


def test_without_a_command_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("    ")} >= set(COMMANDS)


def test_an_unknown_verb_gets_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dmeo"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "scalein: no command 'dmeo'",
        f"  has    {', '.join(COMMANDS)}",
        "  hint   did you mean 'demo'?",
    ]


def test_an_error_of_ours_is_shown_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rows", "0"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("scalein: --rows must be from 1 to ")
    assert "Traceback" not in shown


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--speed", "9"])
    assert stopped.value.code == 2
    assert "--speed" in capsys.readouterr().err


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["doctor"], "run", interrupted)
    assert main(["doctor"]) == 130


def test_runs_as_a_module_and_survives_a_closed_pipe() -> None:
    command = f"{sys.executable} -m scalein --help | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: scalein")
    assert done.stderr == ""
