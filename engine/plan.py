"""Plan: from two layouts and pairs of slots to arrays of (source address, target address, bytes).

Owns the intersection of boxes, copy templates, their expansion, merging and cutting. Pure. Two
rules: every address that leaves the planner was checked against its pool; a template depends on
two layouts only, never on a request.

The boxes of two sides are intersected tensor by tensor and folded into the longest runs that are
contiguous on both sides (`make_template`, once per pair of layouts). A request then costs one
numpy broadcast of that template over its slot pairs (`plan`), and `cut` makes writes of it.
So far the sides may differ in strides, storage order, pools and in how layers and kinds are
spread over tensors; head, token and dim ranges and the block size must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .boxes import Box, Fragments, fold, join
from .errors import InternalError, Refused, UsageError
from .layout import AXIS_NAMES, FRAGMENTS_PER_BLOCK_MAX, Group, Layout, Pool, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .layout import AxisName
    from .ports import MemoryKind

    Int64Array = NDArray[np.int64]

FRAGMENT_BYTES_MIN: Final = 512  # a smaller mean is refused unless the caller allows it
FRAGMENT_BYTES_WARN: Final = 2048  # a smaller mean is worth a warning

_EQUAL_AXES: Final[tuple[AxisName, ...]] = ("head", "token", "dim")
_SPREAD_AXES: Final[tuple[AxisName, ...]] = ("layer", "kind")  # may be cut differently


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


class Route(NamedTuple):
    """From which memory to which memory copies go: what one posted write has in common."""

    source_memory: MemoryKind
    source_device: int
    target_memory: MemoryKind
    target_device: int


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The copies of one route."""

    source_memory: MemoryKind
    source_device: int
    target_memory: MemoryKind
    target_device: int
    copies: Copies


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One end of a stack's p pool pairs: address of a fragment = base + slot * stride."""

    base: Int64Array  # [p, 1, f]
    stride: Int64Array  # [p, 1, 1]
    low: Int64Array  # [p] first address of the pool
    high: Int64Array  # [p] first address behind the pool

    def expand(self, slots: Int64Array) -> Int64Array:
        """Addresses [p, k, f] of slots [k]."""
        return self.base + slots[None, :, None] * self.stride


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """p pool pairs of one route with f fragments per block each, expanded in one broadcast.

    dense: a block is one fragment that fills its slot on both sides, so that neighbouring slots
    join. Where it does not, no two blocks touch on both sides, but for the ends of a slot that is
    full on both sides and yet in pieces: one join in f, not worth looking for.
    """

    route: Route
    source: _Side
    target: _Side
    lengths: Int64Array  # [p, 1, f]
    dense: bool


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """How one block of a source group becomes one block of a target group.

    Valid as long as both layouts are; made by `make_template`.
    """

    source_group: str
    target_group: str
    source_slots: int  # slots that every source pool of the group has
    target_slots: int
    fragments_per_block: int
    block_bytes: int
    stacks: tuple[_Stack, ...]

    @property
    def mean_fragment_bytes(self) -> int:
        """Bytes of a mean fragment before neighbouring blocks merge, rounded down."""
        return self.block_bytes // self.fragments_per_block


# ---------------------------------------------------------------- once per pair of layouts


def make_template(
    source: Layout,
    source_group: str,
    target: Layout,
    target_group: str,
    *,
    fragment_bytes_min: int = FRAGMENT_BYTES_MIN,
) -> Template:
    """Intersect the boxes of two groups. Both layouts have passed `check`.

    Every coordinate of every target tensor that is not optional gets exactly one source. What
    the source holds beyond that stays where it is. `fragment_bytes_min` = 0 allows any layout.

    Raises: UsageError for a group that is not there; Refused (by="peer", code="geometry") naming
    group, field or axis and both values when the sides don't fit; Refused (code="fragments") when
    they fit only in pieces smaller than `fragment_bytes_min` on average.
    """
    ours, theirs = source.group(source_group), target.group(target_group)
    where = f"group {ours.name!r} to {theirs.name!r}"
    for field in ("kind", "tokens_per_block", "window"):
        _require_equal(where, field, getattr(ours, field), getattr(theirs, field))
    holdings = _Holdings(ours)
    pieces: dict[tuple[str, str], list[Fragments]] = {}
    fragments = 0
    for tensor in theirs.tensors:
        for match in _sources_of(tensor, holdings, where):
            box = _intersect(match, tensor)
            fragments += box.count
            if fragments > FRAGMENTS_PER_BLOCK_MAX:
                raise _misfit(f"{where}: more than {FRAGMENTS_PER_BLOCK_MAX} fragments per block")
            pieces.setdefault((match.pool, tensor.pool), []).append(box.fragments())
    if not pieces:
        raise _misfit(f"{where}: nothing to copy: no tensor of the target has a source")
    joined = {pair: join(parts) for pair, parts in pieces.items()}
    template = Template(
        source_group=ours.name,
        target_group=theirs.name,
        source_slots=source.slots(ours.name),
        target_slots=target.slots(theirs.name),
        fragments_per_block=sum(part.lengths.size for part in joined.values()),
        block_bytes=sum(int(part.lengths.sum()) for part in joined.values()),
        stacks=_stack(joined, source, target),
    )
    if template.mean_fragment_bytes < fragment_bytes_min:
        raise Refused(
            f"{where}: a block of {template.block_bytes} bytes falls into "
            f"{template.fragments_per_block} fragments of {template.mean_fragment_bytes} bytes on "
            f"average, the least allowed is {fragment_bytes_min}; store the axes of both sides in "
            "the same order, or allow smaller fragments",
            by="peer",
            code="fragments",
        )
    return template


class _Holdings:
    """The source's tensors by role, with their layer and kind ranges as arrays."""

    def __init__(self, group: Group) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        for tensor in group.tensors:
            self.tensors.setdefault(tensor.role, []).append(tensor)
        self._ranges = {
            role: np.array([[t.range(axis) for axis in _SPREAD_AXES] for t in tensors])
            for role, tensors in self.tensors.items()
        }

    def overlapping(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of the same role that share layers and kinds with `tensor`."""
        ranges = self._ranges.get(tensor.role)
        if ranges is None:
            return []
        wanted = np.array([tensor.range(axis) for axis in _SPREAD_AXES])
        shared = (ranges[:, :, 0] < wanted[:, 1]) & (wanted[:, 0] < ranges[:, :, 1])
        return [self.tensors[tensor.role][at] for at in np.flatnonzero(shared.all(axis=1))]


def _sources_of(tensor: Tensor, holdings: _Holdings, where: str) -> list[Tensor]:
    """The source tensors that together hold all of one target tensor, [] if it goes without."""
    matches = holdings.overlapping(tensor)
    if not matches and tensor.optional:
        return []
    held = 0
    for match in matches:
        at = f"{where}: {tensor}"
        _require_equal(at, "dtype", match.dtype, tensor.dtype)
        _require_equal(at, "item_bytes", match.item_bytes, tensor.item_bytes)
        for axis in _EQUAL_AXES:
            if match.range(axis) != tensor.range(axis):
                raise _misfit(
                    f"{at}: axis {axis!r} covers {_show(match.range(axis))} at the source and "
                    f"{_show(tensor.range(axis))} at the target, must be equal"
                )
        held += _intersect(match, tensor).bytes
    if held != tensor.block_bytes:
        raise _misfit(_shortfall(where, tensor, holdings))
    return matches


def _shortfall(where: str, tensor: Tensor, holdings: _Holdings) -> str:
    """Say what the source lacks of a target tensor: the role, or part of an axis."""
    same = holdings.tensors.get(tensor.role)
    if not same:
        roles = sorted(holdings.tensors)
        return f"{where}: {tensor} has no source; the source has the roles {roles}"
    held = "; ".join(
        f"axis {axis!r} covers {', '.join(sorted({_show(one.range(axis)) for one in same})[:8])} "
        f"at the source and {_show(tensor.range(axis))} at the target"
        for axis in _SPREAD_AXES
    )
    return f"{where}: {tensor} is not all held by the source: {held}"


def _require_equal(where: str, field: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise _misfit(f"{where}: {field} is {ours!r} at the source and {theirs!r} at the target")


def _misfit(message: str) -> Refused:
    return Refused(message, by="peer", code="geometry")


def _show(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}..{bounds[1] - 1}"


def _intersect(source: Tensor, target: Tensor) -> Box:
    """What two tensors that overlap on every axis share."""
    source_offset, target_offset = source.offset, target.offset
    axes = []
    for axis in AXIS_NAMES:
        (source_low, source_high), (low, high) = source.range(axis), target.range(axis)
        start, stop = max(source_low, low), min(source_high, high)
        assert start < stop, f"{source} and {target} don't overlap on axis {axis!r}"
        source_stride, target_stride = source.stride(axis), target.stride(axis)
        source_offset += (start - source_low) * source_stride
        target_offset += (start - low) * target_stride
        axes.append((stop - start, source_stride, target_stride))
    return Box(source_offset, target_offset, *fold(source.item_bytes, axes))


def _stack(
    joined: dict[tuple[str, str], Fragments], source: Layout, target: Layout
) -> tuple[_Stack, ...]:
    """Put pool pairs of one route, fragment count and density together, by source address."""
    alike: dict[tuple[Route, int, bool], list[tuple[Pool, Pool, Fragments]]] = {}
    for (source_name, target_name), part in joined.items():
        ours, theirs = source.pool(source_name), target.pool(target_name)
        route = Route(ours.memory, ours.device, theirs.memory, theirs.device)
        full = int(part.lengths[0]) == ours.stride == theirs.stride
        alike.setdefault((route, part.lengths.size, full), []).append((ours, theirs, part))
    stacks = []
    for (route, _, dense), pairs in alike.items():
        pairs.sort(key=lambda pair: pair[0].address)
        stacks.append(
            _Stack(
                route=route,
                source=_side([pair[0] for pair in pairs], [pair[2].source for pair in pairs]),
                target=_side([pair[1] for pair in pairs], [pair[2].target for pair in pairs]),
                lengths=np.stack([pair[2].lengths for pair in pairs])[:, None, :],
                dense=dense,
            )
        )
    return tuple(stacks)


def _side(pools: Sequence[Pool], offsets: Sequence[Int64Array]) -> _Side:
    addresses = np.array([pool.address for pool in pools], dtype=np.int64)
    return _Side(
        base=addresses[:, None, None] + np.stack(offsets)[:, None, :],
        stride=np.array([pool.stride for pool in pools], dtype=np.int64)[:, None, None],
        low=addresses,
        high=np.array([pool.stop for pool in pools], dtype=np.int64),
    )


# ---------------------------------------------------------------- once per request


def plan(
    template: Template, source_slots: Int64Array, target_slots: Int64Array
) -> tuple[Flow, ...]:
    """Copy the block in `source_slots[i]` to `target_slots[i]`, for every i.

    Shapes: two int64[k], k >= 0, no slot twice on a side (spans see to that). Sorted by source
    slot within each pool, neighbours that touch on both sides merged. One flow per pair of
    memories, none for k = 0. O(k * fragments) numpy work; callers bound k.

    Raises: UsageError naming the group, the slot and the bound when a slot is outside its pool
    or the two lists differ in length.
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
    order = np.argsort(source_slots, kind="stable")
    source_slots, target_slots = source_slots[order], target_slots[order]
    parts: dict[Route, list[Copies]] = {}
    for stack in template.stacks:
        parts.setdefault(stack.route, []).append(_expand(stack, source_slots, target_slots))
    return tuple(Flow(*route, _together(copies)) for route, copies in parts.items())


def _expand(stack: _Stack, source_slots: Int64Array, target_slots: Int64Array) -> Copies:
    """Broadcast a stack over slot pairs sorted by source slot."""
    lengths = stack.lengths
    if stack.dense:
        apart = (np.diff(source_slots) != 1) | (np.diff(target_slots) != 1)
        begins = np.concatenate(([0], np.flatnonzero(apart) + 1))
        counts = np.diff(np.append(begins, source_slots.size))
        source_slots, target_slots = source_slots[begins], target_slots[begins]
        lengths = lengths * counts[None, :, None]
    source = stack.source.expand(source_slots)
    target = stack.target.expand(target_slots)
    _check_addresses("source", stack.source, source, lengths)
    _check_addresses("target", stack.target, target, lengths)
    return Copies(source.ravel(), target.ravel(), np.broadcast_to(lengths, source.shape).ravel())


def _check_range(side: str, group: str, slots: Int64Array, bound: int) -> None:
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= bound:
        raise UsageError(
            f"group {group!r}: {side} slot {low if low < 0 else high} is not in 0..{bound - 1}"
        )


def _check_addresses(name: str, side: _Side, begins: Int64Array, lengths: Int64Array) -> None:
    """Every byte of every copy [p, k, f] lies in its own pool."""
    first = begins.min(axis=(1, 2))
    behind = (begins + lengths).max(axis=(1, 2))
    bad = np.flatnonzero((first < side.low) | (behind > side.high))
    if bad.size:
        at = int(bad[0])
        raise InternalError(
            f"planned {name} addresses {int(first[at]):#x}..{int(behind[at]):#x} leave their pool "
            f"{int(side.low[at]):#x}..{int(side.high[at]):#x}: a bug of the planner, or a layout "
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


def cut(copies: Copies, descriptors_max: int, bytes_max: int) -> list[Copies]:
    """Cut copies into writes of at most `descriptors_max` copies and `bytes_max` bytes each.

    Keeps the order; a copy of more than `bytes_max` bytes becomes several. The parts are views.
    O(n), with a Python step per write.

    Raises: UsageError for a bound below 1.
    """
    if descriptors_max < 1 or bytes_max < 1:
        raise UsageError(
            f"descriptors_max is {descriptors_max} and bytes_max is {bytes_max}, "
            "must both be 1 or more"
        )
    copies = _split(copies, bytes_max)
    ends = np.cumsum(copies.lengths)
    writes = []
    begin, done = 0, 0
    while begin < len(copies):
        fit = int(np.searchsorted(ends, done + bytes_max, side="right"))
        stop = min(fit, begin + descriptors_max)
        part = slice(begin, stop)
        writes.append(Copies(copies.source[part], copies.target[part], copies.lengths[part]))
        begin, done = stop, int(ends[stop - 1])
    return writes


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
