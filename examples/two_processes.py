"""A prefill and a decode process, as in production but for the model and the router.

In two terminals, prefill first; it waits a minute for decode:

    python examples/two_processes.py prefill 127.0.0.1:7400
    python examples/two_processes.py decode 127.0.0.1:7400

Both print the checksum of each request's cache: the lines must be the same. UCX_TLS=tcp in front
of both takes tcp.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import TYPE_CHECKING

import numpy as np

import kvferry as kv
from kvferry.adapters.torch_layout import paged_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Slots = NDArray[np.int64]

REQUESTS = [f"request-{number}" for number in range(8)]  # a router would say them
BLOCKS, BLOCK_TOKENS = 24, 16  # of each request


class Pool:
    """A cache, `[block, layer, kind, token, head, dim]`, whose slots are counted by reference.

    A request holds its slots, and so does a transfer: whichever ends last frees them.
    """

    def __init__(self) -> None:
        self.cache = np.zeros((256, 8, 2, BLOCK_TOKENS, 4, 64), dtype=np.float32)
        self.layout = paged_layout(self.cache, "block layer kind token head dim", model="example")
        self._references = np.zeros(len(self.cache), dtype=np.int64)

    def take(self, blocks: int) -> Slots:
        """Free slots, held once. A server would let the request wait when there are too few."""
        slots = np.flatnonzero(self._references == 0)[:blocks]
        self.hold(slots)
        return slots

    def hold(self, slots: Slots) -> None:
        """One more holder of each of these slots."""
        self._references[slots] += 1

    def drop(self, slots: Slots) -> None:
        """One holder less."""
        self._references[slots] -= 1

    def released(self, slots: dict[str, Slots], evidence: str) -> None:
        """The transfer's hold ends: nothing can touch these slots on its behalf any more."""
        del evidence
        self.drop(slots["full"])

    def print_checksum(self, request: str, slots: Slots) -> None:
        """Say what the cache of a request is."""
        print(request, f"{zlib.crc32(self.cache[slots].tobytes()):08x}", flush=True)


def open_engine(name: str, pool: Pool, listen: str | None = None) -> kv.Engine:
    """An engine over the pool; `async with` opens it."""
    config = kv.Config(name=name, listen=listen)
    return kv.Engine(config, layout=pool.layout, transport=kv.nixl(), owners=[pool.cache])


async def prefill(address: str) -> None:
    """Compute every request block by block, and send each block as soon as it is there."""
    pool = Pool()

    async def serve(engine: kv.Engine, request: str) -> None:
        slots = pool.take(BLOCKS)
        chance = np.random.default_rng(zlib.crc32(request.encode()))
        tokens = BLOCKS * BLOCK_TOKENS
        async with engine.send(request, tokens=tokens, on_released=pool.released) as tx:
            for ordinal, slot in enumerate(slots):
                await asyncio.sleep(0)  # the model would run here
                pool.cache[slot] = chance.random(pool.cache.shape[1:], dtype=np.float32)
                pool.hold(slots[ordinal : ordinal + 1])
                tx.push({"full": kv.Span.from_slots([slot], first=ordinal)})
            tx.finish(aux=b"first token")
        pool.print_checksum(request, slots)
        pool.drop(slots)  # prefill is done with them, the transfer perhaps not yet
        await tx

    async with open_engine("prefill", pool, listen=address) as engine:
        print("listening on", engine.address, flush=True)
        await asyncio.gather(*(serve(engine, request) for request in REQUESTS))


async def decode(address: str) -> None:
    """Get the cache of every request."""
    pool = Pool()

    async def fetch(engine: kv.Engine, request: str) -> None:
        slots = pool.take(BLOCKS)
        pool.hold(slots)
        async with engine.receive(
            kv.Key(request),
            source=kv.Peer("prefill", address),
            need={"full": kv.Span.from_slots(slots)},
            tokens=BLOCKS * BLOCK_TOKENS,
            on_released=pool.released,
        ) as rx:
            await rx
        pool.print_checksum(request, slots)  # decoding would begin here
        pool.drop(slots)

    async with open_engine("decode", pool) as engine:
        await asyncio.gather(*(fetch(engine, request) for request in REQUESTS))


if __name__ == "__main__":
    role, where = sys.argv[1:]
    asyncio.run({"prefill": prefill, "decode": decode}[role](where))
