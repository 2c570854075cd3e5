"""Spans against a model: a plain dict of ordinal to slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.spans import Span, missing

Model = dict[int, int]


@st.composite
def models(draw: st.DrawFn, ordinals_max: int = 24) -> Model:
    """Any set of ordinals, so holes and several runs are common; distinct slots."""
    ordinals = draw(st.sets(st.integers(0, ordinals_max)))
    slots = draw(
        st.lists(st.integers(0, 40), min_size=len(ordinals), max_size=len(ordinals), unique=True)
    )
    return dict(zip(sorted(ordinals), slots, strict=True))


def span_of(model: Model) -> Span:
    """Built block by block, so that joining runs is the span's work."""
    return Span.from_runs((ordinal, [slot]) for ordinal, slot in sorted(model.items()))


def model_of(span: Span) -> Model:
    """Read back through the runs, and compared with the flat arrays."""
    read = {run.first + i: slot for run in span.runs for i, slot in enumerate(run.slots.tolist())}
    assert list(read) == span.ordinals().tolist()
    assert list(read.values()) == span.slots().tolist()
    assert len(read) == len(span)
    stops = [run.first + len(run.slots) for run in span.runs]
    assert all(stop < run.first for stop, run in zip(stops, span.runs[1:], strict=False))
    return read


@given(models())
def test_a_span_says_what_it_was_made_of(model: Model) -> None:
    span = span_of(model)
    assert model_of(span) == model
    assert model_of(Span.from_wire(span.to_wire())) == model


@given(models(), models())
def test_intersect_and_subtract_part_a_span(one: Model, two: Model) -> None:
    need, have = span_of(one), span_of(two)
    ordinals, ours, theirs = need.intersect(have)
    both = sorted(one.keys() & two.keys())
    assert ordinals.tolist() == both
    assert ours.tolist() == [one[ordinal] for ordinal in both]
    assert theirs.tolist() == [two[ordinal] for ordinal in both]
    rest = missing(need, have)
    assert model_of(rest) == {o: s for o, s in one.items() if o not in two}
    assert rest.union(need.subtract(rest)) == need


@given(models(), st.integers(0, 30), st.integers(0, 30))
def test_restrict_keeps_the_ordinals_of_the_range(model: Model, first: int, stop: int) -> None:
    inside = span_of(model).restrict(first, stop)
    assert model_of(inside) == {o: s for o, s in model.items() if first <= o < stop}


@given(models(), st.integers(1, 7))
def test_chunks_tile_a_span_exactly_once(model: Model, size: int) -> None:
    span = span_of(model)
    whole = Span()
    for first in range(0, 30, size):
        whole = whole.union(span.restrict(first, first + size))
    assert whole == span


@given(models(), models())
def test_equal_spans_are_equal_models(one: Model, two: Model) -> None:
    assert (span_of(one) == span_of(two)) == (one == two)
