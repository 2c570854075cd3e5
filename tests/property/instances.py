"""Random pairs of instances: a small model, sharded and stored in two ways.

Owns the drawing of ranks and layouts, and the address of every element, one at a time from the
definition, without fold, template or alignment. Sizes keep a target rank near 4 KiB.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.spans import Span, blocks_for
from kvferry.engine.tensors import Axis, Tensor
from kvferry.engine.topology import Roster, shard_heads, shard_layers

NAMES = ("layer", "kind", "head", "token", "dim")
TP_SIZES = (1, 2, 4, 8)
BLOCK_SIZES = (1, 2, 3, 4, 6)
ELEMENTS_MAX = 1024  # of a target rank's blocks, before its element size

Ranges = dict[str, tuple[int, int]]
Coordinate = tuple[str, int, int, int, int, int]
"""(role, layer, kind, head, token of the request, dim)."""


@dataclass(frozen=True)
class Role:
    """One cached tensor of the model. heads: 0 for one that every tp rank holds whole.

    sections: extents along dim that are sharded each for itself, like heads; () for none.
    """

    name: str
    kinds: int = 1
    heads: int = 0
    dims: int = 1
    item_bytes: int = 1
    sections: tuple[int, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Model:
    layers: int
    roles: tuple[Role, ...]
    state: bool  # a point: one slot, no token axis
    tokens: int


@dataclass
class Rank:
    """One rank: its layout, the span of its slots in global ordinals, and its memory."""

    layout: Layout
    base: int
    size: int
    span: Span
    memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.size, dtype=np.uint8)


@dataclass
class Instance:
    roster: Roster
    ranks: list[Rank]
    tokens_per_block: int


@st.composite
def models(draw: st.DrawFn) -> Model:
    if draw(st.integers(0, 3)) == 0:
        conv = Role("conv", dims=0, sections=draw(st.sampled_from(((8,), (16, 8), (8, 8, 16)))))
        ssm = Role("ssm", heads=8, dims=draw(st.integers(1, 2)), item_bytes=2)
        return Model(draw(st.integers(1, 3)), (conv, ssm), state=True, tokens=1)
    heads = draw(st.sampled_from((1, 2, 4, 8)))
    kv = Role(
        "kv", draw(st.integers(1, 2)), heads, draw(st.integers(1, 2)), draw(st.sampled_from((1, 2)))
    )
    roles = [kv]
    if draw(st.booleans()):
        roles.append(Role("latent", dims=draw(st.integers(1, 3)), optional=draw(st.booleans())))
    return Model(
        draw(st.integers(1, 3)), tuple(roles), state=False, tokens=draw(st.integers(1, 14))
    )


@st.composite
def instances(draw: st.DrawFn, model: Model, base: int, *, is_source: bool) -> Instance:
    """Every rank of an instance stores alike, as real ones do; pools and slots are its own."""
    tp = draw(st.sampled_from(TP_SIZES))
    pp = draw(st.integers(1, min(2, model.layers)))
    first = draw(st.integers(1, model.layers - pp + 1))
    counts = [first, model.layers - first] if pp == 2 else [model.layers]
    size = 1 if model.state else draw(st.sampled_from(BLOCK_SIZES))
    cp = draw(st.sampled_from((1, 1, 1, 2))) if is_source else 1
    roster = Roster(tp=tp, pp=pp, cp=cp)
    order = draw(st.permutations(NAMES))
    padding = draw(st.sampled_from((0, 0, 3)))
    apart = draw(st.booleans())  # a pool per layer, else one for all
    roles = [
        role for role in model.roles if not (role.optional and is_source and draw(st.booleans()))
    ]
    ranks = []
    for number in range(roster.size):
        at = roster.coordinates(number)
        held = shard_layers(counts, at.pp)
        boxes = [
            (role, {**ranges, "layer": layers})
            for role in roles
            for ranges in _shards(role, tp, at.tp, size)
            for layers in ([(n, n + 1) for n in range(*held)] if apart else [held])
        ]
        blocks = blocks_for(model.tokens, size)
        ordinals = [o for o in range(blocks) if o % cp == at.cp or model.state]
        slots = draw(st.permutations(range(max(1, len(ordinals)) + 1)))
        where = base + number * 100_000
        layout, end = _layout(boxes, size, order, padding, len(slots), where, state=model.state)
        span = Span.from_runs((o, [s]) for o, s in zip(ordinals, slots, strict=False))
        ranks.append(Rank(layout, where, end - where, span))
    return Instance(roster, ranks, size)


def _shards(role: Role, tp: int, rank: int, tokens: int) -> list[Ranges]:
    """The boxes of a role that a tp rank holds; several where it has sections."""
    ranges: Ranges = {"kind": (0, role.kinds), "head": (0, 1), "token": (0, tokens)}
    if role.heads:
        ranges["head"] = shard_heads(role.heads, tp, rank)
    if not role.sections:
        return [{**ranges, "dim": (0, role.dims)}]
    begins = itertools.accumulate(role.sections, initial=0)
    return [
        {**ranges, "dim": tuple(begin + at for at in shard_heads(extent, tp, rank))}
        for begin, extent in zip(begins, role.sections, strict=False)
    ]


def _layout(
    boxes: list[tuple[Role, Ranges]],
    tokens: int,
    order: tuple[str, ...],
    padding: int,
    slots: int,
    base: int,
    *,
    state: bool,
) -> tuple[Layout, int]:
    """Boxes one behind the other in a slot; those of one layer in a pool where layers are apart."""
    contents: dict[str, list[Tensor]] = {}
    ends: dict[str, int] = {}
    for role, ranges in boxes:
        pool = f"p{ranges['layer'][0]}"
        offset = ends.get(pool, 0)
        axes, stride = [], role.item_bytes
        for name in reversed(order):
            axes.append(Axis(name, *ranges[name], stride))
            stride *= ranges[name][1] - ranges[name][0]
        tensor = Tensor(
            role.name, pool, offset, tuple(axes[::-1]), role.item_bytes, "any", role.optional
        )
        contents.setdefault(pool, []).append(tensor)
        ends[pool] = offset + stride
    pools, address = [], base
    for name, end in ends.items():
        pools.append(Pool(name, address, end + padding, slots))
        address = pools[-1].stop + padding
    tensors = tuple(tensor for held in contents.values() for tensor in held)
    group = Group("g", "state" if state else "full", tokens, tensors)
    return Layout(tuple(pools), (group,)).check(), address


def elements(layout: Layout, span: Span) -> dict[Coordinate, tuple[int, int, bool]]:
    """{coordinate: (address, bytes, optional)} of every element in the span's blocks."""
    group = layout.groups[0]
    pools = {pool.name: pool for pool in layout.pools}
    found: dict[Coordinate, tuple[int, int, bool]] = {}
    for ordinal, slot in zip(span.ordinals().tolist(), span.slots().tolist(), strict=True):
        for tensor in group.tensors:
            pool = pools[tensor.pool]
            axes = {axis.name: axis for axis in tensor.axes}
            spaces = [range(axes[name].start, axes[name].stop) for name in NAMES]
            for index in itertools.product(*spaces):
                address = pool.address + slot * pool.stride + tensor.offset
                for name, at in zip(NAMES, index, strict=True):
                    address += (at - axes[name].start) * axes[name].stride
                layer, kind, head, token, dim = index
                place = (
                    tensor.role,
                    layer,
                    kind,
                    head,
                    ordinal * group.tokens_per_block + token,
                    dim,
                )
                assert place not in found, f"{place} is held twice"
                found[place] = (address, tensor.item_bytes, tensor.optional)
    return found
