"""Prints the truth table of one or more runs: `python -m tests.truth.report FILE...`.

The files are those of KVFERRY_TRUTH_REPORT (see conftest.py). Two rules: a figure is a range over
all runs that counted, never the best of them; and what did not count is in the table too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.truth.shared import MIB

_HEAD = (
    "event",
    "lane",
    "operation",
    "the memory is given away when",
    "foreign bytes then",
    "given away at once (control)",
    "state reported (times)",
    "seconds after the event",
    "runs",
    "void",
    "crashes",
)


def main() -> None:
    """One line of Markdown for each row of the table."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sys.argv[1:]:
        for line in Path(file).read_text().splitlines():
            record = json.loads(line)
            runs[record["name"]].append(record)
    for cells in (_HEAD, ("---",) * len(_HEAD), *map(_row, runs.values())):
        print("| " + " | ".join(cells) + " |")


def _row(records: list[dict[str, Any]]) -> tuple[str, ...]:
    row = records[0]["row"]
    tried = [record["with_evidence"] for record in records]
    controls = [record["control"] for record in records if record["control"]]
    outcomes = [one["outcome"] for one in tried]
    void = sum(len(one["void"]) for one in tried + controls)
    return (
        row["event"],
        row["lane"],
        row["operation"],
        row["evidence"],
        _foreign(outcomes),
        _foreign([one["outcome"] for one in controls]) if controls else "-",
        _states(outcomes),
        _seconds(outcomes),
        str(len(records)),
        str(void),
        _crashes(tried + controls),
    )


def _foreign(outcomes: list[dict[str, Any]]) -> str:
    amounts = sorted(outcome["foreign"] for outcome in outcomes)
    if not amounts[-1]:
        return "no"
    return f"**{_size(amounts[0])} to {_size(amounts[-1])}**"


def _size(amount: int) -> str:
    return f"{amount / MIB:.0f} MiB" if amount >= 10 * MIB else f"{amount / 1024:.0f} KiB"


def _states(outcomes: list[dict[str, Any]]) -> str:
    told = Counter(_state(outcome) for outcome in outcomes)
    return "; ".join(f"{state} ({times})" for state, times in told.most_common())


def _state(outcome: dict[str, Any]) -> str:
    notes, state = outcome["notes"], outcome["state"].removeprefix("NIXL_ERR_")
    if state in ("in the post", "PROC"):
        state = "nothing"
    return state + (", bytes missing" if notes.get("missing") else "")


def _seconds(outcomes: list[dict[str, Any]]) -> str:
    times = sorted(max(o["state_after_s"], 0) for o in outcomes if o["state_after_s"] is not None)
    return f"{times[0]:.2g} to {times[-1]:.2g}" if times else "-"


def _crashes(tried: list[dict[str, Any]]) -> str:
    """Deaths that made a trial void, and deaths in trials that counted all the same."""
    deaths = [death for one in tried for death in one["crashes"]]
    deaths += [
        one["outcome"]["notes"]["died"] for one in tried if "died" in one["outcome"]["notes"]
    ]
    return "; ".join(f"{death} ({n})" for death, n in Counter(deaths).items()) or "0"


if __name__ == "__main__":
    main()
