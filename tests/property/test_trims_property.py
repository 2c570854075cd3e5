"""Trims against what they mean, token by token; and the whole way from cache to pairs.

The last three tests are the grid A18 of docs/vectors.md: equal ordinals in every pair, all that is
held and needed paired once, whatever the groups, the chunks, the ranks and the beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.engine.errors import UsageError
from kvferry.engine.spans import Span, blocks_for, shortfall
from kvferry.engine.trims import (
    cached_blocks,
    chunk_blocks,
    local_blocks,
    needed,
    pair_tails,
    split_tails,
    stale_chunk,
    stale_window,
    to_global,
    to_local,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS_MAX = 40
sizes = st.integers(1, 9)
prompts = st.integers(0, TOKENS_MAX)
Extents = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Policy:
    """What decides the need of one group: the arguments of `needed`."""

    kind: str
    tokens: int
    size: int
    window: int = 0
    cached_tokens: int = 0
    sink_tokens: int = 0

    def extents(self) -> Extents:
        return needed(
            self.kind,  # type: ignore[arg-type]
            self.tokens,
            self.size,
            window=self.window,
            cached_tokens=self.cached_tokens,
            sink_tokens=self.sink_tokens,
        )

    def attends(self, position: int) -> bool:
        """Whether the token behind the prompt, and so some later one, sees this position."""
        if self.kind == "window":
            return position < self.sink_tokens or position > self.tokens - self.window
        if self.kind == "chunk":
            return position // self.window == self.tokens // self.window
        return True


@st.composite
def policies(draw: st.DrawFn, tokens: int | None = None) -> Policy:
    kind = draw(st.sampled_from(["full", "latent", "indexer", "window", "chunk"]))
    tokens = draw(prompts) if tokens is None else tokens
    return Policy(
        kind,
        tokens,
        draw(sizes),
        draw(st.integers(1, TOKENS_MAX + 5)) if kind in ("window", "chunk") else 0,
        draw(st.integers(0, tokens)),
        draw(st.integers(0, 20)) if kind == "window" else 0,
    )


def members(extents: Extents) -> list[int]:
    return [ordinal for first, stop in extents for ordinal in range(first, stop)]


@given(policies())
def test_a_needed_block_has_a_position_that_is_attended_and_not_cached(policy: Policy) -> None:
    expected = [
        ordinal
        for ordinal in range(blocks_for(policy.tokens, policy.size))
        if any(
            policy.attends(position)
            for position in range(ordinal * policy.size, (ordinal + 1) * policy.size)
            if position <= policy.tokens  # the next token's own one included
        )
        and (ordinal + 1) * policy.size > policy.cached_tokens
    ]
    extents = policy.extents()
    assert members(extents) == expected
    assert all(stop < first for (_, stop), (first, _) in pairwise(extents))


@given(prompts, st.integers(1, 70), st.integers(1, 70), sizes)
def test_blocks_only_ever_become_stale(tokens: int, window: int, chunk: int, size: int) -> None:
    for stale, wide in ((stale_window, window), (stale_chunk, chunk)):
        assert 0 <= stale(tokens, wide, size) <= stale(tokens + 1, wide, size)
        assert stale(tokens, wide, size) <= blocks_for(tokens, size)


@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_share_blocks_out(blocks: int, size: int) -> None:
    assert sum(local_blocks(blocks, rank, size) for rank in range(size)) == blocks
    for rank in range(size):
        assert local_blocks(blocks, rank, size) == len(range(rank, blocks, size))


# ---------------------------------------------------------------- the whole way


@st.composite
def held_spans(draw: st.DrawFn, blocks: int, base: int) -> Span:
    """Any of the ordinals below `blocks`: several runs, holes. Slots descend, from `base` up."""
    held = draw(st.integers(0, 2**blocks - 1), "held, one bit per ordinal")
    return Span.from_table([base + blocks - i if held >> i & 1 else -1 for i in range(blocks)])


@st.composite
def edges(draw: st.DrawFn, tokens: int) -> list[int]:
    """Bounds of prefill chunks, from what the source has cached to the end; any sizes."""
    inner = draw(st.lists(st.integers(0, tokens), min_size=1, max_size=6))
    return [*sorted(set(inner) - {tokens}), tokens]


def extents_of(bounds: list[int], size: int) -> Iterator[tuple[int, int]]:
    for start, stop in pairwise(bounds):
        yield chunk_blocks(start, stop, size, first=start == bounds[0], last=stop == bounds[-1])


@given(prompts.flatmap(edges), sizes)
def test_chunks_tile_the_prompt_in_order(bounds: list[int], size: int) -> None:
    assume(len(bounds) > 1)
    ordinals = members(tuple(extents_of(bounds, size)))
    assert ordinals == list(range(blocks_for(bounds[-1], size)))


@given(prompts.flatmap(edges), sizes)
def test_no_chunk_brings_a_block_before_its_tokens(bounds: list[int], size: int) -> None:
    for (_, stop), done in zip(extents_of(bounds, size), bounds[1:], strict=True):
        assert stop * size <= done or done == bounds[-1]


@given(st.data(), prompts)
def test_a18_what_is_held_and_needed_pairs_once_and_in_order(
    data: st.DataObject, tokens: int
) -> None:
    bounds = data.draw(edges(tokens), "chunks")
    assume(len(bounds) > 1)
    for _ in range(data.draw(st.integers(1, 2), "groups")):
        policy = data.draw(policies(tokens), "policy")
        blocks = blocks_for(tokens, policy.size)
        have = data.draw(held_spans(blocks, base=100), "have")
        # Decode's next block and a hole or two of its own must not matter.
        need = data.draw(held_spans(blocks + 2, base=500), "need").select(policy.extents())
        ordinals, theirs, ours = need.intersect(have)
        wanted = {*members(policy.extents())} & {*need.ordinals().tolist()}
        assert ordinals.tolist() == sorted(wanted & {*have.ordinals().tolist()})
        assert (have.find(ordinals)[1] == ours).all()
        assert (need.find(ordinals)[1] == theirs).all()

        chunks = [have.restrict(*extent) for extent in extents_of(bounds, policy.size)]
        parts = [need.intersect(chunk) for chunk in chunks]
        for index, whole in enumerate((ordinals, theirs, ours)):
            assert np.concatenate([part[index] for part in parts]).tolist() == whole.tolist()

        lacking = shortfall(need, policy.size, have, policy.size, tokens)
        assert lacking.ordinals.tolist() == sorted(wanted - {*ordinals.tolist()})


@given(policies(), st.integers(1, 5), st.data())
def test_a_policy_is_the_same_on_every_rank(policy: Policy, size: int, data: st.DataObject) -> None:
    blocks = blocks_for(policy.tokens, policy.size)
    have = data.draw(held_spans(blocks, base=0))
    need, cached = Span(), cached_blocks(policy.cached_tokens, policy.size)
    for rank in range(size):
        local = to_local(have.stride(rank, size), rank, size)
        assert to_global(local, rank, size) == have.stride(rank, size)
        need = need.union(to_global(local, rank, size).select(policy.extents()))
        # Trimmed by this rank's own count, or by the prompt's ordinals: the same blocks.
        trimmed = local.restrict(local_blocks(cached, rank, size), blocks)
        assert to_global(trimmed, rank, size) == have.stride(rank, size).restrict(cached, blocks)
    assert need == have.select(policy.extents())


@given(policies(), st.integers(1, 4), st.data())
def test_tails_move_with_the_last_block_and_only_then(
    policy: Policy, beams: int, data: st.DataObject
) -> None:
    length = blocks_for(policy.tokens, policy.size)
    counts = data.draw(st.tuples(st.integers(0, beams - 1), st.integers(0, beams - 1)))
    (have, ours), (need, theirs) = (
        split_tails(range(base, base + length + count), length, beams)
        for base, count in zip((0, 500), counts, strict=True)
    )
    assert (ours.size, theirs.size) == counts
    wanted = Span.from_slots(need).select(policy.extents())
    ordinals, _, _ = wanted.intersect(Span.from_slots(have))
    if length - 1 not in members(policy.extents()):
        assert [part.size for part in pair_tails(ours, theirs, ordinals, length)] == [0, 0]
    elif counts[0] == counts[1]:
        paired = pair_tails(ours, theirs, ordinals, length)
        assert [part.tolist() for part in paired] == [ours.tolist(), theirs.tolist()]
    else:
        with pytest.raises(UsageError, match="beam tails"):
            pair_tails(ours, theirs, ordinals, length)
