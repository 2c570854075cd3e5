"""Runs the demo: starts both processes, takes them through the rounds, gathers what they say.

Each round is prepared, then moved, then checked, so nothing but the moving is measured. Two
rules: a step begins only after both processes ended the one before, and both processes are gone
when `run_demo` returns, however it does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ..engine.errors import UsageError
from .messages import Answer, Checked, Closed, Command, Moved, Opened, Prepared
from .outcome import Outcome
from .processes import running
from .workload import make_workload

if TYPE_CHECKING:
    from .processes import Child
    from .workload import Settings, Workload

A = TypeVar("A", bound=Answer)

_PROCESS_BYTES: Final = 512 * 1024 * 1024  # of one process beside its pool: NIXL, torch, numpy


class Watcher(Protocol):
    """Who is told how far the demo is."""

    def phase(self, text: str) -> None:
        """Something else begins."""
        ...

    def done(self, requests: int) -> None:
        """So many more transfers are done."""
        ...


async def run_demo(settings: Settings, watcher: Watcher) -> Outcome:
    """Run it. Raises DemoError when a process fails, UsageError for settings that can't be run.

    Cancelling it ends both processes before it returns.
    """
    workload = make_workload(settings)
    check_memory(workload, memory_available())
    if settings.plant == "wrong-anchor" and workload.blocks(workload.planted) < 2:
        raise UsageError("a wrong anchor needs a request of two blocks: a larger --scale")
    outcome = Outcome(settings, workload)
    watcher.phase("starting")
    async with running(("prefill", "decode"), settings, watcher.done) as children:
        pair = _Pair(*children)
        opened, _ = await pair.ask(Opened, Command("open"))
        outcome.transport, outcome.lane = opened.transport, opened.lane
        for first, stop in workload.rounds:
            await _round(pair, first, stop, opened.address, outcome, watcher)
            if outcome.failures:
                break  # slots of a failed transfer may be missing in the next round
        watcher.phase("closing")
        outcome.close(*await pair.ask(Closed, Command("close")))
    return outcome


async def _round(
    pair: _Pair, first: int, stop: int, source: str, outcome: Outcome, watcher: Watcher
) -> None:
    watcher.phase("computing")
    await pair.ask(Prepared, Command("prepare", first, stop))
    watcher.phase("moving")
    sent, received = await pair.ask(Moved, Command("move", first, stop, source))
    watcher.phase("comparing every byte")
    _, checked = await pair.ask(Checked, Command("check", first, stop))
    outcome.add_round(sent, received, checked)


class _Pair:
    """Both processes, one step at a time."""

    def __init__(self, prefill: Child, decode: Child) -> None:
        self._children = (prefill, decode)

    async def ask(self, kind: type[A], command: Command) -> tuple[A, A]:
        """Let both do one step. The first trouble ends the waiting for the other."""
        asking = [asyncio.ensure_future(child.ask(kind, command)) for child in self._children]
        try:
            prefill, decode = await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
        return prefill, decode


def check_memory(workload: Workload, available: int) -> None:
    """Raise UsageError when both pools don't fit into `available` bytes."""
    needed = 2 * (workload.pool_bytes + _PROCESS_BYTES)
    if needed > available:
        raise UsageError(
            f"this takes {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available: "
            "choose a smaller --scale"
        )


def memory_available() -> int:
    """Bytes that programs may still take. Source: MemAvailable of /proc/meminfo, in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise UsageError("/proc/meminfo does not tell MemAvailable")
