"""Spans: what they refuse, what they keep, and the small cases of every operation."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine.errors import UsageError
from kvferry.engine.spans import Shortfall, Span, blocks_for, shortfall


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
    for empty in (Span(), Span.from_slots([]), Span.from_table([-1, -1])):
        assert empty.is_empty
        assert len(empty) == 0
        assert empty.runs == ()
        assert empty.to_wire() == (b"", b"", b"")
        assert empty == Span()
    assert Span.from_runs([]) == Span.from_wire(b"", b"", b"") == Span.from_blocks([], []) == Span()
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


def int32(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


ILL_WIRE = [
    (b"\0\0\0", int32(1), int32(7), "firsts have 3 bytes"),
    (int32(0), b"\1\0", int32(7), "counts have 2 bytes"),
    (int32(0), int32(1), int32(7) + b"\0", "slots have 5 bytes"),
    (int32(0, 4), int32(1), int32(7), "2 firsts and 1 counts"),
    (int32(0, -1), int32(1, 1), int32(7, 8), "run 1: first is -1, at least 0"),
    (int32(0, 4), int32(1, 0), int32(7), "run 1: count is 0, at least 1"),
    (int32(0), int32(-2), int32(7), "run 0: count is -2, at least 1"),
    (int32(0, 4), int32(2, 1), int32(7, 8), "counts are 3 in all, for 2 slots"),
    (int32(0), int32(2**31 - 1), b"", "counts are 2147483647 in all, for 0 slots"),
    (int32(*[0] * 3), int32(*[2**31 - 1] * 3), b"", "counts are 6442450941 in all"),
    (int32(2**31 - 1), int32(2), int32(7, 8), "ordinal 2147483648 is above"),
    (int32(4, 0), int32(1, 1), int32(7, 8), "run at ordinal 0 follows the run 4..4"),
    (int32(0, 1), int32(2, 1), int32(7, 8, 9), "run at ordinal 1 follows the run 0..1"),
    (int32(0), int32(1), int32(-1), "slot -1 is negative"),
    (int32(0, 4), int32(1, 1), int32(7, 7), "slot 7 appears twice"),
]


@pytest.mark.parametrize(
    ("firsts", "counts", "slots", "message"), ILL_WIRE, ids=[message for *_, message in ILL_WIRE]
)
def test_ill_wire_values_are_refused(
    firsts: bytes, counts: bytes, slots: bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_wire(firsts, counts, slots)


def test_wire_form_is_little_endian_int32() -> None:
    span = Span.from_runs([(0, [1, 258]), (5, [7])])
    assert span.to_wire() == (
        b"\0\0\0\0\5\0\0\0",
        b"\2\0\0\0\1\0\0\0",
        b"\1\0\0\0\2\1\0\0\7\0\0\0",
    )
    assert Span.from_wire(*span.to_wire()) == span
    touching = Span.from_wire(int32(0, 2), int32(2, 1), int32(1, 2, 3))
    assert [run.first for run in touching.runs] == [0], "a peer may cut a run, here it is one"


@pytest.mark.parametrize(
    ("table", "hole", "runs"),
    [
        ([-1, -1, 12, 13], -1, [(2, [12, 13])]),
        ([10, -1, 12, -1], -1, [(0, [10]), (2, [12])]),
        ([0, 0, 9, 1], 0, [(2, [9, 1])]),
        ([0, 3], -1, [(0, [0, 3])]),
        ([0, 0, 0], 0, []),
    ],
    ids=["evicted front", "hole inside", "null block", "slot 0 is a slot", "nothing"],
)
def test_holes_of_a_table_are_absent(table: list, hole: int, runs: list) -> None:
    assert Span.from_table(table, hole=hole) == Span.from_runs(runs)
    moved = Span.from_runs((first + 5, slots) for first, slots in runs)
    assert Span.from_table(table, first=5, hole=hole) == moved


@pytest.mark.parametrize(
    ("table", "first", "message"),
    [
        ([4, 0, 4], 0, "slot 4 appears twice"),
        ([4, -1, 5], 0, "slot -1 is negative"),
        ([4], -1, "ordinal -1 must be"),
        ([0, 4], 2**31 - 1, "ordinal 2147483648 is above"),
        ([[4]], 0, r"slots have shape \[1, 1\]"),
    ],
)
def test_bad_tables_are_refused_with_the_value(table: list, first: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_table(table, first, hole=0)


def test_blocks_may_be_named_one_by_one() -> None:
    assert Span.from_blocks([1, 2, 6], [9, 7, 8]) == Span.from_runs([(1, [9, 7]), (6, [8])])


@pytest.mark.parametrize(
    ("ordinals", "slots", "message"),
    [
        ([1, 2], [5], "2 ordinals have 1 slots"),
        ([2, 1], [5, 6], "ordinals must ascend: 1 follows 2"),
        ([2, 2], [5, 6], "ordinals must ascend: 2 follows 2"),
        ([-1, 0], [5, 6], "ordinal -1 must be"),
        ([2**31], [5], "ordinal 2147483648 is above"),
        ([0.5], [5], "ordinals have type float64"),
        ([0, 1], [5, 5], "slot 5 appears twice"),
    ],
)
def test_bad_blocks_are_refused_with_the_value(ordinals: list, slots: list, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_blocks(ordinals, slots)


def test_intersect_is_aligned_by_ordinal() -> None:
    need = Span.from_runs([(2, [20, 30, 40]), (9, [90])])
    have = Span.from_slots([1, 2, 3, 4], first=0)
    ordinals, ours, theirs = need.intersect(have)
    assert ordinals.tolist() == [2, 3]
    assert ours.tolist() == [20, 30]
    assert theirs.tolist() == [3, 4]
    assert need.subtract(have) == Span.from_runs([(4, [40]), (9, [90])])


def test_restrict_takes_a_half_open_range() -> None:
    span = Span.from_runs([(0, [5, 6, 7]), (10, [8, 9])])
    assert span.restrict(1, 11) == Span.from_runs([(1, [6, 7]), (10, [8])])
    assert span.restrict(3, 10).is_empty
    assert span.restrict(5, 2).is_empty


def test_a_part_of_a_long_span_is_a_view_of_it() -> None:
    span = Span.from_runs((2 * i, [i]) for i in range(1000))
    window = span.restrict(900, 910)
    assert window.ordinals().tolist() == [900, 902, 904, 906, 908]
    assert np.shares_memory(window.slots(), span.slots())
    with pytest.raises(ValueError, match="read-only"):
        window.slots()[0] = 5


def test_select_takes_several_ranges() -> None:
    span = Span.from_slots(range(50, 60))
    assert span.select([(0, 1), (7, 20)]) == Span.from_runs([(0, [50]), (7, [57, 58, 59])])
    assert span.select([(0, 3), (3, 3), (3, 10)]) == span
    assert span.select([]) == span.select([(20, 30)]) == Span()


@pytest.mark.parametrize(
    "extents", [[(4, 6), (0, 2)], [(0, 4), (3, 6)], [(-1, 2)], [(5, 2), (3, 6)]]
)
def test_ranges_that_overlap_are_refused(extents: list) -> None:
    with pytest.raises(UsageError, match=r"begins before"):
        Span.from_slots(range(8)).select(extents)


@pytest.mark.parametrize(
    ("tokens", "ordinals"),
    [
        ((0, 16), [0, 1]),
        ((7, 9), [0, 1]),
        ((8, 9), [1]),
        ((15, 16), [1]),
        ((16, 99), [2, 3]),
        ((9, 9), []),
        ((9, 8), []),
        ((0, 0), []),
    ],
)
def test_clip_takes_the_blocks_that_overlap_the_tokens(tokens: tuple, ordinals: list) -> None:
    assert Span.from_slots(range(4)).clip(*tokens, 8).ordinals().tolist() == ordinals


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((-1, 4, 8), "first token is -1"), ((0, -1, 8), "tokens is -1"), ((0, 4, 0), "is 0, must")],
)
def test_clip_to_nonsense_is_refused(tokens: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span.from_slots(range(4)).clip(*tokens)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(2, 2, "rank is 2, must be 0 to 1"), (-1, 2, "rank is -1"), (0, 0, "size is 0")],
)
def test_a_rank_that_is_not_there_is_refused(rank: int, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Span().stride(rank, size)


def test_find_and_where_look_at_single_blocks() -> None:
    span = Span.from_runs([(2, [7, 8]), (6, [9])])
    held, slots = span.find([0, 3, 5, 6, 2, 7])
    assert held.tolist() == [False, True, False, True, True, False]
    assert slots.tolist() == [8, 9, 7]
    assert span.where(np.array([True, False, True])) == Span.from_runs([(2, [7]), (6, [9])])


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


SHORTFALLS = {
    "nothing lacks": ([(0, 4)], 8, [(0, 4)], 8, 32, [], 0),
    "a hole": ([(0, 4)], 8, [(0, 1), (2, 4)], 8, 32, [1], 8),
    "only tokens that count": ([(0, 4)], 8, [(0, 3)], 8, 30, [3], 6),
    "a block behind the count": ([(0, 5)], 8, [(0, 4)], 8, 32, [], 0),
    "nobody has any": ([(4, 8), (12, 13)], 16, [], 16, 999, [4, 5, 6, 7, 12], 80),
    "no need": ([], 8, [], 8, 32, [], 0),
    "no tokens": ([(0, 4)], 8, [], 8, 0, [], 0),
    "sinks and window": ([(0, 1), (6, 8)], 4, [(0, 1), (7, 8)], 4, 32, [6], 4),
    "source blocks are larger": ([(2, 6)], 16, [(1, 2)], 32, 96, [4, 5], 32),
    "source blocks are smaller": ([(1, 3)], 32, [(2, 3), (4, 6)], 16, 90, [1], 16),
    "sizes that do not divide": ([(0, 2)], 6, [(1, 3)], 4, 12, [0], 4),
}


@pytest.mark.parametrize("name", SHORTFALLS)
def test_a_shortfall_counts_tokens_and_names_ordinals(name: str) -> None:
    need, need_size, have, have_size, tokens, ordinals, lacking = SHORTFALLS[name]
    found = shortfall(extents(need), need_size, extents(have), have_size, tokens)
    assert found.ordinals.tolist() == ordinals
    assert found.tokens == lacking


def extents(ranges: list[tuple[int, int]]) -> Span:
    return Span.from_runs((first, range(first, stop)) for first, stop in ranges)


def test_a_shortfall_says_what_lacks() -> None:
    assert str(Shortfall(96, np.array([4, 5, 6, 7, 12]))) == "ordinals 4..7, 12: 96 tokens"
    assert str(shortfall(Span(), 8, Span(), 8, 4)) == "0 tokens"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8, 4), "tokens_per_block is 0"),
        ((8, -1, 4), "tokens_per_block is -1"),
        ((8, 8, -4), "tokens is -4"),
    ],
)
def test_coverage_in_nonsense_is_refused(sizes: tuple, message: str) -> None:
    need_size, have_size, tokens = sizes
    with pytest.raises(UsageError, match=message):
        shortfall(Span(), need_size, Span(), have_size, tokens)


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
