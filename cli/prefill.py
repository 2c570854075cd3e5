"""The demo's prefill process: computes each request's blocks and streams them out.

Two rules: a block is filled before it is pushed and not touched until it came back, and blocks
are used again as soon as they came back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from ..engine.config import Config
from ..engine.errors import KvferryError
from ..engine.service import Engine
from ..engine.spans import Span
from ..transports.nixl import nixl
from . import measure
from .messages import Checked, Closed, Moved, Opened
from .pools import GROUP, CachePool

if TYPE_CHECKING:
    from ..engine.lease import Slots
    from .pools import Int64Array
    from .workload import Settings, Workload

CHUNK_BLOCKS: Final = 4  # pushed together, as a chunked prefill of 64 tokens per step would
STALL_S: Final = 20.0


class Prefill:
    """Implements `child.Role`. The source of every transfer."""

    name = "prefill"

    def __init__(self, settings: Settings, workload: Workload) -> None:
        self._settings = settings
        self._workload = workload
        self._transport = nixl()
        self._slots: dict[int, Int64Array] = {}  # the block table: by request
        self._room = asyncio.Semaphore(settings.in_flight)

    async def open(self) -> Opened:
        """Listens on a free port of this host."""
        workload = self._workload
        self._pool = CachePool(
            workload.geometry, workload.slots, self._settings.seed, self._settings.model
        )
        self._engine = Engine(
            Config(name=self.name, listen="127.0.0.1:0", stall_s=STALL_S),
            layout=self._pool.layout(),
            transport=self._transport,
        )
        await self._engine.start()
        return Opened(self._engine.address, self._transport.name, self._transport.describe())

    async def prepare(self, first: int, stop: int) -> None:
        """Compute the blocks of the round, into fragmented slots."""
        for request in range(first, stop):
            slots = self._pool.free.take(self._workload.blocks(request))
            self._pool.write(request, slots, np.arange(len(slots)))
            self._slots[request] = slots
            if self._settings.plant == "flip-byte" and request == self._workload.planted:
                self._pool.flip_byte(int(slots[len(slots) // 2]))
            await asyncio.sleep(0)

    async def move(self, first: int, stop: int, source: str) -> Moved:
        """Send the round's requests, `in_flight` at a time."""
        del source
        async with measure.measured() as figures:
            ended = await asyncio.gather(*(self._send(request) for request in range(first, stop)))
        return Moved(figures.lags_ms, figures.cpu_s, [text for text in ended if text])

    async def check(self, first: int, stop: int) -> Checked:
        """Nothing writes into this pool."""
        del first, stop
        return Checked()

    async def close(self) -> Closed:
        """Every block must have come back by now."""
        stats = self._engine.stats()
        await self._engine.aclose()
        faults = []
        if self._pool.free.taken:
            faults.append(f"prefill: {self._pool.free.taken} blocks did not come back")
        if stats.internal_errors or stats.callback_errors:
            faults.append(f"prefill: its engine counts errors: {stats}")
        return Closed(measure.cpu_s(), measure.peak_bytes(), faults)

    async def _send(self, request: int) -> str:
        """Stream one request; return what went wrong, or nothing."""
        slots = self._slots.pop(request)
        async with self._room:
            try:
                send = self._engine.send(
                    f"request-{request}",
                    tokens=self._workload.tokens[request],
                    on_released=self._released,
                )
                async with send:
                    for chunk in self._chunks(request, slots):
                        send.push({GROUP: chunk})
                        await asyncio.sleep(0)  # the next chunk is computed meanwhile
                    send.finish()
                await send
            except KvferryError as error:
                return f"request {request} on prefill: {type(error).__name__}: {error}"
        # Blocks of a failed send may never come back; then `close` counts them.
        await send.released()
        return ""

    def _chunks(self, request: int, slots: Int64Array) -> list[Span]:
        """The request's blocks as they become ready, each chunk anchored at its first ordinal."""
        if self._settings.plant == "wrong-anchor" and request == self._workload.planted:
            slots = np.roll(slots, -1)  # every block one ordinal before its own
        return [
            Span.from_slots(slots[first : first + CHUNK_BLOCKS], first)
            for first in range(0, len(slots), CHUNK_BLOCKS)
        ]

    def _released(self, slots: Slots, evidence: str) -> None:
        del evidence
        self._pool.free.give_back(slots[GROUP])
