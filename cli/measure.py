"""Measures one process while bytes move: loop lag by a 1 ms ticker, and CPU time.

Two rules: nothing is measured outside `measured()`, and measuring costs one timer.
"""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TICK_S: Final = 0.001


@dataclass(slots=True)
class Figures:
    """lags_ms: how much later than 1 ms each tick came. cpu_s: of all threads of the process."""

    lags_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


@asynccontextmanager
async def measured() -> AsyncIterator[Figures]:
    """Measure until the scope is left; the figures are complete then."""
    figures = Figures()
    before = cpu_s()
    ticker = asyncio.create_task(_tick(figures.lags_ms), name="demo-ticker")
    try:
        yield figures
    finally:
        ticker.cancel()
        figures.cpu_s = cpu_s() - before


def cpu_s() -> float:
    """CPU seconds of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """The most memory that this process ever had resident; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def _tick(lags_ms: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags_ms.append(max(0.0, (time.perf_counter() - before - _TICK_S) * 1e3))
