"""The source's side: pairs offers with sends, and answers for every key that it was told of.

Pure. Two rules: an offer that can't be served is answered at once, with nothing started, and
what a target wrote is checked here before anything else sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import wire
from .errors import Busy, Cancelled, Failed, KvferryError, PeerLost, Refused, TimedOut, UsageError
from .keys import Key
from .lease import Evidence
from .limits import AUX_BYTES_MAX, PRIORITY_MAX, REASON_CHARS_MAX
from .mover import Mover
from .offers import Tombstones, WaitingOffer, WaitingOffers, read_need
from .pipeline import Pipeline
from .ports import Connected, ConnectFailed, InDoubt, Posted, Settled
from .scheduler import Bounds, Scheduler
from .source_sessions import SourceSessions, Target
from .spans import Span, blocks_for, shortfall
from .transfer import SourceTransfer
from .transitions import Outcome, OutcomeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .context import Context
    from .ports import Event
    from .transfer import Deadlines


class SourceSide:
    """Every send of this engine, and every offer that it heard of."""

    def __init__(self, context: Context) -> None:
        config = context.config
        self._context = context
        scheduler = Scheduler(Bounds(config.peer_posted_bytes_max, config.peer_posted_writes_max))
        self.sessions = SourceSessions(context, scheduler, self._lose)
        self.mover = Mover(context, scheduler, self.sessions, self._on_ended)
        self._sends: dict[str, SourceTransfer] = {}  # by request, until the outcome ends
        self._offers = WaitingOffers(config.offers_waiting_max)
        self._ended = Tombstones()
        self._closing = False
        self.messages_ignored = 0

    # ------------------------------------------------------------ what callers ask for

    def send(self, request: str, tokens: int, deadlines: Deadlines, now: int) -> SourceTransfer:
        """Start a send. Raises Busy, UsageError; nothing was changed then."""
        if request in self._sends:
            raise UsageError(f"request {request!r} is already being sent")
        sends_max = self._context.config.sends_max
        if len(self.mover) >= sends_max:
            raise Busy(
                f"{len(self.mover)} sends exist, config.sends_max is {sends_max}",
                retry_after_s=1.0,
            )
        number = next(self._context.numbers)
        transfer = SourceTransfer(number, request, tokens, deadlines, now)
        self._sends[request] = transfer
        self.mover.add(transfer)
        self._context.remind(transfer.deadline())
        waiting = self._offers.of_request(request)
        cancelled = self._ended.hear(request)
        if waiting:
            self._match(transfer, max(waiting, key=lambda w: w.offer.key.attempt), now)
        elif cancelled is not None:
            text = f"its target cancelled it before it came: {cancelled.reason}"
            self._cancel(transfer, text, now, by_peer="the target")
        return transfer

    def push(self, number: int, chunk: Mapping[str, Span], now: int) -> bool:
        """Take ready blocks, checked against the layout; False when the outcome has ended.

        The blocks stay the caller's then. Raises UsageError for ordinals that were pushed before
        and for a push after `finish`.
        """
        transfer = self.mover.get(number)
        if transfer is None or transfer.ended:
            return False
        if transfer.sealed:
            raise UsageError(f"send {transfer.request}: push after finish", key=transfer.key)
        for group, span in chunk.items():
            again, _, _ = span.intersect(transfer.pushed.get(group, _NOTHING))
            if len(again):
                raise UsageError(
                    f"send {transfer.request}: group {group!r}: ordinals {again[:4].tolist()} "
                    "were pushed before",
                    key=transfer.key,
                )
        self.mover.release(transfer, transfer.push(chunk, now), Evidence.NEVER_EXPOSED)
        self.mover.advance(transfer, now)
        return True

    def finish(self, number: int, aux: bytes, now: int) -> None:
        """Every block was pushed: seal. Raises UsageError for a second finish or too much aux."""
        if len(aux) > AUX_BYTES_MAX:
            raise UsageError(f"aux has {len(aux)} bytes, the bound is {AUX_BYTES_MAX}")
        transfer = self.mover.get(number)
        if transfer is None or transfer.ended:
            return
        if transfer.sealed:
            raise UsageError(f"send {transfer.request}: finished twice", key=transfer.key)
        transfer.seal(aux, now)
        self.mover.advance(transfer, now)

    def cancel(self, number: int, reason: str, now: int) -> None:
        """End a send, in any state. Idempotent."""
        transfer = self.mover.get(number)
        if transfer is not None:
            self._cancel(transfer, reason, now)

    def _cancel(
        self, transfer: SourceTransfer, reason: str, now: int, *, by_peer: str = ""
    ) -> None:
        who = f"{by_peer} cancelled it" if by_peer else "it was cancelled"
        error = Cancelled(
            f"send {transfer.request}: {who}: {reason}",
            key=transfer.key,
            peer=transfer.target.name if transfer.target is not None else "",
            by="peer" if by_peer else "caller",
            code="cancelled",
        )
        self.mover.end(transfer, OutcomeEvent.CANCEL, error, now)

    def _on_ended(self, transfer: SourceTransfer, reason: str, now: int) -> None:
        """The mover's word that an outcome has ended."""
        del self._sends[transfer.request]
        if transfer.key is not None:
            self._ended.bury(transfer.key, reason[:200], now)

    # ------------------------------------------------------------ messages and events

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> None:
        """A message came on one of this side's connections."""
        target = self.sessions.received(connection, message, now)
        if target is None:
            return
        match message:
            case wire.Offer() if message.key.is_valid:
                self._hear_offer(target, message, now)
            case wire.Cancel() if message.key.is_valid:
                self._hear_cancel(target, message, now)
            case wire.Unsettled():
                keys = [key for key in message.keys if key.is_valid]
                self.messages_ignored += len(message.keys) - len(keys)
                for key in keys:
                    self._answer_unsettled(target, key, now)
            case _:
                self.messages_ignored += 1

    def worker_event(self, event: Event, now: int) -> None:
        """What a transport's worker reports."""
        match event:
            case Connected():
                self.sessions.connected(event.peer, now)
            case ConnectFailed():
                self.sessions.connect_failed(event.peer, event.text, now)
            case Posted():
                self.mover.posted(event)
            case InDoubt():
                self.mover.in_doubt(event, now)
            case Settled():
                self.mover.settled(event, now)
            case _:
                pass

    def _lose(self, target: Target, text: str, now: int) -> None:
        """A target has no session any more: nothing of the pair goes on."""
        for waiting in self._offers.of_target(target):
            self._offers.drop(waiting)
        for transfer in list(target.transfers.values()):
            error = PeerLost(
                f"send {transfer.request}: target {target.name} is lost: {text}",
                key=transfer.key,
                peer=target.name,
                by="peer",
                code="session-lost",
                retry_safe=True,
            )
            self.mover.end(transfer, OutcomeEvent.FAIL, error, now)

    # ------------------------------------------------------------ offers

    def _hear_offer(self, target: Target, offer: wire.Offer, now: int) -> None:
        key = offer.key
        if key in target.transfers or self._holder(key) is target:
            # A copy of what waits or moves: what answers for the key is still to come, and to call
            # the copy refused and drained would free slots that are being written.
            self.messages_ignored += 1
            return
        try:
            self._check_offer(target, offer)
            need = read_need(self._context, target, offer)
        except KvferryError as error:
            self._refuse(target, key, error)
            return
        self.sessions.touch(target, now)
        self._supersede(key, now)
        match_ns = min(max(0, offer.match_ms) * 1_000_000, self._context.deadlines().total)
        expires_at = now + match_ns
        # The spans are kept, not the bytes that they were read from.
        kept = msgspec.structs.replace(offer, needs=[])
        waiting = WaitingOffer(kept, need, target, expires_at)
        self._offers.add(waiting)
        self._context.remind(expires_at)
        transfer = self._sends.get(key.request)
        if transfer is not None and transfer.outcome is Outcome.WAITING:
            self._match(transfer, waiting, now)

    def _check_offer(self, target: Target, offer: wire.Offer) -> None:
        """Raise Refused, Busy or UsageError when an offer can't be served, whatever it needs."""
        key = offer.key
        if self._closing:
            raise _refused("closing", "the source closes", retry_safe=True)
        if offer.initiator != "source":
            raise _refused("initiator", f"initiator {offer.initiator!r} is not supported here")
        grave = self._ended.find(key)
        if grave is not None:
            raise _refused("ended", f"attempt {grave.attempt} has ended: {grave.reason}")
        if self._holder(key) is not None:
            raise _refused("duplicate", "another target has offered this key")
        rivals = [waiting.offer.key for waiting in self._offers.of_request(key.request)]
        send = self._sends.get(key.request)
        if send is not None and send.key is not None:
            rivals.append(send.key)
        for other in rivals:
            if other.branch == key.branch and other.attempt > key.attempt:
                raise _refused("superseded", f"attempt {other.attempt} of it is here already")
        if self._offers.full_for(target):
            raise Busy("too many offers of this target wait already", retry_after_s=1.0)

    def _holder(self, key: Key) -> Target | None:
        """The target that `key` waits or moves for."""
        waiting = self._offers.get(key)
        if waiting is not None:
            return waiting.target
        send = self._sends.get(key.request)
        return send.target if send is not None and send.key == key else None

    def _supersede(self, key: Key, now: int) -> None:
        """A newer attempt of a branch came: end the older ones."""
        for waiting in self._offers.of_request(key.request):
            older = waiting.offer.key
            if older.branch == key.branch and older.attempt < key.attempt:
                self._offers.drop(waiting)
                error = _refused("superseded", f"superseded by attempt {key.attempt}")
                self._refuse(waiting.target, older, error)
        send = self._sends.get(key.request)
        if send is not None and send.key is not None and send.key.branch == key.branch:
            self._cancel(send, f"superseded by attempt {key.attempt}", now, by_peer="its target")

    def _refuse(self, target: Target, key: Key, error: KvferryError) -> None:
        """Answer an offer of which nothing was started."""
        message = wire.Failed(
            key,
            "refused",
            error.code,
            str(error)[:REASON_CHARS_MAX],
            error.retry_safe,
            drained=True,
        )
        self.sessions.tell(target, message, key)

    def _hear_cancel(self, target: Target, message: wire.Cancel, now: int) -> None:
        key, reason = message.key, message.reason
        transfer = target.transfers.get(key)
        if transfer is not None:
            transfer.drained_asked = True
            self._cancel(transfer, reason, now, by_peer=target.name)
            return
        waiting = self._offers.get(key)
        if waiting is not None and waiting.target is target:
            self._offers.drop(waiting)
        elif self._ended.find(key) is not None or waiting is not None:
            return  # the key was answered before: by Done, Failed or a refusal
        send = self._sends.get(key.request)
        if send is not None and send.key == key:
            return  # it moves for another target: here it was refused
        self._ended.bury(key, reason[:200], now, unheard=send is None)
        self.sessions.tell(target, wire.Drained(key), key)
        if send is not None and send.outcome is Outcome.WAITING:
            self._cancel(send, reason, now, by_peer=target.name)

    def _answer_unsettled(self, target: Target, key: Key, now: int) -> None:
        """A target that lost its session asks whether anything of `key` still moves."""
        transfer = target.transfers.get(key)
        if transfer is None:
            clean = self.sessions.is_clean(target, key)
            self.sessions.tell(target, wire.Drained(key, clean), key)
            return
        transfer.drained_asked, transfer.drained_told = True, False
        transfer.connection = target.connection
        self._cancel(transfer, "it was given up with its session", now, by_peer=target.name)
        self.mover.settle_up(transfer, now)

    # ------------------------------------------------------------ matching

    def _match(self, transfer: SourceTransfer, waiting: WaitingOffer, now: int) -> None:
        offer, target, ours = waiting.offer, waiting.target, self._context.layout
        self._offers.drop(waiting)
        tokens = min(offer.tokens, transfer.tokens)
        need = {
            group: span.restrict(0, blocks_for(tokens, target.template(ours, group).target_tokens))
            for group, span in waiting.need.items()
        }
        error = self._uncovered(transfer, offer, need, tokens, target)
        if error is not None:
            self._refuse(target, offer.key, error)
            self._ended.bury(offer.key, str(error)[:200], now)
            self.mover.end(transfer, OutcomeEvent.FAIL, error, now)
            return
        pipeline = Pipeline(
            need,
            tokens,
            lambda group: target.template(ours, group),
            self._context.bounds,
        )
        transfer.priority = max(-PRIORITY_MAX, min(offer.priority, PRIORITY_MAX))
        stall_ns = max(1, offer.stall_ms) * 1_000_000
        free = transfer.start(offer.key, target, pipeline, tokens, stall_ns, now)
        self._context.remind(transfer.deadline())
        self.sessions.tell(target, wire.Moving(offer.key, tokens), offer.key)
        self.mover.release(transfer, free, Evidence.NEVER_EXPOSED)
        self.mover.advance(transfer, now)

    def _misplaced_state(
        self, transfer: SourceTransfer, need: dict[str, Span], tokens: int, target: Target
    ) -> str:
        """Why a state can't be taken: it is that of all tokens sent, and of no fewer."""
        for group, span in need.items():
            is_state = target.layout.group(group).kind == "state"
            if is_state and not span.is_empty and tokens != transfer.tokens:
                return (
                    f"group {group!r} is the state after {transfer.tokens} tokens, "
                    f"it is needed after {tokens}"
                )
        return ""

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
        elif point := self._misplaced_state(transfer, need, tokens, target):
            text = point
        elif transfer.sealed:
            for group, span in need.items():
                template = target.template(self._context.layout, group)
                lacking = shortfall(
                    span,
                    template.target_tokens,
                    transfer.pushed.get(group, _NOTHING),
                    template.source_tokens,
                    tokens,
                )
                if lacking.tokens:
                    text = f"group {group!r}: {lacking} needed and not pushed"
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

    # ------------------------------------------------------------ time

    def tick(self, now: int) -> None:
        """Do what is due: deadlines, waiting offers, permits, old tombstones."""
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
                self.mover.end(transfer, OutcomeEvent.EXPIRE, error, now)
        for waiting in [w for w in self._offers.all() if now >= w.expires_at]:
            self._offers.drop(waiting)
            error_match = _refused("match", "no send came for it in time", retry_safe=True)
            self._refuse(waiting.target, waiting.offer.key, error_match)
        self.sessions.tick(now, offered=self._has_offers)
        self._ended.expire(now)

    def reminders(self, now: int) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for transfer in self._sends.values():
            yield transfer.deadline()
        for waiting in self._offers.all():
            yield waiting.expires_at
        yield from self.sessions.reminders(now, offered=self._has_offers)

    def _has_offers(self, target: Target) -> bool:
        return bool(self._offers.of_target(target))

    # ------------------------------------------------------------ ending and looking

    def close(self, now: int, failure: Failed | None) -> None:
        """End every send, refuse new offers, say goodbye. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for transfer in list(self._sends.values()):
            if failure is None:
                self._cancel(transfer, "the engine closes", now)
            else:
                self.mover.end(transfer, OutcomeEvent.FAIL, failure, now)
        for waiting in list(self._offers.all()):
            self._offers.drop(waiting)
            error = _refused("closing", "the source closes", retry_safe=True)
            self._refuse(waiting.target, waiting.offer.key, error)
        self.sessions.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        self.mover.check_integrity()
        self._offers.check_integrity()
        for request, transfer in self._sends.items():
            assert not transfer.ended, f"send {request} has ended and still is in the table"
            assert self.mover.get(transfer.number) is transfer, f"send {request} is not owned"


_NOTHING = Span.from_runs(())


def _refused(code: str, text: str, *, retry_safe: bool = False) -> Refused:
    return Refused(text, by="peer", code=code, retry_safe=retry_safe)
