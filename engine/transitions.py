"""The state tables of outcome, lease, session and write. Every change of state happens here.

Theory of operation
-------------------
A transfer has two lives that end at different moments. Its *outcome* is what the caller is
told; its *lease* is whether the memory is safe. A cancelled request has its outcome at once,
while a write that was posted a moment earlier may still be landing; so the outcome says
"cancelled", the lease says "draining", and the slots come back when there is evidence. Engines
that kept one state for both have freed memory that was still being written.

    outcome   waiting -> moving -> done | failed | cancelled | timed out
              One per side. The first ending wins; what comes later is counted, not applied,
              and therefore not a row here.
    lease     granted -> in use -> draining -> fenced
                                       |    -> quarantined -> fenced
              One per side. The target's permits writing into its slots, the source's permits
              reading from its blocks. Only evidence leads to fenced. Quarantined means that
              the means of getting evidence are lost for now, and leaves when it comes late.
    session   opening -> proving -> greeting -> live -> closing -> ended
              One per connection. Nothing is told before proving is over.
    write     queued -> handed -> posted -> done | failed
                 |         |         '-> in doubt -> done | failed
                 '---------'-> dropped
              Handed means that the I/O thread has it: from there only its answer counts.

Two rules: no other module assigns a state, and a pair of state and event that is not in its
table raises and changes nothing. `transitions.py` knows no roles, no peers and no messages.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from .errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Outcome(StrEnum):
    """What the caller is told."""

    WAITING = "waiting"
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


class OutcomeEvent(StrEnum):
    """What happens to an outcome."""

    MATCH = "match"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"


OUTCOMES_ENDED = frozenset(
    {Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED, Outcome.TIMED_OUT},
)

OUTCOME: Mapping[tuple[Outcome, OutcomeEvent], Outcome] = {
    (Outcome.WAITING, OutcomeEvent.MATCH): Outcome.MOVING,
    (Outcome.WAITING, OutcomeEvent.FAIL): Outcome.FAILED,
    (Outcome.WAITING, OutcomeEvent.CANCEL): Outcome.CANCELLED,
    (Outcome.WAITING, OutcomeEvent.EXPIRE): Outcome.TIMED_OUT,
    (Outcome.MOVING, OutcomeEvent.COMPLETE): Outcome.DONE,
    (Outcome.MOVING, OutcomeEvent.FAIL): Outcome.FAILED,
    (Outcome.MOVING, OutcomeEvent.CANCEL): Outcome.CANCELLED,
    (Outcome.MOVING, OutcomeEvent.EXPIRE): Outcome.TIMED_OUT,
}


class Lease(StrEnum):
    """Whether memory may be touched by the other side."""

    GRANTED = "granted"
    IN_USE = "in use"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    FENCED = "fenced"


class LeaseEvent(StrEnum):
    """What happens to a lease."""

    EXPOSE = "expose"
    END = "end"
    LOSE = "lose"
    PROVE = "prove"


LEASE: Mapping[tuple[Lease, LeaseEvent], Lease] = {
    (Lease.GRANTED, LeaseEvent.EXPOSE): Lease.IN_USE,
    (Lease.GRANTED, LeaseEvent.PROVE): Lease.FENCED,
    (Lease.IN_USE, LeaseEvent.END): Lease.DRAINING,
    (Lease.IN_USE, LeaseEvent.PROVE): Lease.FENCED,
    (Lease.DRAINING, LeaseEvent.LOSE): Lease.QUARANTINED,
    (Lease.DRAINING, LeaseEvent.PROVE): Lease.FENCED,
    (Lease.QUARANTINED, LeaseEvent.PROVE): Lease.FENCED,
}


class Session(StrEnum):
    """How far one connection has come."""

    OPENING = "opening"
    PROVING = "proving"
    GREETING = "greeting"
    LIVE = "live"
    CLOSING = "closing"
    ENDED = "ended"


class SessionEvent(StrEnum):
    """What happens to a session."""

    HELLO = "hello"
    PROVE = "prove"
    GREET = "greet"
    GOODBYE = "goodbye"
    END = "end"


SESSION: Mapping[tuple[Session, SessionEvent], Session] = {
    (Session.OPENING, SessionEvent.HELLO): Session.PROVING,
    (Session.OPENING, SessionEvent.END): Session.ENDED,
    (Session.PROVING, SessionEvent.PROVE): Session.GREETING,
    (Session.PROVING, SessionEvent.END): Session.ENDED,
    (Session.GREETING, SessionEvent.GREET): Session.LIVE,
    (Session.GREETING, SessionEvent.END): Session.ENDED,
    (Session.LIVE, SessionEvent.GOODBYE): Session.CLOSING,
    (Session.LIVE, SessionEvent.END): Session.ENDED,
    (Session.CLOSING, SessionEvent.END): Session.ENDED,
}


class Write(StrEnum):
    """Where one write is."""

    QUEUED = "queued"
    HANDED = "handed"
    POSTED = "posted"
    IN_DOUBT = "in doubt"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class WriteEvent(StrEnum):
    """What happens to a write."""

    HAND = "hand"
    POST = "post"
    COMPLETE = "complete"
    FAIL = "fail"
    DOUBT = "doubt"
    DROP = "drop"


WRITES_SETTLED = frozenset({Write.DONE, Write.FAILED, Write.DROPPED})

WRITE: Mapping[tuple[Write, WriteEvent], Write] = {
    (Write.QUEUED, WriteEvent.HAND): Write.HANDED,
    (Write.QUEUED, WriteEvent.DROP): Write.DROPPED,
    (Write.HANDED, WriteEvent.POST): Write.POSTED,
    (Write.HANDED, WriteEvent.COMPLETE): Write.DONE,
    (Write.HANDED, WriteEvent.FAIL): Write.FAILED,
    (Write.HANDED, WriteEvent.DROP): Write.DROPPED,
    (Write.POSTED, WriteEvent.COMPLETE): Write.DONE,
    (Write.POSTED, WriteEvent.FAIL): Write.FAILED,
    (Write.POSTED, WriteEvent.DOUBT): Write.IN_DOUBT,
    (Write.IN_DOUBT, WriteEvent.COMPLETE): Write.DONE,
    (Write.IN_DOUBT, WriteEvent.FAIL): Write.FAILED,
}

State = TypeVar("State", bound=StrEnum)
StateEvent = TypeVar("StateEvent", bound=StrEnum)


class IllegalTransition(InternalError):
    """An event came that its state does not allow: a bug. The state is unchanged."""


def follow(
    table: Mapping[tuple[State, StateEvent], State], state: State, event: StateEvent
) -> State:
    """The state after `event`. Raises IllegalTransition when the table has no such row."""
    try:
        return table[state, event]
    except KeyError:
        kind = type(state).__name__.lower()
        raise IllegalTransition(f"{kind} is {state}: {event!s} is not possible") from None
