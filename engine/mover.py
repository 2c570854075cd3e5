"""Moves matched sends: hands writes to the transport, hears how they end, ends transfers.

Pure. Two rules: a write is handed over only under the peer's permit and for a transfer whose
outcome has not ended, and "drained" is said only when nothing of the key is queued, handed,
posted or in doubt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import wire
from .effects import Ended, Fenced, Release, Report, Sent, Submit
from .errors import Failed, InternalError, KvferryError
from .lease import Evidence
from .limits import PUMP_WRITES_MAX, REASON_CHARS_MAX
from .ports import InDoubt, Post, Posted, Settled, Withdraw
from .transitions import Lease, LeaseEvent, Outcome, OutcomeEvent, Write, WriteEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from .context import Context
    from .lease import Slots
    from .pipeline import PlannedWrite
    from .scheduler import Scheduler
    from .source_sessions import SourceSessions, Target
    from .transfer import SourceTransfer

_TOLD = {
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.TIMED_OUT: "timed out",
}


class Mover:
    """Every send of this engine from its start until it is fenced.

    on_ended: called when an outcome has ended, before its target is told.
    """

    def __init__(
        self,
        context: Context,
        scheduler: Scheduler,
        sessions: SourceSessions,
        on_ended: Callable[[SourceTransfer, str, int], None],
    ) -> None:
        self._context = context
        self._emit = context.emit
        self._scheduler = scheduler
        self._sessions = sessions
        self._on_ended = on_ended
        self._transfers: dict[int, SourceTransfer] = {}
        self._writes: dict[int, tuple[SourceTransfer, PlannedWrite]] = {}

    def __len__(self) -> int:
        """Transfers that are not fenced."""
        return len(self._transfers)

    @property
    def writes_open(self) -> int:
        """Writes that were handed over and did not settle."""
        return len(self._writes)

    def add(self, transfer: SourceTransfer) -> None:
        """Own a new send."""
        self._transfers[transfer.number] = transfer

    def get(self, number: int) -> SourceTransfer | None:
        """The send, None when it is fenced."""
        return self._transfers.get(number)

    def release(self, transfer: SourceTransfer, slots: Slots, evidence: Evidence) -> None:
        """Give source blocks back, if there are any."""
        if slots:
            transfer.returned(slots)
            self._emit(Release(transfer.number, slots, evidence))

    # ------------------------------------------------------------ handing over

    def advance(self, transfer: SourceTransfer, now: int) -> None:
        """A transfer may have something to hand over, or be complete."""
        if transfer.ended or transfer.pipeline is None or transfer.target is None:
            return
        if transfer.pipeline.has_work:
            self._scheduler.ready(transfer.number, transfer.target.peer, transfer.priority)
        elif transfer.complete:
            self._complete(transfer, transfer.target, now)

    def pump(self, now: int) -> bool:
        """Hand over a bounded number of writes; True when more could be handed over at once.

        At most one slice is planned in a call: planning is what takes time.
        """
        for _ in range(PUMP_WRITES_MAX):
            turn = self._scheduler.pick()
            if turn is None:
                return False
            if self._hand_over(self._transfers[turn[0]], now):
                break
        return self._scheduler.pick() is not None

    def _hand_over(self, transfer: SourceTransfer, now: int) -> bool:
        """Hand over one write of a transfer; True when a slice had to be planned for it."""
        target, pipeline = transfer.target, transfer.pipeline
        assert target is not None
        assert pipeline is not None
        if target.permit is None or now >= target.permit.posts_until:
            self._scheduler.permit(target.peer, may_post=False)
            return False
        planning = pipeline.must_plan
        try:
            write = pipeline.head()
        except Exception as error:  # noqa: BLE001  a bug in one plan must not end the others
            text = f"planning failed: {error!r}\n{transfer.story}"
            self.end(transfer, OutcomeEvent.FAIL, self._internal(transfer, text), now)
            return planning
        if write is None:
            self._scheduler.idle(transfer.number, target.peer)
        elif self._scheduler.take(transfer.number, target.peer, write.copies.bytes):
            pipeline.take(next(self._context.numbers))
            self._writes[write.number] = (transfer, write)
            if transfer.lease.state is Lease.GRANTED:
                transfer.lease.handle(LeaseEvent.EXPOSE)
            if not pipeline.has_work:
                self._scheduler.idle(transfer.number, target.peer)
            elif pipeline.must_plan:
                self._scheduler.give_way(transfer.number, target.peer)
            self._emit(Submit(target.agent, _post(write, target.peer, target.permit.posts_until)))
        return planning

    # ------------------------------------------------------------ the worker's word

    def posted(self, event: Posted) -> None:
        """A write is on its way."""
        if event.write in self._writes:
            self._writes[event.write][1].follow(WriteEvent.POST)

    def settled(self, event: Settled, now: int) -> None:
        """Nothing of a write moves any more."""
        if event.write not in self._writes:
            return
        transfer, write = self._writes.pop(event.write)
        assert transfer.pipeline is not None
        assert transfer.target is not None
        self._scheduler.settle(transfer.target.peer, write.copies.bytes)
        if event.result in ("expired", "withdrawn") and not transfer.ended:
            # It was never posted, and it is still wanted: the permit ran out on its way.
            transfer.pipeline.requeue(write)
            self.advance(transfer, now)
            return
        transfer.progress_at = now
        if event.result == "failed":
            transfer.clean = False
            assert transfer.key is not None
            self._sessions.remember_unclean(transfer.target, transfer.key)
        outcomes = {
            "done": WriteEvent.COMPLETE,
            "failed": WriteEvent.FAIL,
            "refused": WriteEvent.FAIL,
        }
        free = transfer.pipeline.settle(write, outcomes.get(event.result, WriteEvent.DROP))
        self.release(transfer, free, Evidence.SETTLED)
        if transfer.ended:
            self.settle_up(transfer, now)
        elif write.state is Write.FAILED:
            self._fail_write(transfer, event.text, now)
        else:
            self.advance(transfer, now)

    def in_doubt(self, event: InDoubt, now: int) -> None:
        """A write failed and may still move."""
        if event.write in self._writes:
            self._doubt(*self._writes[event.write], event.text, now)

    def transport_stopped(
        self, agent: int, unsettled: tuple[int, ...], text: str, now: int
    ) -> None:
        """An agent is gone: what it had posted stays in doubt for good.

        What crossed its end gets no answer and was never posted (see `ports.Stopped`).
        """
        for number, (transfer, write) in list(self._writes.items()):
            assert transfer.target is not None
            if transfer.target.agent != agent:
                continue
            if number not in unsettled:
                self.settled(Settled(number, "withdrawn", text), now)
            elif write.state is not Write.IN_DOUBT:
                self._doubt(transfer, write, text, now)

    def _doubt(self, transfer: SourceTransfer, write: PlannedWrite, text: str, now: int) -> None:
        write.follow(WriteEvent.DOUBT)
        transfer.story.note(now, f"write {write.number} in doubt: {text}")
        if not transfer.ended:
            self._fail_write(transfer, text, now)
        self._quarantine(transfer)

    def _fail_write(self, transfer: SourceTransfer, text: str, now: int) -> None:
        assert transfer.target is not None
        error = Failed(
            f"send {transfer.request} to {transfer.target.name}: a write failed: {text}",
            key=transfer.key,
            peer=transfer.target.name,
            by="transport",
            code="write",
            retry_safe=True,
        )
        self.end(transfer, OutcomeEvent.FAIL, error, now)

    # ------------------------------------------------------------ ending

    def _complete(self, transfer: SourceTransfer, target: Target, now: int) -> None:
        assert transfer.pipeline is not None
        assert transfer.key is not None
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
            self.end(transfer, OutcomeEvent.FAIL, error, now)
            return
        transfer.end(OutcomeEvent.COMPLETE, now)
        self._on_ended(transfer, "it is done", now)
        moved, tokens = transfer.pipeline.bytes_done, transfer.promised_tokens
        done = wire.Done(transfer.key, tokens, moved, transfer.aux)
        self._sessions.tell(target, done, transfer.key)
        transfer.drained_told = True
        waiting_ns = transfer.matched_at - transfer.created_at
        result = Sent(transfer.key, tokens, moved, waiting_ns, now - transfer.matched_at)
        self._emit(Ended(transfer.number, result, None))
        self.settle_up(transfer, now)

    def end(
        self, transfer: SourceTransfer, event: OutcomeEvent, error: KvferryError, now: int
    ) -> None:
        """End the outcome without success; drop what can be dropped; say what is true.

        Does nothing but count when it had ended before.
        """
        if not transfer.end(event, now, error):
            return
        self._emit(Ended(transfer.number, None, error))
        self._on_ended(transfer, str(error), now)
        self.release(transfer, transfer.give_up(), Evidence.NEVER_EXPOSED)
        if transfer.target is not None:
            self._recall(transfer, transfer.target)
            self._tell_failed(transfer, transfer.target, error)
        self.settle_up(transfer, now)

    def _recall(self, transfer: SourceTransfer, target: Target) -> None:
        """Hand nothing more over; take back what the worker has not posted."""
        assert transfer.pipeline is not None
        self._scheduler.idle(transfer.number, target.peer)
        for write in transfer.pipeline.open_writes():
            if write.state is Write.HANDED:
                self._emit(Submit(target.agent, Withdraw(write.number)))
        if transfer.writes_open:
            transfer.lease.handle(LeaseEvent.END)
            self._quarantine(transfer)

    def _tell_failed(self, transfer: SourceTransfer, target: Target, error: KvferryError) -> None:
        """Tell the target, unless it asked for the ending: then only `Drained` answers it."""
        assert transfer.key is not None
        if transfer.drained_asked:
            return
        drained = not transfer.writes_open
        message = wire.Failed(
            transfer.key,
            _TOLD[transfer.outcome],
            error.code,
            str(error)[:REASON_CHARS_MAX],
            error.retry_safe,
            drained,
            clean=transfer.clean or not drained,
        )
        self._sessions.tell(target, message, transfer.key)
        transfer.drained_told = drained

    def _quarantine(self, transfer: SourceTransfer) -> None:
        """A write of an ended transfer is in doubt: only its own settling can end the lease."""
        assert transfer.pipeline is not None
        assert transfer.target is not None
        if transfer.lease.state is Lease.DRAINING and any(
            write.state is Write.IN_DOUBT for write in transfer.pipeline.open_writes()
        ):
            transfer.lease.handle(LeaseEvent.LOSE)
            self._emit(
                Report(
                    logging.WARNING,
                    f"blocks of send {transfer.request} are quarantined: a write to "
                    f"{transfer.target.peer} is in doubt and may still read them\n"
                    f"{transfer.story}",
                )
            )

    def settle_up(self, transfer: SourceTransfer, now: int) -> None:
        """An ended transfer: once nothing of it is open, say so and let it go. Idempotent."""
        if transfer.writes_open or transfer.number not in self._transfers:
            return
        target, key = transfer.target, transfer.key
        if target is not None and key is not None:
            if not transfer.drained_told and transfer.connection == target.connection:
                self._sessions.tell(target, wire.Drained(key, transfer.clean), key)
            self._scheduler.drop(transfer.number, target.peer)
            del target.transfers[key]
            target.idle_since = now
            self._sessions.forget(target)
        transfer.lease.prove()
        transfer.story.note(now, "fenced")
        del self._transfers[transfer.number]
        self._emit(Fenced(transfer.number))

    def _internal(self, transfer: SourceTransfer, text: str) -> InternalError:
        return InternalError(f"send {transfer.request}: {text}", key=transfer.key)

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        self._scheduler.check_integrity()
        opened = sum(transfer.writes_open for transfer in self._transfers.values())
        assert opened == len(self._writes), f"{opened} writes open, {len(self._writes)} in table"
        known = len(self._scheduler)
        assert known <= len(self._transfers), f"{known} scheduled, {len(self._transfers)} exist"
        for transfer in self._transfers.values():
            assert not transfer.lease.fenced, f"fenced and still in the table: {transfer.story}"
            assert not transfer.ended or transfer.writes_open, f"should be gone: {transfer.story}"
            if transfer.pipeline is not None:
                transfer.pipeline.check_integrity()


def _post(write: PlannedWrite, peer: str, not_after: int) -> Post:
    flow, copies = write.flow, write.copies
    return Post(
        write.number,
        peer,
        copies.source,
        copies.target,
        copies.lengths,
        not_after,
        flow.source_memory,
        flow.source_device,
        flow.target_memory,
        flow.target_device,
    )
