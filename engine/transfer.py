"""The two transfer machines: one transfer as its target, and as its source, sees it.

Pure. Each holds the outcome (what the caller is told) beside the lease (whether the memory is
safe) and decides what an event means for both; messages and connections are the business of
`target` and `source`. Two rules: the first ending of an outcome wins and later ones are counted,
and no event that ends an outcome ends a lease without evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .errors import UsageError
from .lease import LeaseMachine
from .spans import Span
from .story import Story
from .transitions import OUTCOME, OUTCOMES_ENDED, Lease, LeaseEvent, Outcome, OutcomeEvent, follow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .errors import KvferryError
    from .keys import Key
    from .lease import Slots
    from .pipeline import Pipeline
    from .source_sessions import Target


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a transfer may take, in ns: to be matched, without progress, altogether."""

    match: int
    stall: int
    total: int


class _Transfer:
    """What both sides of a transfer share: an outcome that ends once, a lease, a story."""

    def __init__(self, number: int, title: str, deadlines: Deadlines, now: int) -> None:
        self.number = number
        self.outcome = Outcome.WAITING
        self.deadlines = deadlines
        self.story = Story(title)
        self.error: KvferryError | None = None
        self.late = 0
        self.created_at = now
        self.matched_at = now
        self.progress_at = now
        self.story.note(now, "created")

    @property
    def ended(self) -> bool:
        """True once the caller was told."""
        return self.outcome in OUTCOMES_ENDED

    def match(self, now: int) -> None:
        """Both sides are known to each other. Raises IllegalTransition unless waiting."""
        self.outcome = follow(OUTCOME, self.outcome, OutcomeEvent.MATCH)
        self.matched_at = self.progress_at = now
        self.story.note(now, "matched")

    def end(self, event: OutcomeEvent, now: int, error: KvferryError | None = None) -> bool:
        """End the outcome; False, and only counted, when it had ended before."""
        if self.ended:
            self.late += 1
            self.story.note(now, f"late: {event}")
            return False
        self.outcome = follow(OUTCOME, self.outcome, event)
        self.error = error
        self.story.note(now, f"{self.outcome}{f': {error}' if error else ''}")
        return True

    def expires(self, now: int) -> str | None:
        """Which of the deadlines has passed, None when none has."""
        if self.ended:
            return None
        if now >= self.created_at + self.deadlines.total:
            return "total"
        if self.outcome is Outcome.WAITING and now >= self.created_at + self.deadlines.match:
            return "match"
        if self.outcome is Outcome.MOVING and now >= self.progress_at + self.deadlines.stall:
            return "stall"
        return None

    def deadline(self) -> int:
        """When to look at `expires` again."""
        inner = (
            self.created_at + self.deadlines.match
            if self.outcome is Outcome.WAITING
            else self.progress_at + self.deadlines.stall
        )
        return min(inner, self.created_at + self.deadlines.total)


class TargetTransfer(_Transfer):
    """A transfer as its target sees it: slots lent out until there is evidence.

    need: {group: span of this side's slots}.
    bytes_needed: what the target itself computed that must move for `tokens`.
    """

    def __init__(
        self,
        number: int,
        key: Key,
        need: Mapping[str, Span],
        tokens: int,
        min_tokens: int,
        deadlines: Deadlines,
        priority: int,
        now: int,
    ) -> None:
        super().__init__(number, f"receive {key}", deadlines, now)
        self.key = key
        self.need = need
        self.tokens = tokens
        self.min_tokens = min_tokens
        self.priority = priority
        self.lease = LeaseMachine({group: span.slots() for group, span in need.items()})
        self.exposed_to = ""
        self.unclean = False  # the source has said all it can, and it is no evidence
        self.promised_tokens = 0

    def expires(self, now: int) -> str | None:
        """As its base, but a stall is the source's to see: it alone knows what settles."""
        expired = super().expires(now)
        return None if expired == "stall" else expired

    def deadline(self) -> int:
        """As its base, without the stall."""
        total = self.created_at + self.deadlines.total
        if self.outcome is Outcome.WAITING:
            return min(total, self.created_at + self.deadlines.match)
        return total

    def expose(self, incarnation: str, now: int) -> bool:
        """The offer's first byte is about to leave; False when it must not any more."""
        if self.lease.state is not Lease.GRANTED or self.ended:
            return False
        self.lease.handle(LeaseEvent.EXPOSE)
        self.exposed_to = incarnation
        self.story.note(now, f"offered to {incarnation}")
        return True

    def lose(self, now: int) -> bool:
        """The session that evidence would come from is gone; True when slots are out now."""
        if self.lease.state is Lease.IN_USE:
            self.lease.handle(LeaseEvent.END)
        if self.lease.state is not Lease.DRAINING:
            return False
        self.lease.handle(LeaseEvent.LOSE)
        self.story.note(now, "quarantined: no evidence for now")
        return True

    @property
    def owed(self) -> bool:
        """True while the source's word can still be evidence for the slots."""
        return self.lent and not self.unclean

    @property
    def lent(self) -> bool:
        """True while the source may still touch the slots, as far as is known."""
        return self.lease.state in (Lease.IN_USE, Lease.DRAINING, Lease.QUARANTINED)


class SourceTransfer(_Transfer):
    """A transfer as its source sees it: one send, and the offer that it serves.

    tokens: what this side promises to bring, fixed from the start.
    """

    def __init__(
        self, number: int, request: str, tokens: int, deadlines: Deadlines, now: int
    ) -> None:
        super().__init__(number, f"send {request}", deadlines, now)
        self.request = request
        self.tokens = tokens
        self.pushed: dict[str, Span] = {}  # which ordinals; slots are their numbers
        self._out: Slots = {}  # pushed and not returned
        self.waiting_chunks: list[Mapping[str, Span]] = []
        self.sealed = False
        self.aux = b""
        self.lease = LeaseMachine()
        self.key: Key | None = None
        self.target: Target | None = None
        self.pipeline: Pipeline | None = None
        self.priority = 0
        self.promised_tokens = 0
        self.connection: int | None = None  # the session that its answers belong to
        self.clean = True  # none of its posted writes ended by an error
        self.drained_told = False
        self.drained_asked = False

    @property
    def writes_open(self) -> int:
        """Writes that the I/O thread has, or had without an end that is known."""
        return self.pipeline.writes_open if self.pipeline is not None else 0

    def push(self, chunk: Mapping[str, Span], now: int) -> Slots:
        """Take a chunk of ready blocks; return those that are free at once.

        Raises UsageError for ordinals that were pushed before and for slots that are not back yet:
        a cache whose window passes on uses a slot again. Nothing was taken then.
        """
        pushed, out = {}, {}
        for group, span in chunk.items():
            held = self._out.get(group, _NONE)
            again = np.intersect1d(span.slots(), held)
            if again.size:
                raise UsageError(
                    f"send {self.request}: group {group!r}: slot {int(again[0])} was pushed "
                    "before, and is not released yet",
                    key=self.key,
                )
            out[group] = np.concatenate((held, span.slots()))
            pushed[group] = self.pushed.get(group, Span()).union(span.numbered())
        self.pushed.update(pushed)
        self._out.update(out)
        self.progress_at = now
        if self.pipeline is not None:
            return self.pipeline.add(chunk)
        self.waiting_chunks.append(chunk)
        return {}

    def returned(self, slots: Slots) -> None:
        """These blocks are the caller's again."""
        for group, back in slots.items():
            self._out[group] = np.setdiff1d(self._out[group], back)

    def start(
        self,
        key: Key,
        target: Target,
        pipeline: Pipeline,
        tokens: int,
        stall_ns: int,
        now: int,
    ) -> Slots:
        """Serve `key` of `target`; return the already pushed blocks that it does not need."""
        self.match(now)
        self.key, self.target, self.pipeline = key, target, pipeline
        self.promised_tokens = tokens
        self.connection = target.connection
        self.deadlines = replace(self.deadlines, stall=min(self.deadlines.stall, stall_ns))
        target.transfers[key] = self
        free: Slots = {}
        for chunk in self.waiting_chunks:
            free = merged(free, pipeline.add(chunk))
        self.waiting_chunks = []
        return free

    def seal(self, aux: bytes, now: int) -> None:
        """Every block was pushed."""
        self.sealed, self.aux, self.progress_at = True, aux, now
        self.story.note(now, "sealed")

    def give_up(self) -> Slots:
        """The outcome ended: drop what was not handed over; return the blocks free at once."""
        if self.pipeline is not None:
            return self.pipeline.drop()
        free: Slots = {}
        for chunk in self.waiting_chunks:
            free = merged(free, {group: span.slots() for group, span in chunk.items()})
        self.waiting_chunks = []
        return free

    @property
    def complete(self) -> bool:
        """Sealed, and nothing is left to hand over or to settle."""
        return (
            self.sealed
            and self.pipeline is not None
            and not self.pipeline.has_work
            and not self.pipeline.writes_open
        )


def merged(first: Slots, second: Slots) -> Slots:
    """Both sets of slots as one, group by group."""
    if not first:
        return second
    out = dict(first)
    for group, slots in second.items():
        out[group] = np.concatenate([out[group], slots]) if group in out else slots
    return out


_NONE = np.zeros(0, dtype=np.int64)
