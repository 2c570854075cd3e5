"""Runs the rows of the truth table a few at a time: their settling overlaps, their events do not.

KVFERRY_TRUTH_SETTLE: seconds for which clean memory is watched (5). KVFERRY_TRUTH_REPORT: a file
that gets one line of JSON for each row; `python -m tests.truth.report FILE` prints its table.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.truth.cut import missing_privilege, remove_leftovers
from tests.truth.rows import Result, Row, run_row

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLE_S = float(os.environ.get("KVFERRY_TRUTH_SETTLE", "5"))
_AT_ONCE = 4  # each has two pools of 256 MiB


class Table:
    """The rows of this session, started together, asked for one by one."""

    def __init__(self, rows: list[Row]) -> None:
        self.no_network = missing_privilege() if any(row.network for row in rows) else ""
        self._runner = ThreadPoolExecutor(_AT_ONCE)
        self._results: dict[str, Future[Result]] = {
            row.name: self._runner.submit(run_row, row, SETTLE_S)
            for row in rows
            if not (row.network and self.no_network)
        }

    def result(self, row: Row) -> Result:
        """What the row showed; waits for it. Raises AssertionError if no trial counted."""
        result = self._results[row.name].result()
        if report := os.environ.get("KVFERRY_TRUTH_REPORT"):
            with Path(report).open("a") as lines:
                lines.write(json.dumps(result.record()) + "\n")
        return result

    def close(self) -> None:
        self._runner.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Only the selected rows run."""
    remove_leftovers()
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [call.params["row"] for call in calls if call and "row" in call.params]
    running = Table([row for row in chosen if isinstance(row, Row)])
    yield running
    running.close()
