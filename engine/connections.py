"""Every control connection of an engine: listening, dialling, reading, writing, hanging up.

Two rules: whatever happens to a connection is told to the router, in order, by `tell`; and a
connection that is given up is closed within a moment, whether its peer reads or not.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from .control import Connection
from .limits import CLOCK_TICK_S, HANDSHAKE_S, HANG_UP_S
from .wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import ByteStream

    from . import wire
    from .effects import Dial, Transmit
    from .ports import Listener, Network
    from .router import Router
    from .tasks import Tasks

    Tell = Callable[[Callable[[Router, int], object]], None]

logger = logging.getLogger("kvferry")


class Connections:
    """Connections by number. A number that is over is never used again.

    tell: gives an event to the router and carries out what it decides.
    on_error: hears of bugs.
    """

    def __init__(
        self,
        network: Network,
        tasks: Tasks,
        tell: Tell,
        on_error: Callable[[BaseException], None],
        dial_s: float,
    ) -> None:
        self._network = network
        self._tasks = tasks
        self._tell = tell
        self._on_error = on_error
        self._dial_s = dial_s
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[int, Connection] = {}
        self._writers: dict[int, asyncio.Task[None]] = {}
        self._made = 0
        self._unknown_before = 0  # messages of connections that are over
        self._closed_one = asyncio.Event()
        self._finished = False

    # ------------------------------------------------------------ coming up

    @property
    def address(self) -> str | None:
        """Where this engine can be dialled, None when it does not listen."""
        return self._listener.address if self._listener is not None else None

    @property
    def messages_unknown(self) -> int:
        """Messages of kinds that this version does not know, of all connections so far."""
        open_now = sum(connection.messages_unknown for connection in self._open.values())
        return self._unknown_before + open_now

    async def listen(self, address: str) -> None:
        """Bind the control port, and accept from now on. Raises OSError, UsageError."""
        self._listener = await self._network.listen(address)
        self._accepting = self._tasks.spawn(self._accept(self._listener), "kvferry-accept")

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # Out of file descriptors, or the connection went before it was accepted.
                logger.warning("accept on %s failed: %s", listener.address, error)
                await asyncio.sleep(CLOCK_TICK_S * 100)
                continue
            self._accepted(self._adopt(stream))

    def _accepted(self, number: int) -> None:
        self._tell(lambda router, now: router.accepted(number, now))

    def dial(self, effect: Dial) -> None:
        """Connect to a peer; the router is told how it went. Ignored after `finish`."""
        if not self._finished:
            self._tasks.spawn(self._dial(effect), f"kvferry-dial-{effect.peer.name}")

    async def _dial(self, effect: Dial) -> None:
        link = effect.link
        try:
            async with asyncio.timeout(self._dial_s):
                stream = await self._network.dial(effect.peer.address)
        except TimeoutError:
            text = f"can't be reached: no answer within {self._dial_s} s"
            self._tell(lambda router, now: router.dial_failed(link, text, now))
        except Exception as error:  # noqa: BLE001  also what resolvers raise for an odd address
            failure = f"can't be reached: {str(error) or type(error).__name__}"
            self._tell(lambda router, now: router.dial_failed(link, failure, now))
        else:
            if self._finished:
                await stream.aclose()
                return
            number = self._adopt(stream)
            self._tell(lambda router, now: router.dialled(link, number, now))

    def _adopt(self, stream: ByteStream) -> int:
        self._made += 1
        number = self._made
        self._open[number] = Connection(stream)
        self._writers[number] = self._tasks.spawn(self._write(number), f"kvferry-writer-{number}")
        self._loop.call_later(HANDSHAKE_S, self._handshake_expired, number)
        return number

    def _handshake_expired(self, number: int) -> None:
        if number in self._open:
            try:
                self._tell(lambda router, now: router.handshake_expired(number, now))
            except Exception as error:  # noqa: BLE001  a timer has no caller to raise it in
                self._on_error(error)

    # ------------------------------------------------------------ at work

    def send(self, effect: Transmit) -> None:
        """Queue a message; dropped when its connection is over. Never waits."""
        connection = self._open.get(effect.connection)
        if connection is not None:
            connection.send(effect.message, key=effect.key, gate=effect.gate)

    async def _write(self, number: int) -> None:
        """One connection, until it is closed: this task writes, a second one reads."""
        connection = self._open[number]
        reader = self._tasks.spawn(self._read(number, connection), f"kvferry-reader-{number}")
        text = "cancelled"
        try:
            text = await connection.run_writer()
        finally:
            reader.cancel()
            del self._open[number], self._writers[number]
            self._unknown_before += connection.messages_unknown
            self._closed_one.set()
            try:
                self._tell(lambda router, now: router.lost(number, text, now))
            finally:
                await connection.aclose()

    async def _read(self, number: int, connection: Connection) -> None:
        def receive(message: wire.AnyMessage) -> None:
            self._tell(lambda router, now: router.received(number, message, now))

        try:
            text = await connection.run_reader(receive)
        except WireError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug of ours: it costs this session, whose transfers fail on both sides.
            self._on_error(error)
            text = f"internal error: {error!r}"
        self._tell(lambda router, now: router.lost(number, text, now))
        self.hang_up(number)

    # ------------------------------------------------------------ going down

    def hang_up(self, number: int) -> None:
        """Let the writer flush and end; not longer than a moment. Idempotent."""
        connection = self._open.get(number)
        if connection is not None:
            connection.finish()
            self._loop.call_later(HANG_UP_S, self._cut, number)

    def _cut(self, number: int) -> None:
        writer = self._writers.get(number)
        if writer is not None:
            writer.cancel()

    def refuse(self) -> None:
        """Accept nothing more. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def finish(self) -> None:
        """Dial nothing more, and let every connection flush for a moment."""
        self._finished = True
        for connection in self._open.values():
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_S):
                while self._open:
                    self._closed_one.clear()
                    await self._closed_one.wait()

    async def close_port(self) -> None:
        """Give the control port back. Idempotent."""
        if self._listener is not None:
            await self._listener.aclose()
