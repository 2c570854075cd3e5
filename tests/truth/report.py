"""Prints the truth table of a run: `python -m tests.truth.report FILE` (see conftest.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.truth.shared import MIB

_HEAD = (
    "event",
    "lane",
    "operation",
    "given away when",
    "foreign bytes",
    "control: given away at once",
    "state reported",
    "after s",
    "void",
    "crashes",
)


def main() -> None:
    """One line of Markdown for each line of the file."""
    lines = Path(sys.argv[1]).read_text().splitlines()
    print(*_table([json.loads(line) for line in lines]), sep="\n")


def _table(records: list[dict[str, Any]]) -> list[str]:
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, records)]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    row, tried, control = record["row"], record["with_evidence"], record["control"]
    both = [tried] + ([control] if control else [])
    outcome = tried["outcome"]
    return (
        row["event"],
        row["lane"],
        row["operation"],
        row["evidence"],
        _foreign(outcome),
        _foreign(control["outcome"]) if control else "(this row shows them)",
        _state(outcome),
        _seconds(outcome["state_after_s"]),
        str(sum(len(one["void"]) for one in both)),
        "; ".join(death for one in both for death in one["crashes"]) or "0",
    )


def _foreign(outcome: dict[str, Any]) -> str:
    foreign = outcome["foreign"]
    if not foreign:
        return "no"
    return f"**{foreign / MIB:.3g} MiB**" if foreign >= MIB else f"**{foreign / 1024:.3g} KiB**"


def _state(outcome: dict[str, Any]) -> str:
    notes = outcome["notes"]
    words = [notes["meanwhile"], "then"] if notes.get("meanwhile") not in (None, "") else []
    if words and words[0] == outcome["state"]:
        words = []
    words.append(outcome["state"].removeprefix("NIXL_ERR_"))
    if "died" in notes:
        words.append(f"({notes['died']})")
    if notes.get("missing"):
        words.append(f"({notes['missing'] // 1024} KiB missing)")
    return " ".join(words)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{max(value, 0):.2g}"


if __name__ == "__main__":
    main()
