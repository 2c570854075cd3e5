"""The I/O worker: owns one backend, and what is queued, posted and in doubt on it.

It has neither clock nor thread: a runner calls `step(now)`, from a thread in production and from
the simulator in tests. Rules: only evidence settles a write (a backend's word that it ended, or
that nothing of it was ever handed over), and `not_after` is compared with a `now` that no call
into the backend has made old.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from ..engine.errors import InternalError
from ..engine.ports import (
    BackendError,
    Close,
    Command,
    Connect,
    Connected,
    ConnectFailed,
    Disconnect,
    Event,
    InDoubt,
    NotPosted,
    Opened,
    Post,
    Posted,
    Progress,
    ProgressKind,
    Revoke,
    Revoked,
    Settled,
    Stopped,
    Withdraw,
    WriteResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.ports import Backend

_log = logging.getLogger(__name__)

POLL_MIN_NS: Final = 100_000
POLL_MAX_NS: Final = 1_000_000
DOUBT_POLL_MIN_NS: Final = 1_000_000
DOUBT_POLL_MAX_NS: Final = 100_000_000


@dataclass(slots=True)
class _Cadence:
    """When a group of writes is polled next: soon after activity, then ever more rarely."""

    shortest: int
    longest: int
    delay: int = 0
    due: int = 0

    def hasten(self, now: int) -> None:
        """Something happened: poll after the shortest delay, never later than planned."""
        planned = self.due if self.delay else now + self.shortest
        self.delay = self.shortest
        self.due = min(planned, now + self.shortest)

    def polled(self, now: int, *, settled: bool) -> None:
        """Plan the poll after this one."""
        self.delay = self.shortest if settled else min(self.delay * 3 // 2, self.longest)
        self.due = now + self.delay

    def rest(self) -> None:
        """Nothing is left to poll."""
        self.delay = 0


@dataclass(slots=True)
class _Peer:
    """A connected peer. `leaving`: it is forgotten as soon as nothing to it is posted."""

    metadata: bytes
    posted: int = 0
    leaving: bool = False


@dataclass(slots=True)
class _Flight:
    """A posted write. `handle` is None when the post itself broke: nothing can be asked then."""

    post: Post
    handle: object | None


class Worker:
    """Implements `ports.Steps` over one backend. See the module's rules.

    Ids of writes are the engine's, and unique for the life of a worker; an id used twice stops
    it, because two answers under one name can't be told apart.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._inbox: deque[Command] = deque()
        self._events: list[Event] = []
        self._opened = False
        self._stopped = False
        self._close_by: int | None = None
        self._peers: dict[str, _Peer] = {}
        self._queues: dict[str, OrderedDict[int, Post]] = {}
        self._turns: deque[str] = deque()  # peers with a queue, in the order of their next post
        self._queued: dict[int, str] = {}  # write -> peer
        self._moving: dict[int, _Flight] = {}
        self._doubtful: dict[int, _Flight] = {}
        self._poll = _Cadence(POLL_MIN_NS, POLL_MAX_NS)
        self._poll_doubtful = _Cadence(DOUBT_POLL_MIN_NS, DOUBT_POLL_MAX_NS)

    # ------------------------------------------------------------ ports.Steps

    def submit(self, commands: Sequence[Command]) -> None:
        """Append commands. Thread-safe (one deque operation), never blocks.

        A `Post` that crosses `Stopped` is never posted and gets no answer: `Stopped.unsettled`
        names everything that was.
        """
        self._inbox.extend(commands)

    def take_events(self) -> list[Event]:
        """The events since the last call, in order. Only the thread that steps may call it."""
        events, self._events = self._events, []
        return events

    @property
    def stopped(self) -> bool:
        """True after `Stopped` was emitted."""
        return self._stopped

    def step(self, now: int) -> int | None:
        """Open, or run commands up to one that may block, or post one write; then poll if due.

        Returns when to step again (ns), None to wait for commands. Never raises: what breaks
        here ends the worker with `Stopped(text)`.
        """
        if self._stopped:
            return None
        try:
            return self._step(now)
        except Exception as error:  # noqa: BLE001 - a worker that dies unheard strands every write
            _log.exception("the worker broke")
            self._close(f"the worker broke: {_words(error)}")
            return None

    # ------------------------------------------------------------ one step

    def _step(self, now: int) -> int | None:
        if not self._opened:
            return self._open(now)
        if not self._take_commands():
            self._post_one(now)
        self._poll_due(now)
        self._forget_leaving()
        if self._close_by is not None and (now >= self._close_by or not self._unsettled()):
            self._close("")
            return None
        return self._next_step(now)

    def _open(self, now: int) -> int | None:
        try:
            metadata = self._backend.open()
        except Exception as error:  # noqa: BLE001 - whatever it was, there is no backend
            self._stop(f"the transport could not be opened: {_words(error)}")
            return None
        self._opened = True
        self._events.append(Opened(metadata))
        return now

    def _next_step(self, now: int) -> int | None:
        if self._inbox or self._turns:
            return now
        times = []
        if self._moving:
            times.append(self._poll.due)
        if self._doubtful:
            times.append(self._poll_doubtful.due)
        if times and self._close_by is not None:
            times.append(self._close_by)
        return min(times) if times else None

    def _unsettled(self) -> list[_Flight]:
        return [*self._moving.values(), *self._doubtful.values()]

    # ------------------------------------------------------------ commands

    def _take_commands(self) -> bool:
        """Run commands; return True after one that called the backend, which made `now` old."""
        while self._inbox:
            command = self._inbox.popleft()
            match command:
                case Post():
                    self._queue(command)
                case Withdraw():
                    self._withdraw(command.write, "")
                case Close():
                    self._begin_close(command.not_later_than)
                case Connect():
                    self._connect(command)
                    return True
                case Disconnect():
                    self._disconnect(command.peer)
                    return True
                case Revoke():
                    self._revoke(command.peer)
                    return True
                case _ as unreachable:
                    assert_never(unreachable)
        return False

    def _queue(self, post: Post) -> None:
        write = post.write
        if write in self._queued or write in self._moving or write in self._doubtful:
            raise InternalError(f"write {write} was submitted twice")
        if self._close_by is not None:
            self._settle(write, "withdrawn", "the transport is closing")
            return
        queue = self._queues.get(post.peer)
        if queue is None:
            queue = self._queues[post.peer] = OrderedDict()
            self._turns.append(post.peer)
        queue[write] = post
        self._queued[write] = post.peer

    def _withdraw(self, write: int, text: str) -> None:
        """Settle a queued write. A posted one answers by settling, an unknown one has done so."""
        peer = self._queued.pop(write, None)
        if peer is None:
            return
        queue = self._queues[peer]
        del queue[write]
        if not queue:
            del self._queues[peer]
            self._turns.remove(peer)
        self._settle(write, "withdrawn", text)

    def _begin_close(self, not_later_than: int) -> None:
        """Queued writes are withdrawn; a second Close can only bring the end nearer."""
        for write in list(self._queued):
            self._withdraw(write, "the transport is closing")
        known = self._close_by
        self._close_by = not_later_than if known is None else min(known, not_later_than)

    def _connect(self, command: Connect) -> None:
        """Load a peer, or keep one that is known by the same metadata.

        A peer that is leaving but still has posted writes must not be removed (its writes could
        never be seen to end), so the same metadata keeps it and other metadata is refused.
        """
        peer = command.peer
        known = self._peers.get(peer)
        if known is not None and known.metadata != command.metadata:
            text = f"{peer} is connected with other metadata, {known.posted} writes are posted"
            self._events.append(ConnectFailed(peer, text))
            return
        if known is not None:
            known.leaving = False
            self._events.append(Connected(peer))
            return
        try:
            self._backend.connect(peer, command.metadata)
        except Exception as error:  # noqa: BLE001 - metadata comes from outside: nothing else breaks
            self._events.append(ConnectFailed(peer, _words(error)))
            return
        self._peers[peer] = _Peer(command.metadata)
        self._events.append(Connected(peer))

    def _disconnect(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        for write in list(self._queues.get(peer, ())):
            self._withdraw(write, f"{peer} was disconnected before this write was posted")
        known.leaving = True
        self._forget_leaving()

    def _forget_leaving(self) -> None:
        gone = [name for name, peer in self._peers.items() if peer.leaving and not peer.posted]
        for name in gone:
            del self._peers[name]
            try:
                self._backend.disconnect(name)
            except Exception as error:  # noqa: BLE001 - nothing is posted to it: nothing to lose
                _log.warning("forgetting peer %s failed: %s", name, _words(error))

    def _revoke(self, peer: str) -> None:
        try:
            proven, text = self._backend.revoke(peer)
        except Exception as error:  # noqa: BLE001 - what failed proves nothing
            proven, text = False, _words(error)
        self._events.append(Revoked(peer, proven, text))

    # ------------------------------------------------------------ posting

    def _post_one(self, now: int) -> None:
        """Post the next write, round robin over peers; what may not be posted settles instead."""
        while self._turns:
            peer = self._turns.popleft()
            queue = self._queues[peer]
            write, post = queue.popitem(last=False)
            del self._queued[write]
            if queue:
                self._turns.append(peer)
            else:
                del self._queues[peer]
            if now >= post.not_after:
                self._settle(write, "expired", "")
            elif peer not in self._peers:
                self._settle(write, "refused", f"{peer} is not connected")
            else:
                self._post(post, now)
                return

    def _post(self, post: Post, now: int) -> None:
        handle: object | None = None
        progress: ProgressKind
        try:
            handle, progress, text = self._backend.post(post)
        except NotPosted as error:
            self._settle(post.write, "refused", str(error))
            return
        except Exception as error:  # noqa: BLE001 - it may have been handed over: in doubt for good
            progress, text = Progress.DOUBT, f"the post broke: {_words(error)}"
        flight = _Flight(post, handle)
        if progress in (Progress.DONE, Progress.FAILED):
            self._end(flight, progress, text, posted=False)
            return
        self._peers[post.peer].posted += 1
        self._events.append(Posted(post.write))
        self._moving[post.write] = flight
        self._poll.hasten(now)
        if progress == Progress.DOUBT:
            self._doubt(flight, text, now)

    # ------------------------------------------------------------ polling

    def _poll_due(self, now: int) -> None:
        if self._moving and now >= self._poll.due:
            settled = self._poll_each(self._moving, now)
            self._poll.polled(now, settled=settled)
        if not self._moving:
            self._poll.rest()
        if self._doubtful and now >= self._poll_doubtful.due:
            settled = self._poll_each(self._doubtful, now)
            self._poll_doubtful.polled(now, settled=settled)
        if not self._doubtful:
            self._poll_doubtful.rest()

    def _poll_each(self, flights: dict[int, _Flight], now: int) -> bool:
        """Poll every flight once; return whether one of them ended."""
        ended = False
        for write, flight in list(flights.items()):
            progress, text = self._ask(flight)
            if progress in (Progress.DONE, Progress.FAILED):
                del flights[write]
                self._end(flight, progress, text, posted=True)
                ended = True
            elif progress == Progress.DOUBT and write in self._moving:
                self._doubt(flight, text, now)
        return ended

    def _ask(self, flight: _Flight) -> tuple[ProgressKind, str]:
        if flight.handle is None:
            return Progress.DOUBT, ""
        try:
            return self._backend.poll(flight.handle)
        except Exception as error:  # noqa: BLE001 - a poll that breaks says nothing of the write
            return Progress.DOUBT, f"the poll broke: {_words(error)}"

    def _doubt(self, flight: _Flight, text: str, now: int) -> None:
        write = flight.post.write
        del self._moving[write]
        self._doubtful[write] = flight
        self._poll_doubtful.hasten(now)
        self._events.append(InDoubt(write, text))

    def _end(self, flight: _Flight, progress: ProgressKind, text: str, *, posted: bool) -> None:
        if posted:
            self._peers[flight.post.peer].posted -= 1
        self._settle(flight.post.write, "done" if progress == Progress.DONE else "failed", text)
        if flight.handle is None:
            return
        try:
            self._backend.release(flight.handle)
        except Exception as error:  # noqa: BLE001 - the write ended; only the handle's memory leaks
            _log.warning("releasing write %d failed: %s", flight.post.write, _words(error))

    def _settle(self, write: int, result: WriteResult, text: str) -> None:
        self._events.append(Settled(write, result, text))

    # ------------------------------------------------------------ the end

    def _close(self, text: str) -> None:
        """End the backend; `text` is what broke, if something did.

        A write without a handle is stood in for by its Post, so that the backend sees that its
        memory must stay mapped.
        """
        unsettled = [
            flight.post if flight.handle is None else flight.handle for flight in self._unsettled()
        ]
        try:
            self._backend.close(unsettled)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, once
            failure = f"closing the transport failed: {_words(error)}"
            text = f"{text}; {failure}" if text else failure
        self._stop(text)

    def _stop(self, text: str) -> None:
        """The last event. Everything that was never posted, arriving commands too, is withdrawn."""
        self._stopped = True
        waiting = list(self._queued)
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Post):
                waiting.append(command.write)
        for write in waiting:
            self._settle(write, "withdrawn", text or "the transport was closed")
        self._events.append(Stopped(text, (*self._moving, *self._doubtful)))


def _words(error: BaseException) -> str:
    """An error as one line; the class is told unless it is a backend's own, made to be read."""
    text = str(error)
    if isinstance(error, BackendError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
