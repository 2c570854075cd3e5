"""An engine for synchronous hosts: calls go in from any thread, events come out.

Two rules: what a caller got wrong raises in the caller, before anything is handed over; what was
accepted is answered by events, each outcome once and each slot once, however the engine ends.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import TYPE_CHECKING

from .errors import Busy, Failed, UsageError
from .handles import check_aux, check_reason, check_spans
from .hosted import Ended, HostedReceive, HostedSend
from .keys import Key
from .service import Engine
from .thread_loop import ThreadLoop

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from .config import Config
    from .hosted import AnyHosted, Event
    from .keys import Peer
    from .layout import Layout
    from .ports import CacheFacts, Transport
    from .spans import Span


class _Engine(Engine):
    """An engine whose transfers can be made in any thread; they are entered on its loop."""

    def _check_place(self) -> None:
        """`EngineThread` sees to it."""


class EngineThread:
    """An `Engine` for hosts without an event loop: a scheduler's thread, for example.

    config, layout, transport, owners: as for `Engine`. loop_factory: makes the event loop, for
    example `uvloop.new_event_loop`; asyncio's by default.

    Any thread may call any method. `start` and `close` block, no other does. The calls of one
    thread are carried out in their order. What comes of them is told by `drain`, and `fileno`
    can be waited for. A transfer that was accepted (its `receive` or `send` did not raise) has
    exactly one `Ended`; each slot of its need, or that was pushed, is in exactly one `Released`,
    or in a `Quarantined` after closing. Per transfer the events are in the engine's order: an
    `Ended` comes before what is released because of it.

    A transfer is known by its name, a key or a request id. The name of a receive is taken until
    its `Ended` was drained and its slots are back, that of a send until its `Ended` was drained.

    Events wait until they are drained, and until then their transfers count towards
    `Config.sends_max` and `Config.receives_max`: a host that does not drain gets `Busy`, and what
    waits is bounded by what these bounds allow.

    Its thread is a daemon: a process that forgets `close` ends all the same, and its peers lose
    it. All methods raise UsageError in a forked child, all but `drain`, `fileno` and `close` after
    closing, and Failed (code "crashed") after an internal error ended the thread.
    """

    def __init__(
        self,
        config: Config,
        *,
        layout: Layout,
        transport: Transport,
        owners: Sequence[object] = (),
        loop_factory: Callable[[], AbstractEventLoop] | None = None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._engine = _Engine(config, layout=layout, transport=transport, owners=owners)
        self._loop = ThreadLoop(self._engine, config.name, loop_factory, self._account)
        self._lock = self._loop.lock  # for the rest
        self._readable = -1  # an eventfd, not 0 while `drain` has something
        self._named: dict[Key | str, AnyHosted] = {}
        self._receives: set[AnyHosted] = set()
        self._sends: set[AnyHosted] = set()
        self._events: list[tuple[AnyHosted, Event]] = []
        self._fresh: list[tuple[AnyHosted, Event]] = []  # only on the loop

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the thread and the engine. Blocks until it listens.

        Raises as `Engine.start` does: Failed (transport), OSError (port), UsageError (started
        before). An interrupt while it blocks closes what was opened.
        """
        self._loop.claim()
        self._readable = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A selector may hold the number for as long as this object lives.
        weakref.finalize(self, os.close, self._readable).atexit = False
        self._loop.start()

    def close(self) -> None:
        """Cancel every transfer, wait (bounded by `Config.close_s`) for memory to be safe, end.

        Blocks until the thread has ended; an interrupt stops the waiting, not the closing.
        Idempotent. Afterwards `drain` gives the last events, those of every transfer.
        """
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Failed:
            if error is None:  # a crash; otherwise the host's own exception is the news
                raise

    # ------------------------------------------------------------ transfers

    def receive(
        self,
        key: Key,
        *,
        source: Peer,
        need: Mapping[str, Span],
        tokens: int,
        min_tokens: int | None = None,
        priority: int = 0,
        match_s: float | None = None,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> None:
        """Get the blocks of `key` from `source`; the arguments are those of `Engine.receive`.

        Never waits. The slots of `need` are lent until they are in a `Released`, whatever the
        outcome is. Raises UsageError (also for a name that is taken) and Busy here, in the caller:
        nothing was started and no slot is lent then, so that a host can try again later without
        having anything to clean up.
        """
        self._loop.check()
        if not isinstance(key, Key):
            raise UsageError(f"key is {key!r}, must be a Key")
        need = dict(need)
        receiving = HostedReceive(key, self._tell, self._review)
        receiving.handle = self._engine.receive(
            key,
            source=source,
            need=need,
            tokens=tokens,
            on_released=receiving.on_release,
            min_tokens=min_tokens,
            priority=priority,
            match_s=match_s,
            stall_s=stall_s,
            total_s=total_s,
        )
        receiving.lend(need)
        self._accept(receiving, self._receives, "receives_max", self._config.receives_max)

    def send(
        self,
        request: str,
        facts: CacheFacts | None = None,
        *,
        tokens: int | None = None,
        match_s: float | None = None,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> None:
        """Serve `request` to the target that asks for it; the arguments are those of `Engine.send`.

        Never waits. `facts.released` is not called: released blocks are in events. Raises
        UsageError and Busy as `receive` does.
        """
        self._loop.check()
        sending = HostedSend(request, self._tell, self._review)
        sending.handle = self._engine.send(
            request,
            None if facts is None else sending.facts(facts),
            tokens=tokens,
            on_released=sending.on_release,
            match_s=match_s,
            stall_s=stall_s,
            total_s=total_s,
        )
        self._accept(sending, self._sends, "sends_max", self._config.sends_max)

    def push(self, request: str, chunk: Mapping[str, Span]) -> None:
        """These blocks are ready: see `Send.push`. Never waits.

        They are lent until they are in a `Released`; soon, when the outcome has ended. Raises
        UsageError as `Send.push` does, and for a request that is not sent or whose `Ended` was
        drained; nothing was taken then.
        """
        self._loop.check()
        checked = check_spans(self._layout, chunk)
        with self._lock:
            self._push(self._sending(request), checked)

    def advance(self, request: str, tokens: int) -> None:
        """Tokens [0, `tokens`) are computed: see `Send.advance`. Never waits.

        `facts.extract` is called here, in the calling thread, and what it raises comes out of
        here; nothing was taken then. Raises UsageError as `push`, and when two threads advance
        one request at once.
        """
        self._loop.check()
        with self._lock:
            sending = self._sending(request)
            ready = sending.tokens_ready
        # Without the lock: the facts may call this object, and the loop must not wait for them.
        chunk = check_spans(self._layout, sending.handle.read(ready, tokens))
        with self._lock:
            if self._sending(request) is not sending or sending.tokens_ready != ready:
                raise UsageError(f"send {request} was advanced elsewhere at the same time")
            self._push(sending, chunk)
            sending.tokens_ready = tokens

    def finish(self, request: str, aux: bytes = b"") -> None:
        """Everything was pushed: see `Send.finish`. Never waits.

        Raises UsageError for a second finish, too much aux, and a request as in `push`.
        """
        self._loop.check()
        check_aux(aux)
        with self._lock:
            sending = self._sending(request)
            sending.seal()
            self._loop.post(partial(sending.finish, aux))

    def cancel(self, transfer: Key | str, reason: str) -> None:
        """End the receive of a key, or the send of a request id, in any state. Never waits.

        Idempotent; a name that stands for nothing is let pass, since its transfer may just have
        ended. Raises UsageError for what can't be a name, and for a reason that is no str.
        """
        self._loop.check()
        if not isinstance(transfer, Key | str):
            raise UsageError(f"transfer is {transfer!r}, must be a Key or a request id")
        text = check_reason(reason)
        with self._lock:
            self._loop.check()
            hosted = self._named.get(transfer)
            if hosted is not None:
                self._loop.post(partial(hosted.cancel, text))

    # ------------------------------------------------------------ what comes of them

    def drain(self) -> list[Event]:
        """Every event since the last time, oldest first; [] when there is none. Never waits.

        Also after closing. Raises Failed (code "crashed") when the thread was ended by an internal
        error and all events are drained.
        """
        self._loop.check_started()
        with self._lock:
            if not self._events:
                if self._loop.crashed:
                    self._loop.check_crash()
                return []
            drained, self._events = self._events, []
            if not self._loop.crashed:  # a crash keeps it readable
                os.eventfd_read(self._readable)
            for hosted, event in drained:
                if isinstance(event, Ended):
                    hosted.told = True
                    self._review(hosted)
            return [event for _, event in drained]

    def fileno(self) -> int:
        """A file descriptor that is readable while `drain` has something: for select and epoll.

        Only wait for it: `drain` reads it. It stays open for as long as this object lives.
        """
        self._loop.check_started()
        return self._readable

    @property
    def address(self) -> str:
        """The control address that targets dial. Raises UsageError when it does not listen."""
        self._loop.check()
        return self._engine.address

    # ------------------------------------------------------------ in the callers' threads

    def _accept(self, hosted: AnyHosted, others: set[AnyHosted], bound: str, most: int) -> None:
        with self._lock:
            self._loop.check()
            if hosted.name in self._named:
                raise UsageError(
                    f"{hosted.name} is in use: its end was not drained, or its slots are not back"
                )
            if len(others) >= most:
                raise Busy(
                    f"{len(others)} exist or are not drained, config.{bound} is {most}",
                    retry_after_s=1.0,
                )
            others.add(hosted)
            self._named[hosted.name] = hosted
            self._loop.post(hosted.enter)

    def _push(self, sending: HostedSend, chunk: dict[str, Span]) -> None:
        sending.lend(chunk)
        self._loop.post(partial(sending.push, chunk))

    def _sending(self, request: str) -> HostedSend:
        self._loop.check()
        hosted = self._named.get(request) if isinstance(request, str) else None
        if not isinstance(hosted, HostedSend):
            raise UsageError(f"request {request!r} is not sent, or its end was drained")
        return hosted

    def _review(self, hosted: AnyHosted) -> None:
        """Forget a transfer's name, and the transfer, as soon as they can be."""
        with self._lock:
            if hosted.over:
                self._receives.discard(hosted)
                self._sends.discard(hosted)
            if hosted.name_is_free and self._named.get(hosted.name) is hosted:
                del self._named[hosted.name]

    # ------------------------------------------------------------ in the engine's thread

    def _account(self) -> None:
        """The engine is no more: say what is still to be said, so that nothing is left open."""
        for hosted in [*self._receives, *self._sends]:
            hosted.account()
        self._publish()
        if self._loop.crashed and not self._events:
            os.eventfd_write(self._readable, 1)

    def _tell(self, hosted: AnyHosted, event: Event) -> None:
        """Publish an event with the others of this turn of the loop.

        Not before: what the engine does in one go, as releasing and fencing, a host sees at once,
        so that the name of a transfer whose last event it has drained is free.
        """
        if not self._fresh:
            self._loop.soon(self._publish)
        self._fresh.append((hosted, event))

    def _publish(self) -> None:
        with self._lock:
            if self._fresh and not self._events:
                os.eventfd_write(self._readable, 1)
            self._events += self._fresh
            self._fresh.clear()
