"""`python -m tests.sim --seeds N [--start S]`: run seeds, print failures and how to repeat them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .coverage import rows
from .options import Fault
from .simulate import simulate


def main() -> int:
    """Run the seeds; 0 when all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--verbose", action="store_true", help="one line for every seed")
    arguments = parser.parse_args()
    faults: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failed = steps = 0
    began = time.monotonic()
    for seed in range(arguments.start, arguments.start + arguments.seeds):
        result = simulate(seed)
        faults += result.faults
        seen += result.rows
        outcomes += result.outcomes
        steps += result.steps
        failed += bool(result.failure)
        if result.failure or arguments.verbose:
            print(result, flush=True)
        if arguments.verbose:
            print(f"  trace {result.trace}, {dict(result.outcomes)}", flush=True)
    print_counts("fault", faults, [str(fault) for fault in Fault])
    print_counts("row", seen, rows())
    print_counts("outcome", outcomes, sorted(outcomes))
    print(f"{steps} steps in {time.monotonic() - began:.1f} s")
    print(f"{arguments.seeds - failed} passed, {failed} failed")
    return 1 if failed else 0


def print_counts(what: str, counts: Counter[str], names: list[str]) -> None:
    """One line for each name, those that never happened included."""
    for name in names:
        print(f"{what:8}{counts[name]:8}  {name}")


if __name__ == "__main__":
    sys.exit(main())
