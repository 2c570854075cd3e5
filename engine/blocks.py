"""Ordinals and slots as arrays: reading them from callers and peers, checking and showing them.

Pure. Two rules: what is returned is int64 and the caller's no more; whatever is wrong with a list
is a UsageError that names the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Int64Array = NDArray[np.int64]

INT32_MAX: Final = 2**31 - 1  # slots and ordinals travel as int32
WIRE: Final = np.dtype("<i4")
EMPTY: Final = np.zeros(0, dtype=np.int64)
_RUNS_SHOWN_MAX: Final = 6


def read_ordinal(first: object) -> int:
    """One ordinal, also numpy's. Raises UsageError."""
    if isinstance(first, bool) or not isinstance(first, int | np.integer):
        raise UsageError(f"span ordinal {first!r} is {type(first).__name__}, must be an integer")
    if not 0 <= first <= INT32_MAX:
        raise UsageError(f"span ordinal {first} must be 0 to {INT32_MAX}")
    return int(first)


def read_integers(what: str, values: ArrayLike) -> Int64Array:
    """A list of ordinals or slots (`what` it is: "slot"), copied; not below its least value yet.

    Raises: UsageError for another shape or type, and for values above int32.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise UsageError(f"{what}s have shape {list(array.shape)}, must be one-dimensional")
    if array.size == 0:
        return EMPTY
    if array.dtype.kind not in "iu":
        raise UsageError(f"{what}s have type {array.dtype}, must be integers")
    high = int(array.max())
    if high > INT32_MAX:  # before the cast: a large unsigned value would turn negative
        raise UsageError(f"{what} {high} is above {INT32_MAX}")
    return array.astype(np.int64)


def read_wire(what: str, raw: bytes) -> Int64Array:
    """Little-endian int32, any values. Raises UsageError for bytes that are not whole ones."""
    if len(raw) % WIRE.itemsize:
        raise UsageError(f"span {what} have {len(raw)} bytes, must be a multiple of 4")
    return np.frombuffer(raw, dtype=WIRE).astype(np.int64)


def check_ordinals(ordinals: Int64Array) -> None:
    """Raise UsageError when ordinals are negative or do not ascend. Does not modify."""
    if ordinals.size and ordinals[0] < 0:
        raise UsageError(f"span ordinal {int(ordinals[0])} must be 0 to {INT32_MAX}")
    bad = np.flatnonzero(ordinals[1:] <= ordinals[:-1])
    if bad.size:
        one, two = ordinals[bad[0] : bad[0] + 2].tolist()
        raise UsageError(f"span ordinals must ascend: {two} follows {one}")
    if ordinals.size and ordinals[-1] > INT32_MAX:
        raise UsageError(f"span ordinal {int(ordinals[-1])} is above {INT32_MAX}")


def check_runs(firsts: Int64Array, counts: Int64Array) -> None:
    """Raise UsageError when runs (counts >= 1) overlap or are not sorted. Does not modify."""
    stops = firsts + counts
    if stops.size and stops[-1] - 1 > INT32_MAX:
        raise UsageError(f"span ordinal {int(stops[-1]) - 1} is above {INT32_MAX}")
    bad = np.flatnonzero(firsts[1:] < stops[:-1])
    if bad.size:
        at = int(bad[0])
        raise UsageError(
            f"span runs must be sorted and disjoint: the run at ordinal {int(firsts[at + 1])} "
            f"follows the run {int(firsts[at])}..{int(stops[at]) - 1}"
        )


def check_slots(slots: Int64Array) -> None:
    """Raise UsageError for a negative or a repeated slot. Does not modify."""
    if not slots.size:
        return
    ascending = np.sort(slots)
    if ascending[0] < 0:
        raise UsageError(f"slot {int(ascending[0])} is negative")
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if repeated.size:
        raise UsageError(f"slot {int(repeated[0])} appears twice in one span")


def check_rank(rank: int, size: int) -> None:
    """Raise UsageError when there is no context-parallel rank `rank` of `size`."""
    if size < 1:
        raise UsageError(f"context-parallel size is {size}, must be 1 or more")
    if not 0 <= rank < size:
        raise UsageError(f"context-parallel rank is {rank}, must be 0 to {size - 1}")


def check_units(tokens: int, tokens_per_block: int) -> None:
    """Raise UsageError when tokens can't be converted to blocks."""
    check_at_least("tokens", tokens, 0)
    check_at_least("tokens_per_block", tokens_per_block, 1)


def check_at_least(what: str, value: int, least: int) -> None:
    """Raise UsageError, naming `what`, when `value` is below `least`."""
    if value < least:
        raise UsageError(f"{what} is {value}, must be {least} or more")


def show(ordinals: Int64Array) -> str:
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
