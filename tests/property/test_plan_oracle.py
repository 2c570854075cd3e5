"""Plans against an oracle that walks every coordinate of every block, byte by byte.

Goal: every needed byte of the target comes once from the same (layer, kind, head, token, dim)
coordinate of the source, and no other byte changes. Method: draw two sides that hold the same
coordinates in different storage, and compare every planned byte with the tags of `elements`,
which come from the layouts' definition of an address.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.plan import Copies, Cut, Flow, plan
from kvferry.engine.spans import Span
from kvferry.engine.template import make_template
from kvferry.engine.tensors import Axis, Tensor
from tests.property.instances import Int64Array, elements

NAMES = ("layer", "kind", "head", "token", "dim")
SOURCE_BASE, TARGET_BASE = 1_000_000, 7_000_000  # far apart: a swapped side leaves its buffer

Ranges = dict[str, tuple[int, int]]
Gaps = tuple[int, ...]
TIGHT: Gaps = (0,)
LOOSE: Gaps = (0, 0, 0, 1, 5)


@dataclass
class Side:
    layout: Layout
    size: int  # bytes of the buffer that holds every pool


@dataclass
class Case:
    source: Side
    target: Side
    have: Span
    need: Span


# ---------------------------------------------------------------- drawing two sides


def draw_box(
    draw: st.DrawFn, ranges: Ranges, item: int, gaps: Gaps
) -> tuple[list[tuple[str, int]], int]:
    """Random storage order and padding: ((axis, stride) outermost first, bytes in all)."""
    order = draw(st.permutations(NAMES))
    strides, reach = [], item
    for name in reversed(order):
        stride = reach + draw(st.sampled_from(gaps))
        strides.append((name, stride))
        low, high = ranges[name]
        reach += (high - low - 1) * stride
    return strides[::-1], reach


def draw_tensors(
    draw: st.DrawFn, ranges: Ranges, item: int, gaps: Gaps
) -> tuple[list[tuple[int, tuple[Axis, ...]]], int]:
    """One storage box, cut along layer or kind into tensors that interleave in memory."""
    strides, reach = draw_box(draw, ranges, item, gaps)
    along = draw(st.sampled_from(("", "layer", "kind")))
    low, high = ranges.get(along, (0, 1))
    parts = []
    for index in range(low, high):
        offset, axes = 0, []
        for name, stride in strides:
            start, stop = ranges[name]
            if name == along:
                offset, start, stop = (index - low) * stride, index, index + 1
            if (start, stop) != (0, 1) or name == "token" or draw(st.booleans()):
                axes.append(Axis(name, start, stop, stride))
        parts.append((offset, tuple(axes)))
    return parts, reach


def draw_side(draw: st.DrawFn, base: int, roles: dict[str, tuple[Ranges, int, bool]]) -> Side:
    """Spread boxes over one to three pools, with gaps; some boxes are stored layer by layer."""
    gaps = draw(st.sampled_from((TIGHT, LOOSE)))
    contents: list[list[Tensor]] = [[] for _ in range(draw(st.integers(1, 3)))]
    ends = [0] * len(contents)
    tokens = 1
    for role, (ranges, item, optional) in roles.items():
        tokens = ranges["token"][1]
        low, high = ranges["layer"]
        apart = draw(st.booleans())
        layers = [(at, at + 1) for at in range(low, high)] if apart else [(low, high)]
        for held in layers:
            parts, reach = draw_tensors(draw, {**ranges, "layer": held}, item, gaps)
            at = draw(st.integers(0, len(contents) - 1))
            begin = ends[at] + draw(st.sampled_from(gaps))
            ends[at] = begin + reach
            contents[at] += [
                Tensor(role, f"p{at}", begin + offset, axes, item, "any", optional)
                for offset, axes in parts
            ]
    pools, address = [], base
    for at, (tensors, end) in enumerate(zip(contents, ends, strict=True)):
        if not tensors:
            continue
        address += draw(st.integers(0, 5))
        pool = Pool(
            name=f"p{at}",
            address=address,
            stride=end + draw(st.sampled_from(gaps)),
            slots=draw(st.integers(5, 8)),
            memory=draw(st.sampled_from(("dram", "dram", "vram"))),
            device=draw(st.integers(0, 1)),
        )
        address = pool.stop
        pools.append(pool)
    order = draw(st.permutations([tensor for tensors in contents for tensor in tensors]))
    group = Group("g", "full", tokens, tuple(order))
    return Side(Layout(tuple(pools), (group,)).check(), address - base + 7)


def mirrored(draw: st.DrawFn, layout: Layout) -> Side:
    """The same storage at other addresses, with other slot counts."""
    pools, address = [], TARGET_BASE
    for pool in layout.pools:
        address += draw(st.integers(0, 5))
        pools.append(msgspec.structs.replace(pool, address=address, slots=draw(st.integers(5, 8))))
        address = pools[-1].stop
    return Side(Layout(tuple(pools), layout.groups).check(), address - TARGET_BASE + 7)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token = (0, draw(st.integers(1, 3)))
    target_roles: dict[str, tuple[Ranges, int, bool]] = {}
    source_roles: dict[str, tuple[Ranges, int, bool]] = {}
    for role in draw(st.sampled_from((("kv",), ("kv", "scale")))):
        head = draw(st.integers(0, 2))
        layer = draw(st.integers(0, 2))
        ranges: Ranges = {
            "layer": (layer, layer + draw(st.integers(1, 3))),
            "kind": (0, draw(st.integers(1, 2))),
            "head": (head, head + draw(st.integers(1, 2))),
            "token": token,
            "dim": (0, draw(st.integers(1, 3))),
        }
        item = draw(st.sampled_from((1, 2, 4)))
        target_roles[role] = (ranges, item, False)
        low, high = ranges["layer"]
        more = {**ranges, "layer": (max(0, low - draw(st.integers(0, 1))), high)}
        source_roles[role] = (more, item, False)
    if draw(st.booleans()):  # the target could take this, but no source has it
        target_roles["draft"] = ({**target_roles["kv"][0]}, 1, True)
    source = draw_side(draw, SOURCE_BASE, source_roles)
    if draw(st.booleans()):
        target = draw_side(draw, TARGET_BASE, target_roles)
    else:  # equal storage, the usual case, and the one where whole blocks merge
        target = mirrored(draw, source.layout)
    return Case(source, target, draw(spans(source.layout)), draw(spans(target.layout)))


@st.composite
def spans(draw: st.DrawFn, layout: Layout) -> Span:
    """A few blocks with a hole here and there; ascending slots merge, scattered ones don't."""
    slots = layout.slots("g")
    first = draw(st.integers(0, 2))
    ordinals = range(first, first + draw(st.integers(2, slots)))
    holes = draw(st.sets(st.integers(0, 7), max_size=2))
    ascending = list(range(slots))
    order = draw(st.one_of(st.just(ascending), st.permutations(ascending)))
    return Span.from_runs(
        (ordinal, [slot])
        for ordinal, slot in zip(ordinals, order, strict=False)
        if ordinal not in holes
    )


# ---------------------------------------------------------------- the oracle


def flows_of(case: Case) -> tuple[Flow, ...]:
    template = make_template(case.source.layout, "g", case.target.layout, "g", fragment_bytes_min=0)
    _, target_slots, source_slots = case.need.intersect(case.have)
    flows = plan(template, source_slots, target_slots)
    moved = sum(flow.copies.bytes for flow in flows)
    assert moved == template.block_bytes * source_slots.size
    return flows


def bytes_of(copies: Copies) -> tuple[Int64Array, Int64Array]:
    """(source address, target address) of every byte, in the order of the copies."""
    assert (copies.lengths > 0).all()
    begins = np.cumsum(copies.lengths) - copies.lengths
    inside = np.arange(copies.bytes) - np.repeat(begins, copies.lengths)
    source, target = (np.repeat(a, copies.lengths) for a in (copies.source, copies.target))
    return source + inside, target + inside


def pool_at(layout: Layout, address: int) -> Pool:
    return next(pool for pool in layout.pools if pool.address <= address < pool.stop)


# ---------------------------------------------------------------- the properties


@given(cases())
def test_planned_copies_move_exactly_the_needed_bytes(case: Case) -> None:
    held = elements(case.source.layout, case.have)
    wanted = elements(case.target.layout, case.need)
    assert np.unique(wanted.address).size == wanted.address.size, "a byte is held twice"
    tag_at = dict(zip(held.address.tolist(), held.tag.tolist(), strict=True))
    wanted_at = dict(zip(wanted.address.tolist(), wanted.tag.tolist(), strict=True))
    seen: list[Int64Array] = []
    for flow in flows_of(case):
        copies = flow.copies
        for at, to in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
            ours, theirs = pool_at(case.source.layout, at), pool_at(case.target.layout, to)
            assert (ours.memory, ours.device) == (flow.source_memory, flow.source_device)
            assert (theirs.memory, theirs.device) == (flow.target_memory, flow.target_device)
        source, target = bytes_of(copies)
        for at, to in zip(source.tolist(), target.tolist(), strict=True):
            assert tag_at[at] == wanted_at[to]
        seen.append(target)
    moved = np.concatenate(seen) if seen else np.zeros(0, dtype=np.int64)
    assert np.unique(moved).size == moved.size, "a byte is written twice"
    has_source = np.isin(wanted.tag, held.tag)
    assert set(moved.tolist()) == set(wanted.address[has_source].tolist())


@given(cases(), st.integers(1, 6), st.integers(1, 40))
def test_cut_keeps_every_byte_within_its_bounds(
    case: Case, descriptors_max: int, bytes_max: int
) -> None:
    for flow in flows_of(case):
        writes = list(Cut(flow.copies, descriptors_max, bytes_max))
        for write in writes:
            assert 1 <= len(write) <= descriptors_max
            assert write.bytes <= bytes_max
            for array in (write.source, write.target, write.lengths):
                assert array.dtype == np.int64
                assert array.flags.c_contiguous
        for write, following in itertools.pairwise(writes):
            full = len(write) == descriptors_max
            assert full or write.bytes + int(following.lengths[0]) > bytes_max
        whole = Copies(
            *(
                np.concatenate([getattr(write, name) for write in writes])
                for name in ("source", "target", "lengths")
            )
        )
        for mine, theirs in zip(bytes_of(whole), bytes_of(flow.copies), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@given(cases())
def test_no_two_copies_of_a_block_could_have_been_one(case: Case) -> None:
    """Folding is complete: within a block, what touches on both sides is joined."""
    template = make_template(case.source.layout, "g", case.target.layout, "g", fragment_bytes_min=0)
    slots = np.zeros(1, dtype=np.int64)
    for flow in plan(template, slots, slots):
        copies = flow.copies
        begins = set(zip(copies.source.tolist(), copies.target.tolist(), strict=True))
        for source, target, length in zip(
            copies.source.tolist(), copies.target.tolist(), copies.lengths.tolist(), strict=True
        ):
            following = (source + length, target + length)
            if following in begins:
                same = pool_at(case.source.layout, source), pool_at(case.target.layout, target)
                next_to = pool_at(case.source.layout, following[0])
                other = pool_at(case.target.layout, following[1])
                assert same != (next_to, other), "one pool pair, touching, not joined"
