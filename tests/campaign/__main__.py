"""The command: see the package's text."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.campaign import udf_check
from tests.campaign.child import check_flow, report, seed_of
from tests.campaign.run import campaign
from tests.campaign.spec import reproducer
from tests.campaign.ways import prepare


def main() -> int:
    """Run a campaign, or one flow of it; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description="Random flows against the oracle.")
    parser.add_argument("--seed", type=int, default=1, help="of the whole run; each flow has its own, made from it")
    parser.add_argument("--flows", type=int, default=0, help="how many flows")
    parser.add_argument("--udf", type=int, default=0, help="how many Python functions")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="the number of one flow, or with --udf 1 of one function")
    parser.add_argument("--findings", type=Path, help="JSON lines, appended to (a new temporary file)")
    parser.add_argument("--no-shrink", action="store_true", help="show a flow as it was generated")
    given = parser.parse_args()
    if given.only is not None:
        return _only(given.seed, given.only, bool(given.udf), 0.0 if given.no_shrink else 40.0)
    findings = given.findings or Path(tempfile.mkdtemp(prefix="scalein-campaign-")) / "findings.jsonl"
    print(f"findings go to {findings}")
    made = campaign(given.seed, given.flows, given.udf, given.processes, findings,
                    shrink_s=0.0 if given.no_shrink else 40.0)
    print(made.summary())
    return 1 if made.findings else 0


def _only(run: int, number: int, is_udf: bool, shrink_s: float) -> int:
    """One flow, with its reproducer if it is wrong."""
    prepare()
    if is_udf:
        found = udf_check.problem(seed_of(run, number))
        print(found or "as CPython")
        return int(found is not None)
    spec, ways, facts = check_flow(run, number)
    if facts.problem is None:
        print(reproducer(spec, "".join(way.text() for way in ways), "nothing is wrong with it"))
        return 0
    print(report(run, number, spec, ways, facts, shrink_s)["reproducer"])
    return 1


if __name__ == "__main__":
    sys.exit(main())
