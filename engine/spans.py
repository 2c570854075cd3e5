"""Runs and spans: which blocks one side holds or needs of one layer group, and in which slots.

Owns the set operations over block ordinals and the wire form of a span. Pure, and made of numpy
operations only: a million blocks cost no Python loop. Two rules: a block's position comes from
its anchor, never from the length of a list; a span never changes once it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    Int64Array = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]

_INT32_MAX: Final = 2**31 - 1  # slots and ordinals travel as int32
_WIRE_SLOT: Final = np.dtype("<i4")
_RUNS_SHOWN_MAX: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive ordinals `[first, first + n)`, each with its slot: int64[n], read-only."""

    first: int
    slots: Int64Array


class Span:
    """Sorted disjoint runs, touching ones joined. May be empty, which differs from absent.

    Made by `from_slots`, `from_runs` or `from_wire`; every operation returns a new span. Equality
    compares ordinals and slots. Memory: 8 bytes per block and 16 per run.
    """

    __slots__ = ("_firsts", "_slots", "_starts")
    __hash__ = None  # type: ignore[assignment]  # holds arrays; compared, never a dict key

    _firsts: Int64Array  # [r] first ordinal of each run
    _starts: Int64Array  # [r + 1] where each run begins in _slots; the last is n
    _slots: Int64Array  # [n] in ordinal order

    def __init__(self) -> None:
        self._assign(_EMPTY, _EMPTY)

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
            firsts.append(_ordinal(first))
            parts.append(_integers(slots))
        counts = np.array([part.size for part in parts], dtype=np.int64)
        slots = np.concatenate(parts) if parts else _EMPTY
        return cls._checked(np.array(firsts, dtype=np.int64), counts, slots)

    @classmethod
    def from_wire(cls, runs: Sequence[Sequence[Any]]) -> Span:
        """Read what `to_wire` wrote, from a peer that is not trusted.

        Raises: UsageError naming the run and the value: negative or too large ordinals and
        slots, slot bytes not a multiple of 4, an empty run, runs unsorted or overlapping.
        """
        firsts: list[int] = []
        parts: list[bytes] = []
        for index, run in enumerate(runs):
            if len(run) != 2:
                raise UsageError(f"span run {index} has {len(run)} fields, must be [first, slots]")
            first, slots = run
            if not isinstance(slots, bytes | bytearray | memoryview):
                raise UsageError(f"span run {index}: slots are {type(slots).__name__}, not bytes")
            size = memoryview(slots).nbytes
            if size == 0 or size % _WIRE_SLOT.itemsize:
                raise UsageError(f"span run {index}: {size} bytes of slots, must be 4, 8, 12, ...")
            firsts.append(_ordinal(first))
            parts.append(bytes(slots))
        counts = np.array([len(part) // _WIRE_SLOT.itemsize for part in parts], dtype=np.int64)
        decoded = np.frombuffer(b"".join(parts), dtype=_WIRE_SLOT).astype(np.int64)
        return cls._checked(np.array(firsts, dtype=np.int64), counts, decoded)

    @classmethod
    def _checked(cls, firsts: Int64Array, counts: Int64Array, slots: Int64Array) -> Span:
        """Validate runs given as arrays: first ordinals [r], lengths [r], slots [sum]."""
        kept = counts > 0
        firsts, counts = firsts[kept], counts[kept]
        stops = firsts + counts
        if stops.size and int(stops[-1]) - 1 > _INT32_MAX:
            raise UsageError(f"span ordinal {int(stops[-1]) - 1} is above {_INT32_MAX}")
        bad = np.flatnonzero(firsts[1:] < stops[:-1])
        if bad.size:
            at = int(bad[0])
            raise UsageError(
                f"span runs must be sorted and disjoint: the run at ordinal {int(firsts[at + 1])} "
                f"follows the run {int(firsts[at])}..{int(stops[at]) - 1}"
            )
        _check_slots(slots)
        return cls._of(_expand(firsts, counts), slots)

    @classmethod
    def _of(cls, ordinals: Int64Array, slots: Int64Array) -> Span:
        """A span of ascending ordinals [n] and their slots [n], both known to be valid."""
        span = cls.__new__(cls)
        span._assign(ordinals, slots)
        return span

    def _assign(self, ordinals: Int64Array, slots: Int64Array) -> None:
        breaks = np.flatnonzero(np.diff(ordinals) != 1) + 1
        begins = np.concatenate(([0], breaks)).astype(np.int64) if ordinals.size else _EMPTY
        self._firsts = ordinals[begins]
        self._starts = np.append(begins, ordinals.size).astype(np.int64)
        self._slots = np.array(slots, dtype=np.int64)
        self._slots.flags.writeable = False

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

    def __len__(self) -> int:
        """The number of blocks."""
        return int(self._slots.size)

    def ordinals(self) -> Int64Array:
        """int64[n], ascending."""
        return _expand(self._firsts, np.diff(self._starts))

    def slots(self) -> Int64Array:
        """int64[n] in ordinal order, read-only."""
        return self._slots

    def to_wire(self) -> list[tuple[int, bytes]]:
        """`(first ordinal, slots as little-endian int32)` per run."""
        raw = self._slots.astype(_WIRE_SLOT).tobytes()
        edges = (self._starts * _WIRE_SLOT.itemsize).tolist()
        return [
            (first, raw[start:stop])
            for first, start, stop in zip(self._firsts.tolist(), edges[:-1], edges[1:], strict=True)
        ]

    # ------------------------------------------------------------ set operations, by ordinal

    def intersect(self, other: Span) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The ordinals that both hold: (ordinals, self's slots, other's slots).

        Shapes: three int64[k] arrays aligned with each other, in ordinal order.
        """
        ordinals = self.ordinals()
        held, where = other._find(ordinals)
        return ordinals[held], self._slots[held], other._slots[where[held]]

    def restrict(self, first: int, stop: int) -> Span:
        """The part with ordinals in `[first, stop)`; empty when `stop <= first`."""
        ordinals = self.ordinals()
        low, high = np.searchsorted(ordinals, (first, max(first, stop)))
        return Span._of(ordinals[low:high], self._slots[low:high])

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
            raise UsageError(f"union of spans that share ordinals {_show(both)}")
        ordinals = np.concatenate((self.ordinals(), other.ordinals()))
        slots = np.concatenate((self._slots, other._slots))
        _check_slots(slots)
        order = np.argsort(ordinals, kind="stable")
        return Span._of(ordinals[order], slots[order])

    def _find(self, ordinals: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Which of `ordinals` [n] are here, and where in `_slots` (valid only where True)."""
        if not self._slots.size:
            return np.zeros(ordinals.size, dtype=np.bool_), np.zeros(ordinals.size, dtype=np.int64)
        run = np.maximum(np.searchsorted(self._firsts, ordinals, side="right") - 1, 0)
        where = self._starts[run] + (ordinals - self._firsts[run])
        return (ordinals >= self._firsts[run]) & (where < self._starts[run + 1]), where

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
        return f"Span({_show(self.ordinals())})"


_EMPTY: Final = np.zeros(0, dtype=np.int64)


def missing(need: Span, have: Span) -> Span:
    """Coverage: the blocks of `need` whose ordinal is not in `have`, with need's slots."""
    return need.subtract(have)


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """How many blocks hold `tokens` tokens; the last one may be partly filled.

    Raises: UsageError for negative tokens or a block of less than one token.
    """
    if tokens < 0:
        raise UsageError(f"tokens is {tokens}, must be 0 or more")
    if tokens_per_block < 1:
        raise UsageError(f"tokens_per_block is {tokens_per_block}, must be 1 or more")
    return -(-tokens // tokens_per_block)


def _expand(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """The ordinals of runs: int64[sum(counts)]."""
    begins = np.cumsum(counts) - counts
    return np.repeat(firsts - begins, counts) + np.arange(counts.sum(), dtype=np.int64)


def _ordinal(first: object) -> int:
    if isinstance(first, bool) or not isinstance(first, int | np.integer):
        raise UsageError(f"span ordinal {first!r} is {type(first).__name__}, must be an integer")
    if not 0 <= first <= _INT32_MAX:
        raise UsageError(f"span ordinal {first} must be 0 to {_INT32_MAX}")
    return int(first)


def _integers(slots: ArrayLike) -> Int64Array:
    array = np.asarray(slots)
    if array.ndim != 1:
        raise UsageError(f"slots have shape {list(array.shape)}, must be one-dimensional")
    if array.size == 0:
        return _EMPTY
    if array.dtype.kind not in "iu":
        raise UsageError(f"slots have type {array.dtype}, must be integers")
    high = int(array.max())
    if high > _INT32_MAX:  # before the cast: a large unsigned value would turn negative
        raise UsageError(f"slot {high} is above {_INT32_MAX}")
    return array.astype(np.int64)


def _check_slots(slots: Int64Array) -> None:
    """Raise UsageError for a negative or a repeated slot. Does not modify `slots`."""
    if not slots.size:
        return
    ascending = np.sort(slots)
    if ascending[0] < 0:
        raise UsageError(f"slot {int(ascending[0])} is negative")
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if repeated.size:
        raise UsageError(f"slot {int(repeated[0])} appears twice in one span")


def _show(ordinals: Int64Array) -> str:
    """Ascending ordinals as inclusive ranges: "0..7, 12"."""
    if not ordinals.size:
        return ""
    breaks = np.flatnonzero(np.diff(ordinals) != 1)
    lows = ordinals[np.concatenate(([0], breaks + 1))].tolist()
    highs = ordinals[np.append(breaks, ordinals.size - 1)].tolist()
    ranges = [
        f"{low}..{high}" if low != high else f"{low}"
        for low, high in zip(lows[:_RUNS_SHOWN_MAX], highs[:_RUNS_SHOWN_MAX], strict=True)
    ]
    if len(lows) > _RUNS_SHOWN_MAX:
        ranges.append(f"{len(lows) - _RUNS_SHOWN_MAX} more runs")
    return ", ".join(ranges)
