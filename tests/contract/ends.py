"""The two ends of a contract check: a near one that posts, a far one whose memory is written.

The far end of a NIXL lane is a process of its own. Nothing here knows how bytes move.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from kvferry.engine.ports import (
    Close,
    Connect,
    Connected,
    Opened,
    Post,
    Region,
    Settled,
    Stopped,
)
from kvferry.transports.memory import Fabric, PromptCourier, memory
from kvferry.transports.nixl import nixl
from kvferry.transports.runner import ThreadRunner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from multiprocessing.connection import Connection

    from kvferry.engine.ports import Command, Event, Steps
    from kvferry.transports.transport import RunnerFactory, WorkerTransport

    Make = Callable[..., WorkerTransport]

Lane = Literal["memory", "memory-delayed", "nixl", "nixl-tcp"]
LANES: tuple[Lane, ...] = ("memory", "memory-delayed", "nixl", "nixl-tcp")
POOL_BYTES = 16 * 1024 * 1024
LIMIT_S = 60  # a lost event, not a slow one
FOREVER = 2**62


def maker(lane: Lane) -> Make:
    """What makes the transports of one lane; those of one call can reach each other."""
    if lane.startswith("nixl"):
        return nixl
    fabric = Fabric()
    courier = PromptCourier(200_000 if lane == "memory-delayed" else 0)

    def make(*, agents: int = 1, runner_factory: RunnerFactory | None = None) -> WorkerTransport:
        return memory(fabric, agents=agents, courier=courier, runner_factory=runner_factory)

    return make


class WatchedSteps:
    """A worker that records the threads on which it is stepped."""

    def __init__(self, worker: Steps, threads: set[int]) -> None:
        self._worker = worker
        self._threads = threads

    def step(self, now: int) -> int | None:
        self._threads.add(threading.get_ident())
        return self._worker.step(now)

    def submit(self, commands: Sequence[Command]) -> None:
        self._worker.submit(commands)

    def take_events(self) -> list[Event]:
        return self._worker.take_events()

    @property
    def stopped(self) -> bool:
        return self._worker.stopped


class WatchedRunner(ThreadRunner):
    """The real runner over watched steps."""

    def __init__(self, name: str, threads: set[int]) -> None:
        super().__init__(asyncio.get_running_loop(), name)
        self._threads = threads

    def start(self, worker: Steps, deliver: Callable[[list[Event]], None]) -> None:
        super().start(WatchedSteps(worker, self._threads), deliver)


class End:
    """A started transport with a pool of its own, and every event that it delivered."""

    _names = count()

    def __init__(self, make: Make, *, agents: int = 1) -> None:
        self.events: list[tuple[int, Event]] = []
        self.delivered_on: set[int] = set()
        self.stepped_on: set[int] = set()
        self._changed = asyncio.Event()
        self._writes = count(1)
        self.pool = np.zeros(POOL_BYTES, dtype=np.uint8)
        self.base = self.pool.ctypes.data
        self.regions = [Region(self.base, POOL_BYTES, owner=self.pool)]
        self.name = f"end-{time.monotonic_ns()}-{next(self._names)}"
        self.transport = make(
            agents=agents, runner_factory=lambda name: WatchedRunner(name, self.stepped_on)
        )
        self.transport.start(self.name, self.regions, self._deliver)

    def _deliver(self, agent: int, events: list[Event]) -> None:
        assert events
        self.delivered_on.add(threading.get_ident())
        self.events += [(agent, event) for event in events]
        self._changed.set()

    def submit(self, *commands: Command, agent: int = 0) -> None:
        self.transport.submit(agent, commands)

    def of(self, kind: type, agent: int | None = None) -> list[Event]:
        return [
            event for by, event in self.events if isinstance(event, kind) and agent in (None, by)
        ]

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; it is asked after every delivery."""
        async with asyncio.timeout(LIMIT_S):
            while not done():
                self._changed.clear()
                await self._changed.wait()

    async def first(self, kind: type, agent: int | None = None) -> Event:
        await self.until(lambda: bool(self.of(kind, agent)))
        return self.of(kind, agent)[0]

    async def metadata(self, agent: int = 0) -> bytes:
        opened = await self.first(Opened, agent)
        assert isinstance(opened, Opened)
        return opened.metadata

    async def connect(self, metadata: bytes, peer: str = "far", agent: int = 0) -> None:
        before = len(self.of(Connected))
        self.submit(Connect(peer, metadata), agent=agent)
        await self.until(lambda: len(self.of(Connected)) > before)

    def results(self) -> dict[int, str]:
        """What each write settled as. Fails when one settled twice."""
        results: dict[int, str] = {}
        for event in self.of(Settled):
            assert isinstance(event, Settled)
            assert event.write not in results, f"write {event.write} settled twice"
            results[event.write] = event.result
        return results

    async def settled(self, *posts: Post) -> list[str]:
        await self.until(lambda: all(post.write in self.results() for post in posts))
        return [self.results()[post.write] for post in posts]

    def post(
        self,
        source: Sequence[int],
        target: Sequence[int],
        lengths: Sequence[int],
        *,
        to: int,
        peer: str = "far",
        not_after: int = FOREVER,
    ) -> Post:
        """A write from offsets of our pool to offsets of the pool at address `to`."""
        return Post(
            next(self._writes),
            peer,
            np.asarray(source, dtype=np.int64) + self.base,
            np.asarray(target, dtype=np.int64) + to,
            np.asarray(lengths, dtype=np.int64),
            not_after,
        )

    async def close(self, within_s: float = 5) -> Stopped:
        not_later_than = time.monotonic_ns() + int(within_s * 1e9)
        for agent in range(self.transport.agents):
            self.submit(Close(not_later_than), agent=agent)
        await self.until(lambda: len(self.of(Stopped)) == self.transport.agents)
        last = self.events[-1][1]
        assert isinstance(last, Stopped)
        return last


class Far(Protocol):
    """Memory that a near end may write into."""

    metadata: bytes
    base: int

    async def fill(self, value: int) -> None:
        """Set every byte."""
        ...

    async def read(self) -> np.ndarray:
        """A copy of every byte."""
        ...


class LocalFar:
    """A far end on this loop."""

    def __init__(self, end: End, metadata: bytes) -> None:
        self._end = end
        self.metadata = metadata
        self.base = end.base

    async def fill(self, value: int) -> None:
        self._end.pool[:] = value

    async def read(self) -> np.ndarray:
        return self._end.pool.copy()


class ProcessFar:
    """A far end in a process of its own."""

    def __init__(self, connection: Connection, metadata: bytes, base: int) -> None:
        self._connection = connection
        self.metadata = metadata
        self.base = base

    async def fill(self, value: int) -> None:
        self._connection.send(("fill", value))
        await asyncio.to_thread(self._connection.recv)

    async def read(self) -> np.ndarray:
        self._connection.send(("read", None))
        return np.frombuffer(await asyncio.to_thread(self._connection.recv_bytes), dtype=np.uint8)


async def _serve(lane: Lane, connection: Connection) -> None:
    end = End(maker(lane))
    connection.send((await end.metadata(), end.base))
    while True:
        command, value = await asyncio.to_thread(connection.recv)
        if command == "fill":
            end.pool[:] = value
            connection.send("filled")
        elif command == "read":
            connection.send_bytes(end.pool.data)
        else:
            break
    await end.close()


def _serve_process(lane: Lane, connection: Connection) -> None:
    asyncio.run(_serve(lane, connection))


@asynccontextmanager
async def far_end(lane: Lane, make: Make) -> AsyncIterator[Far]:
    """A far end of `lane`; a process is asked to end and must end with exit code 0."""
    if lane.startswith("memory"):
        end = End(make)
        yield LocalFar(end, await end.metadata())
        await end.close()
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_process, args=(lane, theirs), daemon=True)
    process.start()
    theirs.close()
    metadata, base = await asyncio.to_thread(ours.recv)
    try:
        yield ProcessFar(ours, metadata, base)
        ours.send(("end", None))
        await asyncio.to_thread(process.join, LIMIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        ours.close()
