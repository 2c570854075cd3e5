"""Random pairs of instances: a small model, sharded and stored in two ways.

Owns the drawing of ranks and layouts, and the tag of every byte: which coordinate of the model
belongs there. Memory holds tags instead of bytes, so that a wrong byte can't look right.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.spans import Span, blocks_for
from kvferry.engine.tensors import Axis, Tensor
from kvferry.engine.topology import Roster, shard_heads, shard_layers

NAMES = ("layer", "kind", "head", "token", "dim")
TP_SIZES = (1, 2, 4, 8)
BLOCK_SIZES = (1, 2, 3, 4, 6)
BYTES_MAX = 4096  # of a target rank

Ranges = dict[str, tuple[int, int]]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

NOTHING = -1  # the tag of a byte that belongs to no coordinate


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
    """One rank: its layout, the span of its slots in global ordinals, and its memory as tags."""

    layout: Layout
    base: int
    size: int
    span: Span
    memory: Int64Array = field(init=False)
    held: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.full(self.size, NOTHING)
        self.held = elements(self.layout, self.span)
        assert np.unique(self.held.address).size == self.held.address.size, "a byte held twice"

    def compute(self) -> None:
        """Put every coordinate into its place."""
        self.memory[self.held.address - self.base] = self.held.tag


@dataclass
class Instance:
    roster: Roster
    ranks: list[Rank]
    tokens_per_block: int


@st.composite
def models(draw: st.DrawFn, *, optional: bool = True) -> Model:
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
        may_lack = optional and draw(st.booleans())
        roles.append(Role("latent", dims=draw(st.integers(1, 3)), optional=may_lack))
    return Model(
        draw(st.integers(1, 3)), tuple(roles), state=False, tokens=draw(st.integers(1, 14))
    )


@st.composite
def instances(
    draw: st.DrawFn, model: Model, base: int, *, is_source: bool, block: int = 0, tp_max: int = 8
) -> Instance:
    """Every rank of an instance stores alike, as real ones do; pools and slots are its own.

    is_source: it may lack optional tensors, have a layer more than the target wants, and deal out
    its blocks over ranks (context parallelism) where `block` is given. block: tokens per block, 0
    to draw it.
    """
    tp = draw(st.sampled_from([size for size in TP_SIZES if size <= tp_max]))
    pp = draw(st.integers(1, min(2, model.layers)))
    first = draw(st.integers(1, model.layers - pp + 1))
    counts = [first, model.layers - first] if pp == 2 else [model.layers]
    if is_source:
        counts[-1] += draw(st.integers(0, 1))
    size = block or (1 if model.state else draw(st.sampled_from(BLOCK_SIZES)))
    cp = draw(st.sampled_from((1, 2))) if is_source and block else 1
    roster = Roster(tp=tp, pp=pp, cp=cp)
    order = draw(st.permutations(NAMES))
    padding = draw(st.sampled_from((0, 0, 3)))
    apart = draw(st.booleans())  # a pool per layer, else one for all
    roles = [
        role for role in model.roles if not (role.optional and is_source and draw(st.booleans()))
    ]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
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
        slots = rng.permutation(len(ordinals) + 1)
        where = base + number * 100_000
        layout, end = _layout(boxes, size, order, padding, slots.size, where, state=model.state)
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


class Bytes(NamedTuple):
    """Every byte of the elements of some blocks: four aligned arrays [n]."""

    address: Int64Array
    tag: Int64Array  # which byte of which coordinate: different for different ones
    token: Int64Array
    optional: BoolArray


def elements(layout: Layout, span: Span) -> Bytes:
    """Where each byte lies, from the definition of an address: no fold, template or alignment."""
    group = layout.groups[0]
    pools = {pool.name: pool for pool in layout.pools}
    found = []
    for tensor in group.tensors:
        pool = pools[tensor.pool]
        axes = {axis.name: axis for axis in tensor.axes}
        bounds = [(axes[n].start, axes[n].stop) if n in axes else (0, 1) for n in NAMES]
        grid = np.meshgrid(
            np.arange(len(span)),
            *(np.arange(low, high) for low, high in bounds),
            np.arange(tensor.item_bytes),
            indexing="ij",
        )
        at, *index, byte = (each.ravel() for each in grid)
        address = pool.address + span.slots()[at] * pool.stride + tensor.offset + byte
        for name, place in zip(NAMES, index, strict=True):
            if name in axes:
                address = address + (place - axes[name].start) * axes[name].stride
        layer, kind, head, token, dim = index
        token = token + span.ordinals()[at] * group.tokens_per_block
        tag = np.full(byte.shape, zlib.crc32(tensor.role.encode()) & 0xFFFF)
        for value, bits in ((layer, 6), (kind, 2), (head, 5), (token, 10), (dim, 8), (byte, 4)):
            assert not value.size or 0 <= value.min() <= value.max() < 1 << bits
            tag = (tag << bits) | value
        found.append((address, tag, token, np.full(byte.shape, tensor.optional)))
    if not found:
        return Bytes(*(np.zeros(0, dtype=np.int64) for _ in range(3)), np.zeros(0, dtype=np.bool_))
    return Bytes(*(np.concatenate(column) for column in zip(*found, strict=True)))
