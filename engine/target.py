"""The target's side: offers its slots to sources, and takes them back with evidence.

Pure. Two rules: slots are offered only over a live session and exposed only to one incarnation,
and only that incarnation's word is evidence for them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import wire
from .align import shared_tokens
from .effects import Ended, Fenced, Received, Release, Report, Transmit, Unwatch, Watch
from .errors import Busy, Cancelled, Failed, KvferryError, PeerLost, Refused, TimedOut, UsageError
from .lease import Evidence
from .limits import REASON_CHARS_MAX, UNSETTLED_KEYS_MAX
from .spans import blocks_for
from .target_links import TargetLinks
from .transfer import TargetTransfer
from .transitions import Lease, LeaseEvent, Outcome, OutcomeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .context import Context
    from .keys import Key, Peer
    from .spans import Span
    from .target_links import Link
    from .transfer import Deadlines

_ENDINGS = {
    "failed": (OutcomeEvent.FAIL, Failed),
    "refused": (OutcomeEvent.FAIL, Refused),
    "cancelled": (OutcomeEvent.CANCEL, Cancelled),
    "timed out": (OutcomeEvent.EXPIRE, TimedOut),
}


class TargetSide:
    """Every receive of this engine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._emit = context.emit
        self.links = TargetLinks(context, self._begin, self._lose)
        self._transfers: dict[int, tuple[Link, TargetTransfer]] = {}
        self._watched: dict[str, Link] = {}  # incarnations whose process may hold our slots
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
        known = self.links.find(peer)
        if known is not None and key in known.transfers:
            raise UsageError(
                f"key {key} is already in use with {peer.name}, or its slots are not released "
                "yet: use a higher attempt",
                key=key,
            )
        number = next(self._context.numbers)
        transfer = TargetTransfer(number, key, need, tokens, min_tokens, deadlines, priority, now)
        link = self.links.need(peer, now)
        link.transfers[key] = transfer
        self._transfers[number] = (link, transfer)
        self._context.remind(transfer.deadline())
        if link.live:
            self._offer(link, transfer, now)
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

    # ------------------------------------------------------------ sessions

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> None:
        """A message came on one of this side's connections."""
        link = self.links.received(connection, message, now)
        if link is None:
            return
        match message:
            case wire.Moving() | wire.Done() | wire.Failed() | wire.Drained():
                self._hear(link, message, now)
            case _:
                self.messages_ignored += 1

    def _begin(self, link: Link, now: int) -> None:
        """A session has begun: ask for what a lost one left, then offer."""
        assert link.connection is not None
        assert link.session is not None
        assert link.session.peer_geometry is not None
        if link.incarnation not in self._watched:
            self._watched[link.incarnation] = link
            self._emit(Watch(link.incarnation, link.session.peer_geometry.process))
        unsettled = [
            transfer.key
            for transfer in link.transfers.values()
            if transfer.owed and transfer.exposed_to == link.incarnation
        ]
        for start in range(0, len(unsettled), UNSETTLED_KEYS_MAX):
            part = unsettled[start : start + UNSETTLED_KEYS_MAX]
            self._emit(Transmit(link.connection, wire.Unsettled(part)))
        for transfer in list(link.transfers.values()):
            if transfer.lease.state is Lease.GRANTED:
                self._offer(link, transfer, now)

    def _lose(self, link: Link, code: str, text: str, now: int) -> None:
        """A link has no session: its transfers fail, and slots that are out are quarantined."""
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
            if transfer.lose(now):
                self._emit(
                    Report(
                        logging.WARNING,
                        f"{transfer.lease.slots_held} slots of {transfer.key} are quarantined: "
                        f"{link.peer.name} is lost ({text}) and may still write to them",
                    )
                )

        for incarnation in [one for one, owner in self._watched.items() if owner is link]:
            self._unwatch(link, incarnation)

    def process_ended(self, incarnation: str, now: int) -> None:
        """A source's process has ended, and nothing of it can land: evidence for what it had."""
        link = self._watched.pop(incarnation, None)
        if link is None:
            return
        if link.incarnation == incarnation and link.connection is not None:
            self.links.end(link.connection, "session-lost", "its process ended", now)
        for transfer in list(link.transfers.values()):
            if transfer.lent and transfer.exposed_to == incarnation:
                self._prove(link, transfer, Evidence.ENDED, now)

    def _unwatch(self, link: Link, incarnation: str) -> None:
        """Let a watch go when no session is with that process and it holds none of our slots."""
        lent = (t.lent and t.exposed_to == incarnation for t in link.transfers.values())
        if incarnation in self._watched and link.incarnation != incarnation and not any(lent):
            del self._watched[incarnation]
            self._emit(Unwatch(incarnation))

    # ------------------------------------------------------------ transfers

    def _offer(self, link: Link, transfer: TargetTransfer, now: int) -> None:
        assert link.connection is not None
        try:
            for group in transfer.need:
                link.template(self._context.layout, group)
        except (Refused, UsageError) as error:
            self._end(link, transfer, OutcomeEvent.FAIL, self._misfit(link, transfer, error), now)
            return
        incarnation = link.incarnation

        def gate() -> bool:
            return transfer.expose(incarnation, now)

        self.links.expect(link, now)
        offer = wire.Offer(
            key=transfer.key,
            tokens=transfer.tokens,
            min_tokens=transfer.min_tokens,
            needs=[wire.Need(group, *span.to_wire()) for group, span in transfer.need.items()],
            match_ms=transfer.deadlines.match // 1_000_000,
            stall_ms=transfer.deadlines.stall // 1_000_000,
            total_ms=transfer.deadlines.total // 1_000_000,
            priority=transfer.priority,
        )
        self._emit(Transmit(link.connection, offer, key=transfer.key, gate=gate))

    def _hear(
        self,
        link: Link,
        message: wire.Moving | wire.Done | wire.Failed | wire.Drained,
        now: int,
    ) -> None:
        transfer = link.transfers.get(message.key)
        if transfer is None or not transfer.owed or transfer.exposed_to != link.incarnation:
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
                drained, clean = message.drained, message.clean
                self._end(link, transfer, event, error, now, drained=drained, clean=clean)
            case wire.Drained():
                # Normal after a cancel; before any ending it is the source's mistake.
                error = self._broken(link, transfer, "it drained without an outcome")
                clean = message.clean
                self._end(link, transfer, OutcomeEvent.FAIL, error, now, drained=True, clean=clean)

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
        if not transfer.ended:
            # Offered in this session, so that the templates are there.
            needed = self._bytes_needed(link, transfer, transfer.promised_tokens)
            told = (transfer.outcome, message.tokens, message.bytes_moved)
            if told != (Outcome.MOVING, transfer.promised_tokens, needed):
                event = OutcomeEvent.FAIL
                text = (
                    f"it reports {message.bytes_moved} bytes for {message.tokens} tokens, needed "
                    f"are {needed} bytes for {transfer.promised_tokens} tokens"
                )
                error = self._broken(link, transfer, text)
        result = Received(
            message.tokens,
            message.bytes_moved,
            message.aux,
            transfer.matched_at - transfer.created_at,
            now - transfer.matched_at,
        )
        self._end(link, transfer, event, error, now, drained=True, result=result)

    def _bytes_needed(self, link: Link, transfer: TargetTransfer, tokens: int) -> int:
        """What must move for `tokens`, by this side's own count."""
        layout = self._context.layout
        total = 0
        for name, span in transfer.need.items():
            template = link.template(layout, name)
            sizes = template.target_tokens, template.source_tokens
            moved = shared_tokens(span.restrict(0, blocks_for(tokens, sizes[0])), *sizes, tokens)
            total += moved * template.block_bytes // sizes[0]
        return total

    def _misfit(self, link: Link, transfer: TargetTransfer, error: KvferryError) -> Refused:
        return Refused(
            f"receive {transfer.key} from {link.peer.name}: {error}",
            key=transfer.key,
            peer=link.peer.name,
            by="peer",
            code="geometry",
        )

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
        clean: bool = True,
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
        elif drained and clean:
            self._prove(link, transfer, Evidence.DRAINED, now)
        elif drained:
            self._keep(link, transfer, now)
        elif lease.state is Lease.IN_USE:
            lease.handle(LeaseEvent.END)
            if tell is not None and link.live:
                assert link.connection is not None
                cancel = wire.Cancel(transfer.key, tell[:REASON_CHARS_MAX])
                self._emit(Transmit(link.connection, cancel, key=transfer.key))

    def _keep(self, link: Link, transfer: TargetTransfer, now: int) -> None:
        """The source is drained, but not clean: its word is no evidence for these slots."""
        transfer.unclean = True
        transfer.lose(now)
        text = (
            f"{transfer.lease.slots_held} slots of {transfer.key} stay quarantined: a write of "
            f"{link.peer.name} ended by an error, and what this host had received of it may still "
            "land"
        )
        self._emit(Report(logging.WARNING, text))

    def _prove(self, link: Link, transfer: TargetTransfer, evidence: Evidence, now: int) -> None:
        slots = transfer.lease.prove()
        transfer.story.note(now, f"fenced: {evidence}")
        del link.transfers[transfer.key]
        del self._transfers[transfer.number]
        self._emit(Release(transfer.number, slots, evidence))
        self._emit(Fenced(transfer.number))
        self._unwatch(link, transfer.exposed_to)

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
        self.links.tick(now)

    def reminders(self, now: int) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for _, transfer in self._transfers.values():
            if not transfer.ended:
                yield transfer.deadline()
        yield from self.links.reminders(now)

    # ------------------------------------------------------------ ending and looking

    def close(self, now: int, failure: Failed | None) -> None:
        """End every receive, and say goodbye. Idempotent."""
        for number, (link, transfer) in list(self._transfers.items()):
            if failure is None:
                self.cancel(number, "the engine closes", now)
            else:
                self._end(link, transfer, OutcomeEvent.FAIL, failure, now, tell=str(failure))
        self.links.close()

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
        linked = {t.number for link in self.links.all() for t in link.transfers.values()}
        assert self._transfers.keys() == linked, "a transfer is in one table only"
        for link, transfer in self._transfers.values():
            assert not transfer.lease.fenced, f"{transfer.story} is fenced and still in a table"
            assert transfer.ended or transfer.lease.state in (Lease.GRANTED, Lease.IN_USE)
            assert link.live or transfer.lease.state in (Lease.GRANTED, Lease.QUARANTINED)
