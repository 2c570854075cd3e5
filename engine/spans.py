"""Runs and spans: which blocks one side holds or needs of one layer group, and in which slots.

Owns the set operations over block ordinals and the wire form of a span. Pure, and made of numpy
operations only: a million blocks cost no Python loop, in one run or in a million. Two rules: a
block's position comes from its anchor, never from the length of a list; a span never changes
once it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .blocks import (
    EMPTY,
    WIRE,
    check_at_least,
    check_ordinals,
    check_rank,
    check_runs,
    check_slots,
    check_units,
    read_integers,
    read_ordinal,
    read_wire,
    show,
)
from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    Int64Array = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive ordinals `[first, first + n)`, each with its slot: int64[n], read-only."""

    first: int
    slots: Int64Array


class Span:
    """Sorted disjoint runs, touching ones joined. May be empty, which differs from absent.

    Made by the `from_` methods; every operation returns a new span. Equality compares ordinals
    and slots. Memory: `nbytes`.
    """

    __slots__ = ("_firsts", "_slots", "_starts")
    __hash__ = None  # type: ignore[assignment]  # holds arrays; compared, never a dict key

    _firsts: Int64Array  # [r] first ordinal of each run
    _starts: Int64Array  # [r + 1] where each run begins in _slots; the last is n
    _slots: Int64Array  # [n] in ordinal order, read-only; may be a view of another span's

    def __init__(self) -> None:
        self._firsts, self._starts, self._slots = EMPTY, np.zeros(1, dtype=np.int64), EMPTY

    # ------------------------------------------------------------ making

    @classmethod
    def from_slots(cls, slots: ArrayLike, first: int = 0) -> Span:
        """One run: the block at ordinal `first + i` lies in `slots[i]`.

        Shapes: slots int[n], any integer type; copied. n = 0 gives the empty span.
        Raises: UsageError for a negative or repeated slot, a negative `first`, or a shape or
        type that is not a list of integers.
        """
        return cls.from_runs([(first, slots)])

    @classmethod
    def from_runs(cls, runs: Iterable[tuple[int, ArrayLike]]) -> Span:
        """A span of `(first_ordinal, slots)` runs, in order and disjoint; empty ones vanish.

        Raises: UsageError as `from_slots`, and for runs that overlap or are not sorted.
        """
        firsts: list[int] = []
        parts: list[Int64Array] = []
        for first, slots in runs:
            firsts.append(read_ordinal(first))
            parts.append(read_integers("slot", slots))
        counts = np.array([part.size for part in parts], dtype=np.int64)
        kept = counts > 0
        slots = np.concatenate([EMPTY, *parts])
        return cls._checked(np.array(firsts, dtype=np.int64)[kept], counts[kept], slots)

    @classmethod
    def from_table(cls, slots: ArrayLike, first: int = 0, hole: int = -1) -> Span:
        """A block table: the block at ordinal `first + i` lies in `slots[i]`, except in holes.

        hole: the slot that means "no block here": -1 for TensorRT-LLM, 0 (the null block) for
        vLLM. It may repeat.
        Shapes and errors as `from_slots`.
        """
        first, table = read_ordinal(first), read_integers("slot", slots)
        held = np.flatnonzero(table != hole)
        return cls.from_blocks(first + held, table[held])

    @classmethod
    def from_blocks(cls, ordinals: ArrayLike, slots: ArrayLike) -> Span:
        """The block at `ordinals[i]`, ascending, lies in `slots[i]`.

        Shapes: both int[n], any integer type; copied.
        Raises: UsageError as `from_slots`, and for ordinals that do not ascend.
        """
        where, what = read_integers("ordinal", ordinals), read_integers("slot", slots)
        if where.size != what.size:
            raise UsageError(f"{where.size} ordinals have {what.size} slots")
        check_ordinals(where)
        check_slots(what)
        return cls._of(where, what)

    @classmethod
    def from_wire(cls, firsts: bytes, counts: bytes, slots: bytes) -> Span:
        """Read what `to_wire` wrote, from a peer that is not trusted.

        Raises: UsageError naming the field or run and the value: bytes that are not whole int32,
        fields that do not fit each other, a run of less than one block, negative or too large
        ordinals and slots, repeated slots, runs unsorted or overlapping.
        """
        begin, size = read_wire("firsts", firsts), read_wire("counts", counts)
        held = read_wire("slots", slots)
        if begin.size != size.size:
            raise UsageError(f"span has {begin.size} firsts and {size.size} counts")
        for name, values, least in (("first", begin, 0), ("count", size, 1)):
            bad = np.flatnonzero(values < least)
            if bad.size:
                at = int(bad[0])
                raise UsageError(f"span run {at}: {name} is {int(values[at])}, at least {least}")
        if int(size.sum()) != held.size:
            raise UsageError(f"span counts are {int(size.sum())} in all, for {held.size} slots")
        return cls._checked(begin, size, held)

    @classmethod
    def _checked(cls, firsts: Int64Array, counts: Int64Array, slots: Int64Array) -> Span:
        """Validate runs given as arrays: first ordinals [r], lengths [r] >= 1, slots [sum]."""
        check_runs(firsts, counts)
        check_slots(slots)
        return cls._joined(firsts, counts, slots)

    @classmethod
    def _joined(cls, firsts: Int64Array, counts: Int64Array, slots: Int64Array) -> Span:
        """A span of runs known to be valid; joins those that touch. O(runs): takes `slots` over."""
        opens = np.ones(firsts.size, dtype=np.bool_)
        opens[1:] = firsts[1:] != (firsts + counts)[:-1]
        span = cls.__new__(cls)
        span._firsts = firsts[opens]
        span._starts = np.append((np.cumsum(counts) - counts)[opens], slots.size)
        span._slots = slots
        span._slots.flags.writeable = False
        return span

    @classmethod
    def _of(cls, ordinals: Int64Array, slots: Int64Array) -> Span:
        """A span of ascending ordinals [n] and their slots [n], known to be valid. O(n)."""
        begins = np.flatnonzero(np.diff(ordinals, prepend=-2) != 1)
        return cls._joined(ordinals[begins], np.diff(begins, append=ordinals.size), slots)

    # ------------------------------------------------------------ reading

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs, in order."""
        edges = self._starts.tolist()
        return tuple(
            Run(first, self._slots[start:stop])
            for first, start, stop in zip(self._firsts.tolist(), edges[:-1], edges[1:], strict=True)
        )

    @property
    def is_empty(self) -> bool:
        """True when the span has no block."""
        return not self._slots.size

    @property
    def nbytes(self) -> int:
        """Bytes of memory: 8 per block and 16 per run."""
        return 8 * len(self) + 16 * int(self._firsts.size)

    def __len__(self) -> int:
        """The number of blocks."""
        return int(self._slots.size)

    def ordinals(self) -> Int64Array:
        """int64[n], ascending."""
        return _expand(self._firsts, np.diff(self._starts))

    def slots(self) -> Int64Array:
        """int64[n] in ordinal order, read-only."""
        return self._slots

    def to_wire(self) -> tuple[bytes, bytes, bytes]:
        """(first ordinals, counts, slots) of the runs, each as little-endian int32."""
        parts = (self._firsts, np.diff(self._starts), self._slots)
        firsts, counts, slots = (part.astype(WIRE).tobytes() for part in parts)
        return firsts, counts, slots

    # ------------------------------------------------------------ parts

    def restrict(self, first: int, stop: int) -> Span:
        """The part with ordinals in `[first, stop)`; empty when `stop <= first`.

        Bounds: O(log runs + runs of the result). Its slots are a view of self's.
        """
        low_run, low = self._seek(first)
        high_run, high = self._seek(max(first, stop))
        if low == high:
            return Span()
        last = high_run + int(high > self._starts[high_run])  # that run begins before `stop`
        firsts = self._firsts[low_run:last].copy()
        firsts[0] += low - self._starts[low_run]
        edges = np.clip(self._starts[low_run : last + 1], low, high)
        return Span._joined(firsts, np.diff(edges), self._slots[low:high])

    def select(self, extents: Iterable[tuple[int, int]]) -> Span:
        """The part with ordinals in any of `[first, stop)`, sorted and disjoint: sinks + window.

        Raises: UsageError for extents that overlap or are not sorted.
        """
        parts, end = [Span()], 0
        for first, stop in extents:
            if first < end:
                raise UsageError(f"extent [{first}, {stop}) begins before {end}, where one ended")
            parts.append(self.restrict(first, stop))
            end = max(first, stop)
        return Span._joined(
            np.concatenate([part._firsts for part in parts]),
            np.concatenate([np.diff(part._starts) for part in parts]),
            np.concatenate([part._slots for part in parts]),
        )

    def clip(self, first_token: int, stop_token: int, tokens_per_block: int) -> Span:
        """The blocks that overlap the tokens `[first_token, stop_token)`.

        Raises: UsageError for negative tokens or a block of less than one token.
        """
        check_at_least("first token", first_token, 0)
        stop = blocks_for(stop_token, tokens_per_block)
        if stop_token <= first_token:
            return Span()
        return self.restrict(first_token // tokens_per_block, stop)

    def stride(self, rank: int, size: int) -> Span:
        """The blocks that rank `rank` of `size` holds: those with `ordinal % size == rank`.

        Raises: UsageError for a rank that is not in `[0, size)`.
        """
        check_rank(rank, size)
        return self.where(self.ordinals() % size == rank)

    def _seek(self, ordinal: int) -> tuple[int, int]:
        """(run, place in `_slots`) of the first block at `ordinal` or behind it."""
        run = int(np.searchsorted(self._firsts, ordinal, side="right")) - 1
        if run < 0:
            return 0, 0
        place = int(self._starts[run]) + ordinal - int(self._firsts[run])
        stop = int(self._starts[run + 1])
        return (run, place) if place < stop else (run + 1, stop)

    # ------------------------------------------------------------ set operations, by ordinal

    def intersect(self, other: Span) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The ordinals that both hold: (ordinals, self's slots, other's slots).

        Shapes: three int64[k] arrays aligned with each other, in ordinal order.
        """
        ordinals = self.ordinals()
        held, where = other._find(ordinals)
        return ordinals[held], self._slots[held], other._slots[where[held]]

    def subtract(self, other: Span) -> Span:
        """The blocks of self whose ordinal is not in `other`, with self's slots."""
        ordinals = self.ordinals()
        held, _ = other._find(ordinals)
        return Span._of(ordinals[~held], self._slots[~held])

    def union(self, other: Span) -> Span:
        """Both spans as one.

        Raises: UsageError naming the ordinals that both hold, or a slot that both use.
        """
        both = self.intersect(other)[0]
        if both.size:
            raise UsageError(f"union of spans that share ordinals {show(both)}")
        ordinals = np.concatenate((self.ordinals(), other.ordinals()))
        slots = np.concatenate((self._slots, other._slots))
        check_slots(slots)
        order = np.argsort(ordinals, kind="stable")
        return Span._of(ordinals[order], slots[order])

    def find(self, ordinals: ArrayLike) -> tuple[BoolArray, Int64Array]:
        """Look ordinals up: (which of them are here: bool[n], the slots of those: int64[k])."""
        held, where = self._find(np.asarray(ordinals, dtype=np.int64))
        return held, self._slots[where[held]]

    def numbered(self) -> Span:
        """The same ordinals, each in the slot of its own number: for sets without slots."""
        return Span._of(self.ordinals(), self.ordinals())

    def where(self, kept: BoolArray) -> Span:
        """The blocks for which `kept` (bool[n], in ordinal order) is true."""
        return Span._of(self.ordinals()[kept], self._slots[kept])

    def _find(self, ordinals: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Which of `ordinals` [n] are here, and where in `_slots` (valid only where True)."""
        if not self._slots.size:
            return np.zeros(ordinals.size, dtype=np.bool_), np.zeros(ordinals.size, dtype=np.int64)
        run = np.maximum(np.searchsorted(self._firsts, ordinals, side="right") - 1, 0)
        where = self._starts[run] + (ordinals - self._firsts[run])
        return (ordinals >= self._firsts[run]) & (where < self._starts[run + 1]), where

    def _tokens_below(self, tokens: Int64Array, tokens_per_block: int) -> Int64Array:
        """How many tokens below each of `tokens` [n] lie in a block: int64[n]."""
        if self.is_empty:
            return np.zeros(tokens.size, dtype=np.int64)
        begins = self._firsts * tokens_per_block
        run = np.maximum(np.searchsorted(begins, tokens, side="right") - 1, 0)
        counts = self._starts[run + 1] - self._starts[run]
        inside = np.clip(tokens - begins[run], 0, counts * tokens_per_block)
        below: Int64Array = self._starts[run] * tokens_per_block + inside
        return below

    # ------------------------------------------------------------ comparing, showing

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Span):
            return NotImplemented
        return (
            np.array_equal(self._firsts, other._firsts)
            and np.array_equal(self._starts, other._starts)
            and np.array_equal(self._slots, other._slots)
        )

    def __repr__(self) -> str:
        return f"Span({show(self.ordinals())})"


@dataclass(frozen=True, slots=True, eq=False)
class Shortfall:
    """Needed tokens that nobody holds: how many, and the needed blocks (int64[n]) they are in.

    As text: "ordinals 4..7, 12: 96 tokens", or "0 tokens".
    """

    tokens: int
    ordinals: Int64Array

    def __str__(self) -> str:
        where = f"ordinals {show(self.ordinals)}: " if self.tokens else ""
        return f"{where}{self.tokens} tokens"


def shortfall(
    need: Span,
    need_tokens_per_block: int,
    have: Span,
    have_tokens_per_block: int,
    tokens: int,
) -> Shortfall:
    """Coverage: the tokens below `tokens` that are in a block of `need` and in none of `have`.

    Raises: UsageError for negative tokens or a block of less than one token.
    """
    ordinals = need.restrict(0, blocks_for(tokens, need_tokens_per_block)).ordinals()
    held = have.restrict(0, blocks_for(tokens, have_tokens_per_block))
    low = ordinals * need_tokens_per_block
    high = np.minimum(low + need_tokens_per_block, tokens)
    lacking = high - low
    lacking -= held._tokens_below(high, have_tokens_per_block)
    lacking += held._tokens_below(low, have_tokens_per_block)
    return Shortfall(int(lacking.sum()), ordinals[lacking > 0])


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """How many blocks hold `tokens` tokens; the last one may be partly filled.

    Raises: UsageError for negative tokens or a block of less than one token.
    """
    check_units(tokens, tokens_per_block)
    return -(-tokens // tokens_per_block)


def _expand(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """The ordinals of runs: int64[sum(counts)]."""
    begins = np.cumsum(counts) - counts
    return np.repeat(firsts - begins, counts) + np.arange(counts.sum(), dtype=np.int64)
