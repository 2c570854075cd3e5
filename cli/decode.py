"""The demo's decode process: asks for every request, and judges what came.

Two rules: what must be in the pool is worked out from coordinates and this side's block table
alone, and no slot is lent again before every byte of the pool was compared.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from ..engine.config import Config
from ..engine.errors import KvferryError
from ..engine.keys import Key, Peer
from ..engine.service import Engine
from ..engine.spans import Span
from ..transports.nixl import nixl
from . import measure
from .messages import Checked, Closed, Moved, Opened, Progress
from .pools import GROUP, CachePool
from .prefill import STALL_S, Prefill

if TYPE_CHECKING:
    from ..engine.effects import Received
    from ..engine.lease import Slots
    from .child import Report
    from .pools import Int64Array
    from .workload import Settings, Workload


class Decode:
    """Implements `child.Role`. The target of every transfer."""

    name = "decode"

    def __init__(self, settings: Settings, workload: Workload, report: Report) -> None:
        self._settings = settings
        self._workload = workload
        self._report = report
        self._transport = nixl()
        self._slots: dict[int, Int64Array] = {}  # the block table: by request
        self._room = asyncio.Semaphore(settings.in_flight)
        self._in_flight = 0
        self._in_flight_most = 0
        self._lent = 0  # slots that were offered, and with which evidence they came back
        self._evidence: dict[str, int] = {}

    async def open(self) -> Opened:
        """Does not listen: it dials the prefill engine."""
        workload = self._workload
        self._pool = CachePool(
            workload.geometry, workload.slots, self._settings.seed, self._settings.model
        )
        self._engine = Engine(
            Config(name=self.name, stall_s=STALL_S),
            layout=self._pool.layout(),
            transport=self._transport,
        )
        await self._engine.start()
        return Opened("", self._transport.name, self._transport.describe())

    async def prepare(self, first: int, stop: int) -> None:
        """Take fragmented slots for the round."""
        for request in range(first, stop):
            slots = self._pool.free.take(self._workload.blocks(request))
            self._pool.own(request, slots)
            self._slots[request] = slots
            # A source may copy the whole last block. Tokens past the last one get their values
            # before the transfer, so that copied or not copied, nothing else may be there.
            past = self._workload.tokens[request] % self._workload.geometry.tokens_per_block
            if past:
                last = np.array([len(slots) - 1])
                self._pool.write(request, slots[-1:], last, skip=past)

    async def move(self, first: int, stop: int, source: str) -> Moved:
        """Receive the round's requests from the engine at `source`, `in_flight` at a time."""
        peer = Peer(Prefill.name, source)
        bystander = self._pool.free.first()  # not a slot of this round
        start = self._ended_at = time.perf_counter()
        async with measure.measured() as figures:
            ended = await asyncio.gather(
                *(self._receive(request, peer) for request in range(first, stop))
            )
        if self._settings.plant == "extra-byte" and first <= self._workload.planted < stop:
            self._pool.flip_byte(bystander)
        done = [end for end in ended if not isinstance(end, str)]
        return Moved(
            lags_ms=figures.lags_ms,
            cpu_s=figures.cpu_s,
            failures=[end for end in ended if isinstance(end, str)],
            seconds=self._ended_at - start,
            latencies_ms=[seconds * 1e3 for seconds, _ in done],
            bytes=sum(got.bytes_moved for _, got in done),
            in_flight=self._in_flight_most,
        )

    async def check(self, first: int, stop: int) -> Checked:
        """Compare every byte of the pool: of the round, of rounds before, of free slots."""
        differences = []
        for difference in self._pool.check(first, stop):
            if difference is not None:
                differences.append(difference)
            await asyncio.sleep(0)  # the engine's control messages go on
        return Checked(differences)

    async def close(self) -> Closed:
        """Every slot must have come back by now, as drained: nothing was cancelled."""
        stats = self._engine.stats()
        await self._engine.aclose()
        faults = []
        if self._evidence != {"drained": self._lent}:
            faults.append(f"decode: {self._lent} slots were lent, back are {self._evidence}")
        if stats.internal_errors or stats.callback_errors:
            faults.append(f"decode: its engine counts errors: {stats}")
        return Closed(measure.cpu_s(), measure.peak_bytes(), faults)

    async def _receive(self, request: int, source: Peer) -> str | tuple[float, Received]:
        """Ask for one request; return (seconds from receive to done, what came) or what failed."""
        slots = self._slots.pop(request)
        async with self._room:
            start = time.perf_counter()
            self._in_flight += 1
            self._in_flight_most = max(self._in_flight_most, self._in_flight)
            self._lent += len(slots)
            receive = self._engine.receive(
                Key(f"request-{request}"),
                source=source,
                need={GROUP: Span.from_slots(slots)},
                tokens=self._workload.tokens[request],
                on_released=self._released,
            )
            try:
                async with receive:
                    got = await receive
            except KvferryError as error:
                return f"request {request} on decode: {type(error).__name__}: {error}"
            finally:
                self._in_flight -= 1
                self._ended_at = time.perf_counter()
            seconds = self._ended_at - start
        self._report(Progress(1))
        await receive.released()
        return seconds, got

    def _released(self, slots: Slots, evidence: str) -> None:
        given = slots[GROUP]
        self._evidence[evidence] = self._evidence.get(evidence, 0) + len(given)
        self._pool.free.give_back(given)
