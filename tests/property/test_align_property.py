"""Alignment against an oracle that walks every token, with equal and unequal block sizes.

Goal: a source block's token goes to the one place of the target that needs it; a stream hands
each pair out once, when its blocks are complete, and each source block leaves in one step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.align import Pairs, Stream, align, shared_tokens, steps
from kvferry.engine.spans import Span, blocks_for

SIZES = (1, 2, 3, 4, 6, 8)
Moves = dict[tuple[int, int], tuple[int, int]]
"""{(target slot, token in it): (source slot, token in it)}."""


@dataclass
class Case:
    have: Span
    source_tokens: int
    need: Span
    target_tokens: int
    tokens: int  # that are transferred


@st.composite
def cases(draw: st.DrawFn, *, whole: bool = False) -> Case:
    """Two spans with holes. whole: the source holds all tokens, the need ends with them."""
    source_tokens, target_tokens = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    tokens = draw(st.integers(1, 40))
    have = draw(spans(blocks_for(tokens, source_tokens) + draw(st.integers(0, 3)), holes=not whole))
    need = draw(spans(blocks_for(tokens, target_tokens), holes=True))
    return Case(have, source_tokens, need, target_tokens, tokens)


@st.composite
def spans(draw: st.DrawFn, blocks: int, *, holes: bool) -> Span:
    slots = draw(st.permutations(range(100, 100 + blocks)))
    absent = draw(st.sets(st.integers(0, max(0, blocks - 1)), max_size=blocks)) if holes else set()
    return Span.from_runs((at, [slot]) for at, slot in enumerate(slots) if at not in absent)


def by_ordinal(span: Span) -> dict[int, int]:
    return dict(zip(span.ordinals().tolist(), span.slots().tolist(), strict=True))


def expected(case: Case) -> Moves:
    """Every token that both sides have in a block, one token at a time."""
    have, need = by_ordinal(case.have), by_ordinal(case.need)
    moves = {}
    for ordinal, slot in need.items():
        for inside in range(case.target_tokens):
            token = ordinal * case.target_tokens + inside
            source = token // case.source_tokens
            if source in have:
                moves[slot, inside] = (have[source], token % case.source_tokens)
    return moves


def moves_of(pairs: Pairs, case: Case) -> Moves:
    count = pairs.ordinals.size
    zeros, whole = np.zeros(count, np.int64), np.full(count, case.target_tokens)
    moves: Moves = {}
    columns = (pairs.source_slots, pairs.target_slots, *(pairs.shift or (zeros, zeros, whole)))
    for source, target, at, to, tokens in zip(*(c.tolist() for c in columns), strict=True):
        for step in range(tokens):
            assert (target, to + step) not in moves, "a token is moved twice"
            moves[target, to + step] = (source, at + step)
    return moves


@given(cases())
def test_pairs_are_the_tokens_that_both_sides_have(case: Case) -> None:
    pairs = align(case.have, case.source_tokens, case.need, case.target_tokens)
    assert moves_of(pairs, case) == expected(case)
    assert (np.diff(pairs.ordinals) >= 0).all()
    assert (pairs.shift is None) == (case.source_tokens == case.target_tokens)


@given(cases(whole=True), st.data())
def test_a_stream_pairs_all_that_is_needed_whatever_the_order(
    case: Case, data: st.DataObject
) -> None:
    """Chunks come in any order and size; the last ones may lie beyond the transferred count."""
    stream = Stream(case.need, case.target_tokens, case.source_tokens, case.tokens)
    left = list(by_ordinal(case.have).items())
    left = data.draw(st.permutations(left), label="order")
    moves: Moves = {}
    freed: list[int] = []
    used: list[int] = []
    while left:
        size = data.draw(st.integers(1, len(left)), label="chunk")
        chunk, left = sorted(left[:size]), left[size:]
        pairs, unneeded = stream.add(Span.from_runs((at, [slot]) for at, slot in chunk))
        new = moves_of(pairs, case)
        assert not new.keys() & moves.keys()
        moves.update(new)
        freed += unneeded.tolist()
        now = set(pairs.source_slots.tolist())
        assert not now & set(used), "a source block left in two steps"
        used += now
    inside = blocks_for(case.tokens, case.source_tokens)
    beyond = {slot for at, slot in by_ordinal(case.have).items() if at >= inside}
    if case.source_tokens == case.target_tokens:
        beyond = set()
    assert moves == {to: at for to, at in expected(case).items() if at[0] not in beyond}
    assert len(moves) == shared_tokens(
        case.need, case.target_tokens, case.source_tokens, case.tokens
    )
    assert Counter(freed + used) == Counter(case.have.slots().tolist())
    assert stream.drop().size == 0


@given(cases(), st.data())
def test_a_stream_hands_out_complete_blocks_only(case: Case, data: st.DataObject) -> None:
    """With holes at the source: what is not complete waits, and comes back when given up."""
    stream = Stream(case.need, case.target_tokens, case.source_tokens, case.tokens)
    left = list(by_ordinal(case.have).items())
    cut = data.draw(st.integers(0, len(left)))
    freed: list[int] = []
    written: Counter[int] = Counter()
    for chunk in (left[:cut], left[cut:]):
        pairs, unneeded = stream.add(Span.from_runs((at, [slot]) for at, slot in chunk))
        freed += unneeded.tolist() + np.unique(pairs.source_slots).tolist()
        tokens = (
            pairs.shift.tokens if pairs.shift else np.full(pairs.ordinals.size, case.target_tokens)
        )
        for ordinal, count in zip(pairs.ordinals.tolist(), tokens.tolist(), strict=True):
            written[ordinal] += count
    for ordinal, count in written.items():
        start = ordinal * case.target_tokens
        assert count >= min(start + case.target_tokens, case.tokens) - start
    assert Counter(freed + stream.drop().tolist()) == Counter(case.have.slots().tolist())


@given(cases(), st.integers(1, 9))
def test_steps_tile_the_pairs_and_share_no_block(case: Case, size: int) -> None:
    pairs = align(case.have, case.source_tokens, case.need, case.target_tokens)
    sizes = case.target_tokens, case.source_tokens
    parts = list(steps(pairs, *sizes, size))
    longest = max(
        np.unique(pairs.ordinals * sizes[0] // np.lcm(*sizes), return_counts=True)[1], default=0
    )
    assert all(0 < part.ordinals.size < size + max(1, longest) for part in parts)
    moves: Moves = {}
    blocks: set[int] = set()
    for part in parts:
        moves.update(moves_of(part, case))
        now = set(part.source_slots.tolist())
        assert not now & blocks
        blocks |= now
    assert moves == moves_of(pairs, case)
