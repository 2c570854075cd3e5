"""TensorRT-LLM's vectors on windows, prefix reuse and chunked prefill.

Its managers and slice builders trim lists and move their anchors, on either side; here the target
states extents, and a span is restricted to them. docs/vectors.md says where the numbers come from,
and names those where kvferry differs on purpose.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvferry.engine.spans import Span, blocks_for, shortfall
from kvferry.engine.trims import (
    chunk_blocks,
    needed,
    pair_tails,
    split_tails,
    stale_window,
    to_global,
)


def at(first: int, slots: object) -> Span:
    return Span.from_slots(slots, first)


# {id: (tokens, tokens per block, window, stale blocks, live blocks)}
WINDOWS = {
    "W1": (100, 32, 64, 1, 3),
    "W2": (97, 32, 64, 1, 3),
    "W3": (128, 32, 64, 2, 2),
    "W4": (31, 8, 16, 2, 2),
    "W5": (32, 8, 16, 2, 2),
    "W6": (33, 8, 16, 2, 3),
    "W7": (39, 8, 16, 3, 2),
    "W8": (40, 8, 16, 3, 2),
    "W9": (17, 16, 16, 0, 2),
    "W10": (64, 16, 1, 4, 0),
    "W11": (256, 128, 128, 1, 1),
    "W12": (257, 128, 128, 1, 2),
    "W13": (300, 128, 128, 1, 2),
    "W14": (512, 128, 128, 3, 1),
    "W15": (1150, 128, 133, 7, 2),
    "W15 1151": (1151, 128, 133, 7, 2),
    "W15 1152": (1152, 128, 133, 7, 2),
    "W16": (131072, 64, 4096, 1984, 64),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_leave_a_window(name: str) -> None:
    tokens, size, window, stale, live = WINDOWS[name]
    assert stale_window(tokens, window, size) == stale
    assert blocks_for(tokens, size) - stale == live
    extents = needed("window", tokens, size, window=window)
    assert extents == (((stale, stale + live),) if live else ())


WINDOW_16: dict[str, Any] = {"kind": "window", "window": 16}
WINDOW_24: dict[str, Any] = {"kind": "window", "window": 24}
WINDOW_32: dict[str, Any] = {"kind": "window", "window": 32}
WHOLE = at(0, [100, 101, 102, 103])

# {id: (tokens, policy, blocks of the target, what of them is needed)}, 8 tokens per block
POLICIES = {
    "D1": (32, {}, WHOLE, WHOLE),
    "D2": (32, WINDOW_16, WHOLE, at(2, [102, 103])),
    "D3": (32, WINDOW_16, at(2, [102, 103]), at(2, [102, 103])),
    "D4": (32, WINDOW_16, at(3, [103]), at(3, [103])),
    "D5": (32, {"cached_tokens": 16}, WHOLE, at(2, [102, 103])),
    "D6": (32, {**WINDOW_16, "cached_tokens": 24}, WHOLE, at(3, [103])),
    "D7": (32, {**WINDOW_16, "cached_tokens": 8}, at(2, [102, 103]), at(2, [102, 103])),
    "D9": (32, {**WINDOW_24, "cached_tokens": 16}, at(1, [10, 11, 12]), at(2, [11, 12])),
    "D10": (32, {**WINDOW_32, "cached_tokens": 8}, at(0, range(10, 14)), at(1, [11, 12, 13])),
    "D11": (32, {"cached_tokens": 32}, WHOLE, Span()),
    "D14": (32, WINDOW_16, to_global(at(0, [100, 102]), 0, 2), at(2, [102])),
    "D17": (32, WINDOW_16, Span(), Span()),
    "D18 reuse off": (128, {"cached_tokens": 0}, at(0, range(16)), at(0, range(16))),
    "D18 all groups": (128, {"cached_tokens": 64}, at(0, range(16)), at(8, range(8, 16))),
    "D18 window": (32, {**WINDOW_16, "cached_tokens": 24}, WHOLE, at(3, [103])),
    "G10": (32, WINDOW_16, at(2, [102, 103, 104]), at(2, [102, 103])),
    "G11": (32, {}, at(0, [100, 101]), at(0, [100, 101])),
    "G13": (48, {**WINDOW_32, "cached_tokens": 32}, at(0, range(100, 106)), at(4, [104, 105])),
    "G14": (32, {}, at(0, range(10, 14)).restrict(2, 4), at(2, [12, 13])),
    "G15": (16, {}, at(0, [10, 11]).restrict(5, 2), Span()),
}


def need_of(held: Span, tokens: int, size: int = 8, kind: Any = "full", **options: int) -> Span:
    return held.select(needed(kind, tokens, size, **options))


@pytest.mark.parametrize("name", POLICIES)
def test_a_target_needs_what_its_policy_leaves(name: str) -> None:
    tokens, policy, held, need = POLICIES[name]
    assert need_of(held, tokens, **policy) == need


def test_d8_a_source_trims_nothing_by_itself() -> None:
    need = need_of(WHOLE, 32, **WINDOW_16)
    ordinals, _, sources = need.intersect(at(0, range(10, 14)))
    assert (ordinals.tolist(), sources.tolist()) == ([2, 3], [12, 13])


# {id: (tokens, policy, beam 0's blocks, packed list, blocks that move, tails that move)}
BEAMS: dict[str, tuple[int, dict[str, Any], int, list[int], list[int], list[int]]] = {
    "D12": (32, WINDOW_16, 4, [100, 101, 102, 103, 200, 201, 202], [102, 103], [200, 201, 202]),
    "D13": (8, {"cached_tokens": 8}, 1, [10, 11, 12, 13], [], []),
    "G12": (16, {"cached_tokens": 16}, 2, [100, 101, 200, 201, 202], [], []),
}


@pytest.mark.parametrize("name", BEAMS)
def test_tails_are_needed_with_the_last_block(name: str) -> None:
    tokens, policy, length, packed, blocks, tails = BEAMS[name]
    chain, packed_tails = split_tails(packed, length, 4)
    need = need_of(at(0, chain), tokens, **policy)
    moved, _ = pair_tails(packed_tails, packed_tails, need.ordinals(), length)
    assert need.slots().tolist() == blocks
    assert moved.tolist() == tails


# ---------------------------------------------------------------- chunked prefill

EIGHT = at(0, range(8))
LATE = at(4, range(104, 108))

# {id: (tokens, tokens per block, tokens cached at the source, policy of the target, blocks of the
# source, chunks in tokens, what of each chunk moves)}
CHUNKS: dict[str, tuple[int, int, int, dict[str, Any], Span, list, list]] = {
    "F1": (32, 4, 0, {}, EIGHT, [(0, 6)], [at(0, [0])]),
    "F2": (
        32,
        4,
        0,
        {},
        EIGHT,
        [(0, 6), (6, 12), (12, 32)],
        [at(0, [0]), at(1, [1, 2]), at(3, range(3, 8))],
    ),
    "F3": (32, 4, 0, {}, EIGHT, [(0, 2), (5, 7)], [Span(), Span()]),
    "F4": (
        32,
        4,
        0,
        WINDOW_16,
        at(4, range(4, 8)),
        [(0, 16), (16, 32)],
        [Span(), at(4, range(4, 8))],
    ),
    "F5": (32, 4, 0, {}, EIGHT, [(0, 16)], [at(0, range(4))]),
    "F5 w32": (32, 4, 0, WINDOW_32, EIGHT, [(0, 16)], [at(0, range(4))]),
    "F5 w36": (32, 4, 0, {**WINDOW_32, "window": 36}, EIGHT, [(0, 16)], [at(0, range(4))]),
    "F6": (32, 4, 6, {}, EIGHT, [(6, 14)], [at(0, [0, 1, 2])]),
    "F7": (32, 4, 12, {}, EIGHT, [(12, 24)], [at(0, range(6))]),
    "F8": (32, 4, 12, {}, EIGHT, [(24, 32)], [at(6, [6, 7])]),
    "F8 nothing cached": (
        32,
        4,
        0,
        {},
        EIGHT,
        [(0, 16), (16, 32)],
        [at(0, range(4)), at(4, range(4, 8))],
    ),
    "F9": (32, 4, 12, {}, EIGHT, [(12, 32)], [EIGHT]),
    "F10": (32, 4, 0, {}, LATE, [(0, 16)], [Span()]),
    "F11": (32, 4, 0, {}, LATE, [(12, 24)], [at(4, [104, 105])]),
    "F13": (16, 4, 0, {}, at(0, range(4)), [(0, 8), (8, 16)], [at(0, [0, 1]), at(2, [2, 3])]),
    "F16": (
        128_000,
        128,
        0,
        {},
        at(0, range(1000)),
        [(0, 2048), (2048, 4096)],
        [at(0, range(16)), at(16, range(16, 32))],
    ),
    "F17": (
        128,
        8,
        0,
        WINDOW_32,
        at(0, range(16)),
        [(88, 104), (104, 128)],
        [at(12, [12]), at(13, [13, 14, 15])],
    ),
    "F17 evicted": (128, 8, 0, WINDOW_32, at(9, [9, 10, 11, 12]), [(88, 104)], [at(12, [12])]),
    "F18": (30, 4, 0, {}, EIGHT, [(0, 16), (16, 30)], [at(0, range(4)), at(4, range(4, 8))]),
    "F18 at once": (30, 4, 0, {}, EIGHT, [(0, 30)], [EIGHT]),
    "F19": (32, 4, 0, {}, EIGHT, [(0, 18), (18, 32)], [at(0, range(4)), at(4, range(4, 8))]),
    "D15": (32, 8, 0, WINDOW_16, WHOLE, [(0, 24), (24, 32)], [at(2, [102]), at(3, [103])]),
    "D16": (32, 8, 0, WINDOW_32, WHOLE, [(0, 24)], [at(0, [100, 101, 102])]),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_moves_what_it_completes_and_is_needed(name: str) -> None:
    tokens, size, cached, policy, have, chunks, moved = CHUNKS[name]
    need = need_of(at(0, range(blocks_for(tokens, size))), tokens, size, **policy)
    for (start, stop), part in zip(chunks, moved, strict=True):
        extent = chunk_blocks(start, stop, size, first=start == cached, last=stop == tokens)
        ordinals, _, slots = need.intersect(have.restrict(*extent))
        assert ordinals.tolist() == part.ordinals().tolist()
        assert slots.tolist() == part.slots().tolist()


def test_f12_a_source_that_is_short_is_named_with_what_it_lacks() -> None:
    assert str(shortfall(at(4, range(4)), 4, at(4, [104, 105]), 4, 32)) == "ordinals 6..7: 8 tokens"


def extents_of(blocks: int, chunk: int, cached: int = 0) -> list[tuple[int, int]]:
    """Extents of a prompt of whole blocks that is prefilled `chunk` blocks at a time."""
    tokens, edges = 4 * blocks, [*range(4 * cached, 4 * blocks, 4 * chunk), 4 * blocks]
    return [
        chunk_blocks(start, stop, 4, first=start == 4 * cached, last=stop == tokens)
        for start, stop in pairwise(edges)
    ]


@pytest.mark.parametrize(
    ("blocks", "chunk", "pieces"), [(10, 4, 3), (8, 4, 2), (8, 8, 1), (0, 4, 0), (3, 64, 1)]
)
def test_f14_pieces_of_a_prompt(blocks: int, chunk: int, pieces: int) -> None:
    assert len(extents_of(blocks, chunk)) == pieces


@pytest.mark.parametrize("cached", [0, 1, 5])
def test_f15_pieces_joined_are_the_prompt(cached: int) -> None:
    for have in (at(0, range(17)), at(0, range(50, 67))):
        pieces = [have.restrict(*extent).slots() for extent in extents_of(17, 4, cached)]
        assert np.concatenate(pieces).tolist() == have.slots().tolist()
