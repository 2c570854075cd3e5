"""Trims: the small cases of every conversion, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.engine import trims
from kvferry.engine.errors import UsageError
from kvferry.engine.layout import GROUP_KINDS
from kvferry.engine.spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDS = {
    "full": (("full", 30, 8), {}, ((0, 4),)),
    "latent, prefix cached": (("latent", 30, 8), {"cached_tokens": 17}, ((2, 4),)),
    "indexer": (("indexer", 32, 8), {"cached_tokens": 31}, ((3, 4),)),
    "all cached": (("full", 32, 8), {"cached_tokens": 32}, ()),
    "all cached but a partly filled block": (("full", 30, 8), {"cached_tokens": 30}, ((3, 4),)),
    "no tokens": (("full", 0, 8), {}, ()),
    "window": (("window", 32, 8), {"window": 16}, ((2, 4),)),
    "window of more than the prompt": (("window", 32, 8), {"window": 99}, ((0, 4),)),
    "window that nothing is left of": (("window", 32, 8), {"window": 1}, ()),
    "window behind the cached prefix": (
        ("window", 32, 8),
        {"window": 16, "cached_tokens": 8},
        ((2, 4),),
    ),
    "cached prefix into the window": (
        ("window", 32, 8),
        {"window": 16, "cached_tokens": 24},
        ((3, 4),),
    ),
    "sinks and window": (
        ("window", 64, 8),
        {"window": 16, "sink_tokens": 9},
        ((0, 2), (6, 8)),
    ),
    "sinks partly cached": (
        ("window", 64, 8),
        {"window": 16, "sink_tokens": 16, "cached_tokens": 8},
        ((1, 2), (6, 8)),
    ),
    "sinks all cached": (
        ("window", 64, 8),
        {"window": 16, "sink_tokens": 4, "cached_tokens": 8},
        ((6, 8),),
    ),
    "sinks that touch the window": (
        ("window", 32, 8),
        {"window": 16, "sink_tokens": 16},
        ((0, 4),),
    ),
    "sinks of more than the prompt": (
        ("window", 32, 8),
        {"window": 16, "sink_tokens": 999},
        ((0, 4),),
    ),
    "sinks beside a window that nothing is left of": (
        ("window", 32, 8),
        {"window": 1, "sink_tokens": 4},
        ((0, 1),),
    ),
    "second attention chunk": (("chunk", 30, 8), {"window": 16}, ((2, 4),)),
    "attention chunk that begins with the next token": (("chunk", 32, 8), {"window": 16}, ()),
    "attention chunk, cached": (("chunk", 30, 8), {"window": 16, "cached_tokens": 24}, ((3, 4),)),
    "state": (("state", 30, 1), {}, ((0, 1),)),
    "state, prefix cached": (("state", 30, 1), {"cached_tokens": 29}, ((0, 1),)),
    "state of these very tokens cached": (("state", 30, 1), {"cached_tokens": 30}, ()),
    "state of no tokens": (("state", 0, 1), {}, ()),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_target_needs(name: str) -> None:
    args, options, extents = NEEDS[name]
    assert trims.needed(*args, **options) == extents


def test_every_kind_has_needs() -> None:
    assert {args[0] for args, _, _ in NEEDS.values()} == set(GROUP_KINDS)


@pytest.mark.parametrize(
    ("tokens", "chunk", "tokens_per_block", "stale"),
    [
        (0, 16, 8, 0),
        (15, 16, 8, 0),
        (16, 16, 8, 2),
        (31, 16, 8, 2),
        (32, 16, 8, 4),
        (13, 12, 8, 1),  # the block of tokens 8..15 holds a token of the second chunk
        (8192 * 3 + 1, 8192, 64, 384),
    ],
)
def test_blocks_that_left_an_attention_chunk(
    tokens: int, chunk: int, tokens_per_block: int, stale: int
) -> None:
    assert trims.stale_chunk(tokens, chunk, tokens_per_block) == stale


@pytest.mark.parametrize(
    ("first", "last", "extent"),
    [(False, False, (1, 3)), (True, False, (0, 3)), (False, True, (1, 4)), (True, True, (0, 4))],
)
def test_bounds_of_a_prefill_chunk(first: bool, last: bool, extent: tuple) -> None:
    assert trims.chunk_blocks(6, 13, 4, first=first, last=last) == extent


@pytest.mark.parametrize(
    ("blocks", "rank", "size", "local"),
    [
        (0, 0, 2, 0),
        (1, 0, 2, 1),
        (1, 1, 2, 0),
        (4, 1, 2, 2),
        (5, 0, 2, 3),
        (5, 1, 2, 2),
        (3, 3, 4, 0),
    ],
)
def test_blocks_of_one_rank(blocks: int, rank: int, size: int, local: int) -> None:
    assert trims.local_blocks(blocks, rank, size) == local


def test_local_and_global_ordinals() -> None:
    local = Span.from_runs([(0, [7, 8]), (3, [9])])
    strided = trims.to_global(local, 1, 4)
    assert strided == Span.from_runs([(1, [7]), (5, [8]), (13, [9])])
    assert trims.to_local(strided, 1, 4) == local
    assert trims.to_global(Span(), 3, 4) == trims.to_local(Span(), 3, 4) == Span()


def test_ranks_take_turns_block_by_block() -> None:
    trims.check_interleave(16, 16)
    with pytest.raises(UsageError, match="interleaves ranks every 1 tokens, must be one block of"):
        trims.check_interleave(1, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2}, "4 beams can't be moved with context parallelism over 2 ranks"),
        ({"chunked": True}, "4 beams can't be moved with a prefill streamed in chunks"),
        ({"evicted_blocks": 3}, "4 beams can't be moved with 3 evicted blocks"),
    ],
)
def test_beams_are_refused_with(options: dict, message: str) -> None:
    trims.check_beams(1, **options)
    trims.check_beams(4)
    with pytest.raises(UsageError, match=message):
        trims.check_beams(4, **options)


def test_tails_go_with_the_last_block_of_beam_0() -> None:
    ours, theirs = np.array([20, 21]), np.array([30, 31])
    source, target = trims.pair_tails(ours, theirs, np.array([2, 3]), 4)
    assert (source.tolist(), target.tolist()) == ([20, 21], [30, 31])
    for ordinals in ([], [1, 2]):
        source, target = trims.pair_tails(ours, theirs[:1], np.array(ordinals), 4)
        assert (source.tolist(), target.tolist()) == ([], []), "what does not move need not match"


REFUSALS: dict[str, tuple[Callable, tuple, dict, str]] = {
    "unknown kind": (trims.needed, ("ring", 8, 8), {}, "kind is 'ring'"),
    "tokens": (trims.needed, ("full", -1, 8), {}, "tokens is -1"),
    "block": (trims.needed, ("full", 8, 0), {}, "tokens_per_block is 0"),
    "cached below 0": (trims.needed, ("full", 8, 8), {"cached_tokens": -1}, "cached_tokens is -1"),
    "cached above the prompt": (
        trims.needed,
        ("state", 8, 1),
        {"cached_tokens": 9},
        "cached_tokens is 9, must be 0 to the prompt's 8",
    ),
    "window of a full group": (
        trims.needed,
        ("full", 8, 8),
        {"window": 4},
        "window is 4, must be 0",
    ),
    "window group without": (trims.needed, ("window", 8, 8), {}, "window is 0, must be 1"),
    "chunk group without": (trims.needed, ("chunk", 8, 8), {}, "attention chunk is 0"),
    "negative sinks": (
        trims.needed,
        ("window", 8, 8),
        {"window": 4, "sink_tokens": -1},
        "tokens is -1",
    ),
    "sinks of a chunk group": (
        trims.needed,
        ("chunk", 8, 8),
        {"window": 4, "sink_tokens": 4},
        "sink_tokens is 4, must be 0 for kind 'chunk'",
    ),
    "stale tokens": (trims.stale_window, (-1, 4, 8), {}, "tokens is -1"),
    "stale block": (trims.stale_window, (8, 4, 0), {}, "tokens_per_block is 0"),
    "stale chunk tokens": (trims.stale_chunk, (-1, 4, 8), {}, "tokens is -1"),
    "stale chunk block": (trims.stale_chunk, (8, 4, 0), {}, "tokens_per_block is 0"),
    "cached tokens": (trims.cached_blocks, (-1, 8), {}, "tokens is -1"),
    "cached block": (trims.cached_blocks, (8, 0), {}, "tokens_per_block is 0"),
    "chunk start": (
        trims.chunk_blocks,
        (-1, 4, 8),
        {"first": True, "last": False},
        "chunk start is -1",
    ),
    "chunk backwards": (
        trims.chunk_blocks,
        (8, 4, 8),
        {"first": False, "last": True},
        "chunk stop is 4, must be 8 or more",
    ),
    "chunk block": (trims.chunk_blocks, (0, 4, 0), {"first": True, "last": True}, "block is 0"),
    "global blocks": (trims.local_blocks, (-1, 0, 2), {}, "blocks is -1"),
    "local rank": (trims.local_blocks, (4, 2, 2), {}, "rank is 2, must be 0 to 1"),
    "to global rank": (trims.to_global, (Span(), -1, 2), {}, "rank is -1"),
    "to local size": (trims.to_local, (Span(), 0, 0), {}, "size is 0"),
    "another rank's block": (
        trims.to_local,
        (Span.from_slots([3, 4], first=2), 0, 2),
        {},
        "ordinal 3 is held by rank 1, not 0",
    ),
    "global ordinal too large": (
        trims.to_global,
        (Span.from_slots([3], first=2**30), 0, 2),
        {},
        "ordinal 2147483648 is above",
    ),
    "no beams": (trims.split_tails, ([1], 1, 0), {}, "beams is 0"),
    "length": (trims.split_tails, ([1], -1, 2), {}, "length of beam 0 is -1"),
    "more tails than beams": (
        trims.split_tails,
        ([10, 11, 12, 13], 2, 2),
        {},
        "4 slots are 2 of beam 0 and 2 tails, but 2 beams have at most 1",
    ),
    "beams below 1": (trims.check_beams, (0,), {}, "beams is 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_nonsense_is_refused_with_the_value(name: str) -> None:
    function, args, options, message = REFUSALS[name]
    with pytest.raises(UsageError, match=message):
        function(*args, **options)
