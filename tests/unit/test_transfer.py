"""The transfer machines: the first ending wins, and no ending ends a lease."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvferry.engine.errors import Cancelled, Failed, UsageError
from kvferry.engine.keys import Key
from kvferry.engine.pipeline import Pipeline
from kvferry.engine.source_sessions import Target
from kvferry.engine.spans import Span
from kvferry.engine.transfer import Deadlines, SourceTransfer, TargetTransfer, merged
from kvferry.engine.transitions import IllegalTransition, Lease, LeaseEvent, Outcome, OutcomeEvent
from tests.unit.test_pipeline import BOUNDS, TEMPLATES

DEADLINES = Deadlines(match=100, stall=50, total=1000)
ENDINGS = [OutcomeEvent.COMPLETE, OutcomeEvent.FAIL, OutcomeEvent.CANCEL, OutcomeEvent.EXPIRE]


def receive(now: int = 0) -> TargetTransfer:
    need = {"full": Span.from_slots([4, 5])}
    return TargetTransfer(1, Key("r"), need, 8, 8, DEADLINES, 0, now)


def send(now: int = 0) -> SourceTransfer:
    return SourceTransfer(2, "r", 8, DEADLINES, now)


def matched(now: int = 10, stall: int = 50, **need: Span) -> SourceTransfer:
    transfer = send()
    target = cast("Target", SimpleNamespace(connection=7, transfers={}))
    line = Pipeline(need or {"full": Span.from_slots([4, 5])}, 1000, TEMPLATES.__getitem__, BOUNDS)
    transfer.start(Key("r"), target, line, 8, stall, now)
    assert target.transfers == {Key("r"): transfer}
    return transfer


@pytest.mark.parametrize(("first", "second"), list(permutations(ENDINGS, 2)))
def test_the_first_ending_wins(first: OutcomeEvent, second: OutcomeEvent) -> None:
    transfer = receive()
    transfer.match(1)
    error = Failed("first")
    assert transfer.end(first, 2, error)
    outcome = transfer.outcome
    assert not transfer.end(second, 3, Cancelled("second"))
    assert transfer.outcome is outcome
    assert transfer.error is error
    assert transfer.late == 1
    assert f"late: {second}" in str(transfer.story)


def test_an_end_that_is_not_possible_changes_nothing() -> None:
    transfer = receive()
    with pytest.raises(IllegalTransition):
        transfer.end(OutcomeEvent.COMPLETE, 1)
    assert not transfer.ended
    transfer.match(1)
    with pytest.raises(IllegalTransition):
        transfer.match(2)
    assert transfer.matched_at == 1


@pytest.mark.parametrize("event", ENDINGS)
def test_no_ending_ends_the_lease(event: OutcomeEvent) -> None:
    transfer = receive()
    assert transfer.expose("abc", 1)
    transfer.match(1)
    transfer.end(event, 2)
    assert transfer.lease.state is Lease.IN_USE
    assert transfer.lent
    assert transfer.lease.slots_held == 2


def test_an_offer_leaves_once_and_not_after_the_end() -> None:
    transfer = receive()
    assert not transfer.lent
    assert transfer.expose("abc", 1)
    assert transfer.exposed_to == "abc"
    assert not transfer.expose("def", 2)
    assert transfer.exposed_to == "abc"
    cancelled = receive()
    cancelled.end(OutcomeEvent.CANCEL, 1)
    assert not cancelled.expose("abc", 2)
    assert cancelled.lease.state is Lease.GRANTED


def test_losing_the_session_quarantines_what_is_out() -> None:
    granted = receive()
    assert not granted.lose(1)
    assert granted.lease.state is Lease.GRANTED
    for events in ([], [LeaseEvent.END]):
        transfer = receive()
        transfer.expose("abc", 1)
        for event in events:
            transfer.lease.handle(event)
        assert transfer.lose(2)
        assert not transfer.lose(3)
        assert transfer.lease.state is Lease.QUARANTINED


def test_deadlines_of_a_source() -> None:
    transfer = send(now=1000)
    assert transfer.deadline() == 1100
    assert transfer.expires(1099) is None
    assert transfer.expires(1100) == "match"
    transfer.match(1050)
    assert transfer.deadline() == 1100
    assert transfer.expires(1100) == "stall"
    transfer.progress_at = 1980
    assert transfer.deadline() == 2000
    assert transfer.expires(1999) is None
    assert transfer.expires(2000) == "total"
    transfer.end(OutcomeEvent.CANCEL, 1990)
    assert transfer.expires(5000) is None


def test_a_stall_is_the_sources_to_see() -> None:
    transfer = receive(now=1000)
    assert transfer.deadline() == 1100
    assert transfer.expires(1100) == "match"
    transfer.match(1050)
    assert transfer.deadline() == 2000
    assert transfer.expires(1999) is None
    assert transfer.expires(2000) == "total"


def test_whenever_something_expires_the_deadline_said_so() -> None:
    for make in (send, receive):
        for match in (None, 0, 40, 99):
            transfer = make()
            if match is not None:
                transfer.match(match)
            for now in range(0, 1100, 7):
                assert (transfer.expires(now) is not None) == (now >= transfer.deadline())


def test_the_shorter_stall_of_both_sides_counts() -> None:
    assert matched(stall=20).deadlines.stall == 20
    assert matched(stall=90).deadlines.stall == 50


def test_blocks_pushed_before_the_match_wait_and_are_sorted_out_by_it() -> None:
    transfer = send()
    assert transfer.push({"full": Span.from_slots([1, 2])}, 3) == {}
    assert transfer.push({"full": Span.from_slots([3], first=2)}, 4) == {}
    target = cast("Target", SimpleNamespace(connection=7, transfers={}))
    line = Pipeline({"full": Span.from_slots([4, 5])}, 1000, TEMPLATES.__getitem__, BOUNDS)
    free = transfer.start(Key("r"), target, line, 8, 50, 5)
    assert {group: slots.tolist() for group, slots in free.items()} == {"full": [3]}
    assert transfer.waiting_chunks == []
    assert line.has_work


def test_giving_up_returns_what_waits_once() -> None:
    transfer = send()
    transfer.push({"full": Span.from_slots([1, 2])}, 3)
    transfer.push({"full": Span.from_slots([3], first=2), "side": Span.from_slots([8])}, 4)
    free = {group: slots.tolist() for group, slots in transfer.give_up().items()}
    assert free == {"full": [1, 2, 3], "side": [8]}
    assert transfer.give_up() == {}
    started = matched()
    started.push({"full": Span.from_slots([1, 2])}, 11)
    assert {g: s.tolist() for g, s in started.give_up().items()} == {"full": [1, 2]}


@pytest.mark.parametrize("groups", [("full", "side"), ("side", "full")])
def test_a_push_that_raises_takes_nothing(groups: tuple[str, str]) -> None:
    transfer = matched()
    transfer.push({"full": Span.from_slots([1])}, 11)
    bad = {"full": Span.from_slots([1], first=1), "side": Span.from_slots([7])}
    before = dict(transfer.pushed)
    with pytest.raises(UsageError):
        transfer.push({group: bad[group] for group in groups}, 12)
    assert transfer.pushed == before
    assert transfer.progress_at == 11
    transfer.push({"side": bad["side"]}, 13)


def test_a_slot_is_pushed_again_once_it_is_back() -> None:
    """As where a window passes on while its request is sent."""
    transfer = matched()
    transfer.push({"full": Span.from_slots([1, 2])}, 11)
    again = {"full": Span.from_slots([2], first=2)}
    with pytest.raises(UsageError, match="'full': slot 2 was pushed before, and is not released"):
        transfer.push(again, 12)
    transfer.returned({"full": np.array([2])})
    transfer.push(again, 13)
    with pytest.raises(UsageError, match="share ordinals 2"):
        transfer.push({"full": Span.from_slots([5], first=2)}, 14)


def test_complete_means_sealed_and_nothing_left() -> None:
    transfer = matched()
    assert not transfer.complete
    transfer.push({"full": Span.from_slots([1, 2])}, 11)
    transfer.seal(b"aux", 12)
    assert not transfer.complete
    assert transfer.pipeline is not None
    transfer.pipeline.head()
    write = transfer.pipeline.take(1)
    assert not transfer.complete
    assert transfer.writes_open == 1
    from kvferry.engine.transitions import WriteEvent

    transfer.pipeline.settle(write, WriteEvent.COMPLETE)
    assert transfer.complete
    unmatched = send()
    unmatched.seal(b"", 1)
    assert not unmatched.complete
    assert unmatched.outcome is Outcome.WAITING


def test_merged_slots() -> None:
    one, two = {"a": np.array([1])}, {"a": np.array([2]), "b": np.array([3])}
    assert merged({}, two) is two
    assert {g: s.tolist() for g, s in merged(one, two).items()} == {"a": [1, 2], "b": [3]}
    assert one["a"].tolist() == [1]
