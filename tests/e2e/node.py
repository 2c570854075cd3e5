"""A process that hosts one engine after another, driven over a socket: `python -m ... FD`.

Its pool has slots of 512 KiB. Commands are methods of `Node`; one answer each, in order. Nothing
here judges: that is the test's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

import kvferry as kv
from kvferry.adapters.torch_layout import paged_layout

# [slot, layer, kind, token, head, dim] in uint16: 512 KiB per slot.
SHAPE = (4, 2, 16, 8, 256)
AXES = "block layer kind token head dim"
TOKENS_PER_BLOCK = SHAPE[2]
GROUP = "full"


class Node:
    """What the other end of the socket may call."""

    def __init__(self) -> None:
        self._engine: kv.Engine | None = None
        self._pool = np.empty(0, dtype=np.uint16)
        self._fill = 0
        self._trigger: asyncio.Task[Any] | None = None
        self._transfers: dict[str, kv.Receive | kv.Send] = {}
        self._released: dict[str, list[tuple[list[int], str]]] = {}
        self._seconds: dict[str, float] = {}

    async def open(
        self,
        slots: int,
        fill: int,
        config: dict[str, Any],
        *,
        shape: tuple[int, ...] = SHAPE,
        axes: str = AXES,
        heads: tuple[int, int] | None = None,
    ) -> str:
        """Start a fresh engine over a pool that is filled with `fill`, or at random if -1.

        shape, axes: of a block and of the pool; heads: the global range that this rank holds.
        """
        self._pool = np.empty((slots, *shape), dtype=np.uint16)
        await self.fill(fill)
        self._engine = kv.Engine(
            kv.Config(**config),
            layout=paged_layout(self._pool, axes, group=GROUP, heads=heads, model="e2e"),
            transport=kv.nixl(),
        )
        await self._engine.start()
        self._transfers, self._released, self._seconds = {}, {}, {}
        return self._engine.address if config.get("listen") else ""

    async def close(self) -> kv.Stats:
        """Close the engine; return what it counted before."""
        assert self._engine is not None
        self._engine.check_integrity()
        stats = self._engine.stats()
        await self._engine.aclose()
        return stats

    async def die(self) -> None:
        """Be killed, with every thread and whatever it is doing."""
        os.kill(os.getpid(), signal.SIGKILL)

    async def drain(self) -> None:
        """Wait until every slot of every transfer is back."""
        for transfer in self._transfers.values():
            await transfer.released()

    async def when_moving(self, method: str, *arguments: Any) -> None:
        """Call a method by itself as soon as bytes of a transfer move; `triggered` waits for it."""

        async def wait() -> Any:
            while not self._moving():  # noqa: ASYNC110  bytes that come set no event
                await asyncio.sleep(0)
            return await getattr(self, method)(*arguments)

        self._trigger = asyncio.create_task(wait())

    async def triggered(self) -> Any:
        assert self._trigger is not None
        return await self._trigger

    def _moving(self) -> bool:
        """As a source: a write is out. As a target: a block has begun to come."""
        assert self._engine is not None
        first = self._pool.reshape(len(self._pool), -1)[:, 0]
        begun = self._fill >= 0 and bool((first != self._fill).any())
        return begun or self._engine.stats().writes_open > 0

    async def fill(self, value: int) -> None:
        self._fill = value
        if value >= 0:
            self._pool[:] = value
        else:
            random = np.random.default_rng(-value)
            self._pool[:] = random.integers(0, 2**16, self._pool.shape, dtype=np.uint16)

    async def pool(self) -> np.ndarray:
        """A copy of everything, uint16[slots, elements]."""
        return self._pool.reshape(len(self._pool), -1).copy()

    async def changed(self, value: int, slots: list[int]) -> int:
        """How many elements of these slots are not `value`."""
        return int((self._pool[slots] != value).sum())

    # ------------------------------------------------------------ transfers

    async def receive(
        self, request: str, runs: list[Any], tokens: int, peer: tuple[str, str], **more: Any
    ) -> None:
        assert self._engine is not None
        attempt = more.pop("attempt", 0)
        receive = self._engine.receive(
            kv.Key(request, attempt),
            source=kv.Peer(*peer),
            need={GROUP: kv.Span.from_runs(runs)},
            tokens=tokens,
            on_released=self._on_released(request),
            **more,
        )
        self._watch(request, receive)
        await receive.__aenter__()

    async def send(self, request: str, tokens: int, **more: Any) -> None:
        assert self._engine is not None
        send = self._engine.send(
            request, tokens=tokens, on_released=self._on_released(request), **more
        )
        self._watch(request, send)
        await send.__aenter__()

    async def push(self, request: str, runs: list[Any]) -> None:
        self._sending(request).push({GROUP: kv.Span.from_runs(runs)})

    async def finish(self, request: str, aux: bytes = b"") -> None:
        self._sending(request).finish(aux)

    async def cancel(self, request: str, reason: str) -> None:
        self._transfers[request].cancel(reason)

    async def leave(self, request: str) -> None:
        """Leave the transfer's scope."""
        await self._transfers[request].__aexit__(None, None, None)

    async def outcome(self, request: str) -> dict[str, Any]:
        """Wait for the end: the result's fields, or those of the error."""
        try:
            result = await self._transfers[request]
        except kv.KvferryError as error:
            return {
                "end": type(error).__name__,
                "text": str(error),
                "by": error.by,
                "code": error.code,
                "peer": error.peer,
                "retry_safe": error.retry_safe,
            }
        found: dict[str, Any] = {"end": "done", "tokens": result.tokens}
        found["bytes"] = result.bytes_moved
        if isinstance(result, kv.Received):
            found["aux"] = result.aux
        return found

    async def seconds(self, request: str) -> float:
        """From entering the transfer until its outcome was known."""
        return self._seconds[request]

    async def released(self, request: str) -> list[tuple[list[int], str]]:
        """Wait until every slot is back: (slots, evidence) as they came."""
        await self._transfers[request].released()
        return self._released[request]

    def _sending(self, request: str) -> kv.Send:
        transfer = self._transfers[request]
        assert isinstance(transfer, kv.Send)
        return transfer

    def _watch(self, request: str, transfer: kv.Receive | kv.Send) -> None:
        self._transfers[request] = transfer
        self._released[request] = []
        start = time.perf_counter()

        async def watch() -> None:
            try:
                await transfer
            except kv.KvferryError:
                pass
            finally:
                self._seconds[request] = time.perf_counter() - start

        async def later() -> None:
            await asyncio.sleep(0)  # until it was entered
            await watch()

        self._watcher = asyncio.create_task(later())

    def _on_released(self, request: str) -> Any:
        def on_released(slots: dict[str, np.ndarray], evidence: str) -> None:
            self._released[request].append((slots[GROUP].tolist(), evidence))

        return on_released


async def _serve(connection: Connection) -> int:
    """Answer commands until one asks to exit, or the test is gone; return the exit code."""
    node = Node()
    while True:
        try:
            method, arguments, named = await asyncio.to_thread(connection.recv)
        except EOFError:
            return 0
        if method == "exit":
            return int(arguments[0])
        try:
            answer = (True, await getattr(node, method)(*arguments, **named))
        except Exception as error:  # noqa: BLE001  the test decides what it means
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve(Connection(int(sys.argv[1])))))
