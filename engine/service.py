"""The public API: an engine, and the two ends of a transfer.

Thin: it checks what callers give it and forwards to the driver. Two rules: bad input raises
here, in the caller that made it, and changes nothing; leaving a transfer's scope never waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .driver import Driver
from .errors import KvferryError, UsageError
from .host import RealHost
from .keys import check_request
from .lease import Evidence
from .spans import Span, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from types import TracebackType
    from typing import Self

    from .config import Config
    from .effects import Received, Sent
    from .keys import Key, Peer
    from .layout import Layout
    from .lease import Slots
    from .ports import CacheFacts, Host, Transport
    from .router import Router
    from .transfer import SourceTransfer, TargetTransfer

    OnReleased = Callable[[Slots, str], None]

logger = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one engine at one moment.

    slots_lent: target slots that a source may still touch; slots_quarantined: those of them
    whose evidence is out of reach for now. writes_open: writes that were handed to the transport
    and did not settle. messages_ignored: late, duplicate or unknown ones. internal_errors and
    callback_errors should be 0: they count bugs of ours and exceptions of your callbacks.
    """

    transfers: int
    slots_lent: int
    slots_quarantined: int
    writes_open: int
    messages_ignored: int
    internal_errors: int
    callback_errors: int


class Engine:
    """One rank's transfer engine: source and target at once, on one event loop.

    config: see `Config`. layout: this rank's pools and layer groups. transport: `kvferry.nixl()`
    or another; it belongs to this engine. host: replaced only by simulations.

    Use it as an async context manager, or `start` and `aclose` (in different tasks, if a
    lifespan or a fixture does so). Only the thread of its loop may call it.
    """

    def __init__(
        self,
        config: Config,
        *,
        layout: Layout,
        transport: Transport,
        host: Host | None = None,
    ) -> None:
        self._config = config
        self._layout = layout.check()
        self._transport = transport
        self._host: Host = host or RealHost()
        self._driver: Driver | None = None
        self._thread = 0
        self._pid = 0
        self._closed = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Register the pools, bind the control port.

        Raises Failed (transport), OSError (port), UsageError (started before). Cancelling it
        closes what was opened.
        """
        if self._driver is not None or self._closed:
            raise UsageError(f"engine {self._config.name} was started before, make a new one")
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._driver = Driver(self._config, self._layout, self._transport, self._host)
        try:
            await self._driver.start()
        except BaseException:
            self._closed = True
            raise

    async def aclose(self) -> None:
        """Cancel every transfer, wait (bounded by `Config.close_s`) for memory to be safe, close.

        Idempotent. Cancelling it stops the waiting, not the closing.
        """
        self._closed = True
        if self._driver is not None:
            await self._driver.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------ transfers

    def receive(
        self,
        key: Key,
        *,
        source: Peer,
        need: Mapping[str, Span],
        tokens: int,
        on_released: OnReleased,
        min_tokens: int | None = None,
        priority: int = 0,
        match_s: float | None = None,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> Receive:
        """Get the blocks of `key` from `source` into this side's slots.

        need: {group: span of this side's slots by ordinal}, policy (window, reuse) applied.
        tokens: how many are wanted; min_tokens: how few are accepted, default all.
        on_released: called on the loop, once, with every slot and its evidence, when nothing
        can write to them any more; on success as well as after a failure.
        match_s, stall_s, total_s: deadlines in seconds, defaults from Config.

        Nothing happens before the result is entered with `async with`. Raises UsageError.
        """
        self._check()
        key.check()
        _check_tokens(tokens, tokens if min_tokens is None else min_tokens)
        checked = {group: self._check_span(group, span) for group, span in need.items()}
        for group, span in checked.items():
            self._check_need(group, span, tokens)
        return Receive(
            self,
            key,
            source,
            checked,
            tokens,
            tokens if min_tokens is None else min_tokens,
            priority,
            (match_s, stall_s, total_s),
            on_released,
        )

    def send(
        self,
        request: str,
        facts: CacheFacts | None = None,
        *,
        tokens: int | None = None,
        on_released: OnReleased | None = None,
        match_s: float | None = None,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> Send:
        """Serve `request` to the target that asks for it.

        Either `facts`, which `advance` reads, or `tokens` (how many this side promises) and
        `on_released` (called on the loop with source blocks that are read no more, each slot
        exactly once), for callers that `push`.

        Nothing happens before the result is entered with `async with`. Raises UsageError.
        """
        self._check()
        check_request(request)
        if (facts is None) == (tokens is None):
            raise UsageError("send takes either facts or tokens")
        promised = tokens if facts is None else facts.tokens
        assert promised is not None
        _check_tokens(promised, 0)
        released = on_released if facts is None else facts.released
        if released is None:
            raise UsageError("send with tokens needs on_released: it gives your blocks back")
        return Send(self, request, facts, promised, (match_s, stall_s, total_s), released)

    # ------------------------------------------------------------ looking

    @property
    def address(self) -> str:
        """The control address that targets dial. Raises UsageError when it does not listen."""
        self._check()
        address = self._open().address
        if address is None:
            raise UsageError(f"engine {self._config.name} has no config.listen")
        return address

    def stats(self) -> Stats:
        """Counts of this moment."""
        self._check()
        driver = self._open()
        target, source = driver.router.target, driver.router.source
        return Stats(
            transfers=driver.transfers,
            slots_lent=target.slots_lent,
            slots_quarantined=target.slots_quarantined,
            writes_open=source.mover.writes_open,
            messages_ignored=target.messages_ignored + source.messages_ignored,
            internal_errors=driver.internal_errors,
            callback_errors=driver.callback_errors,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when any of the engine's tables contradicts another. For tests."""
        self._check()
        self._open().router.check_integrity()

    # ------------------------------------------------------------ checks

    def _open(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def _check(self) -> None:
        """Raise UsageError unless this engine may be used here and now."""
        name = self._config.name
        if self._driver is None:
            raise UsageError(f"engine {name} is not started: use it in `async with engine:`")
        if self._pid != os.getpid():
            raise UsageError(f"engine {name} was started in another process: fork copies no engine")
        if self._thread != threading.get_ident():
            raise UsageError(f"engine {name} belongs to the thread of its event loop")
        if self._closed:
            raise UsageError(f"engine {name} is closed", code="closed")

    def _check_span(self, group: str, span: Span) -> Span:
        if not isinstance(span, Span):
            raise UsageError(f"group {group!r}: a Span is needed, not {type(span).__name__}")
        self._layout.check_slots(group, span.slots())
        return span

    def _check_need(self, group: str, span: Span, tokens: int) -> None:
        blocks = blocks_for(tokens, self._layout.group(group).tokens_per_block)
        beyond = span.restrict(blocks, max(blocks, 2**31 - 1))
        if len(beyond):
            raise UsageError(
                f"group {group!r}: ordinal {int(beyond.ordinals()[0])} is needed, but {tokens} "
                f"tokens end at ordinal {blocks - 1}"
            )


class _Transfer:
    """What both ends share: an outcome to wait for, a fence to wait for, a way to cancel."""

    def __init__(self, engine: Engine, on_released: OnReleased) -> None:
        self._engine = engine
        self._on_released = on_released
        self._ended = asyncio.Event()
        self._fenced = asyncio.Event()
        self._result: Received | Sent | None = None
        self._error: KvferryError | None = None
        self._transfer: TargetTransfer | SourceTransfer | None = None

    # The driver's calls.

    def on_ended(self, result: Received | Sent | None, error: KvferryError | None) -> None:
        """See `driver.Handle`."""
        self._result, self._error = result, error
        self._ended.set()

    def on_release(self, slots: Slots, evidence: Evidence) -> None:
        """See `driver.Handle`."""
        self._on_released(slots, str(evidence))

    def on_fenced(self) -> None:
        """See `driver.Handle`."""
        self._fenced.set()

    # The caller's calls.

    @property
    def ended(self) -> bool:
        """True once the outcome is known."""
        return self._ended.is_set()

    @property
    def story(self) -> str:
        """What happened to this transfer so far, for people."""
        return "not entered" if self._transfer is None else str(self._transfer.story)

    async def released(self) -> None:
        """Wait until every slot of this transfer is released. Cancelling only stops waiting."""
        self._entered()
        await self._fenced.wait()

    async def _wait(self) -> Received | Sent:
        self._entered()
        await self._ended.wait()
        if self._error is not None:
            # A fresh traceback for each waiter; the error itself is one object.
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def _entered(self) -> TargetTransfer | SourceTransfer:
        if self._transfer is None:
            raise UsageError("enter the transfer first: `async with ... as transfer:`")
        return self._transfer

    def _enter(self, start: Callable[[Router, int], TargetTransfer | SourceTransfer]) -> None:
        if self._transfer is not None:
            raise UsageError("a transfer can be entered once")
        self._engine._check()
        driver = self._engine._open()
        # `begin` may call back before it returns: the transfer is known from inside `start`.

        def remember(router: Router, now: int) -> TargetTransfer | SourceTransfer:
            self._transfer = start(router, now)
            return self._transfer

        driver.begin(remember, self)


class Receive(_Transfer):
    """The target's end of one transfer. Made by `Engine.receive`.

    `async with` offers the slots; leaving early cancels and never waits. `await` gives `Received`
    or raises Refused, PeerLost, Failed, Cancelled, TimedOut; cancelling the await only stops
    waiting.
    """

    def __init__(
        self,
        engine: Engine,
        key: Key,
        source: Peer,
        need: Mapping[str, Span],
        tokens: int,
        min_tokens: int,
        priority: int,
        deadlines_s: tuple[float | None, float | None, float | None],
        on_released: OnReleased,
    ) -> None:
        super().__init__(engine, on_released)
        self.key = key
        self._source = source
        self._need = need
        self._tokens = tokens
        self._min_tokens = min_tokens
        self._priority = priority
        self._deadlines_s = deadlines_s

    async def __aenter__(self) -> Self:
        """Offer. Raises Busy, UsageError; nothing was started and no slot is lent then."""

        def start(router: Router, now: int) -> TargetTransfer:
            return router.target.receive(
                self.key,
                self._source,
                self._need,
                self._tokens,
                self._min_tokens,
                router.deadlines(*self._deadlines_s),
                self._priority,
                now,
            )

        self._enter(start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            self.cancel("its scope was left" if error is None else f"its scope raised {error!r}")

    def __await__(self) -> Generator[object, None, Received]:
        return cast("Generator[object, None, Received]", self._wait().__await__())

    def cancel(self, reason: str) -> None:
        """End it, in any state; never waits. Idempotent. The slots follow with evidence."""
        number = self._entered().number
        driver = self._engine._open()
        driver.do(lambda router, now: router.target.cancel(number, reason, now))


class Send(_Transfer):
    """The source's end of one transfer. Made by `Engine.send`.

    `async with` registers it; `push` or `advance` as blocks become ready; `finish` seals. Leaving
    before `finish` cancels, leaving after it does not; leaving never waits. `await` gives `Sent`
    or raises as `Receive` does; cancelling the await only stops waiting.
    """

    def __init__(
        self,
        engine: Engine,
        request: str,
        facts: CacheFacts | None,
        tokens: int,
        deadlines_s: tuple[float | None, float | None, float | None],
        on_released: OnReleased,
    ) -> None:
        super().__init__(engine, on_released)
        self.request = request
        self._facts = facts
        self._tokens = tokens
        self._tokens_ready = 0
        self._sealed = False
        self._deadlines_s = deadlines_s

    async def __aenter__(self) -> Self:
        """Register. Raises Busy, UsageError; nothing was started then."""

        def start(router: Router, now: int) -> SourceTransfer:
            return router.source.send(
                self.request, self._tokens, router.deadlines(*self._deadlines_s), now
            )

        self._enter(start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._sealed and not self.ended:
            self.cancel("its scope was left before finish" if error is None else f"{error!r}")

    def __await__(self) -> Generator[object, None, Sent]:
        return cast("Generator[object, None, Sent]", self._wait().__await__())

    def push(self, chunk: Mapping[str, Span]) -> None:
        """These blocks are ready: {group: span of source slots}. Never waits.

        From now until they come back by `on_released` they stay readable and unchanged. After
        the outcome has ended they come back at once. Raises UsageError for slots outside the
        pool, ordinals that were pushed before, and after `finish`; nothing was taken then.
        """
        number = self._entered().number
        engine = self._engine
        checked = {group: engine._check_span(group, span) for group, span in chunk.items()}
        taken = True

        def push(router: Router, now: int) -> None:
            nonlocal taken
            taken = router.source.push(number, checked, now)

        engine._open().do(push)
        if not taken and checked:
            slots = {group: span.slots() for group, span in checked.items()}
            self._on_released(slots, str(Evidence.NEVER_EXPOSED))

    def advance(self, tokens: int) -> None:
        """Tokens [0, `tokens`) are computed: read the facts of the new blocks, and push them.

        Monotone. An unfinished last block follows with the advance that reaches the promised
        tokens. Raises UsageError without facts, backwards, beyond the promise.
        """
        self._entered()
        if self._facts is None:
            raise UsageError("advance needs facts: engine.send(request, facts)")
        if not self._tokens_ready <= tokens <= self._tokens:
            raise UsageError(
                f"send {self.request}: advance to {tokens}, was at {self._tokens_ready} of "
                f"{self._tokens}"
            )
        layout = self._engine._layout
        chunk: dict[str, Span] = {}
        for group in layout.groups:
            first = self._blocks_ready(self._tokens_ready, group.tokens_per_block)
            stop = self._blocks_ready(tokens, group.tokens_per_block)
            if stop > first:
                chunk[group.name] = self._facts.extract(group.name, first, stop)
        self.push(chunk)
        self._tokens_ready = tokens

    def _blocks_ready(self, tokens: int, tokens_per_block: int) -> int:
        if tokens == self._tokens:
            return blocks_for(tokens, tokens_per_block)
        return tokens // tokens_per_block

    def finish(self, aux: bytes = b"") -> None:
        """Everything was pushed: seal. `aux` (at most 64 KiB) travels to the target with done.

        Never waits. Raises UsageError for a second finish or too much aux.
        """
        number = self._entered().number
        driver = self._engine._open()
        driver.do(lambda router, now: router.source.finish(number, aux, now))
        self._sealed = True

    def cancel(self, reason: str) -> None:
        """End it, in any state; never waits. Idempotent. The blocks follow with evidence."""
        number = self._entered().number
        driver = self._engine._open()
        driver.do(lambda router, now: router.source.cancel(number, reason, now))


def _check_tokens(tokens: int, min_tokens: int) -> None:
    if not 0 <= min_tokens <= tokens:
        raise UsageError(f"tokens is {tokens} and min_tokens {min_tokens}: 0 <= min <= tokens")
