"""Counts which rows of the engine's state tables a run went through.

Two rules: every row of `transitions` is known by its table, state and event, and counting never
changes what `follow` does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.engine import transitions

TABLES = {
    "outcome": transitions.OUTCOME,
    "lease": transitions.LEASE,
    "session": transitions.SESSION,
    "write": transitions.WRITE,
}


def rows() -> list[str]:
    """Every row of every table."""
    return [_row(name, state, event) for name, table in TABLES.items() for state, event in table]


def _row(name: str, state: object, event: object) -> str:
    return f"{name}: {state!s} + {event!s}"


@contextmanager
def rows_counted(counter: Counter[str]) -> Iterator[None]:
    """Count every transition that is followed while this is open."""
    follow = transitions.follow
    names = {id(table): name for name, table in TABLES.items()}

    def counting(table: Any, state: Any, event: Any) -> Any:
        after = follow(table, state, event)
        counter[_row(names[id(table)], state, event)] += 1
        return after

    users = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("kvferry.engine") and getattr(module, "follow", None) is follow
    ]
    for module in users:
        module.follow = counting  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.follow = follow  # type: ignore[attr-defined]
