"""Carries out what the router decides: connections, timers, the transport, callbacks.

The only file beside `control` and `service` that awaits. One owner task runs the engine from
opening to closing; every other task here has it as its owner. Two rules: every event ends in
`_settle`, which does the effects in their order however callbacks nest, and nothing on the loop
waits for the transport.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from .context import Context, nanoseconds
from .control import Connection
from .effects import Dial, Ended, Fenced, HangUp, Release, Report, Submit, Transmit
from .errors import Failed, KvferryError
from .limits import CLOCK_TICK_S, HANDSHAKE_S, HANG_UP_S
from .ports import Close, Opened, Stopped
from .router import Router
from .wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from anyio.abc import ByteStream

    from . import wire
    from .config import Config
    from .effects import Effect, Received, Sent
    from .layout import Layout
    from .lease import Evidence, Slots
    from .ports import Command, Event, Host, Listener, Transport
    from .transfer import SourceTransfer, TargetTransfer

logger = logging.getLogger("kvferry")


class Handle(Protocol):
    """A caller's end of a transfer, told by the driver. Each exactly as often as it says."""

    def on_ended(self, result: Received | Sent | None, error: KvferryError | None) -> None:
        """Once: the outcome."""

    def on_release(self, slots: Slots, evidence: Evidence) -> None:
        """Any number of times: these slots are back."""

    def on_fenced(self) -> None:
        """Once, after the outcome: no slot is out any more."""

    def on_abandoned(self) -> None:
        """Instead of `on_fenced`: the engine has closed without evidence for some slots."""


class Driver:
    """One engine at work. `start` and `close` are called once each, on the loop that owns it."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        owners: tuple[object, ...],
        transport: Transport,
        host: Host,
    ) -> None:
        self._config = config
        self._layout = layout
        self._owners = owners
        self._transport = transport
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._router: Router | None = None
        self._context: Context | None = None
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handles: dict[int, Handle] = {}
        self._connections: dict[int, Connection] = {}
        self._writers: dict[int, asyncio.Task[None]] = {}
        self._connections_made = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that closing is too
        self._transport_started = False
        self._agents_open: dict[int, bytes] = {}
        self._agents_stopped: dict[int, str] = {}
        self._agents_changed = asyncio.Event()
        self._settling = False
        self._again = False  # something became ready while settling
        self._settle_soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._closing = asyncio.Event()
        self._shutting = False  # nothing new is begun: no dial, no timer
        self._moved = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self.internal_errors = 0
        self.callback_errors = 0

    # ------------------------------------------------------------ life

    @property
    def router(self) -> Router:
        """The decisions. Available while the engine is open."""
        assert self._router is not None
        return self._router

    @property
    def address(self) -> str | None:
        """Where targets can reach this engine, None when it does not listen."""
        return self._listener.address if self._listener is not None else None

    @property
    def transfers(self) -> int:
        """Transfers that are not fenced yet."""
        return len(self._handles)

    async def start(self) -> None:
        """Open the transport and the control port. Raises Failed, OSError.

        When it is cancelled or fails, the owner task closes what was opened.
        """
        started = self._loop.create_future()
        self._owner = self._loop.create_task(self._run(started), name="kvferry-owner")
        try:
            await asyncio.shield(started)
        except BaseException:
            self._closing.set()
            raise

    async def close(self) -> None:
        """End everything. Cancelling it leaves the rest to the owner task. Idempotent."""
        self._closing.set()
        if self._owner is not None:
            await asyncio.wait([self._owner])
            if not self._owner.cancelled() and (error := self._owner.exception()) is not None:
                raise error

    async def _run(self, started: asyncio.Future[None]) -> None:
        """The owner: open, wait until closing is asked for, close."""
        try:
            try:
                await self._open()
            except Exception as error:  # noqa: BLE001  it is raised in `start`
                started.set_exception(error)
                started.exception()  # it may be that nobody waits for it any more
                return
            started.set_result(None)
            await self._closing.wait()
            await self._drain()
        finally:
            started.cancel()  # without effect unless this task was cancelled before it opened
            await self._shut()

    async def _open(self) -> None:
        incarnation = self._host.entropy(16).hex()
        regions = [replace(region, owner=self._owners) for region in self._layout.regions()]
        self._transport.start(f"{self._config.name}/{incarnation}", regions, self._deliver)
        self._transport_started = True
        while len(self._agents_open) < self._transport.agents:
            for agent, text in self._agents_stopped.items():
                raise Failed(
                    f"agent {agent} of transport {self._transport.name} did not open: {text}",
                    by="transport",
                    code="transport-open",
                )
            self._agents_changed.clear()
            await self._agents_changed.wait()
        self._context = Context(
            self._config,
            self._layout,
            incarnation,
            self._transport.name,
            self._transport.bounds,
            [self._agents_open[agent] for agent in range(self._transport.agents)],
            self._host.identity(),
            self._host.entropy,
        )
        self._router = Router(self._context)
        if self._config.listen is not None:
            self._listener = await self._host.network.listen(self._config.listen)
            self._accepting = self._spawn(self._accept(self._listener), "kvferry-accept")

    async def _drain(self) -> None:
        """End every transfer, then give running writes and the last messages their time."""
        self._give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.close_s):
                while self._handles:
                    self._moved.clear()
                    await self._moved.wait()

    def _give_up(self) -> None:
        """Accept nothing more, and end every transfer."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._router is not None:
            self._router.close(self._host.now())
            self._settle()

    async def _shut(self) -> None:
        """Close connections and agents; bounded, and also when the owner was cancelled."""
        self._give_up()
        self._shutting = True
        if self._timer is not None:
            self._timer.cancel()
        if self._settle_soon is not None:
            self._settle_soon.cancel()
        for connection in self._connections.values():
            connection.finish()
        if self._connections:
            with suppress(TimeoutError):
                async with asyncio.timeout(HANG_UP_S):
                    while self._connections:
                        self._moved.clear()
                        await self._moved.wait()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        if self._listener is not None:
            await self._listener.aclose()
        if self._transport_started:
            await self._stop_agents()
        if self._handles:
            logger.warning(
                "engine %s closed with %d transfers whose memory was not proven safe",
                self._config.name,
                len(self._handles),
            )
        for transfer in list(self._handles):
            self._call(transfer, "on_abandoned")

    async def _stop_agents(self) -> None:
        deadline = self._host.now() + nanoseconds(self._config.close_s)
        for agent in range(self._transport.agents):
            if agent not in self._agents_stopped:
                self._transport.submit(agent, [Close(deadline)])
        while len(self._agents_stopped) < self._transport.agents:
            self._agents_changed.clear()
            await self._agents_changed.wait()

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._internal_error(error)

    def _internal_error(self, error: BaseException) -> None:
        self.internal_errors += 1
        logger.error("internal error in engine %s", self._config.name, exc_info=error)

    # ------------------------------------------------------------ what callers do

    def begin(
        self,
        start: Callable[[Router, int], TargetTransfer | SourceTransfer],
        handle: Handle,
    ) -> None:
        """Start a transfer and tell `handle` about it. Raises what `start` raises."""
        self.router.check_usable()
        transfer = start(self.router, self._host.now())
        self._handles[transfer.number] = handle
        self._settle()

    def do(self, action: Callable[[Router, int], None]) -> None:
        """Tell the router something. Raises what `action` raises."""
        try:
            action(self.router, self._host.now())
        finally:
            self._settle()

    # ------------------------------------------------------------ effects

    def _settle(self) -> None:
        """Hand over writes, then carry out effects until there are none.

        A callback that calls the engine again only appends effects: the outermost call does all,
        and pumps again soon for what the callback made ready. Nothing but what a callback raises
        on purpose (an interrupt) comes out of here.
        """
        if self._context is None:
            return
        if self._settling:
            self._again = True
            return
        self._settling, self._again = True, False
        commands: dict[int, list[Command]] = {}
        try:
            self._guard(self._pump)
            while self._context.effects:
                self._attempt(self._context.effects.popleft(), commands)
        finally:
            self._settling = False
            for agent, batch in commands.items():
                self._transport.submit(agent, batch)
            if not self._shutting:
                if (self._again or self._context.effects) and self._settle_soon is None:
                    self._settle_soon = self._loop.call_soon(self._settle_again)
                self._arm()

    def _pump(self) -> None:
        if self.router.pump(self._host.now()):
            self._again = True

    def _settle_again(self) -> None:
        self._settle_soon = None
        self._settle()

    def _attempt(self, effect: Effect, commands: dict[int, list[Command]]) -> None:
        """Carry out one effect. A bug in it costs at most the session that it was for."""
        try:
            self._perform(effect, commands)
        except Exception as error:  # noqa: BLE001  the effects behind it must not be lost with it
            self._internal_error(error)
            if isinstance(effect, Transmit):
                text = f"internal error: {error!r}"
                self.router.lost(effect.connection, text, self._host.now())

    def _guard(self, event: Callable[[], object]) -> None:
        """Take an event that the loop brings. A bug shows itself, and costs nothing else."""
        try:
            event()
        except Exception as error:  # noqa: BLE001  there is no caller to raise it in
            self._internal_error(error)

    def _perform(self, effect: Effect, commands: dict[int, list[Command]]) -> None:
        match effect:
            case Transmit():
                connection = self._connections.get(effect.connection)
                if connection is not None:
                    connection.send(effect.message, key=effect.key, gate=effect.gate)
            case Submit():
                commands.setdefault(effect.agent, []).append(effect.command)
            case Release():
                self._call(effect.transfer, "on_release", effect.slots, effect.evidence)
            case Ended():
                self._call(effect.transfer, "on_ended", effect.result, effect.error)
            case Fenced():
                self._call(effect.transfer, "on_fenced")
                self._handles.pop(effect.transfer, None)
                self._moved.set()
            case Dial():
                if not self._shutting:
                    self._spawn(self._dial(effect), f"kvferry-dial-{effect.peer.name}")
            case HangUp():
                self._hang_up(effect.connection)
            case Report():
                logger.log(effect.level, "engine %s: %s", self._config.name, effect.text)

    def _call(self, transfer: int, method: str, *arguments: object) -> None:
        handle = self._handles.get(transfer)
        if handle is None:
            return
        try:
            getattr(handle, method)(*arguments)
        except Exception:
            # A caller's callback must not cost anybody else their transfer.
            self.callback_errors += 1
            logger.exception("engine %s: a callback of a transfer raised", self._config.name)

    def _arm(self) -> None:
        """Keep one timer at the router's next moment."""
        wake_at = self.router.wake_at
        if wake_at is None or (self._timer is not None and self._timer_at <= wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max((wake_at - self._host.now()) / 1e9, CLOCK_TICK_S)
        self._timer_at = wake_at
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._guard(partial(self.router.tick, self._host.now()))
        self._settle()

    # ------------------------------------------------------------ transport

    def _deliver(self, agent: int, events: list[Event]) -> None:
        """A batch of one worker's events, on the loop."""
        for event in events:
            if isinstance(event, Opened):
                self._agents_open[agent] = event.metadata
            elif isinstance(event, Stopped):
                self._agents_stopped[agent] = event.text
        self._agents_changed.set()
        if self._router is not None:
            now = self._host.now()
            for event in events:
                self._guard(partial(self.router.worker_event, agent, event, now))
            self._settle()

    # ------------------------------------------------------------ connections

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # Out of file descriptors, or the connection went before it was accepted.
                logger.warning("engine %s: accept failed: %s", self._config.name, error)
                await asyncio.sleep(CLOCK_TICK_S * 100)
                continue
            number = self._adopt(stream)
            self.router.accepted(number, self._host.now())
            self._settle()

    async def _dial(self, effect: Dial) -> None:
        peer = effect.peer
        try:
            async with asyncio.timeout(self._config.dial_s):
                stream = await self._host.network.dial(peer.address)
        except TimeoutError:
            text = f"no answer within {self._config.dial_s} s"
            self.router.dial_failed(effect.link, f"can't be reached: {text}", self._host.now())
        except Exception as error:  # noqa: BLE001  also what resolvers raise for an odd address
            text = str(error) or type(error).__name__
            self.router.dial_failed(effect.link, f"can't be reached: {text}", self._host.now())
        else:
            if self._shutting:
                await stream.aclose()
                return
            self.router.dialled(effect.link, self._adopt(stream), self._host.now())
        self._settle()

    def _adopt(self, stream: ByteStream) -> int:
        self._connections_made += 1
        number = self._connections_made
        self._connections[number] = Connection(stream)
        self._writers[number] = self._spawn(self._serve(number), f"kvferry-writer-{number}")
        self._loop.call_later(HANDSHAKE_S, self._handshake_expired, number)
        return number

    async def _serve(self, number: int) -> None:
        """One connection, until it is closed: this task writes, a second one reads."""
        connection = self._connections[number]
        reader = self._spawn(self._read(number, connection), f"kvferry-reader-{number}")
        text = "cancelled"
        try:
            text = await connection.run_writer()
        finally:
            reader.cancel()
            del self._connections[number], self._writers[number]
            self._moved.set()
            self.router.lost(number, text, self._host.now())
            self._settle()
            await connection.aclose()

    async def _read(self, number: int, connection: Connection) -> None:
        def receive(message: wire.AnyMessage) -> None:
            self.router.received(number, message, self._host.now())
            self._settle()

        try:
            text = await connection.run_reader(receive)
        except WireError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001
            # A bug of ours: it costs this session, whose transfers fail on both sides.
            self._internal_error(error)
            text = f"internal error: {error!r}"
        self.router.lost(number, text, self._host.now())
        self._settle()
        self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        """Let the writer flush and end; not longer than a moment."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.finish()
            self._loop.call_later(HANG_UP_S, self._cut, number)

    def _cut(self, number: int) -> None:
        writer = self._writers.get(number)
        if writer is not None:
            writer.cancel()

    def _handshake_expired(self, number: int) -> None:
        if number in self._connections:
            self._guard(partial(self.router.handshake_expired, number, self._host.now()))
            self._settle()
