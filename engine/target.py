"""The target's side: offers its slots to sources, and takes them back with evidence.

Pure. One `Link` per source that is spoken to, with the session it has now and every transfer
whose slots are still lent. Two rules: slots are offered only over a live session and exposed only
to one incarnation, and only that incarnation's word is evidence for them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import wire
from .context import nanoseconds
from .effects import Dial, Ended, Fenced, HangUp, Received, Release, Report, Transmit
from .errors import Busy, Cancelled, Failed, KvferryError, PeerLost, Refused, TimedOut, UsageError
from .lease import Evidence
from .limits import REDIAL_DELAY_MAX_S, REDIAL_DELAY_MIN_S, UNSETTLED_KEYS_MAX
from .session import SessionMachine, SessionRefused, TargetPermit
from .spans import blocks_for
from .transfer import TargetTransfer
from .transitions import Lease, LeaseEvent, Outcome, OutcomeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .context import Context
    from .keys import Key, Peer
    from .spans import Span
    from .transfer import Deadlines

_ENDINGS = {
    "failed": (OutcomeEvent.FAIL, Failed),
    "refused": (OutcomeEvent.FAIL, Refused),
    "cancelled": (OutcomeEvent.CANCEL, Cancelled),
    "timed out": (OutcomeEvent.EXPIRE, TimedOut),
}


@dataclass(slots=True, eq=False)
class Link:
    """One source, as this target knows it."""

    number: int
    peer: Peer
    transfers: dict[Key, TargetTransfer] = field(default_factory=dict)
    connection: int | None = None
    session: SessionMachine | None = None
    permit: TargetPermit | None = None
    dialling: bool = False
    redial_at: int | None = None
    redial_delay_ns: int = 0

    @property
    def live(self) -> bool:
        """True while transfers may be offered."""
        return self.session is not None and self.session.live


class TargetSide:
    """Every receive of this engine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._emit = context.emit
        self._links: dict[Peer, Link] = {}
        self._by_number: dict[int, Link] = {}
        self._by_connection: dict[int, Link] = {}
        self._transfers: dict[int, tuple[Link, TargetTransfer]] = {}
        self.messages_ignored = 0

    # ------------------------------------------------------------ what callers ask for

    def receive(
        self,
        key: Key,
        peer: Peer,
        need: Mapping[str, Span],
        tokens: int,
        min_tokens: int,
        deadlines: Deadlines,
        priority: int,
        now: int,
    ) -> TargetTransfer:
        """Start a receive. Raises Busy, UsageError; nothing was changed then."""
        if len(self._transfers) >= self._context.config.receives_max:
            raise Busy(
                f"{len(self._transfers)} receives exist, config.receives_max is "
                f"{self._context.config.receives_max}",
                retry_after_s=1.0,
                key=key,
                peer=peer.name,
            )
        link = self._links.get(peer)
        if link is not None and key in link.transfers:
            raise UsageError(
                f"key {key} is already in use with {peer.name}, or its slots are not released "
                "yet: use a higher attempt",
                key=key,
            )
        if link is None:
            link = Link(next(self._context.numbers), peer)
            self._links[peer] = self._by_number[link.number] = link
        number = next(self._context.numbers)
        transfer = TargetTransfer(number, key, need, tokens, min_tokens, deadlines, priority, now)
        link.transfers[key] = transfer
        self._transfers[number] = (link, transfer)
        self._context.remind(transfer.deadline())
        if link.live:
            self._offer(link, transfer, now)
        else:
            self._dial(link)
        return transfer

    def cancel(self, number: int, reason: str, now: int) -> None:
        """End a receive, in any state. Idempotent."""
        if number not in self._transfers:
            return
        link, transfer = self._transfers[number]
        error = Cancelled(
            f"receive {transfer.key} was cancelled: {reason}",
            key=transfer.key,
            peer=link.peer.name,
            by="caller",
            code="cancelled",
        )
        self._end(link, transfer, OutcomeEvent.CANCEL, error, now, tell=reason)

    # ------------------------------------------------------------ connections

    def owns(self, connection: int) -> bool:
        """True when this connection was dialled by this side."""
        return connection in self._by_connection

    def is_live(self, connection: int) -> bool:
        """True when this connection has become a session."""
        link = self._by_connection.get(connection)
        return link is not None and link.live

    def dialled(self, number: int, connection: int, now: int) -> None:
        """A connection to a link's source is up."""
        link = self._by_number.get(number)
        if link is None or not link.dialling:
            self._emit(HangUp(connection, "nothing needs this connection any more"))
            return
        link.dialling = False
        link.connection = connection
        link.session = SessionMachine(
            "target",
            self._context.introduction(link.peer.name),
            self._context.entropy(16),
            link.peer.name,
        )
        self._by_connection[connection] = link
        for message in link.session.start():
            self._emit(Transmit(connection, message))

    def dial_failed(self, number: int, text: str, now: int) -> None:
        """A link's source can't be reached."""
        link = self._by_number.get(number)
        if link is not None and link.dialling:
            link.dialling = False
            self._fail_all(link, "unreachable", text, now)
            self._rest(link, now)

    def lost(self, connection: int, text: str, now: int) -> None:
        """A connection ended."""
        link = self._by_connection.get(connection)
        if link is not None:
            self._end_session(link, "session-lost", text, now)

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> None:
        """A message came on one of this side's connections."""
        link = self._by_connection[connection]
        session = link.session
        assert session is not None
        if not session.live or isinstance(message, wire.Goodbye | wire.Refuse):
            self._shake_hands(link, session, message, now)
            return
        match message:
            case wire.Renew():
                assert link.permit is not None
                self._emit(Transmit(connection, link.permit.receive(message, now)))
            case wire.Moving() | wire.Done() | wire.Failed() | wire.Drained():
                self._hear(link, session, message, now)
            case _:
                self.messages_ignored += 1

    def _shake_hands(
        self, link: Link, session: SessionMachine, message: wire.AnyMessage, now: int
    ) -> None:
        assert link.connection is not None
        was_live = session.live
        try:
            answers = session.receive(message)
        except SessionRefused as refused:
            if refused.refusal is not None:
                self._emit(Transmit(link.connection, refused.refusal))
            code = "session-lost" if was_live else f"refused-{refused.code}"
            self._end_session(link, code, refused.text, now)
            return
        for answer in answers:
            self._emit(Transmit(link.connection, answer))
        if session.live and not was_live:
            self._begin(link, session, now)

    def _begin(self, link: Link, session: SessionMachine, now: int) -> None:
        """The session is live: ask for what a lost one left, then offer."""
        assert link.connection is not None
        link.redial_delay_ns = 0
        link.permit = TargetPermit(nanoseconds(self._context.config.permit_ttl_s), now)
        self._context.remind(link.permit.runs_out_at)
        unsettled = [
            t.key
            for t in link.transfers.values()
            if t.lent and t.exposed_to == session.peer_incarnation
        ]
        for start in range(0, len(unsettled), UNSETTLED_KEYS_MAX):
            part = unsettled[start : start + UNSETTLED_KEYS_MAX]
            self._emit(Transmit(link.connection, wire.Unsettled(part)))
        for transfer in list(link.transfers.values()):
            if transfer.lease.state is Lease.GRANTED:
                self._offer(link, transfer, now)

    # ------------------------------------------------------------ transfers

    def _offer(self, link: Link, transfer: TargetTransfer, now: int) -> None:
        assert link.session is not None
        assert link.connection is not None
        assert link.permit is not None
        session, permit = link.session, link.permit

        def gate() -> bool:
            return transfer.expose(session.peer_incarnation, now)

        permit.expect(now)
        self._context.remind(permit.runs_out_at)
        offer = wire.Offer(
            key=transfer.key,
            tokens=transfer.tokens,
            min_tokens=transfer.min_tokens,
            needs=[wire.Need(group, span.to_wire()) for group, span in transfer.need.items()],
            match_ms=transfer.deadlines.match // 1_000_000,
            stall_ms=transfer.deadlines.stall // 1_000_000,
            total_ms=transfer.deadlines.total // 1_000_000,
            priority=transfer.priority,
        )
        self._emit(Transmit(link.connection, offer, key=transfer.key, gate=gate))

    def _hear(
        self,
        link: Link,
        session: SessionMachine,
        message: wire.Moving | wire.Done | wire.Failed | wire.Drained,
        now: int,
    ) -> None:
        transfer = link.transfers.get(message.key)
        if transfer is None or not transfer.lent or transfer.exposed_to != session.peer_incarnation:
            self.messages_ignored += 1
            return
        match message:
            case wire.Moving():
                self._hear_moving(link, transfer, message, now)
            case wire.Done():
                self._hear_done(link, transfer, message, now)
            case wire.Failed():
                event, kind = _ENDINGS.get(message.outcome, _ENDINGS["failed"])
                error = kind(
                    f"receive {message.key}: {link.peer.name} says: {message.text}",
                    key=message.key,
                    peer=link.peer.name,
                    by="peer",
                    code=message.code,
                    retry_safe=message.retry_safe,
                )
                self._end(link, transfer, event, error, now, drained=message.drained)
            case wire.Drained():
                # Normal after a cancel; before any ending it is the source's mistake.
                error = self._broken(link, transfer, "it drained without an outcome")
                self._end(link, transfer, OutcomeEvent.FAIL, error, now, drained=True)

    def _hear_moving(
        self, link: Link, transfer: TargetTransfer, message: wire.Moving, now: int
    ) -> None:
        if transfer.ended:
            transfer.late += 1
        elif transfer.outcome is not Outcome.WAITING or not (
            transfer.min_tokens <= message.tokens <= transfer.tokens
        ):
            error = self._broken(link, transfer, f"it wants to move {message.tokens} tokens")
            self._end(link, transfer, OutcomeEvent.FAIL, error, now, tell=str(error))
        else:
            transfer.match(now)
            transfer.promised_tokens = message.tokens

    def _hear_done(
        self, link: Link, transfer: TargetTransfer, message: wire.Done, now: int
    ) -> None:
        error: KvferryError | None = None
        event = OutcomeEvent.COMPLETE
        needed = self._bytes_needed(transfer, transfer.promised_tokens)
        if not transfer.ended and (
            transfer.outcome is not Outcome.MOVING
            or message.tokens != transfer.promised_tokens
            or message.bytes_moved != needed
        ):
            event = OutcomeEvent.FAIL
            error = self._broken(
                link,
                transfer,
                f"it reports {message.bytes_moved} bytes for {message.tokens} tokens, needed are "
                f"{needed} bytes for {transfer.promised_tokens} tokens",
            )
        result = Received(
            message.tokens,
            message.bytes_moved,
            message.aux,
            transfer.matched_at - transfer.created_at,
            now - transfer.matched_at,
        )
        self._end(link, transfer, event, error, now, drained=True, result=result)

    def _bytes_needed(self, transfer: TargetTransfer, tokens: int) -> int:
        layout = self._context.layout
        total = 0
        for name, span in transfer.need.items():
            stop = blocks_for(tokens, layout.group(name).tokens_per_block)
            total += len(span.restrict(0, stop)) * layout.block_bytes(name)
        return total

    def _broken(self, link: Link, transfer: TargetTransfer, text: str) -> Failed:
        return Failed(
            f"receive {transfer.key}: {link.peer.name} broke the protocol: {text}",
            key=transfer.key,
            peer=link.peer.name,
            by="peer",
            code="protocol",
        )

    def _end(
        self,
        link: Link,
        transfer: TargetTransfer,
        event: OutcomeEvent,
        error: KvferryError | None,
        now: int,
        *,
        drained: bool = False,
        tell: str | None = None,
        result: Received | None = None,
    ) -> None:
        """End the outcome if it has not ended, and move the lease on as far as this proves."""
        first = transfer.end(event, now, error)
        if first:
            self._emit(Ended(transfer.number, None if error else result, error))
        lease = transfer.lease
        if lease.state is Lease.GRANTED:
            self._prove(link, transfer, Evidence.NEVER_EXPOSED, now)
        elif drained:
            self._prove(link, transfer, Evidence.DRAINED, now)
        elif lease.state is Lease.IN_USE:
            lease.handle(LeaseEvent.END)
            if tell is not None and link.live:
                assert link.connection is not None
                cancel = wire.Cancel(transfer.key, tell[:1000])
                self._emit(Transmit(link.connection, cancel, key=transfer.key))

    def _prove(self, link: Link, transfer: TargetTransfer, evidence: Evidence, now: int) -> None:
        slots = transfer.lease.prove()
        transfer.story.note(now, f"fenced: {evidence}")
        del link.transfers[transfer.key]
        del self._transfers[transfer.number]
        self._emit(Release(transfer.number, slots, evidence))
        self._emit(Fenced(transfer.number))

    # ------------------------------------------------------------ losing and finding a source

    def _dial(self, link: Link) -> None:
        if link.connection is None and not link.dialling:
            link.dialling = True
            link.redial_at = None
            self._emit(Dial(link.number, link.peer))

    def _end_session(self, link: Link, code: str, text: str, now: int) -> None:
        assert link.connection is not None
        assert link.session is not None
        self._emit(HangUp(link.connection, text))
        link.session.end()
        del self._by_connection[link.connection]
        link.connection = link.session = link.permit = None
        self._fail_all(link, code, text, now)
        self._rest(link, now)

    def _fail_all(self, link: Link, code: str, text: str, now: int) -> None:
        for transfer in list(link.transfers.values()):
            kind = Refused if code.startswith("refused") else PeerLost
            error = kind(
                f"receive {transfer.key}: {link.peer.name} at {link.peer.address}: {text}",
                key=transfer.key,
                peer=link.peer.name,
                by="peer",
                code=code,
                retry_safe=kind is PeerLost,
            )
            if not transfer.ended:
                self._end(link, transfer, OutcomeEvent.FAIL, error, now)
            quarantined_before = transfer.lease.state is Lease.QUARANTINED
            transfer.lose(now)
            if transfer.lease.state is Lease.QUARANTINED and not quarantined_before:
                self._emit(
                    Report(
                        logging.WARNING,
                        f"{transfer.lease.slots_held} slots of {transfer.key} are quarantined: "
                        f"{link.peer.name} is lost ({text}) and may still write to them",
                    )
                )

    def _rest(self, link: Link, now: int) -> None:
        """No session: forget the source, or come back for evidence after a growing delay."""
        if not link.transfers:
            del self._links[link.peer], self._by_number[link.number]
            return
        delay_max = nanoseconds(REDIAL_DELAY_MAX_S)
        delay = link.redial_delay_ns * 2 or nanoseconds(REDIAL_DELAY_MIN_S)
        link.redial_delay_ns = min(delay, delay_max)
        link.redial_at = now + link.redial_delay_ns
        self._context.remind(link.redial_at)

    # ------------------------------------------------------------ time

    def tick(self, now: int) -> None:
        """Do what is due: deadlines, redials, permits that ran out."""
        for link, transfer in list(self._transfers.values()):
            expired = transfer.expires(now)
            if expired is not None:
                error = TimedOut(
                    f"receive {transfer.key} from {link.peer.name}: its {expired} deadline passed "
                    f"while {transfer.outcome}",
                    key=transfer.key,
                    peer=link.peer.name,
                    by="deadline",
                    code=expired,
                    retry_safe=True,
                )
                self._end(link, transfer, OutcomeEvent.EXPIRE, error, now, tell=str(error))
        for link in list(self._by_number.values()):
            if link.redial_at is not None and now >= link.redial_at:
                self._dial(link)
            elif link.permit is not None and now >= link.permit.runs_out_at and self._lends(link):
                self._end_session(link, "permit", "it went silent: its permit ran out", now)

    def reminders(self) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for _, transfer in self._transfers.values():
            if not transfer.ended:
                yield transfer.deadline()
        for link in self._by_number.values():
            if link.redial_at is not None:
                yield link.redial_at
            elif link.permit is not None and self._lends(link):
                yield link.permit.runs_out_at

    def _lends(self, link: Link) -> bool:
        """True while this session's incarnation holds a lease: its silence counts."""
        assert link.session is not None
        incarnation = link.session.peer_incarnation
        return any(t.lent and t.exposed_to == incarnation for t in link.transfers.values())

    # ------------------------------------------------------------ ending and looking

    def close(self, now: int) -> None:
        """Cancel every receive, and say goodbye."""
        for number in list(self._transfers):
            self.cancel(number, "the engine closes", now)
        for link in list(self._by_number.values()):
            if link.live and link.connection is not None:
                self._emit(Transmit(link.connection, wire.Goodbye("the engine closes")))

    @property
    def slots_lent(self) -> int:
        """Slots that a source may still touch."""
        return sum(t.lease.slots_held for _, t in self._transfers.values() if t.lent)

    @property
    def slots_quarantined(self) -> int:
        """Slots whose evidence is out of reach for now."""
        return sum(
            t.lease.slots_held
            for _, t in self._transfers.values()
            if t.lease.state is Lease.QUARANTINED
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        held = {number for number, _ in self._transfers.items()}
        linked = {t.number for link in self._by_number.values() for t in link.transfers.values()}
        assert held == linked, f"transfers {held ^ linked} are in one table only"
        for link, transfer in self._transfers.values():
            assert not transfer.lease.fenced, f"{transfer.story} is fenced and still in a table"
            assert transfer.ended or transfer.lease.state in (Lease.GRANTED, Lease.IN_USE)
            assert link.live or transfer.lease.state in (Lease.GRANTED, Lease.QUARANTINED)
