"""The public API: an engine. The two ends of its transfers are in `handles`.

Thin: it checks what callers give it and forwards to the driver. Two rules: bad input raises
here, in the caller that made it, and changes nothing; closing never forgets memory that is out.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .driver import Driver
from .errors import UsageError
from .handles import Access, Receive, Send, check_spans
from .host import RealHost
from .keys import Peer, check_request
from .limits import (
    FRAME_BYTES_MAX,
    OFFER_BYTES_MAX,
    PEER_NAME_BYTES_MAX,
    PRIORITY_MAX,
    TOKENS_MAX,
)
from .spans import Span, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self, SupportsIndex

    from .config import Config
    from .handles import Seconds
    from .keys import Key
    from .layout import Layout
    from .lease import Slots
    from .ports import CacheFacts, Host, Transport

    OnReleased = Callable[[Slots, str], None]

logger = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one engine at one moment.

    slots_lent: target slots that a source may still touch; slots_quarantined: those of them
    whose evidence is out of reach for now. writes_open: writes that were handed to the transport
    and did not settle. messages_ignored: late or duplicate ones; messages_unknown: of kinds that
    only a newer version knows. internal_errors and callback_errors should be 0: they count bugs of
    ours and exceptions of your callbacks.
    """

    transfers: int
    slots_lent: int
    slots_quarantined: int
    writes_open: int
    messages_ignored: int
    messages_unknown: int
    internal_errors: int
    callback_errors: int


class Engine:
    """One rank's transfer engine: source and target at once, on one event loop.

    config: see `Config`. layout: this rank's pools and layer groups. transport: `kvferry.nixl()`
    or another; it belongs to this engine. owners: the tensors or arrays that the layout's
    addresses lie in; they are kept alive for as long as anything may still touch them, which can
    be longer than this engine is. host: replaced only by simulations.

    Use it as an async context manager, or `start` and `aclose` (in different tasks, if a
    lifespan or a fixture does so). Only the thread of its loop may call it.
    """

    def __init__(
        self,
        config: Config,
        *,
        layout: Layout,
        transport: Transport,
        owners: Sequence[object] = (),
        host: Host | None = None,
    ) -> None:
        self._config = config
        self._layout = layout.check()
        self._transport = transport
        self._owners = tuple(owners)
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
        self._driver = Driver(self._config, self._layout, self._owners, self._transport, self._host)
        try:
            await self._driver.start()
        except BaseException:
            self._closed = True
            raise

    async def aclose(self) -> None:
        """Cancel every transfer, wait (bounded by `Config.close_s`) for memory to be safe, close.

        Idempotent. Cancelling it stops the waiting, not the closing. Raises UsageError in another
        thread or process.
        """
        if self._driver is not None:
            self._check_place()
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
        priority: -3 to 3; each step doubles this transfer's share of its source's bytes to us.
        match_s, stall_s, total_s: deadlines in seconds, defaults from Config.

        Nothing happens before the result is entered with `async with`. Raises UsageError.
        """
        self._check()
        key.check()
        _check_peer(source)
        tokens = _check_integer("tokens", tokens, 0, TOKENS_MAX)
        wanted = tokens if min_tokens is None else min_tokens
        least = _check_integer("min_tokens", wanted, 0, tokens)
        priority = _check_integer("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        deadlines_s = _check_deadlines(match_s, stall_s, total_s)
        _check_callable(on_released)
        checked = check_spans(self._layout, need)
        for group, span in checked.items():
            self._check_need(group, span, tokens)
        size = sum(len(part) for span in checked.values() for part in span.to_wire())
        if size > OFFER_BYTES_MAX - FRAME_BYTES_MAX:
            raise UsageError(f"the need of {key} takes {size} bytes in an offer, too many")
        return Receive(
            self._access(),
            key,
            source,
            checked,
            tokens,
            least,
            priority,
            deadlines_s,
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
        promised = _check_integer("tokens", promised, 0, TOKENS_MAX)
        deadlines_s = _check_deadlines(match_s, stall_s, total_s)
        released = on_released if facts is None else facts.released
        if released is None:
            raise UsageError("send with tokens needs on_released: it gives your blocks back")
        _check_callable(released)
        return Send(self._access(), request, facts, promised, deadlines_s, released)

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
            messages_unknown=driver.messages_unknown,
            internal_errors=driver.internal_errors,
            callback_errors=driver.callback_errors,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when any of the engine's tables contradicts another. For tests."""
        self._check()
        self._open().router.check_integrity()

    # ------------------------------------------------------------ checks

    def _access(self) -> Access:
        return Access(self._open(), self._layout, self._check, self._check_place)

    def _open(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def _check(self) -> None:
        """Raise UsageError unless this engine may be used here and now."""
        name = self._config.name
        if self._driver is None:
            raise UsageError(f"engine {name} is not started: use it in `async with engine:`")
        self._check_place()
        if self._closed:
            raise UsageError(f"engine {name} is closed", code="closed")

    def _check_place(self) -> None:
        """Raise UsageError in a thread or process that this engine does not belong to."""
        name = self._config.name
        if self._pid != os.getpid():
            raise UsageError(f"engine {name} was started in another process: fork copies no engine")
        if self._thread != threading.get_ident():
            raise UsageError(f"engine {name} belongs to the thread of its event loop")

    def _check_need(self, group: str, span: Span, tokens: int) -> None:
        held = self._layout.group(group)
        blocks = 1 if held.kind == "state" else blocks_for(tokens, held.tokens_per_block)
        beyond = span.restrict(blocks, max(blocks, 2**31 - 1))
        if len(beyond):
            end = "a state is" if held.kind == "state" else f"{tokens} tokens end at"
            raise UsageError(
                f"group {group!r}: ordinal {int(beyond.ordinals()[0])} is needed, but {end} "
                f"ordinal {blocks - 1}"
            )


def _check_integer(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """A plain int, also from numpy's: nothing else can travel. Raises UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, must be an integer") from None
    if not low <= number <= high:
        raise UsageError(f"{name} is {number}, must be {low} to {high}")
    return number


def _check_deadlines(*seconds: float | None) -> Seconds:
    """Raise UsageError unless each is None or over 0 and under 1e6, as in `Config`."""
    for name, value in zip(("match_s", "stall_s", "total_s"), seconds, strict=True):
        if value is not None and not (isinstance(value, int | float) and 0 < value < 1e6):
            raise UsageError(f"{name} is {value!r}, must be over 0 and under 1e6")
    match_s, stall_s, total_s = seconds
    return match_s, stall_s, total_s


def _check_peer(peer: Peer) -> None:
    texts = isinstance(peer, Peer) and [type(peer.name), type(peer.address)]
    if texts != [str, str]:
        raise UsageError(f"source is {peer!r}, must be a Peer of two strings")
    try:
        size = len(peer.name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"source.name {peer.name!r} is not valid UTF-8: {error}") from None
    if not 1 <= size <= PEER_NAME_BYTES_MAX:
        raise UsageError(f"source.name has {size} bytes, must be 1 to {PEER_NAME_BYTES_MAX}")


def _check_callable(on_released: object) -> None:
    if not callable(on_released):
        raise UsageError(f"on_released is {on_released!r}, must be callable")
