"""Plan: from a template and pairs of slots to arrays of (source address, target address, bytes).

Owns the expansion of templates over slot pairs, merging and cutting. Pure. Two rules: every
address that leaves the planner was checked against its pool; the work is array operations, one
broadcast per stack of pools, whatever the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import InternalError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .align import Shift
    from .ports import MemoryKind
    from .template import End, Route, Stack, Template

    Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """`lengths[i]` bytes go from `source[i]` to `target[i]`: three int64[n], C-contiguous."""

    source: Int64Array
    target: Int64Array
    lengths: Int64Array

    def __len__(self) -> int:
        """The number of copies (descriptors)."""
        return int(self.source.size)

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The copies of one route."""

    source_memory: MemoryKind
    source_device: int
    target_memory: MemoryKind
    target_device: int
    copies: Copies


def plan(
    template: Template,
    source_slots: Int64Array,
    target_slots: Int64Array,
    shift: Shift | None = None,
) -> tuple[Flow, ...]:
    """Copy the block in `source_slots[i]` to `target_slots[i]`, for every i.

    Shapes: two int64[k], k >= 0. With equal block sizes no slot appears twice on a side (spans see
    to that) and `shift` is None; with unequal ones it says which tokens each pair shares. Sorted
    by source slot within each pool, neighbours that touch on both sides merged. One flow per pair
    of memories, none for k = 0. O(k * fragments) numpy work; callers bound k.

    Raises: UsageError naming the group, the slot and the bound when a slot is outside its pool,
    the lists differ in length, or `shift` is missing or not of this template.
    """
    if source_slots.shape != target_slots.shape:
        raise UsageError(
            f"group {template.target_group!r}: {source_slots.size} source slots and "
            f"{target_slots.size} target slots, must be as many"
        )
    if not source_slots.size:
        return ()
    _check_range("source", template.source_group, source_slots, template.source_slots)
    _check_range("target", template.target_group, target_slots, template.target_slots)
    _check_shift(template, shift)
    keys = (source_slots,) if shift is None else (shift.source_token, source_slots)
    order = np.lexsort(keys)
    parts: dict[Route, list[Copies]] = {}
    for tokens, stacks in template.stacks.items():
        alike = order if shift is None else order[shift.tokens[order] == tokens]
        for stack in stacks if alike.size else ():
            copies = _expand(stack, source_slots[alike], target_slots[alike], shift, alike)
            parts.setdefault(stack.route, []).append(copies)
    return tuple(Flow(*route, _together(copies)) for route, copies in parts.items())


def _expand(
    stack: Stack,
    source_slots: Int64Array,
    target_slots: Int64Array,
    shift: Shift | None,
    pairs: Int64Array,
) -> Copies:
    """Broadcast a stack over k pairs of slots, sorted by source slot and token.

    pairs: where these pairs stand in `shift`.
    """
    lengths = stack.lengths[:, :, None]
    if stack.dense:
        apart = (np.diff(source_slots) != 1) | (np.diff(target_slots) != 1)
        begins = np.concatenate(([0], np.flatnonzero(apart) + 1))
        lengths = lengths * np.diff(np.append(begins, source_slots.size))
        source_slots, target_slots = source_slots[begins], target_slots[begins]
    elif shift is None and source_slots.size < stack.lengths.shape[1]:
        # numpy is quickest with the longer axis innermost: [p, k, f]
        source = stack.source.by_block(source_slots)
        target = stack.target.by_block(target_slots)
        return _copies(stack, source, target, stack.lengths[:, None, :])
    if shift is None:
        source, target = (
            stack.source.by_fragment(source_slots),
            stack.target.by_fragment(target_slots),
        )
        return _copies(stack, source, target, lengths)
    source = stack.source.by_fragment(source_slots, shift.source_token[pairs])
    target = stack.target.by_fragment(target_slots, shift.target_token[pairs])
    return _join(_copies(stack, source, target, lengths), source.shape[-1])


def _copies(stack: Stack, source: Int64Array, target: Int64Array, lengths: Int64Array) -> Copies:
    """Addresses [p, ...] as copies, once they are known to lie in their pools."""
    _check_addresses("source", stack.source, source, lengths)
    _check_addresses("target", stack.target, target, lengths)
    return Copies(source.ravel(), target.ravel(), np.broadcast_to(lengths, source.shape).ravel())


def _join(copies: Copies, row: int) -> Copies:
    """Join neighbours that touch on both sides, within rows of `row` copies."""
    source, target, lengths = copies.source, copies.target, copies.lengths
    apart = np.ones(len(copies), dtype=np.bool_)
    apart[1:] = source[:-1] + lengths[:-1] != source[1:]
    apart[1:] |= target[:-1] + lengths[:-1] != target[1:]
    apart[::row] = True  # another fragment or pool
    begins = np.flatnonzero(apart)
    return Copies(source[begins], target[begins], np.add.reduceat(lengths, begins))


def _check_range(side: str, group: str, slots: Int64Array, bound: int) -> None:
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= bound:
        raise UsageError(
            f"group {group!r}: {side} slot {low if low < 0 else high} is not in 0..{bound - 1}"
        )


def _check_shift(template: Template, shift: Shift | None) -> None:
    sizes = template.source_tokens, template.target_tokens
    if (shift is None) != (sizes[0] == sizes[1]):
        raise UsageError(
            f"group {template.target_group!r}: blocks of {sizes[0]} and {sizes[1]} tokens are "
            f"planned {'with' if shift is None else 'without'} a shift"
        )
    if shift is None:
        return
    unknown = np.setdiff1d(shift.tokens, list(template.stacks))
    outside = (shift.source_token < 0) | (shift.source_token + shift.tokens > sizes[0])
    outside |= (shift.target_token < 0) | (shift.target_token + shift.tokens > sizes[1])
    if unknown.size or outside.any():
        raise UsageError(
            f"group {template.target_group!r}: a shift that is not of blocks of {sizes[0]} and "
            f"{sizes[1]} tokens"
        )


def _check_addresses(name: str, end: End, begins: Int64Array, lengths: Int64Array) -> None:
    """Every byte of every copy [p, k, f] lies in its own pool."""
    first = begins.min(axis=(1, 2))
    behind = (begins + lengths).max(axis=(1, 2))
    bad = np.flatnonzero((first < end.low) | (behind > end.high))
    if bad.size:
        at = int(bad[0])
        raise InternalError(
            f"planned {name} addresses {int(first[at]):#x}..{int(behind[at]):#x} leave their pool "
            f"{int(end.low[at]):#x}..{int(end.high[at]):#x}: a bug of the planner, or a layout "
            "that was never checked"
        )


def _together(copies: Sequence[Copies]) -> Copies:
    if len(copies) == 1:
        return copies[0]
    return Copies(
        np.concatenate([one.source for one in copies]),
        np.concatenate([one.target for one in copies]),
        np.concatenate([one.lengths for one in copies]),
    )


# ---------------------------------------------------------------- writes


class Cut:
    """Copies as writes of at most `descriptors_max` copies and `bytes_max` bytes, one at a time.

    Keeps the order; a copy of more than `bytes_max` bytes becomes several. Writes are views. One
    at a time, since each costs microseconds, and large blocks make thousands of them.

    Raises: UsageError for a bound below 1.
    """

    def __init__(self, copies: Copies, descriptors_max: int, bytes_max: int) -> None:
        if descriptors_max < 1 or bytes_max < 1:
            raise UsageError(
                f"descriptors_max is {descriptors_max} and bytes_max is {bytes_max}, "
                "must both be 1 or more"
            )
        self._descriptors_max, self._bytes_max = descriptors_max, bytes_max
        self._copies = _split(copies, bytes_max)
        self._ends = np.cumsum(self._copies.lengths)
        self._begin, self._done = 0, 0

    @property
    def is_over(self) -> bool:
        """True when nothing is left."""
        return self._begin == len(self._copies)

    def __iter__(self) -> Iterator[Copies]:
        """The writes that are left."""
        return self

    def __next__(self) -> Copies:
        """The next write."""
        if self.is_over:
            raise StopIteration
        fit = int(self._ends.searchsorted(self._done + self._bytes_max, "right"))
        part = slice(self._begin, min(fit, self._begin + self._descriptors_max))
        self._begin, self._done = part.stop, int(self._ends[part.stop - 1])
        copies = self._copies
        return Copies(copies.source[part], copies.target[part], copies.lengths[part])


def _split(copies: Copies, bytes_max: int) -> Copies:
    """Replace every copy of more than `bytes_max` bytes by pieces of at most that."""
    if not len(copies) or int(copies.lengths.max()) <= bytes_max:
        return copies
    pieces = -(-copies.lengths // bytes_max)
    index = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = index * bytes_max
    return Copies(
        np.repeat(copies.source, pieces) + done,
        np.repeat(copies.target, pieces) + done,
        np.minimum(np.repeat(copies.lengths, pieces) - done, bytes_max),
    )
