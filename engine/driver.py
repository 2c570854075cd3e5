"""Carries out what the router decides: connections, timers, the transport, callbacks.

One owner task runs the engine from opening to closing; every other task has it as its owner. Two
rules: every event ends in `_settle`, which does the effects in their order however callbacks
nest, and nothing on the loop waits for the transport.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from .connections import Connections
from .context import Context, nanoseconds
from .effects import (
    Dial,
    Ended,
    Fenced,
    HangUp,
    Release,
    Report,
    Submit,
    Transmit,
    Unwatch,
    Watch,
)
from .errors import Failed, KvferryError
from .limits import AGENT_STOP_S, CLOCK_TICK_S
from .ports import Close, Opened, Stopped
from .router import Router
from .tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .effects import Effect, Received, Sent
    from .layout import Layout
    from .lease import Evidence, Slots
    from .ports import Command, Event, Host, Transport
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
        self.internal_errors = 0
        self.callback_errors = 0
        self._router: Router | None = None
        self._tasks = Tasks(self._internal_error)
        self._connections = Connections(
            host.network, self._tasks, self.do, self._internal_error, config.dial_s
        )
        self._handles: dict[int, Handle] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
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
        self._shutting = False  # nothing new is begun: no timer, no later turn
        self._moved = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    @property
    def router(self) -> Router:
        """The decisions. Available while the engine is open."""
        assert self._router is not None
        return self._router

    @property
    def address(self) -> str | None:
        """Where targets can reach this engine, None when it does not listen."""
        return self._connections.address

    @property
    def messages_unknown(self) -> int:
        """Messages of kinds that this version does not know."""
        return self._connections.messages_unknown

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
        context = Context(
            self._config,
            self._layout,
            incarnation,
            self._transport.name,
            self._transport.bounds,
            [self._agents_open[agent] for agent in range(self._transport.agents)],
            self._host.identity(),
            self._host.entropy,
        )
        self._router = Router(context)
        if self._config.listen is not None:
            await self._connections.listen(self._config.listen)

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
        self._connections.refuse()
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
        await self._connections.finish()
        await self._tasks.cancel()
        await self._connections.close_port()
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
        try:
            async with asyncio.timeout(self._config.close_s + AGENT_STOP_S):
                while len(self._agents_stopped) < self._transport.agents:
                    self._agents_changed.clear()
                    await self._agents_changed.wait()
        except TimeoutError:
            # A call into the transport does not return. Its thread is a daemon, and what it may
            # still touch stays referenced by its backend.
            logger.exception("engine %s: its transport does not stop", self._config.name)

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

    def do(self, action: Callable[[Router, int], object]) -> None:
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
        if self._router is None:
            return
        if self._settling:
            self._again = True
            return
        self._settling, self._again = True, False
        commands: dict[int, list[Command]] = {}
        try:
            self._guard(self._pump)
            while (effect := self.router.next_effect()) is not None:
                self._attempt(effect, commands)
        finally:
            self._settling = False
            for agent, batch in commands.items():
                self._transport.submit(agent, batch)
            if not self._shutting:
                if (self._again or self.router.has_effects) and self._settle_soon is None:
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
                self._connections.send(effect)
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
                self._connections.dial(effect)
            case HangUp():
                self._connections.hang_up(effect.connection)
            case Watch():
                work, name = self._watch(effect), f"kvferry-watch-{effect.process.pid}"
                self._watches[effect.incarnation] = self._tasks.spawn(work, name)
            case Unwatch():
                self._watches.pop(effect.incarnation).cancel()
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

    async def _watch(self, effect: Watch) -> None:
        """Tell the router when a source's process has ended and left nothing on its way."""
        watch = self._host.watch(effect.process)
        if watch is None:
            return
        try:
            await watch.ended()
            await self._transport.emptied()
        finally:
            watch.close()
        del self._watches[effect.incarnation]
        self.do(lambda router, now: router.process_ended(effect.incarnation, now))

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
