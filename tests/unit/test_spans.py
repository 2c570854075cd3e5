"""Spans: what they refuse, what they keep, and the small cases of every operation."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine.errors import UsageError
from kvferry.engine.spans import Span, blocks_for, missing


def test_a_span_of_one_run_keeps_anchor_and_order() -> None:
    span = Span.from_slots([9, 3, 7], first=4)
    assert len(span) == 3
    assert [(run.first, run.slots.tolist()) for run in span.runs] == [(4, [9, 3, 7])]
    assert span.ordinals().tolist() == [4, 5, 6]
    assert span.slots().tolist() == [9, 3, 7]


def test_touching_runs_join_and_empty_runs_vanish() -> None:
    span = Span.from_runs([(0, [5]), (1, [6, 2]), (3, []), (8, [1])])
    assert [(run.first, run.slots.tolist()) for run in span.runs] == [(0, [5, 6, 2]), (8, [1])]
    assert span == Span.from_runs([(0, [5, 6, 2]), (8, [1])])


def test_an_empty_span_is_a_span() -> None:
    for empty in (Span(), Span.from_slots([]), Span.from_runs([]), Span.from_wire([])):
        assert empty.is_empty
        assert len(empty) == 0
        assert empty.runs == ()
        assert empty.to_wire() == []
        assert empty == Span()
    assert not Span.from_slots([0]).is_empty


def test_a_span_does_not_follow_its_callers_array() -> None:
    slots = np.array([1, 2, 3])
    span = Span.from_slots(slots)
    slots[0] = 99
    assert span.slots().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        span.slots()[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        span.runs[0].slots[0] = 5


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, [3, -2])], "slot -2 is negative"),
        ([(0, [3, 4, 3])], "slot 3 appears twice"),
        ([(0, [3]), (5, [3])], "slot 3 appears twice"),
        ([(-1, [3])], "ordinal -1 must be"),
        ([(True, [3])], "ordinal True is bool"),
        ([(1.5, [3])], "ordinal 1.5 is float"),
        ([(0, [1, 2, 3]), (2, [9])], "run at ordinal 2 follows the run 0..2"),
        ([(7, [1]), (2, [9])], "run at ordinal 2 follows the run 7..7"),
        ([(0, [1.0])], "type float64"),
        ([(0, [True])], "type bool"),
        ([(0, [[1, 2]])], r"shape \[1, 2\]"),
        ([(0, [2**31])], "slot 2147483648 is above"),
        ([(0, np.array([2**63], dtype=np.uint64))], "slot 9223372036854775808 is above"),
        ([(2**31 - 1, [1, 2])], "ordinal 2147483648 is above"),
    ],
)
def test_bad_runs_are_refused_with_the_value(runs: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_runs(runs)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ([[-1, b"\0\0\0\0"]], "ordinal -1"),
        ([[2**40, b"\0\0\0\0"]], "ordinal 1099511627776"),
        ([["0", b"\0\0\0\0"]], "ordinal '0' is str"),
        ([[0, b"\0\0\0"]], "run 0: 3 bytes of slots"),
        ([[0, b""]], "run 0: 0 bytes of slots"),
        ([[0, [1]]], "run 0: slots are list"),
        ([[0]], "run 0 has 1 fields"),
        ([[0, b"\xff\xff\xff\xff"]], "slot -1 is negative"),
        ([[0, b"\1\0\0\0\1\0\0\0"]], "slot 1 appears twice"),
        ([[4, b"\1\0\0\0"], [0, b"\2\0\0\0"]], "run at ordinal 0 follows the run 4..4"),
        ([[0, b"\1\0\0\0\2\0\0\0"], [1, b"\3\0\0\0"]], "run at ordinal 1 follows"),
    ],
)
def test_ill_wire_values_are_refused(wire: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_wire(wire)


def test_wire_form_is_little_endian_int32_per_run() -> None:
    span = Span.from_runs([(0, [1, 258]), (5, [7])])
    assert span.to_wire() == [(0, b"\1\0\0\0\2\1\0\0"), (5, b"\7\0\0\0")]
    assert Span.from_wire(span.to_wire()) == span


def test_intersect_is_aligned_by_ordinal() -> None:
    need = Span.from_runs([(2, [20, 30, 40]), (9, [90])])
    have = Span.from_slots([1, 2, 3, 4], first=0)
    ordinals, ours, theirs = need.intersect(have)
    assert ordinals.tolist() == [2, 3]
    assert ours.tolist() == [20, 30]
    assert theirs.tolist() == [3, 4]
    assert missing(need, have) == Span.from_runs([(4, [40]), (9, [90])])


def test_restrict_takes_a_half_open_range() -> None:
    span = Span.from_runs([(0, [5, 6, 7]), (10, [8, 9])])
    assert span.restrict(1, 11) == Span.from_runs([(1, [6, 7]), (10, [8])])
    assert span.restrict(3, 10).is_empty
    assert span.restrict(5, 2).is_empty


def test_union_joins_and_refuses_what_both_hold() -> None:
    sinks, window = Span.from_slots([4], first=0), Span.from_slots([8, 9], first=1)
    assert window.union(sinks) == Span.from_slots([4, 8, 9])
    with pytest.raises(UsageError, match=r"share ordinals 1\.\.2"):
        window.union(Span.from_slots([1, 2, 3], first=0))
    with pytest.raises(UsageError, match="slot 8 appears twice"):
        window.union(Span.from_slots([8], first=7))


def test_equality_needs_the_same_ordinals_and_slots() -> None:
    span = Span.from_slots([1, 2], first=3)
    assert span == Span.from_slots([1, 2], first=3)
    assert span != Span.from_slots([2, 1], first=3)
    assert span != Span.from_slots([1, 2], first=4)
    assert span != Span.from_runs([(3, [1]), (5, [2])])
    assert span != "Span(3..4)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(span)


def test_repr_is_short() -> None:
    assert repr(Span.from_runs([(0, range(8)), (12, [50, 51]), (20, [60])])) == (
        "Span(0..7, 12..13, 20)"
    )
    assert repr(Span()) == "Span()"
    many = Span.from_runs((2 * i, [i]) for i in range(100))
    assert repr(many) == "Span(0, 2, 4, 6, 8, 10, 94 more runs)"


@pytest.mark.parametrize(
    ("tokens", "tokens_per_block", "blocks"),
    [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)],
)
def test_blocks_round_up(tokens: int, tokens_per_block: int, blocks: int) -> None:
    assert blocks_for(tokens, tokens_per_block) == blocks


def test_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="tokens is -1"):
        blocks_for(-1, 16)
    with pytest.raises(UsageError, match="tokens_per_block is 0"):
        blocks_for(1, 0)
