"""A transport made of workers: n backends, each behind its own worker and runner.

Shared by every way to move bytes; what differs is the backend. Rules: nothing here blocks the
loop or touches a backend, and events keep the order in which their worker emitted them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..engine.errors import UsageError
from .runner import ThreadRunner
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..engine.ports import Backend, Command, Event, Region, Runner, WriteBounds

    RunnerFactory = Callable[[str], Runner]


class BackendFactory(Protocol):
    """Makes one agent's backend. Called on the loop, so it must not touch the transport."""

    def __call__(self, name: str, regions: Sequence[Region]) -> Backend:
        """`name` is unique per incarnation and agent."""
        ...


class WorkerTransport:
    """Implements `ports.Transport`. Belongs to one engine; started once."""

    def __init__(
        self,
        name: str,
        bounds: WriteBounds,
        make_backend: BackendFactory,
        *,
        agents: int = 1,
        describe: Callable[[], str],
        runner_factory: RunnerFactory | None = None,
        emptied: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if agents < 1:
            raise UsageError(f"agents is {agents}, must be at least 1")
        self.name = name
        self.agents = agents
        self.bounds = bounds
        self._make_backend = make_backend
        self._describe = describe
        self._runner_factory = runner_factory or _thread_runner
        self._emptied = emptied
        self._workers: list[tuple[Worker, Runner]] = []

    def describe(self) -> str:
        """What moves the bytes, for people: library, version, lane."""
        return self._describe()

    def start(
        self,
        incarnation: str,
        regions: Sequence[Region],
        deliver: Callable[[int, list[Event]], None],
    ) -> None:
        """Open every agent; each answers with `Opened` or `Stopped`. Call it on the loop.

        incarnation: unique per life of an engine process; agents are named after it.
        Raises UsageError when it was started before.
        """
        if self._workers:
            raise UsageError(f"this {self.name} transport was started before, make a new one")
        for agent in range(self.agents):
            name = f"{incarnation}/{agent}"
            worker = Worker(self._make_backend(name, tuple(regions)))
            runner = self._runner_factory(f"kvferry-{self.name}-{agent}")
            self._workers.append((worker, runner))
            runner.start(worker, partial(deliver, agent))

    async def emptied(self) -> None:
        """See the port. At once where bytes never wait in a kernel."""
        if self._emptied is not None:
            await self._emptied()

    def submit(self, agent: int, commands: Sequence[Command]) -> None:
        """Hand commands to one agent. Never blocks."""
        worker, runner = self._workers[agent]
        worker.submit(commands)
        runner.wake()


def _thread_runner(name: str) -> Runner:
    return ThreadRunner(asyncio.get_running_loop(), name)
