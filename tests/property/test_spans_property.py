"""Spans against a model: a plain dict of ordinal to slot."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.errors import UsageError
from kvferry.engine.spans import Span, shortfall

Model = dict[int, int]


@st.composite
def models(draw: st.DrawFn, ordinals_max: int = 24) -> Model:
    """Any set of ordinals, so holes and several runs are common; distinct slots in any order."""
    held = draw(st.integers(0, 2 ** (ordinals_max + 1) - 1), "held, one bit per ordinal")
    first, step = draw(st.tuples(st.integers(0, 40), st.integers(1, 40)))
    return {o: (first + step * o) % 41 for o in range(ordinals_max + 1) if held >> o & 1}


def span_of(model: Model) -> Span:
    """Built block by block, so that joining runs is the span's work."""
    return Span.from_runs((ordinal, [slot]) for ordinal, slot in sorted(model.items()))


def model_of(span: Span) -> Model:
    """Read back through the runs, and compared with the flat arrays."""
    read = {run.first + i: slot for run in span.runs for i, slot in enumerate(run.slots.tolist())}
    assert list(read) == span.ordinals().tolist()
    assert list(read.values()) == span.slots().tolist()
    assert len(read) == len(span)
    assert all(run.slots.size for run in span.runs)
    stops = [run.first + len(run.slots) for run in span.runs]
    assert all(stop < run.first for stop, run in zip(stops, span.runs[1:], strict=False))
    return read


@given(models())
def test_a_span_says_what_it_was_made_of(model: Model) -> None:
    span = span_of(model)
    assert model_of(span) == model
    assert model_of(Span.from_wire(*span.to_wire())) == model
    assert model_of(Span.from_blocks(list(model), list(model.values()))) == model
    assert span.nbytes == 8 * len(model) + 16 * len(span.runs)


@given(models(), models())
def test_intersect_and_subtract_part_a_span(one: Model, two: Model) -> None:
    need, have = span_of(one), span_of(two)
    ordinals, ours, theirs = need.intersect(have)
    both = sorted(one.keys() & two.keys())
    assert ordinals.tolist() == both
    assert ours.tolist() == [one[ordinal] for ordinal in both]
    assert theirs.tolist() == [two[ordinal] for ordinal in both]
    rest = need.subtract(have)
    assert model_of(rest) == {o: s for o, s in one.items() if o not in two}
    assert rest.union(need.subtract(rest)) == need


@given(models(), st.integers(0, 30), st.integers(0, 30))
def test_restrict_keeps_the_ordinals_of_the_range(model: Model, first: int, stop: int) -> None:
    inside = span_of(model).restrict(first, stop)
    assert model_of(inside) == {o: s for o, s in model.items() if first <= o < stop}


@given(models(), st.lists(st.integers(0, 30), max_size=8).map(sorted))
def test_select_keeps_the_ordinals_of_any_range(model: Model, edges: list[int]) -> None:
    extents = list(zip(edges[::2], edges[1::2], strict=False))
    inside = span_of(model).select(extents)
    assert model_of(inside) == {
        o: s for o, s in model.items() if any(first <= o < stop for first, stop in extents)
    }


@given(models(), st.integers(0, 130), st.integers(0, 130), st.integers(1, 5))
def test_clip_keeps_the_blocks_with_one_of_the_tokens(
    model: Model, first: int, stop: int, size: int
) -> None:
    inside = span_of(model).clip(first, stop, size)
    assert model_of(inside) == {
        o: s for o, s in model.items() if {*range(o * size, (o + 1) * size)} & {*range(first, stop)}
    }


@given(models(), st.integers(1, 6))
def test_ranks_part_a_span(model: Model, size: int) -> None:
    span = span_of(model)
    whole = Span()
    for rank in range(size):
        mine = span.stride(rank, size)
        assert model_of(mine) == {o: s for o, s in model.items() if o % size == rank}
        whole = whole.union(mine)
    assert whole == span


@given(
    st.lists(st.sampled_from([-1, 0, *range(1, 40)]), max_size=20),
    st.integers(0, 9),
    st.sampled_from([-1, 0]),
)
def test_a_table_holds_what_is_no_hole(table: list[int], first: int, hole: int) -> None:
    model = {first + i: slot for i, slot in enumerate(table) if slot != hole}
    try:
        span = Span.from_table(table, first, hole)
    except UsageError:
        assert -1 in model.values() or len({*model.values()}) < len(model)
    else:
        assert model_of(span) == model


@given(models(), st.lists(st.integers(0, 26)))
def test_find_gives_the_slots_of_those_that_are_there(model: Model, ordinals: list[int]) -> None:
    held, slots = span_of(model).find(ordinals)
    assert held.tolist() == [ordinal in model for ordinal in ordinals]
    assert slots.tolist() == [model[ordinal] for ordinal in ordinals if ordinal in model]


int32s = st.one_of(
    st.binary(max_size=24),
    st.lists(st.one_of(st.integers(-2, 6), st.integers(-(2**31), 2**31 - 1)), max_size=5).map(
        lambda values: np.array(values, dtype="<i4").tobytes()
    ),
)


@given(int32s, int32s, int32s)
def test_any_bytes_give_a_span_or_a_usage_error(firsts: bytes, counts: bytes, slots: bytes) -> None:
    with contextlib.suppress(UsageError):
        span = Span.from_wire(firsts, counts, slots)
        model_of(span)
        assert Span.from_wire(*span.to_wire()) == span


@given(models(), st.integers(1, 7), models(), st.integers(1, 7), st.integers(0, 80))
def test_a_shortfall_is_every_needed_token_that_nobody_holds(
    one: Model, need_size: int, two: Model, have_size: int, tokens: int
) -> None:
    lacking = shortfall(span_of(one), need_size, span_of(two), have_size, tokens)
    short = [t for t in range(tokens) if t // need_size in one and t // have_size not in two]
    assert lacking.tokens == len(short)
    assert lacking.ordinals.tolist() == sorted({t // need_size for t in short})


@given(models(), st.integers(4, 12))
def test_chunks_tile_a_span_exactly_once(model: Model, size: int) -> None:
    span = span_of(model)
    whole = Span()
    for first in range(0, 30, size):
        whole = whole.union(span.restrict(first, first + size))
    assert whole == span


@given(models(), models())
def test_equal_spans_are_equal_models(one: Model, two: Model) -> None:
    assert (span_of(one) == span_of(two)) == (one == two)
