"""The callers' ends of a transfer: `Receive` and `Send`.

Thin: they check what callers give them and forward to the driver. Two rules: bad input raises
here, in the caller that made it, and changes nothing; leaving a transfer's scope never waits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .errors import Failed, KvferryError, UsageError
from .lease import Evidence
from .limits import AUX_BYTES_MAX
from .spans import Span, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from types import TracebackType
    from typing import Self

    from .driver import Driver, Handle
    from .effects import Received, Sent
    from .keys import Key, Peer
    from .layout import Group, Layout
    from .lease import Slots
    from .ports import CacheFacts
    from .router import Router
    from .transfer import SourceTransfer, TargetTransfer

    OnReleased = Callable[[Slots, str], None]
    Seconds = tuple[float | None, float | None, float | None]  # match, stall, total


@dataclass(frozen=True, slots=True)
class Access:
    """What a handle needs of its engine.

    check: raises UsageError unless the engine may be used here and now.
    check_place: raises UsageError in another thread or process; a closed engine is fine.
    """

    driver: Driver
    layout: Layout
    check: Callable[[], None]
    check_place: Callable[[], None]


def check_spans(layout: Layout, spans: Mapping[str, Span]) -> dict[str, Span]:
    """A checked copy: known groups, slots inside their pools. Raises UsageError."""
    for group, span in spans.items():
        if not isinstance(span, Span):
            raise UsageError(f"group {group!r}: a Span is needed, not {type(span).__name__}")
        layout.check_slots(group, span.slots())
    return dict(spans)


def check_reason(reason: str) -> str:
    """A text that can travel. Raises UsageError."""
    if not isinstance(reason, str):
        raise UsageError(f"reason is {reason!r}, must be a str")
    return reason.encode(errors="replace").decode()


def check_aux(aux: bytes) -> bytes:
    """Return `aux`. Raises UsageError unless it is bytes, and not too many."""
    if not isinstance(aux, bytes):
        raise UsageError(f"aux is {type(aux).__name__}, must be bytes")
    if len(aux) > AUX_BYTES_MAX:
        raise UsageError(f"aux has {len(aux)} bytes, the bound is {AUX_BYTES_MAX}")
    return aux


class _Transfer:
    """What both ends share: an outcome to wait for, a fence to wait for, a way to cancel."""

    def __init__(self, access: Access, on_released: OnReleased) -> None:
        self._access = access
        self._on_released = on_released
        self._ended = asyncio.Event()
        self._fenced = asyncio.Event()
        self._abandoned = False
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

    def on_abandoned(self) -> None:
        """See `driver.Handle`."""
        self._abandoned = True
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
        """Wait until every slot of this transfer is released. Cancelling only stops waiting.

        Raises Failed (code "unproven") when the engine closes without evidence for some of them:
        they were never released, and the other side may still touch their memory.
        """
        self._entered()
        await self._fenced.wait()
        if self._abandoned:
            raise Failed(
                "the engine closed without evidence that this transfer's memory is safe",
                by="engine",
                code="unproven",
            )

    async def _wait(self) -> Received | Sent:
        self._entered()
        await self._ended.wait()
        if self._error is not None:
            # A fresh traceback for each waiter; the error itself is one object.
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def _entered(self) -> TargetTransfer | SourceTransfer:
        self._access.check_place()
        if self._transfer is None:
            raise UsageError("enter the transfer first: `async with ... as transfer:`")
        return self._transfer

    def enter(self, handle: Handle) -> None:
        """What `async with` does, telling `handle` in this transfer's place. For `EngineThread`."""
        if self._transfer is not None:
            raise UsageError("a transfer can be entered once")
        self._access.check()
        # `begin` may call back before it returns: the transfer is known from inside `start`.

        def start(router: Router, now: int) -> TargetTransfer | SourceTransfer:
            self._transfer = self._start(router, now)
            return self._transfer

        self._access.driver.begin(start, handle)

    def _start(self, router: Router, now: int) -> TargetTransfer | SourceTransfer:
        raise NotImplementedError


class Receive(_Transfer):
    """The target's end of one transfer. Made by `Engine.receive`.

    `async with` offers the slots; leaving early cancels and never waits. `await` gives `Received`
    or raises Refused, PeerLost, Failed, Cancelled, TimedOut; cancelling the await only stops
    waiting.
    """

    def __init__(
        self,
        access: Access,
        key: Key,
        source: Peer,
        need: Mapping[str, Span],
        tokens: int,
        min_tokens: int,
        priority: int,
        deadlines_s: Seconds,
        on_released: OnReleased,
    ) -> None:
        super().__init__(access, on_released)
        self.key = key
        self._source = source
        self._need = need
        self._tokens = tokens
        self._min_tokens = min_tokens
        self._priority = priority
        self._deadlines_s = deadlines_s

    async def __aenter__(self) -> Self:
        """Offer. Raises Busy, UsageError; nothing was started and no slot is lent then."""
        self.enter(self)
        return self

    def _start(self, router: Router, now: int) -> TargetTransfer:
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
        number, text = self._entered().number, check_reason(reason)
        self._access.driver.do(lambda router, now: router.target.cancel(number, text, now))


class Send(_Transfer):
    """The source's end of one transfer. Made by `Engine.send`.

    `async with` registers it; `push` or `advance` as blocks become ready; `finish` seals. Leaving
    before `finish` cancels, leaving after it does not; leaving never waits. `await` gives `Sent`
    or raises as `Receive` does; cancelling the await only stops waiting.
    """

    def __init__(
        self,
        access: Access,
        request: str,
        facts: CacheFacts | None,
        tokens: int,
        deadlines_s: Seconds,
        on_released: OnReleased,
    ) -> None:
        super().__init__(access, on_released)
        self.request = request
        self._facts = facts
        self._tokens = tokens
        self._tokens_ready = 0
        self._sealed = False
        self._deadlines_s = deadlines_s

    async def __aenter__(self) -> Self:
        """Register. Raises Busy, UsageError; nothing was started then."""
        self.enter(self)
        return self

    def _start(self, router: Router, now: int) -> SourceTransfer:
        deadlines = router.deadlines(*self._deadlines_s)
        return router.source.send(self.request, self._tokens, deadlines, now)

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
        self._access.check()
        checked = check_spans(self._access.layout, chunk)
        taken = True

        def push(router: Router, now: int) -> None:
            nonlocal taken
            taken = router.source.push(number, checked, now)

        self._access.driver.do(push)
        if not taken and checked:
            slots = {group: span.slots() for group, span in checked.items()}
            self._on_released(slots, str(Evidence.NEVER_EXPOSED))

    def advance(self, tokens: int) -> None:
        """Tokens [0, `tokens`) are computed: read the facts of the new blocks, and push them.

        Monotone. An unfinished last block follows with the advance that reaches the promised
        tokens. Raises UsageError without facts, backwards, beyond the promise.
        """
        self._entered()
        self.push(self.read(self._tokens_ready, tokens))
        self._tokens_ready = tokens

    def read(self, ready: int, tokens: int) -> dict[str, Span]:
        """The blocks that `tokens` tokens complete and `ready` did not, as the facts give them.

        Changes nothing. Raises UsageError without facts, backwards, beyond the promise.
        """
        if self._facts is None:
            raise UsageError("advance needs facts: engine.send(request, facts)")
        if not ready <= tokens <= self._tokens:
            raise UsageError(
                f"send {self.request}: advance to {tokens}, was at {ready} of {self._tokens}"
            )
        chunk: dict[str, Span] = {}
        for group in self._access.layout.groups:
            first, stop = self._blocks_ready(ready, group), self._blocks_ready(tokens, group)
            if stop > first:
                chunk[group.name] = self._facts.extract(group.name, first, stop)
        return chunk

    def _blocks_ready(self, tokens: int, group: Group) -> int:
        """How many blocks of a group are complete with so many tokens; a state is at the end."""
        if group.kind == "state":
            return int(tokens == self._tokens)
        if tokens == self._tokens:
            return blocks_for(tokens, group.tokens_per_block)
        return tokens // group.tokens_per_block

    def finish(self, aux: bytes = b"") -> None:
        """Everything was pushed: seal. `aux` (at most 64 KiB) travels to the target with done.

        Never waits. Raises UsageError for a second finish or too much aux.
        """
        number = self._entered().number
        check_aux(aux)
        self._access.driver.do(lambda router, now: router.source.finish(number, aux, now))
        self._sealed = True

    def cancel(self, reason: str) -> None:
        """End it, in any state; never waits. Idempotent. The blocks follow with evidence."""
        number, text = self._entered().number, check_reason(reason)
        self._access.driver.do(lambda router, now: router.source.cancel(number, text, now))
