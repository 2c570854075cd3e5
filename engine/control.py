"""One control connection: frames over an anyio byte stream, read and written by two tasks.

Two rules: the reader never awaits a write, and what is sent never waits: `send` puts a message
into the outbox and returns.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from .frames import Inbox, Outbox
from .limits import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import ByteStream

    from . import wire
    from .keys import Key


class Connection:
    """A framed connection. `run_reader` and `run_writer` are tasks that the driver owns."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._wanted = asyncio.Event()
        self._finishing = False

    def send(
        self,
        message: wire.Message,
        *,
        key: Key | None = None,
        gate: Callable[[], bool] | None = None,
    ) -> None:
        """Queue a message. Never waits. See `Outbox.put` for `key` and `gate`."""
        if not self._finishing:
            self._outbox.put(message, key=key, gate=gate)
            self._wanted.set()

    @property
    def messages_unknown(self) -> int:
        """Messages of kinds that this version does not know; they were skipped."""
        return self._inbox.unknown

    def finish(self) -> None:
        """Queue nothing more; `run_writer` returns when what is queued was handed over."""
        self._finishing = True
        self._wanted.set()

    async def run_reader(self, receive: Callable[[wire.AnyMessage], None]) -> str:
        """Call `receive` for each message until the connection ends; return why it ended.

        Raises WireError when the peer breaks the framing, and whatever `receive` raises.
        """
        while True:
            try:
                data = await self._stream.receive(FRAME_BYTES_MAX)
            except anyio.EndOfStream:
                return "the peer closed the connection"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                return f"connection lost ({type(error.__cause__ or error).__name__})"
            for message in self._inbox.feed(data):
                receive(message)

    async def run_writer(self) -> str:
        """Hand queued messages to the socket until `finish`; return why it ended."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while data := self._outbox.take(FRAME_BYTES_MAX):
                    await self._stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                return f"connection lost ({type(error.__cause__ or error).__name__})"
            if self._finishing and not self._outbox.bytes_waiting:
                return "finished"

    async def aclose(self) -> None:
        """Close the stream. Idempotent."""
        await self._stream.aclose()
