"""Topology: how an instance numbers its ranks, what each holds, and who writes what.

Owns rosters, the usual sharding of heads and layers, and the target's assignment. Pure. Two
rules: of one block, every coordinate of the target is written by exactly one source rank; cost
grows with boxes and ranks, never with blocks or tokens.

Replication is not an axis: ranks that hold the same coordinates are candidates for them, and the
target chooses. `assign` cuts the target's boxes along every edge of the source ranks' boxes into
cells, gives each cell to one rank that holds it, and joins each rank's cells into parts. Tokens
are never cut: blocks are what moves, and context parallelism deals out whole blocks.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from .errors import Refused, UsageError
from .tensors import AXIS_NAMES, Part, check_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from .layout import Group, Layout
    from .tensors import AxisName, Tensor

    BoolArray = NDArray[np.bool_]
    Int64Array = NDArray[np.int64]

# Rosters and layouts come from a peer: what they make us compute is bounded.
RANKS_MAX: Final = 2**12
CELLS_MAX: Final = 2**20  # of one role, times the ranks that may hold them

_AXES: Final[tuple[AxisName, ...]] = tuple(name for name in AXIS_NAMES if name != "token")


class Coordinates(NamedTuple):
    """Where a rank stands in its instance."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0


class Roster(msgspec.Struct, frozen=True):
    """The sizes of an instance; ranks are numbered with dp outermost, then pp, tp and cp.

    tp: ranks that share the heads of a layer. pp: stages that share the layers. cp: ranks that
    share the blocks of a request: of c ranks, rank r holds the ordinals r, r + c, ...
    dp: groups of ranks that hold whole requests each. Under attention data parallelism this is
    the number of attention groups, and tp the ranks of one of them.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    def check(self) -> Roster:
        """Return self when every size is valid. Raises: UsageError naming the field."""
        for field in ("tp", "pp", "cp", "dp"):
            check_bounds(f"roster.{field}", getattr(self, field), 1, RANKS_MAX)
        check_bounds("roster.size", self.size, 1, RANKS_MAX)
        return self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.tp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands. Raises: UsageError for a rank that is not in 0..size - 1."""
        check_bounds("rank", rank, 0, self.size - 1)
        rest, cp = divmod(rank, self.cp)
        rest, tp = divmod(rest, self.tp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, tp, cp)

    def rank(self, at: Coordinates) -> int:
        """The rank that stands there. Raises: UsageError naming the coordinate."""
        for field, value in at._asdict().items():
            check_bounds(field, value, 0, getattr(self, field) - 1)
        return ((at.dp * self.pp + at.pp) * self.tp + at.tp) * self.cp + at.cp


class Assignment(msgspec.Struct, frozen=True):
    """What one source rank writes of a target's group.

    parts: disjoint boxes of global indices, all of which this rank holds.
    stride: (phase, step) of the ordinals that it holds: phase, phase + step, ...; (0, 1) for all.
    """

    rank: int
    parts: tuple[Part, ...]
    stride: tuple[int, int] = (0, 1)


# ---------------------------------------------------------------- the usual sharding


def shard_heads(heads: int, size: int, rank: int) -> tuple[int, int]:
    """The heads `[start, stop)` of tensor-parallel rank `rank` of `size`.

    With fewer heads than ranks, neighbouring ranks hold the same head.

    Raises: UsageError when neither number divides the other, or for a rank out of range.
    """
    check_bounds("heads", heads, 1, 2**31 - 1)
    check_bounds("tp size", size, 1, RANKS_MAX)
    check_bounds("tp rank", rank, 0, size - 1)
    if heads % size and size % heads:
        raise UsageError(f"{heads} heads don't divide over {size} ranks, nor ranks over heads")
    start = rank * heads // size
    return start, start + max(1, heads // size)


def shard_layers(counts: Sequence[int], stage: int) -> tuple[int, int]:
    """The global layers `[start, stop)` of a pipeline stage; `counts` are the layers of each.

    Raises: UsageError for a negative count or a stage out of range.
    """
    for at, count in enumerate(counts):
        check_bounds(f"layers of stage {at}", count, 0, 2**31 - 1)
    check_bounds("stage", stage, 0, len(counts) - 1)
    start = sum(counts[:stage])
    return start, start + counts[stage]


# ---------------------------------------------------------------- the assignment


def assign(
    target: Layout,
    group: str,
    sources: Mapping[int, Layout],
    *,
    roster: Roster,
    dp: int | None = None,
    target_rank: int = 0,
    source_group: str | None = None,
) -> tuple[Assignment, ...]:
    """Decide which source rank writes which part of the target's group. Does not modify.

    sources: {rank: its layout} of the ranks of the source's `roster` that take part, all layouts
    checked. A rank whose layout lacks the group holds nothing of it. `source_group` is the
    group's name at the source when it differs. `dp` is the dp rank that holds the request.

    Returns assignments by ascending rank, none for a rank that writes nothing. Of replicas, one
    that writes anyway is chosen, else `target_rank` decides, so that the ranks of a target use
    different ones. Under context parallelism the ranks of each cp coordinate write their ordinals
    of the whole target; a state is one point, and all of them share it.

    Raises: UsageError for a group or rank that is not there, or a `dp` that is needed; Refused
    (by="peer", code="geometry") naming group, tensor or field, both values and the rank when the
    element types, kinds or block sizes don't fit, and naming what no source rank holds.
    """
    wanted = target.group(group)
    steps = 1 if wanted.kind == "state" else roster.cp
    held = _source_groups(sources, group if source_group is None else source_group, roster, dp)
    for rank, theirs in held.items():
        _check_group(wanted, theirs, rank, steps)
    holdings = {rank: _boxes(theirs.tensors) for rank, theirs in held.items()}
    needs = _needs(wanted, holdings)
    _check_contents(wanted, needs, holdings)
    assigned = []
    for phase in range(steps):
        members = {r: h for r, h in holdings.items() if roster.coordinates(r).cp % steps == phase}
        whom = f"no source rank of cp {phase}" if steps > 1 else "no source rank"
        parts = _share_out(needs, members, target_rank, f"group {group!r}: {whom}")
        assigned += [Assignment(rank, mine, (phase, steps)) for rank, mine in parts.items()]
    return tuple(sorted(assigned, key=lambda each: each.rank))


class _Content(NamedTuple):
    """What has to be equal where two tensors share coordinates."""

    role: str
    dtype: str
    item_bytes: int
    per_block: bool


# A rank's holding: int64[n, axis, (start, stop)], disjoint, per content.
_Boxes = dict[_Content, "Int64Array"]


def _source_groups(
    sources: Mapping[int, Layout], name: str, roster: Roster, dp: int | None
) -> dict[int, Group]:
    """{rank: its group of that name} of the ranks of one dp group that have it, ascending."""
    if dp is None:
        if roster.dp > 1:
            raise UsageError(
                f"dp is None, but the source has {roster.dp} dp ranks and each holds whole "
                "requests: the dp rank that holds this one must be given"
            )
        dp = 0
    check_bounds("dp", dp, 0, roster.dp - 1)
    members = [rank for rank in sorted(sources) if roster.coordinates(rank).dp == dp]
    return {r: group for r in members for group in sources[r].groups if group.name == name}


def _check_group(wanted: Group, held: Group, rank: int, steps: int) -> None:
    """Blocks dealt out over cp ranks must have one size: their ordinals are compared."""
    under = f" under context parallelism of {steps}" if steps > 1 else ""
    for field in ("kind", "tokens_per_block") if steps > 1 else ("kind",):
        ours, theirs = getattr(held, field), getattr(wanted, field)
        _require_equal(f"group {wanted.name!r}{under}", field, ours, theirs, rank)


def _require_equal(where: str, field: str, held: Any, wanted: Any, rank: int) -> None:
    if held != wanted:
        both = f"{held!r} at source rank {rank} and {wanted!r} at the target"
        raise _misfit(f"{where}: {field} is {both}")


def _misfit(message: str) -> Refused:
    return Refused(message, by="peer", code="geometry")


def _boxes(tensors: Iterable[Tensor]) -> _Boxes:
    """Reduce tensors to few boxes: one-layer tensors of one content become one box."""
    ranges: dict[_Content, list[list[tuple[int, int]]]] = {}
    for tensor in tensors:
        content = _Content(tensor.role, tensor.dtype, tensor.item_bytes, tensor.per_block)
        ranges.setdefault(content, []).append(_ranges(tensor))
    return {content: _merge(np.array(each)) for content, each in ranges.items()}


def _ranges(tensor: Tensor) -> list[tuple[int, int]]:
    held = {axis.name: (axis.start, axis.stop) for axis in tensor.axes}
    return [held.get(axis, (0, 1)) for axis in _AXES]


def _merge(boxes: Int64Array) -> Int64Array:
    """Join boxes [n, axis, 2] that differ on one axis only and touch there, axis by axis."""
    for axis in range(len(_AXES)) if len(boxes) > 1 else ():
        others = np.delete(boxes, axis, axis=1).reshape(len(boxes), -1)
        order = np.lexsort((boxes[:, axis, 0], *others.T))
        boxes, others = boxes[order], others[order]
        apart = boxes[1:, axis, 0] != boxes[:-1, axis, 1]
        apart |= (others[1:] != others[:-1]).any(axis=1)
        begins = np.concatenate(([0], np.flatnonzero(apart) + 1))
        stops = boxes[np.append(begins[1:], len(boxes)) - 1, axis, 1]
        boxes = boxes[begins]
        boxes[:, axis, 1] = stops
    return boxes


def _overlap(ours: Int64Array, theirs: Int64Array) -> BoolArray:
    """Which of the boxes [n, axis, 2] share a coordinate with any of [m, axis, 2]: bool[n]."""
    shared = ours[:, None, :, 0] < theirs[None, :, :, 1]
    shared &= theirs[None, :, :, 0] < ours[:, None, :, 1]
    found: BoolArray = np.any(np.all(shared, axis=2), axis=1)
    return found


def _needs(wanted: Group, holdings: Mapping[int, _Boxes]) -> _Boxes:
    """The target's boxes, without the optional tensors of which no source rank holds anything."""
    held: dict[str, list[Int64Array]] = {}
    for content, boxes in itertools.chain.from_iterable(h.items() for h in holdings.values()):
        held.setdefault(content.role, []).append(boxes)
    together = {role: np.concatenate(boxes) for role, boxes in held.items()}

    def has_source(tensor: Tensor) -> bool:
        boxes = together.get(tensor.role)
        return boxes is not None and bool(_overlap(np.array([_ranges(tensor)]), boxes).any())

    return _boxes(each for each in wanted.tensors if not each.optional or has_source(each))


def _check_contents(wanted: Group, needs: _Boxes, holdings: Mapping[int, _Boxes]) -> None:
    """Refuse tensors that share coordinates but differ in what an element is."""
    for (need, boxes), (rank, holding) in itertools.product(needs.items(), holdings.items()):
        for content, held in holding.items():
            if content.role != need.role or content == need:
                continue
            shared = boxes[_overlap(boxes, held)]
            if len(shared):
                where = f"group {wanted.name!r}: {_show(need.role, shared, boxes)}"
                for field, ours, theirs in zip(_Content._fields, content, need, strict=True):
                    _require_equal(where, field, ours, theirs, rank)


def _share_out(
    needs: _Boxes, holdings: Mapping[int, _Boxes], target_rank: int, nobody: str
) -> dict[int, tuple[Part, ...]]:
    """{rank: its parts} over ranks of which each holds every block. Empty ones are absent."""
    none = np.zeros((0, len(_AXES), 2), dtype=np.int64)
    pieces: list[tuple[str, Int64Array]] = []
    masks = []
    for content, boxes in needs.items():
        held = [holding.get(content, none) for holding in holdings.values()]
        cells, holders = _cells(content.role, boxes, held)
        if not holders.any(axis=0).all():
            lacking = _merge(cells[~holders.any(axis=0)])
            raise _misfit(f"{nobody} holds {_show(content.role, lacking, boxes)}")
        pieces.append((content.role, cells))
        masks.append(holders)
    if not pieces:  # everything is optional, and no source rank has it
        return {}
    owners = _choose(np.concatenate(masks, axis=1), target_rank)
    stops = np.cumsum([len(cells) for _, cells in pieces])
    parts: dict[int, tuple[Part, ...]] = {}
    for at, rank in enumerate(holdings):
        mine = [
            part
            for (role, cells), owner in zip(pieces, np.split(owners, stops[:-1]), strict=True)
            for part in _parts(role, cells[owner == at])
        ]
        if mine:
            parts[rank] = tuple(mine)
    return parts


def _cells(
    role: str, wanted: Int64Array, held: Sequence[Int64Array]
) -> tuple[Int64Array, BoolArray]:
    """Cut the target's boxes along every edge of the boxes that the ranks hold.

    Shapes: wanted [w, axis, 2], held [n, axis, 2] per rank; returns the cells [c, axis, 2] and
    which rank holds which, bool[rank, c]. A cell lies inside or outside of a box, never across.
    """
    edges = []
    for axis in range(len(_AXES)):
        mine = wanted[:, axis]
        every = np.concatenate((mine, *(boxes[:, axis] for boxes in held)))
        edges.append(np.unique(np.clip(every, mine.min(), mine.max())))
    shape = [each.size - 1 for each in edges]
    if math.prod(shape) * len(held) > CELLS_MAX:
        raise _misfit(
            f"{len(held)} source ranks cut {role!r} into {math.prod(shape)} cells, "
            f"the product must be at most {CELLS_MAX}"
        )
    inside = np.flatnonzero(_paint(wanted, edges))
    where = np.unravel_index(inside, shape)
    bounds = [(each[at], each[at + 1]) for each, at in zip(edges, where, strict=True)]
    cells = np.array(bounds).transpose(2, 0, 1)
    holders = np.zeros((len(held), inside.size), dtype=np.bool_)
    for at, boxes in enumerate(held):
        holders[at] = _paint(boxes, edges).ravel()[inside]
    return cells, holders


def _paint(boxes: Int64Array, edges: Sequence[Int64Array]) -> BoolArray:
    """Which cells between the edges lie in one of the boxes: bool, a dimension per axis."""
    mask = np.zeros([each.size - 1 for each in edges], dtype=np.bool_)
    bounds = [np.searchsorted(each, boxes[:, axis]) for axis, each in enumerate(edges)]
    for box in np.stack(bounds, axis=1).tolist():
        mask[tuple(slice(low, high) for low, high in box)] = True
    return mask


def _choose(holders: BoolArray, target_rank: int) -> Int64Array:
    """One holder for each cell: bool[rank, c] -> int64[c], few ranks in all.

    Ranks that alone hold a cell write anyway, so they serve what they can. What is left goes to
    the rank that serves the most of it, again and again. Ties are broken by `target_rank`.
    """
    must = holders[:, holders.sum(axis=0) == 1].any(axis=1, keepdims=True)
    busy = holders & must
    count = busy.sum(axis=0)
    nth = target_rank % np.maximum(count, 1) + 1
    owners: Int64Array = (np.cumsum(busy, axis=0, dtype=np.int32) == nth).argmax(axis=0)
    left = count == 0
    while left.any():
        served = (holders & left).sum(axis=1)
        assert served.any(), "a cell that no rank holds was not refused"
        best = np.flatnonzero(served == served.max())
        rank = best[target_rank % best.size]
        owners[left & holders[rank]] = rank
        left &= ~holders[rank]
    return owners


def _parts(role: str, cells: Int64Array) -> list[Part]:
    return [
        Part(role, tuple((axis, low, high) for axis, (low, high) in zip(_AXES, box, strict=True)))
        for box in _merge(cells).tolist()
    ]


def _show(role: str, boxes: Int64Array, wanted: Int64Array) -> str:
    """The first box in words: its layers, and every axis of which it is not all that is wanted."""
    whole = np.stack((wanted[:, :, 0].min(axis=0), wanted[:, :, 1].max(axis=0)), axis=1).tolist()
    ranges = [
        f"{axis} {low}" if high == low + 1 else f"{axis}s {low}..{high - 1}"
        for axis, (low, high), widest in zip(_AXES, boxes[0].tolist(), whole, strict=True)
        if axis == "layer" or [low, high] != widest
    ]
    more = f" (and {len(boxes) - 1} boxes more)" if len(boxes) > 1 else ""
    return f"{', '.join(ranges)} of {role!r}{more}"
