"""Template: how blocks of one layout become blocks of another, worked out once per pair.

Owns the matching of two groups' tensors and the intersection of their boxes. Pure. Two rules:
every coordinate that the target is to get has exactly one source; a template depends on two
layouts and the part that is meant, never on a request.

The boxes of two sides are intersected tensor by tensor on every axis and folded into the longest
runs that are contiguous on both sides. The token axis is different in one way: blocks of two
sides can begin at different tokens. Where they do, a pair of blocks shares fewer tokens than a
block has, and a fragment's address moves by the tensor's token stride: no more than that differs
from pair to pair, so that one set of fragments serves all pairs that share as many tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .boxes import Box, Fragments, fold, join
from .errors import Refused
from .layout import FRAGMENTS_PER_BLOCK_MAX
from .tensors import AXIS_NAMES, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .layout import Group, Layout, Pool
    from .ports import MemoryKind
    from .tensors import AxisName, Tensor

    Int64Array = NDArray[np.int64]

FRAGMENT_BYTES_MIN: Final = 512  # a smaller mean is refused unless the caller allows it
FRAGMENT_BYTES_WARN: Final = 2048  # a smaller mean is worth a warning
SHARES_MAX: Final = 16  # different token counts that pairs of blocks may share

_BOX_AXES: Final[tuple[AxisName, ...]] = tuple(name for name in AXIS_NAMES if name != "token")


class Route(NamedTuple):
    """From which memory to which memory copies go: what one posted write has in common."""

    source_memory: MemoryKind
    source_device: int
    target_memory: MemoryKind
    target_device: int


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """One end of a stack's p pool pairs, with f fragments per pair of blocks.

    A fragment's address is `base + slot * stride + token * token_stride`, with the token at which
    the pair's shared tokens begin in the block.
    """

    base: Int64Array  # [p, f]
    stride: Int64Array  # [p]
    token_stride: Int64Array  # [p, f]
    low: Int64Array  # [p] first address of the pool
    high: Int64Array  # [p] first address behind the pool

    def by_block(self, slots: Int64Array) -> Int64Array:
        """Addresses [p, k, f] of slots [k]."""
        return self.base[:, None, :] + slots[:, None] * self.stride[:, None, None]

    def by_fragment(self, slots: Int64Array, tokens: Int64Array | None = None) -> Int64Array:
        """Addresses [p, f, k] of slots [k], from `tokens` [k] on or from the blocks' first."""
        begin = self.base[:, :, None] + slots * self.stride[:, None, None]
        if tokens is not None:
            begin += tokens * self.token_stride[:, :, None]
        return begin


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """p pool pairs of one route with f fragments each, expanded in one broadcast.

    dense: a block is one fragment that fills its slot on both sides, so that neighbouring slots
    join. Where it does not, no two blocks touch on both sides, but for the ends of a slot that is
    full on both sides and yet in pieces: one join in f, not worth looking for.
    """

    route: Route
    source: End
    target: End
    lengths: Int64Array  # [p, f]
    dense: bool


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """How blocks of a source group become blocks of a target group.

    Valid as long as both layouts are; made by `make_template`.
    stacks: by the number of tokens that a pair of blocks shares; one entry where both sides have
    equal block sizes.
    """

    source_group: str
    target_group: str
    source_tokens: int  # tokens_per_block of the source
    target_tokens: int
    source_slots: int  # slots that every source pool of the group has
    target_slots: int
    fragments_per_block: int  # of the target, rounded up
    block_bytes: int  # of the target, as far as it is written
    stacks: dict[int, tuple[Stack, ...]]

    @property
    def mean_fragment_bytes(self) -> int:
        """Bytes of a mean fragment before neighbouring blocks merge, rounded down."""
        return self.block_bytes // self.fragments_per_block


class _Match(NamedTuple):
    """What one target tensor gets from one source tensor: a box of global indices."""

    source: Tensor
    target: Tensor
    low: Int64Array  # per axis of _BOX_AXES
    high: Int64Array


def make_template(
    source: Layout,
    source_group: str,
    target: Layout,
    target_group: str,
    *,
    parts: Sequence[Part] = (),
    fragment_bytes_min: int = FRAGMENT_BYTES_MIN,
) -> Template:
    """Intersect the boxes of two groups. Both layouts have passed `check`.

    parts: what of the target's group is meant, disjoint; all of it by default, but for optional
    tensors that the source does not hold. Every coordinate that is meant gets exactly one source.
    What the source holds beyond that stays where it is. `fragment_bytes_min` = 0 allows any layout.

    Raises: UsageError for a group that is not there; Refused (by="peer", code="geometry") naming
    group, field or axis and both values when the sides don't fit; Refused (code="fragments") when
    they fit only in pieces smaller than `fragment_bytes_min` on average.
    """
    ours, theirs = source.group(source_group), target.group(target_group)
    where = f"group {ours.name!r} to {theirs.name!r}"
    for field in ("kind", "window"):
        _require_equal(where, field, getattr(ours, field), getattr(theirs, field))
    matches = _matches(where, ours, theirs, parts)
    shares = _shares(where, ours, theirs, matches)
    joined = {tokens: _fragments(where, matches, tokens, shares) for tokens in shares}
    pairs = sum(shares.values())
    per_share = {
        tokens: (
            sum(part.lengths.size for part in found.values()) * shares[tokens],
            sum(int(part.lengths.sum()) for part in found.values()) * shares[tokens],
        )
        for tokens, found in joined.items()
    }
    blocks = ours.tokens_per_block // math.gcd(ours.tokens_per_block, theirs.tokens_per_block)
    template = Template(
        source_group=ours.name,
        target_group=theirs.name,
        source_tokens=ours.tokens_per_block,
        target_tokens=theirs.tokens_per_block,
        source_slots=source.slots(ours.name),
        target_slots=target.slots(theirs.name),
        fragments_per_block=-(-sum(count for count, _ in per_share.values()) // blocks),
        block_bytes=sum(size for _, size in per_share.values()) // blocks,
        stacks={
            tokens: _stack(found, source, target, equal=pairs == 1)
            for tokens, found in joined.items()
        },
    )
    _check_fragments(where, template, fragment_bytes_min)
    return template


# ---------------------------------------------------------------- matching


class _Holdings:
    """The source's tensors by role, with their ranges as arrays."""

    def __init__(self, group: Group) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        for tensor in group.tensors:
            self.tensors.setdefault(tensor.role, []).append(tensor)
        self._bounds = {role: _bounds(tensors) for role, tensors in self.tensors.items()}

    def overlapping(self, target: Tensor, low: Int64Array, high: Int64Array) -> list[_Match]:
        """What each tensor of the target's role holds of a box, where it holds some of it."""
        if target.role not in self._bounds:
            return []
        starts, stops = self._bounds[target.role]
        starts, stops = np.maximum(starts, low), np.minimum(stops, high)
        return [
            _Match(self.tensors[target.role][at], target, starts[at], stops[at])
            for at in np.flatnonzero((starts < stops).all(axis=1))
        ]


def _bounds(tensors: Sequence[Tensor | Part]) -> tuple[Int64Array, Int64Array]:
    """(first, behind the last) index of each tensor on each axis but the token's: [t, axes]."""
    ranges = [[tensor.range(axis) for axis in _BOX_AXES] for tensor in tensors]
    bounds = np.array(ranges, dtype=np.int64)
    return bounds[:, :, 0], bounds[:, :, 1]


def _matches(where: str, ours: Group, theirs: Group, parts: Sequence[Part]) -> list[_Match]:
    """Where every coordinate that is meant comes from."""
    holdings = _Holdings(ours)
    meant = list(parts) or [Part()]
    part_low, part_high = _bounds(meant)
    found = []
    for tensor in theirs.tensors:
        (low,), (high,) = _bounds([tensor])
        for at, part in enumerate(meant):
            start, stop = np.maximum(low, part_low[at]), np.minimum(high, part_high[at])
            if part.role not in ("", tensor.role) or (start >= stop).any():
                continue
            held = holdings.overlapping(tensor, start, stop)
            if not held and tensor.optional and not parts:
                continue
            _check_all_held(where, tensor, start, stop, held, holdings)
            found += held
    if not found:
        raise _misfit(f"{where}: nothing to copy: no tensor of the target has a source")
    return found


def _check_all_held(
    where: str,
    tensor: Tensor,
    low: Int64Array,
    high: Int64Array,
    held: Sequence[_Match],
    holdings: _Holdings,
) -> None:
    """A layout's tensors are disjoint, so that volumes tell whether a box is covered."""
    at = f"{where}: {tensor}"
    for match in held:
        for field in ("dtype", "item_bytes", "per_block"):
            ours = getattr(match.source, field)
            _require_equal(at, field, ours, getattr(tensor, field))
    volume = sum(math.prod((match.high - match.low).tolist()) for match in held)
    if volume == math.prod((high - low).tolist()):
        return
    same = holdings.tensors.get(tensor.role)
    if not same:
        raise _misfit(f"{at} has no source; the source has the roles {sorted(holdings.tensors)}")
    lacking = "; ".join(
        f"axis {axis!r} covers {', '.join(sorted({_show(one.range(axis)) for one in same})[:8])} "
        f"at the source and {_show(bounds)} at the target"
        for axis, *bounds in zip(_BOX_AXES, low.tolist(), high.tolist(), strict=True)
        if any(one.range(axis) != tuple(bounds) for one in same)
    )
    raise _misfit(f"{at} is not all held by the source: {lacking}")


# ---------------------------------------------------------------- tokens that blocks share


def _shares(where: str, ours: Group, theirs: Group, matches: Sequence[_Match]) -> dict[int, int]:
    """{tokens: pairs} of blocks that overlap by so many tokens, before the pattern repeats."""
    sizes = ours.tokens_per_block, theirs.tokens_per_block
    if sizes[0] == sizes[1]:
        return {sizes[0]: 1}
    for match in matches:
        if match.target.per_block:
            _require_equal(f"{where}: {match.target} is one per block", "tokens_per_block", *sizes)
    step = math.gcd(*sizes)
    ahead = np.arange(step - sizes[0], sizes[1], step)  # of the target block's first token
    shared = np.minimum(sizes[0] - np.maximum(-ahead, 0), sizes[1] - np.maximum(ahead, 0))
    counts, pairs = np.unique(shared, return_counts=True)
    if counts.size > SHARES_MAX:
        raise _misfit(
            f"{where}: tokens_per_block is {sizes[0]} at the source and {sizes[1]} at the target: "
            f"blocks overlap in {counts.size} different ways, at most {SHARES_MAX} are planned"
        )
    return dict(zip(counts.tolist(), pairs.tolist(), strict=True))


def _fragments(
    where: str, matches: Sequence[_Match], tokens: int, shares: dict[int, int]
) -> dict[tuple[str, str], Fragments]:
    """The fragments of a pair of blocks that share `tokens` tokens, per (source, target) pool."""
    shifted = sum(shares.values()) > 1
    pieces: dict[tuple[str, str], list[Fragments]] = {}
    count = 0
    for match in matches:
        box = _box(match, tokens, shifted=shifted)
        count += box.count
        if count > FRAGMENTS_PER_BLOCK_MAX:
            raise _misfit(f"{where}: more than {FRAGMENTS_PER_BLOCK_MAX} fragments per block")
        pieces.setdefault((match.source.pool, match.target.pool), []).append(box.fragments())
    return {pair: join(parts) for pair, parts in pieces.items()}


def _box(match: _Match, tokens: int, *, shifted: bool) -> Box:
    """The bytes of a match for `tokens` tokens from the first of a block on."""
    source, target = match.source, match.target
    source_offset, target_offset = source.offset, target.offset
    token_strides = source.stride("token"), target.stride("token")
    axes = [(1 if target.per_block else tokens, *token_strides)]
    for axis, start, stop in zip(_BOX_AXES, match.low.tolist(), match.high.tolist(), strict=True):
        source_offset += (start - source.range(axis)[0]) * source.stride(axis)
        target_offset += (start - target.range(axis)[0]) * target.stride(axis)
        axes.append((stop - start, source.stride(axis), target.stride(axis)))
    length, outer = fold(source.item_bytes, axes)
    strides = token_strides if shifted else (0, 0)
    return Box(source_offset, target_offset, length, outer, *strides)


# ---------------------------------------------------------------- stacking


def _stack(
    joined: dict[tuple[str, str], Fragments], source: Layout, target: Layout, *, equal: bool
) -> tuple[Stack, ...]:
    """Put pool pairs of one route, fragment count and density together, by source address.

    equal: both sides have equal block sizes.
    """
    alike: dict[tuple[Route, int, bool], list[tuple[Pool, Pool, Fragments]]] = {}
    for (source_name, target_name), part in joined.items():
        ours, theirs = source.pool(source_name), target.pool(target_name)
        route = Route(ours.memory, ours.device, theirs.memory, theirs.device)
        full = equal and int(part.lengths[0]) == ours.stride == theirs.stride
        alike.setdefault((route, part.lengths.size, full), []).append((ours, theirs, part))
    stacks = []
    for (route, _, dense), pairs in alike.items():
        pairs.sort(key=lambda pair: pair[0].address)
        sources, targets, parts = zip(*pairs, strict=True)
        stacks.append(
            Stack(
                route=route,
                source=_end(sources, [p.source for p in parts], [p.source_token for p in parts]),
                target=_end(targets, [p.target for p in parts], [p.target_token for p in parts]),
                lengths=np.stack([part.lengths for part in parts]),
                dense=dense,
            )
        )
    return tuple(stacks)


def _end(
    pools: Sequence[Pool], offsets: Sequence[Int64Array], token_strides: Sequence[Int64Array]
) -> End:
    addresses = np.array([pool.address for pool in pools], dtype=np.int64)
    return End(
        base=addresses[:, None] + np.stack(offsets),
        stride=np.array([pool.stride for pool in pools], dtype=np.int64),
        token_stride=np.stack(token_strides),
        low=addresses,
        high=np.array([pool.stop for pool in pools], dtype=np.int64),
    )


# ---------------------------------------------------------------- refusing


def _check_fragments(where: str, template: Template, fragment_bytes_min: int) -> None:
    if template.mean_fragment_bytes >= fragment_bytes_min:
        return
    raise Refused(
        f"{where}: a block of {template.block_bytes} bytes falls into "
        f"{template.fragments_per_block} fragments of {template.mean_fragment_bytes} bytes on "
        f"average, the least allowed is {fragment_bytes_min}; store the axes of both sides in "
        "the same order, or allow smaller fragments",
        by="peer",
        code="fragments",
    )


def _require_equal(where: str, field: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise _misfit(f"{where}: {field} is {ours!r} at the source and {theirs!r} at the target")


def _misfit(message: str) -> Refused:
    return Refused(message, by="peer", code="geometry")


def _show(bounds: Sequence[int]) -> str:
    return f"{bounds[0]}..{bounds[1] - 1}"
