"""Align: which source block gives its bytes to which target block.

Owns the pairing of two spans of one group by the tokens that their blocks share, also where the
two sides have unequal block sizes, and the waiting of a stream until blocks are complete. Pure.
Two rules: position comes from ordinals alone, as an interval intersection; a target block is
paired only once the source holds all of its tokens below the transferred count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .spans import Span, blocks_for, shortfall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    BoolArray = NDArray[np.bool_]
    Int64Array = NDArray[np.int64]


class Shift(NamedTuple):
    """Where in its blocks each of k pairs begins to share tokens, and how many: three int64[k]."""

    source_token: Int64Array
    target_token: Int64Array
    tokens: Int64Array


class Pairs(NamedTuple):
    """k pairs of blocks that share tokens, in token order: int64[k] each.

    ordinals: the target's. shift: None where both sides have equal block sizes; there, no block
    is in two pairs.
    """

    ordinals: Int64Array
    source_slots: Int64Array
    target_slots: Int64Array
    shift: Shift | None

    def part(self, start: int, stop: int) -> Pairs:
        """Pairs `start` to `stop`, as views."""
        cut = slice(start, stop)
        shift = None if self.shift is None else Shift(*(array[cut] for array in self.shift))
        return Pairs(self.ordinals[cut], self.source_slots[cut], self.target_slots[cut], shift)


def align(have: Span, source_tokens: int, need: Span, target_tokens: int) -> Pairs:
    """Every pair of a held and a needed block that share a token.

    source_tokens, target_tokens: tokens per block of the two sides.
    """
    if source_tokens == target_tokens:
        ordinals, target_slots, source_slots = need.intersect(have)
        return Pairs(ordinals, source_slots, target_slots, None)
    needed = need.ordinals()
    first = needed * target_tokens // source_tokens
    counts = ((needed + 1) * target_tokens - 1) // source_tokens - first + 1
    at = np.repeat(np.arange(needed.size), counts)
    begins = np.cumsum(counts) - counts
    sources = first[at] + np.arange(at.size) - begins[at]
    held, source_slots = have.find(sources)
    at, sources = at[held], sources[held]
    ahead = sources * source_tokens - needed[at] * target_tokens
    source_token, target_token = np.maximum(-ahead, 0), np.maximum(ahead, 0)
    tokens = np.minimum(source_tokens - source_token, target_tokens - target_token)
    shift = Shift(source_token, target_token, tokens)
    return Pairs(needed[at], source_slots, need.slots()[at], shift)


def shared_tokens(need: Span, target_tokens: int, source_tokens: int, tokens: int) -> int:
    """How many tokens' bytes a transfer of `tokens` tokens moves into `need`.

    need: has no block beyond the count. Whole blocks move; with unequal block sizes only as much
    of the last one as the source's own last block has.
    """
    if need.is_empty:
        return 0
    behind = (int(need.ordinals()[-1]) + 1) * target_tokens
    moved = blocks_for(tokens, source_tokens) * source_tokens
    return len(need) * target_tokens - (max(0, behind - moved) if moved else 0)


class Stream:
    """One group of one transfer: source blocks come in any order, complete pairs go out.

    With unequal block sizes a block can be in several pairs. So that it is planned, and released,
    in one piece, pairs leave by the period: the fewest tokens that are whole blocks on both sides.
    """

    def __init__(self, need: Span, target_tokens: int, source_tokens: int, tokens: int) -> None:
        self._need, self._needed = need, need.ordinals()
        self._target_tokens, self._source_tokens = target_tokens, source_tokens
        self._tokens = tokens
        self._period = math.lcm(target_tokens, source_tokens)
        self._waiting = Span()

    def add(self, span: Span) -> tuple[Pairs, Int64Array]:
        """Take ready source blocks: (pairs that are complete now, slots that nobody needs)."""
        if self._source_tokens == self._target_tokens:
            pairs = align(span, self._source_tokens, self._need, self._target_tokens)
            unneeded = (
                span.subtract(self._need).slots() if len(pairs.ordinals) < len(span) else _NONE
            )
            return pairs, unneeded
        needed = self._is_needed(span.ordinals())
        self._waiting = self._waiting.union(span.where(needed))
        ready, need = self._take_complete()
        pairs = align(ready, self._source_tokens, need, self._target_tokens)
        return pairs, span.slots()[~needed]

    def drop(self) -> Int64Array:
        """Give up: the slots of source blocks that were never paired."""
        slots, self._waiting = self._waiting.slots(), Span()
        return slots

    def _is_needed(self, ordinals: Int64Array) -> BoolArray:
        """Which source blocks share a token below the count with a needed block."""
        first = ordinals * self._source_tokens // self._target_tokens
        last = ((ordinals + 1) * self._source_tokens - 1) // self._target_tokens
        low, high = (
            np.searchsorted(self._needed, first, "left"),
            np.searchsorted(self._needed, last, "right"),
        )
        return (low < high) & (ordinals < blocks_for(self._tokens, self._source_tokens))

    def _take_complete(self) -> tuple[Span, Span]:
        """The waiting source blocks of complete periods, and what is needed there."""
        if self._waiting.is_empty:
            return Span(), Span()
        periods = self._waiting.ordinals() * self._source_tokens // self._period
        blocks = self._period // self._target_tokens
        need = self._need.restrict(int(periods[0]) * blocks, (int(periods[-1]) + 1) * blocks)
        lacking = shortfall(
            need, self._target_tokens, self._waiting, self._source_tokens, self._tokens
        )
        complete = ~np.isin(periods, lacking.ordinals // blocks)
        ready = self._waiting.where(complete)
        self._waiting = self._waiting.where(~complete)
        return ready, need


def steps(pairs: Pairs, target_tokens: int, source_tokens: int, size: int) -> Iterator[Pairs]:
    """Cut pairs into steps of bounded work: `size` pairs, or what one period needs beyond it.

    No source or target block is in two steps.
    """
    period = math.lcm(target_tokens, source_tokens) // target_tokens
    start = 0
    while start < pairs.ordinals.size:
        stop = min(start + size, pairs.ordinals.size)
        if pairs.shift is not None:
            behind = (int(pairs.ordinals[stop - 1]) // period + 1) * period
            stop = int(np.searchsorted(pairs.ordinals, behind))
        yield pairs.part(start, stop)
        start = stop


_NONE = np.zeros(0, dtype=np.int64)
