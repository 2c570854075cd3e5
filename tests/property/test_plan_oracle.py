"""Plans against an oracle that walks every coordinate of every block, byte by byte.

Goal: every needed byte of the target comes once from the same (layer, kind, head, token, dim)
coordinate of the source, and no other byte changes. Method: draw two sides that hold the same
coordinates in different storage, execute the planned copies on real buffers, and compare with
addresses computed one element at a time from the layouts' definition.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.plan import Copies, cut, plan
from kvferry.engine.spans import Span
from kvferry.engine.template import make_template
from kvferry.engine.tensors import Axis, Tensor

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


def element_addresses(layout: Layout, slot: int) -> dict[tuple, tuple[int, int, bool]]:
    """{(role, layer, kind, head, token, dim): (address, bytes, optional)} of one block.

    Written from the definition of an address, without fold, offsets or templates.
    """
    found = {}
    for tensor in layout.groups[0].tensors:
        pool = next(pool for pool in layout.pools if pool.name == tensor.pool)
        listed = {axis.name: axis for axis in tensor.axes}
        spaces = [
            range(listed[name].start, listed[name].stop) if name in listed else range(1)
            for name in NAMES
        ]
        for coordinate in itertools.product(*spaces):
            address = pool.address + slot * pool.stride + tensor.offset
            for name, index in zip(NAMES, coordinate, strict=True):
                if name in listed:
                    address += (index - listed[name].start) * listed[name].stride
            key = (tensor.role, *coordinate)
            assert key not in found, f"{key} is held twice"
            found[key] = (address, tensor.item_bytes, tensor.optional)
    return found


def expected_bytes(case: Case) -> dict[int, int]:
    """{target address: source address} of every byte that must move."""
    have = {o: s for run in case.have.runs for o, s in enumerate(run.slots.tolist(), run.first)}
    need = {o: s for run in case.need.runs for o, s in enumerate(run.slots.tolist(), run.first)}
    moves = {}
    for ordinal, slot in need.items():
        if ordinal not in have:
            continue
        held = element_addresses(case.source.layout, have[ordinal])
        for key, (address, size, optional) in element_addresses(case.target.layout, slot).items():
            if key not in held:
                assert optional
                continue
            for byte in range(size):
                moves[address + byte] = held[key][0] + byte
    return moves


def moved_bytes(copies: Copies) -> dict[int, int]:
    """{target address: source address} that copies write; fails on a byte written twice."""
    moves: dict[int, int] = {}
    for source, target, length in zip(
        copies.source.tolist(), copies.target.tolist(), copies.lengths.tolist(), strict=True
    ):
        assert length > 0
        for byte in range(length):
            assert target + byte not in moves, f"byte {target + byte} is written twice"
            moves[target + byte] = source + byte
    return moves


def flows_of(case: Case) -> tuple:
    template = make_template(case.source.layout, "g", case.target.layout, "g", fragment_bytes_min=0)
    _, target_slots, source_slots = case.need.intersect(case.have)
    flows = plan(template, source_slots, target_slots)
    moved = sum(flow.copies.bytes for flow in flows)
    assert moved == template.block_bytes * source_slots.size
    return flows


def pool_at(layout: Layout, address: int) -> Pool:
    return next(pool for pool in layout.pools if pool.address <= address < pool.stop)


# ---------------------------------------------------------------- the properties


@given(cases())
def test_planned_copies_move_exactly_the_needed_bytes(case: Case) -> None:
    moves: dict[int, int] = {}
    for flow in flows_of(case):
        for target, source in moved_bytes(flow.copies).items():
            assert target not in moves
            moves[target] = source
            ours, theirs = pool_at(case.source.layout, source), pool_at(case.target.layout, target)
            assert (ours.memory, ours.device) == (flow.source_memory, flow.source_device)
            assert (theirs.memory, theirs.device) == (flow.target_memory, flow.target_device)
    assert moves == expected_bytes(case)


@given(cases(), st.integers(0, 2**32 - 1))
def test_executed_copies_change_nothing_else(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, case.source.size, dtype=np.uint8)
    target = rng.integers(0, 256, case.target.size, dtype=np.uint8)
    expected = target.copy()
    for to, origin in expected_bytes(case).items():
        expected[to - TARGET_BASE] = source[origin - SOURCE_BASE]
    for flow in flows_of(case):
        copies = flow.copies
        for origin, to, length in zip(copies.source, copies.target, copies.lengths, strict=True):
            low, start = to - TARGET_BASE, origin - SOURCE_BASE
            assert 0 <= low <= low + length <= target.size
            assert 0 <= start <= start + length <= source.size
            target[low : low + length] = source[start : start + length]
    np.testing.assert_array_equal(target, expected)


@given(cases(), st.integers(1, 6), st.integers(1, 40))
def test_cut_keeps_every_byte_within_its_bounds(
    case: Case, descriptors_max: int, bytes_max: int
) -> None:
    for flow in flows_of(case):
        writes = cut(flow.copies, descriptors_max, bytes_max)
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
        assert list(moved_bytes(whole).items()) == list(moved_bytes(flow.copies).items())


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
