"""The source's side: pairs offers with sends, hands their writes over, and answers for them.

Pure. Two rules: a write is handed over only under the peer's permit and for a transfer whose
outcome has not ended, and "drained" is said only when nothing of the key is queued, handed,
posted or in doubt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import wire
from .context import nanoseconds
from .effects import Ended, Fenced, HangUp, Release, Report, Sent, Submit, Transmit
from .errors import (
    Busy,
    Cancelled,
    Failed,
    InternalError,
    KvferryError,
    PeerLost,
    Refused,
    TimedOut,
    UsageError,
)
from .keys import Key
from .lease import Evidence
from .limits import (
    AUX_BYTES_MAX,
    OFFERS_WAITING_BYTES_MAX,
    PERMIT_LINGER_S,
    PUMP_WRITES_MAX,
    TOMBSTONE_S,
    TOMBSTONES_MAX,
)
from .pipeline import Pipeline, PlannedWrite
from .plan import Template, make_template
from .ports import (
    Connect,
    Connected,
    ConnectFailed,
    Disconnect,
    InDoubt,
    Post,
    Posted,
    Settled,
    Withdraw,
)
from .scheduler import Bounds, Scheduler
from .session import SessionMachine, SessionRefused, SourcePermit
from .spans import Span, blocks_for, missing
from .transfer import SourceTransfer
from .transitions import Lease, LeaseEvent, Outcome, OutcomeEvent, Write, WriteEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .context import Context
    from .layout import Layout
    from .lease import Slots
    from .ports import Event
    from .transfer import Deadlines

_TELLS = {
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.TIMED_OUT: "timed out",
}


@dataclass(slots=True, eq=False)
class Target:
    """One target incarnation, as this source knows it. `connection` is None between sessions."""

    peer: str
    name: str
    agent: int
    layout: Layout
    connected: bool = False
    connection: int | None = None
    session: SessionMachine | None = None
    permit: SourcePermit | None = None
    idle_since: int = 0
    templates: dict[str, Template] = field(default_factory=dict)
    offers: dict[Key, WaitingOffer] = field(default_factory=dict)
    offers_bytes: int = 0
    transfers: dict[Key, SourceTransfer] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WaitingOffer:
    """An offer whose send has not come yet."""

    offer: wire.Offer
    need: dict[str, Span]
    target: Target
    size: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An ended (request, branch): offers up to `attempt` are refused. `unheard`: no send yet."""

    attempt: int
    reason: str
    expires_at: int
    unheard: bool


class SourceSide:
    """Every send of this engine."""

    def __init__(self, context: Context) -> None:
        config = context.config
        self._context = context
        self._emit = context.emit
        self._sessions: dict[int, SessionMachine] = {}
        self._by_connection: dict[int, Target] = {}
        self._targets: dict[str, Target] = {}
        self._latest: dict[str, Target] = {}  # by name: the incarnation that spoke last
        self._sends: dict[str, SourceTransfer] = {}  # waiting or moving, by request
        self._transfers: dict[int, SourceTransfer] = {}  # until fenced
        self._offers: dict[str, dict[Key, WaitingOffer]] = {}  # by request
        self._tombstones: dict[tuple[str, int], Tombstone] = {}
        self._writes: dict[int, tuple[SourceTransfer, PlannedWrite]] = {}
        self._scheduler = Scheduler(
            Bounds(config.peer_posted_bytes_max, config.peer_posted_writes_max)
        )
        self._closing = False
        self.messages_ignored = 0

    # ------------------------------------------------------------ what callers ask for

    def send(self, request: str, tokens: int, deadlines: Deadlines, now: int) -> SourceTransfer:
        """Start a send. Raises Busy, UsageError; nothing was changed then."""
        if request in self._sends:
            raise UsageError(f"request {request!r} is already being sent")
        if len(self._transfers) >= self._context.config.sends_max:
            raise Busy(
                f"{len(self._transfers)} sends exist, config.sends_max is "
                f"{self._context.config.sends_max}",
                retry_after_s=1.0,
            )
        number = next(self._context.numbers)
        transfer = SourceTransfer(number, request, tokens, deadlines, now)
        self._sends[request] = self._transfers[number] = transfer
        self._context.remind(transfer.deadline())
        waiting = self._offers.get(request)
        if waiting:
            self._match(transfer, max(waiting.values(), key=lambda w: w.offer.key.attempt), now)
            return transfer
        grave = self._tombstones.get((request, 0))
        if grave is not None and grave.unheard:
            self._bury(Key(request, grave.attempt, 0), grave.reason, now, unheard=False)
            error = Cancelled(
                f"send {request}: its target cancelled it before it came: {grave.reason}",
                by="peer",
                code="cancelled",
            )
            self._end(transfer, OutcomeEvent.CANCEL, error, now)
        return transfer

    def push(self, number: int, chunk: Mapping[str, Span], now: int) -> bool:
        """Take ready blocks, checked against the layout; False when the outcome has ended.

        The blocks stay the caller's then. Raises UsageError for ordinals that were pushed before
        and for a push after `finish`.
        """
        transfer = self._transfers.get(number)
        if transfer is None or transfer.ended:
            return False
        if transfer.sealed:
            raise UsageError(f"send {transfer.request}: push after finish", key=transfer.key)
        for group, span in chunk.items():
            held = transfer.pushed.get(group)
            if held is not None:
                again, _, _ = span.intersect(held)
                if len(again):
                    raise UsageError(
                        f"send {transfer.request}: group {group!r}: ordinals {again[:4].tolist()} "
                        "were pushed before",
                        key=transfer.key,
                    )
        self._release(transfer, transfer.push(chunk, now), Evidence.NEVER_EXPOSED)
        self._advance(transfer, now)
        return True

    def finish(self, number: int, aux: bytes, now: int) -> None:
        """Every block was pushed: seal. Raises UsageError for a second finish or too much aux."""
        if len(aux) > AUX_BYTES_MAX:
            raise UsageError(f"aux has {len(aux)} bytes, the bound is {AUX_BYTES_MAX}")
        transfer = self._transfers.get(number)
        if transfer is None or transfer.ended:
            return
        if transfer.sealed:
            raise UsageError(f"send {transfer.request}: finished twice", key=transfer.key)
        transfer.sealed, transfer.aux, transfer.progress_at = True, aux, now
        transfer.story.note(now, "sealed")
        self._advance(transfer, now)

    def cancel(self, number: int, reason: str, now: int) -> None:
        """End a send, in any state. Idempotent."""
        transfer = self._transfers.get(number)
        if transfer is not None:
            error = Cancelled(
                f"send {transfer.request} was cancelled: {reason}",
                key=transfer.key,
                by="caller",
                code="cancelled",
            )
            self._end(transfer, OutcomeEvent.CANCEL, error, now)

    # ------------------------------------------------------------ connections

    def owns(self, connection: int) -> bool:
        """True when this connection was accepted by this side."""
        return connection in self._sessions

    def is_live(self, connection: int) -> bool:
        """True when this connection has become a session."""
        return connection in self._by_connection

    def accepted(self, connection: int, now: int) -> None:
        """A target has connected."""
        session = SessionMachine(
            "source", self._context.introduction(None), self._context.entropy(16)
        )
        self._sessions[connection] = session
        for message in session.start():
            self._emit(Transmit(connection, message))

    def lost(self, connection: int, text: str, now: int) -> None:
        """A connection ended."""
        if connection in self._sessions:
            self._end_session(connection, text, now)

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> None:
        """A message came on one of this side's connections."""
        session = self._sessions[connection]
        if not session.live or isinstance(message, wire.Goodbye | wire.Refuse):
            self._shake_hands(connection, session, message, now)
            return
        target = self._by_connection[connection]
        match message:
            case wire.Granted():
                assert target.permit is not None
                target.permit.receive(message, now)
                self._allow(target, now)
            case wire.Offer():
                self._hear_offer(target, message, now)
            case wire.Cancel():
                self._hear_cancel(target, message, now)
            case wire.Unsettled():
                for key in message.keys:
                    self._answer_unsettled(target, key, now)
            case _:
                self.messages_ignored += 1

    def _shake_hands(
        self, connection: int, session: SessionMachine, message: wire.AnyMessage, now: int
    ) -> None:
        was_live = session.live
        try:
            answers = session.receive(message)
        except SessionRefused as refused:
            if refused.refusal is not None:
                self._emit(Transmit(connection, refused.refusal))
            self._end_session(connection, refused.text, now)
            return
        if session.live and not was_live:
            self._begin(connection, session, now)
        for answer in answers:
            self._emit(Transmit(connection, answer))
        if session.live and not was_live:
            self._renew(self._by_connection[connection], now)

    def _begin(self, connection: int, session: SessionMachine, now: int) -> None:
        """The session is live: it replaces an older one of the pair."""
        older = self._latest.pop(session.peer_name, None)
        if older is not None:
            if older.connection is not None:
                self._end_session(older.connection, "a newer session of the same target", now)
            if older.peer != session.peer:
                self._forget(older)
        geometry = session.peer_geometry
        assert geometry is not None
        target = self._targets.get(session.peer)
        if target is None:
            agent = self._context.agent_for(session.peer_name)
            target = Target(session.peer, session.peer_name, agent, geometry.layout)
            self._targets[session.peer] = target
            self._emit(Submit(agent, Connect(session.peer, geometry.metadata)))
        self._latest[session.peer_name] = target
        self._by_connection[connection] = target
        target.connection, target.session = connection, session
        target.permit = SourcePermit(nanoseconds(self._context.config.permit_ttl_s))
        target.idle_since = now

    def _forget(self, target: Target) -> None:
        """Let a target go for good, if a newer incarnation took its place and nothing moves."""
        if self._latest.get(target.name) is not target and not target.transfers:
            self._targets.pop(target.peer, None)
            self._scheduler.forget(target.peer)
            self._emit(Submit(target.agent, Disconnect(target.peer)))

    def _end_session(self, connection: int, text: str, now: int) -> None:
        session = self._sessions.pop(connection)
        session.end()
        self._emit(HangUp(connection, text))
        target = self._by_connection.pop(connection, None)
        if target is None:
            return
        target.connection = target.session = target.permit = None
        self._scheduler.permit(target.peer, may_post=False)
        for waiting in list(target.offers.values()):
            self._drop_offer(waiting)
        for transfer in list(target.transfers.values()):
            transfer.drained_asked = False
            error = PeerLost(
                f"send {transfer.request}: target {target.name} is lost: {text}",
                key=transfer.key,
                peer=target.name,
                by="peer",
                code="session-lost",
                retry_safe=True,
            )
            self._end(transfer, OutcomeEvent.FAIL, error, now)

    # ------------------------------------------------------------ permit

    def _renew(self, target: Target, now: int) -> None:
        assert target.permit is not None
        assert target.connection is not None
        self._emit(Transmit(target.connection, target.permit.renew(now)))
        self._context.remind(target.permit.renew_at())

    def _allow(self, target: Target, now: int) -> None:
        may_post = (
            target.connected and target.permit is not None and now < target.permit.posts_until
        )
        self._scheduler.permit(target.peer, may_post=may_post)

    def _wants_permit(self, target: Target, now: int) -> bool:
        busy = bool(target.offers or target.transfers)
        return busy or now < target.idle_since + nanoseconds(PERMIT_LINGER_S)

    def _touch(self, target: Target, now: int) -> None:
        """Something of this target starts: make sure that a permit is there or on its way."""
        target.idle_since = now
        if target.permit is not None and now >= target.permit.renew_at():
            self._renew(target, now)

    # ------------------------------------------------------------ offers

    def _hear_offer(self, target: Target, offer: wire.Offer, now: int) -> None:
        key = offer.key
        refusal = self._refusal(target, offer)
        need: dict[str, Span] = {}
        if refusal is None:
            try:
                need = self._read_need(target, offer)
            except (UsageError, Refused) as error:
                refusal = ("offer", str(error), False)
        if refusal is not None:
            code, text, retry_safe = refusal
            self._refuse(target, key, code, text, retry_safe=retry_safe)
            return
        self._touch(target, now)
        self._supersede(key, now)
        size = 64 + 4 * sum(len(span) for span in need.values())
        expires_at = now + max(0, offer.match_ms) * 1_000_000
        waiting = WaitingOffer(offer, need, target, size, expires_at)
        target.offers[key] = waiting
        target.offers_bytes += size
        self._offers.setdefault(key.request, {})[key] = waiting
        self._context.remind(expires_at)
        transfer = self._sends.get(key.request)
        if transfer is not None and transfer.outcome is Outcome.WAITING:
            self._match(transfer, waiting, now)

    def _refusal(self, target: Target, offer: wire.Offer) -> tuple[str, str, bool] | None:
        """Why an offer can't be served: code, text, whether a retry is safe."""
        key = offer.key
        try:
            key.check()
        except UsageError as error:
            return "offer", str(error), False
        if self._closing:
            return "closing", "the source closes", True
        if offer.initiator != "source":
            return "initiator", f"initiator {offer.initiator!r} is not supported here", False
        grave = self._tombstones.get((key.request, key.branch))
        if grave is not None and key.attempt <= grave.attempt:
            return "ended", f"attempt {grave.attempt} has ended: {grave.reason}", False
        if key in self._offers.get(key.request, {}) or key in target.transfers:
            return "duplicate", "the key was offered before", False
        if any(
            o.branch == key.branch and o.attempt > key.attempt
            for o in self._offers.get(key.request, {})
        ):
            return "superseded", "a higher attempt of this branch waits", False
        config = self._context.config
        if (
            len(target.offers) >= config.offers_waiting_max
            or target.offers_bytes >= OFFERS_WAITING_BYTES_MAX
        ):
            return "busy", f"{len(target.offers)} offers of this target wait already", True
        return None

    def _read_need(self, target: Target, offer: wire.Offer) -> dict[str, Span]:
        """Check what the peer wrote. Raises UsageError, Refused."""
        if not 0 <= offer.min_tokens <= offer.tokens:
            raise UsageError(f"offer of {offer.tokens} tokens, at least {offer.min_tokens}")
        need: dict[str, Span] = {}
        for item in offer.needs:
            if item.group in need:
                raise UsageError(f"group {item.group!r} is in the offer twice")
            self._template(target, item.group)
            span = Span.from_wire(item.runs)
            target.layout.check_slots(item.group, span.slots())
            need[item.group] = span
        return need

    def _template(self, target: Target, group: str) -> Template:
        template = target.templates.get(group)
        if template is None:
            template = make_template(self._context.layout, group, target.layout, group)
            target.templates[group] = template
        return template

    def _supersede(self, key: Key, now: int) -> None:
        """A newer attempt of a branch came: end the older ones."""
        for waiting in list(self._offers.get(key.request, {}).values()):
            older = waiting.offer.key
            if older.branch == key.branch and older.attempt < key.attempt:
                self._drop_offer(waiting)
                text = f"superseded by attempt {key.attempt}"
                self._refuse(waiting.target, older, "superseded", text, retry_safe=False)
        send = self._sends.get(key.request)
        if send is not None and send.key is not None and send.key < key:
            error = Cancelled(
                f"send {key.request}: attempt {send.key.attempt} was superseded by attempt "
                f"{key.attempt}",
                key=send.key,
                by="peer",
                code="superseded",
            )
            self._end(send, OutcomeEvent.CANCEL, error, now)

    def _drop_offer(self, waiting: WaitingOffer) -> None:
        key, target = waiting.offer.key, waiting.target
        del target.offers[key]
        target.offers_bytes -= waiting.size
        same_request = self._offers[key.request]
        del same_request[key]
        if not same_request:
            del self._offers[key.request]

    def _refuse(self, target: Target, key: Key, code: str, text: str, *, retry_safe: bool) -> None:
        """Answer an offer of which nothing was started."""
        if target.connection is not None:
            message = wire.Failed(key, "refused", code, text[:1000], retry_safe, drained=True)
            self._emit(Transmit(target.connection, message))

    def _hear_cancel(self, target: Target, message: wire.Cancel, now: int) -> None:
        key, reason = message.key, message.reason
        transfer = target.transfers.get(key)
        waiting = target.offers.get(key)
        if transfer is None and waiting is not None:
            self._drop_offer(waiting)
        send = transfer or self._sends.get(key.request)
        if send is not None and (send is transfer or send.outcome is Outcome.WAITING):
            error = Cancelled(
                f"send {send.request}: {target.name} cancelled it: {reason}",
                key=key,
                peer=target.name,
                by="peer",
                code="cancelled",
            )
            if transfer is not None:
                transfer.drained_asked = True
            self._end(send, OutcomeEvent.CANCEL, error, now)
        grave = self._tombstones.get((key.request, key.branch))
        if transfer is None and (grave is None or grave.attempt < key.attempt):
            self._bury(key, reason, now, unheard=send is None)
            self._tell(target, wire.Drained(key), key)
        # Under an older tombstone the key was answered before, by Done, Failed or a refusal.

    def _answer_unsettled(self, target: Target, key: Key, now: int) -> None:
        transfer = target.transfers.get(key)
        if transfer is None:
            self._tell(target, wire.Drained(key), key)
            return
        transfer.drained_asked, transfer.drained_told = True, False
        transfer.connection = target.connection
        if not transfer.ended:
            # The target has given it up with its session; a live send would be a contradiction.
            error = PeerLost(f"send {transfer.request}: its session was lost", key=key)
            self._end(transfer, OutcomeEvent.FAIL, error, now)
        self._settle_up(transfer, now)

    def _tell(self, target: Target, message: wire.Message, key: Key) -> None:
        if target.connection is not None:
            self._emit(Transmit(target.connection, message, key=key))

    # ------------------------------------------------------------ matching and moving

    def _match(self, transfer: SourceTransfer, waiting: WaitingOffer, now: int) -> None:
        offer, target, key = waiting.offer, waiting.target, waiting.offer.key
        self._drop_offer(waiting)
        transfer.key = key
        tokens = min(offer.tokens, transfer.tokens)
        need = {
            group: span.restrict(
                0, blocks_for(tokens, self._context.layout.group(group).tokens_per_block)
            )
            for group, span in waiting.need.items()
        }
        error = self._uncovered(transfer, offer, need, tokens, target)
        if error is not None:
            self._refuse(target, key, error.code, str(error), retry_safe=error.retry_safe)
            self._end(transfer, OutcomeEvent.FAIL, error, now)
            return
        pipeline = Pipeline(need, lambda group: self._template(target, group), self._context.bounds)
        target.transfers[key] = transfer
        transfer.connection = target.connection
        deadlines = transfer.deadlines
        stall = min(deadlines.stall, max(1, offer.stall_ms) * 1_000_000)
        transfer.deadlines = type(deadlines)(deadlines.match, stall, deadlines.total)
        free = transfer.start(key, target.peer, pipeline, tokens, now)
        self._context.remind(transfer.deadline())
        self._tell(target, wire.Moving(key, tokens), key)
        self._release(transfer, free, Evidence.NEVER_EXPOSED)
        self._advance(transfer, now)

    def _uncovered(
        self,
        transfer: SourceTransfer,
        offer: wire.Offer,
        need: dict[str, Span],
        tokens: int,
        target: Target,
    ) -> KvferryError | None:
        """Why this send can't serve this offer, None when it can as far as is known."""
        text = ""
        if tokens < offer.min_tokens:
            text = f"{transfer.tokens} tokens are sent, at least {offer.min_tokens} are needed"
        elif transfer.sealed:
            for group, span in need.items():
                lacking = missing(span, transfer.pushed.get(group, _NOTHING))
                if len(lacking):
                    text = f"group {group!r}: {lacking!r} is needed and was not pushed"
                    break
        if not text:
            return None
        return Refused(
            f"send {transfer.request} to {target.name}: {text}",
            key=offer.key,
            peer=target.name,
            by="caller",
            code="coverage",
        )

    def _advance(self, transfer: SourceTransfer, now: int) -> None:
        """A transfer may have something to hand over, or be complete."""
        if transfer.ended or transfer.pipeline is None:
            return
        if transfer.pipeline.has_work:
            self._scheduler.ready(transfer.number, transfer.peer)
        elif transfer.complete:
            self._complete(transfer, now)

    def _complete(self, transfer: SourceTransfer, now: int) -> None:
        assert transfer.pipeline is not None
        assert transfer.key is not None
        target = self._targets[transfer.peer]
        lacking = transfer.pipeline.missing()
        if lacking:
            group, ordinals = next(iter(lacking.items()))
            error = Failed(
                f"send {transfer.request} to {target.name}: group {group!r}: {len(ordinals)} "
                f"needed blocks were never pushed, the first is ordinal {int(ordinals[0])}",
                key=transfer.key,
                peer=target.name,
                by="caller",
                code="coverage",
            )
            self._end(transfer, OutcomeEvent.FAIL, error, now)
            return
        transfer.end(OutcomeEvent.COMPLETE, now)
        moved = transfer.pipeline.bytes_done
        done = wire.Done(transfer.key, transfer.promised_tokens, moved, transfer.aux)
        transfer.drained_told = True
        self._tell(target, done, transfer.key)
        result = Sent(
            transfer.key,
            transfer.promised_tokens,
            moved,
            transfer.matched_at - transfer.created_at,
            now - transfer.matched_at,
        )
        self._emit(Ended(transfer.number, result, None))
        self._bury(transfer.key, "it is done", now, unheard=False)
        self._settle_up(transfer, now)

    def pump(self, now: int) -> bool:
        """Hand over a bounded number of writes; True when more could be handed over at once.

        At most one slice is planned in a call: planning is what takes time.
        """
        for _ in range(PUMP_WRITES_MAX):
            turn = self._scheduler.pick()
            if turn is None:
                return False
            if self._hand_over(*turn, now):
                break
        return self._scheduler.pick() is not None

    def _hand_over(self, number: int, peer: str, now: int) -> bool:
        """Hand over one write of a transfer; True when a slice had to be planned for it."""
        transfer, target = self._transfers[number], self._targets[peer]
        assert transfer.pipeline is not None
        planning = transfer.pipeline.must_plan
        if target.permit is None or now >= target.permit.posts_until:
            self._scheduler.permit(peer, may_post=False)
            return planning
        try:
            write = transfer.pipeline.head()
        except Exception as error:  # noqa: BLE001  a bug in one plan must not end the others
            self._scheduler.idle(number, peer)
            failure = InternalError(
                f"planning failed: {error!r}\n{transfer.story}", key=transfer.key, peer=target.name
            )
            self._end(transfer, OutcomeEvent.FAIL, failure, now)
            return planning
        if write is None:
            self._scheduler.idle(number, peer)
            return planning
        if not self._scheduler.take(number, peer, write.copies.bytes):
            return planning
        transfer.pipeline.take(next(self._context.numbers))
        self._writes[write.number] = (transfer, write)
        if transfer.lease.state is Lease.GRANTED:
            transfer.lease.handle(LeaseEvent.EXPOSE)
        if not transfer.pipeline.has_work:
            self._scheduler.idle(number, peer)
        flow, copies = write.flow, write.copies
        self._emit(
            Submit(
                target.agent,
                Post(
                    write.number,
                    peer,
                    copies.source,
                    copies.target,
                    copies.lengths,
                    target.permit.posts_until,
                    flow.source_memory,
                    flow.source_device,
                    flow.target_memory,
                    flow.target_device,
                ),
            )
        )
        return planning

    # ------------------------------------------------------------ the worker's word

    def worker_event(self, event: Event, now: int) -> None:
        """What a transport's worker reports."""
        match event:
            case Connected():
                target = self._targets.get(event.peer)
                if target is not None:
                    target.connected = True
                    self._allow(target, now)
            case ConnectFailed():
                target = self._targets.pop(event.peer, None)
                if target is not None and target.connection is not None:
                    refuse = wire.Refuse("metadata", event.text[:1000])
                    self._emit(Transmit(target.connection, refuse))
                    self._end_session(target.connection, event.text, now)
            case Posted() if event.write in self._writes:
                self._writes[event.write][1].follow(WriteEvent.POST)
            case InDoubt() if event.write in self._writes:
                self._doubt(*self._writes[event.write], event.text, now)
            case Settled() if event.write in self._writes:
                self._settled(event, now)
            case _:
                pass

    def _settled(self, event: Settled, now: int) -> None:
        transfer, write = self._writes.pop(event.write)
        pipeline = transfer.pipeline
        assert pipeline is not None
        self._scheduler.settle(transfer.peer, write.copies.bytes)
        transfer.progress_at = now
        if event.result in ("expired", "withdrawn") and not transfer.ended:
            pipeline.requeue(write)
            self._advance(transfer, now)
            return
        outcome = {"done": WriteEvent.COMPLETE, "failed": WriteEvent.FAIL}
        free = pipeline.settle(write, outcome.get(event.result, WriteEvent.DROP))
        self._release(transfer, free, Evidence.SETTLED)
        if transfer.ended:
            self._settle_up(transfer, now)
        elif write.state is Write.FAILED:
            self._fail_write(transfer, event.text, now)
        else:
            self._advance(transfer, now)

    def _doubt(self, transfer: SourceTransfer, write: PlannedWrite, text: str, now: int) -> None:
        write.follow(WriteEvent.DOUBT)
        transfer.story.note(now, f"write {write.number} in doubt: {text}")
        if not transfer.ended:
            self._fail_write(transfer, text, now)
        self._quarantine(transfer, now)

    def _fail_write(self, transfer: SourceTransfer, text: str, now: int) -> None:
        error = Failed(
            f"send {transfer.request}: a write failed: {text}",
            key=transfer.key,
            peer=self._targets[transfer.peer].name,
            by="transport",
            code="write",
            retry_safe=True,
        )
        self._end(transfer, OutcomeEvent.FAIL, error, now)

    def transport_stopped(self, unsettled: tuple[int, ...], text: str, now: int) -> None:
        """An agent is gone: what it had posted stays in doubt for good."""
        for number in unsettled:
            if number in self._writes:
                transfer, write = self._writes[number]
                if write.state is not Write.IN_DOUBT:
                    self._doubt(transfer, write, text, now)

    # ------------------------------------------------------------ ending

    def _end(
        self, transfer: SourceTransfer, event: OutcomeEvent, error: KvferryError, now: int
    ) -> None:
        """End the outcome if it has not ended; drop what can be dropped; say what is true."""
        if not transfer.end(event, now, error):
            self._settle_up(transfer, now)
            return
        self._emit(Ended(transfer.number, None, error))
        self._unlist(transfer)
        self._release(transfer, transfer.give_up(), Evidence.NEVER_EXPOSED)
        target = self._targets.get(transfer.peer)
        if target is not None and transfer.pipeline is not None:
            self._scheduler.idle(transfer.number, transfer.peer)
            for write in transfer.pipeline.open_writes():
                if write.state is Write.HANDED:
                    self._emit(Submit(target.agent, Withdraw(write.number)))
        if transfer.lease.state is Lease.IN_USE and transfer.writes_open:
            transfer.lease.handle(LeaseEvent.END)
            self._quarantine(transfer, now)
        if transfer.key is not None:
            self._bury(transfer.key, str(error)[:200], now, unheard=False)
        if target is not None and transfer.key is not None and not transfer.drained_asked:
            drained = not transfer.writes_open
            transfer.drained_told = drained
            message = wire.Failed(
                transfer.key,
                _TELLS[transfer.outcome],
                error.code,
                str(error)[:1000],
                error.retry_safe,
                drained,
            )
            self._tell(target, message, transfer.key)
        self._settle_up(transfer, now)

    def _quarantine(self, transfer: SourceTransfer, now: int) -> None:
        """A write of an ended transfer is in doubt: only its own settling can end the lease."""
        assert transfer.pipeline is not None
        if transfer.lease.state is Lease.DRAINING and any(
            write.state is Write.IN_DOUBT for write in transfer.pipeline.open_writes()
        ):
            transfer.lease.handle(LeaseEvent.LOSE)
            self._emit(
                Report(
                    logging.WARNING,
                    f"blocks of send {transfer.request} are quarantined: a write to "
                    f"{transfer.peer} is in doubt and may still read them\n{transfer.story}",
                )
            )

    def _settle_up(self, transfer: SourceTransfer, now: int) -> None:
        """An ended transfer: once nothing of it is open, say so and let it go."""
        if transfer.writes_open or transfer.number not in self._transfers:
            return
        target = self._targets.get(transfer.peer)
        if target is not None and transfer.key is not None:
            if not transfer.drained_told and transfer.connection == target.connection:
                self._tell(target, wire.Drained(transfer.key), transfer.key)
            target.transfers.pop(transfer.key, None)
            target.idle_since = now
            self._forget(target)
        transfer.lease.prove()
        transfer.story.note(now, "fenced")
        self._unlist(transfer)
        del self._transfers[transfer.number]
        self._emit(Fenced(transfer.number))

    def _unlist(self, transfer: SourceTransfer) -> None:
        """Stop serving its request by it; a newer send of the request may be listed already."""
        if self._sends.get(transfer.request) is transfer:
            del self._sends[transfer.request]

    def _release(self, transfer: SourceTransfer, slots: Slots, evidence: Evidence) -> None:
        if slots:
            self._emit(Release(transfer.number, slots, evidence))

    def _bury(self, key: Key, reason: str, now: int, *, unheard: bool) -> None:
        place = (key.request, key.branch)
        older = self._tombstones.pop(place, None)
        attempt = key.attempt if older is None else max(older.attempt, key.attempt)
        while len(self._tombstones) >= TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]
        expires_at = now + nanoseconds(TOMBSTONE_S)
        self._tombstones[place] = Tombstone(attempt, reason, expires_at, unheard)

    # ------------------------------------------------------------ time

    def tick(self, now: int) -> None:
        """Do what is due: deadlines, waiting offers, renewals, silent targets, old tombstones."""
        for transfer in list(self._sends.values()):
            expired = transfer.expires(now)
            if expired is not None:
                error = TimedOut(
                    f"send {transfer.request}: its {expired} deadline passed while "
                    f"{transfer.outcome}",
                    key=transfer.key,
                    by="deadline",
                    code=expired,
                    retry_safe=True,
                )
                self._end(transfer, OutcomeEvent.EXPIRE, error, now)
        for target in list(self._by_connection.values()):
            for waiting in [w for w in target.offers.values() if now >= w.expires_at]:
                self._drop_offer(waiting)
                text = "no send came for it in time"
                self._refuse(target, waiting.offer.key, "match", text, retry_safe=True)
            self._tick_permit(target, now)
        while self._tombstones:
            place, grave = next(iter(self._tombstones.items()))
            if grave.expires_at > now:
                break
            del self._tombstones[place]

    def _tick_permit(self, target: Target, now: int) -> None:
        permit, connection = target.permit, target.connection
        assert permit is not None
        assert connection is not None
        silent_since = permit.silent_since()
        if silent_since is not None and now >= silent_since + self._silence_ns:
            self._end_session(connection, "it went silent: renewals are not answered", now)
            return
        self._allow(target, now)
        if now >= permit.renew_at() and self._wants_permit(target, now):
            self._renew(target, now)

    @property
    def _silence_ns(self) -> int:
        return nanoseconds(self._context.config.permit_ttl_s)

    def reminders(self, now: int) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for transfer in self._sends.values():
            if not transfer.ended:
                yield transfer.deadline()
        for target in self._by_connection.values():
            assert target.permit is not None
            for waiting in target.offers.values():
                yield waiting.expires_at
            silent_since = target.permit.silent_since()
            if silent_since is not None:
                yield silent_since + self._silence_ns
            if self._wants_permit(target, now):
                yield target.permit.renew_at()

    # ------------------------------------------------------------ ending and looking

    def close(self, now: int) -> None:
        """Cancel every send, refuse new offers, say goodbye."""
        self._closing = True
        for number in list(self._transfers):
            self.cancel(number, "the engine closes", now)
        for target in list(self._by_connection.values()):
            for waiting in list(target.offers.values()):
                self._drop_offer(waiting)
                self._refuse(
                    target, waiting.offer.key, "closing", "the source closes", retry_safe=True
                )
            if target.connection is not None:
                self._emit(Transmit(target.connection, wire.Goodbye("the engine closes")))

    @property
    def writes_open(self) -> int:
        """Writes that were handed over and did not settle."""
        return len(self._writes)

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        self._scheduler.check_integrity()
        open_writes = sum(t.writes_open for t in self._transfers.values())
        assert open_writes == len(self._writes), f"{open_writes} writes open, {len(self._writes)}"
        for transfer in self._transfers.values():
            assert not transfer.lease.fenced, f"{transfer.story} is fenced and still in a table"
            assert not transfer.ended or transfer.writes_open, f"{transfer.story} should be gone"
            if transfer.pipeline is not None:
                transfer.pipeline.check_integrity()
        for request, transfer in self._sends.items():
            assert not transfer.ended, f"send {request} has ended and still is in the table"
        for target in self._targets.values():
            assert target.offers_bytes >= 0
            assert bool(target.offers) or target.offers_bytes == 0


_NOTHING = Span.from_runs(())
