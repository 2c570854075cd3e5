"""Runs every check over one lane under one loop: `python -m tests.contract.run LANE LOOP OUT`.

NIXL lanes run in a process of their own, because UCX reads its settings once per process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import uvloop

from .checks import CHECKS
from .ends import far_end, maker

if TYPE_CHECKING:
    from .ends import Lane

LoopName = Literal["asyncio", "uvloop"]


async def _all(lane: Lane) -> dict[str, str]:
    make = maker(lane)
    failures: dict[str, str] = {}
    async with far_end(lane, make) as far:
        for name, check in CHECKS.items():
            try:
                await check(make, far)
            except Exception:  # noqa: BLE001 - every check is reported by itself
                failures[name] = traceback.format_exc()
            else:
                failures[name] = ""
    return failures


def run_checks(lane: Lane, loop: LoopName) -> dict[str, str]:
    """What went wrong by check, "" where nothing did."""
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_all(lane))


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(run_checks(sys.argv[1], sys.argv[2])))  # type: ignore[arg-type]
