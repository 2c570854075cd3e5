"""Assignments against an oracle that walks every coordinate of every rank.

Goal: of one block, every coordinate that the target needs is written by exactly one source rank
that holds it, and what nobody holds is refused. Method: draw two instances of one model (heads
shared out or replicated, uneven stages, latents on every rank, sections of a state, optional
layers), or ranks that hold any boxes at all, and expand every part to single coordinates.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.errors import Refused
from kvferry.engine.layout import Group, Layout
from kvferry.engine.tensors import AxisName, Part, Tensor, dense_tensor
from kvferry.engine.topology import (
    Assignment,
    Coordinates,
    Roster,
    assign,
    shard_heads,
    shard_layers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

AXES: tuple[AxisName, ...] = ("layer", "kind", "head", "dim")
SIZES = (1, 2, 3, 4, 6, 8)

Bounds = tuple[int, int]
Box = tuple[Bounds, ...]  # a range for each of AXES
Coordinate = tuple[Any, ...]  # role, layer, kind, head, dim


@dataclass
class Case:
    target: Layout
    sources: dict[int, Layout]
    roster: Roster
    dp: int
    target_rank: int

    def assign(self) -> tuple[Assignment, ...]:
        return assign(
            self.target, "g", self.sources,
            roster=self.roster, dp=self.dp, target_rank=self.target_rank,
        )  # fmt: skip


def layout(tensors: Iterable[Tensor]) -> Layout:
    """Where things lie in memory is of no concern here."""
    return Layout((), (Group("g", "full", 2, tuple(tensors)),))


def tensor(role: str, box: Box, *, optional: bool = False) -> Tensor:
    ranges = dict(zip(AXES, box, strict=True))
    return dense_tensor(
        role, "p", "layer kind head token dim", {**ranges, "token": (0, 2)},
        item_bits=16, dtype="any", optional=optional,
    )  # fmt: skip


# ---------------------------------------------------------------- two instances of one model


@dataclass
class Model:
    layers: int
    heads: int
    section: int  # width of each of two sections, a multiple of every tp size
    roles: tuple[str, ...]


def rank_boxes(model: Model, roster: Roster, counts: Sequence[int], at: Coordinates) -> Any:
    """(role, box) of what a rank holds by the usual rules."""
    layers = shard_layers(counts, at.pp)
    if layers[0] == layers[1]:
        return
    for role in model.roles:
        if role == "kv":
            yield role, (layers, (0, 2), shard_heads(model.heads, roster.tp, at.tp), (0, 2))
        elif role == "latent":
            yield role, (layers, (0, 1), (0, 1), (0, 3))
        else:
            width = model.section // roster.tp
            for begin in (0, model.section):
                low = begin + at.tp * width
                yield role, (layers, (0, 1), (0, 1), (low, low + width))


def cut_apart(role: str, box: Box, axis: int, *, optional: bool) -> list[Tensor]:
    """One box as one tensor for each index of an axis; whole for the axis behind the last."""
    if axis == len(AXES):
        return [tensor(role, box, optional=optional)]
    single = [(index, index + 1) for index in range(*box[axis])]
    boxes = [(*box[:axis], bounds, *box[axis + 1 :]) for bounds in single]
    return [tensor(role, each, optional=optional) for each in reversed(boxes)]


@st.composite
def rosters(draw: st.DrawFn, tp: int) -> Roster:
    """Few ranks beside tp's: they cost, and teach no more."""
    pp, cp, dp = draw(st.sampled_from(((1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2))))
    return Roster(tp=tp, pp=pp, cp=cp, dp=dp).check()


@st.composite
def stages(draw: st.DrawFn, layers: int, pp: int) -> list[int]:
    """Layers of each stage, uneven; none of the later ones, possibly."""
    cuts = sorted(draw(st.lists(st.integers(1, layers), min_size=pp - 1, max_size=pp - 1)))
    return [stop - start for start, stop in itertools.pairwise([0, *cuts, layers])]


@st.composite
def instances(draw: st.DrawFn) -> Case:
    source_tp, target_tp = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    heads = [
        each for each in (1, 2, 3, 4, 6, 8, 12)
        if all(each % size == 0 or size % each == 0 for size in (source_tp, target_tp))
    ]  # fmt: skip
    model = Model(
        layers=draw(st.integers(2, 4)),
        heads=draw(st.sampled_from(heads)),
        section=math.lcm(source_tp, target_tp),
        roles=draw(st.sampled_from((("kv",), ("kv", "latent"), ("latent",), ("kv", "conv")))),
    )
    roster = draw(rosters(source_tp))
    counts = draw(stages(model.layers, roster.pp))
    axis = draw(st.integers(0, len(AXES)))
    sources = {}
    for rank in range(roster.size):
        held = rank_boxes(model, roster, counts, roster.coordinates(rank))
        tensors = [one for role, box in held for one in cut_apart(role, box, axis, optional=False)]
        sources[rank] = layout(tensors)
    target, target_rank = draw_target(draw, model, target_tp)
    return Case(target, sources, roster, draw(st.integers(0, roster.dp - 1)), target_rank)


def draw_target(draw: st.DrawFn, model: Model, tp: int) -> tuple[Layout, int]:
    """One rank of another instance, some of them with optional layers that no source has."""
    roster = Roster(tp=tp, pp=draw(st.sampled_from((1, 1, 2, 3))))
    counts = draw(stages(model.layers, roster.pp))
    rank = draw(st.integers(0, roster.size - 1))
    axis = draw(st.integers(0, len(AXES)))
    tensors = []
    for role, box in rank_boxes(model, roster, counts, roster.coordinates(rank)):
        tensors += cut_apart(role, box, axis, optional=draw(st.booleans()))
        if draw(st.booleans()):
            beyond = ((model.layers, model.layers + 2), *box[1:])
            tensors += cut_apart(role, beyond, axis, optional=True)
    return layout(tensors), rank


# ---------------------------------------------------------------- ranks that hold anything


def pieces(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box at random, each piece again."""
    axis = draw(st.sampled_from([at for at, (low, high) in enumerate(box) if high - low > 1]))
    low, high = box[axis]
    at = draw(st.integers(low + 1, high - 1))
    sides = [(*box[:axis], bounds, *box[axis + 1 :]) for bounds in ((low, at), (at, high))]
    whole = [side for side in sides if depth == 1 or all(high - low < 2 for low, high in side)]
    return whole + [
        piece for side in sides if side not in whole for piece in pieces(draw, side, depth - 1)
    ]


@st.composite
def any_boxes(draw: st.DrawFn) -> Case:
    """Each piece of a model is held by some ranks, now and then by none."""
    model: Box = ((0, 3), (0, 2), (0, 3), (0, 3))
    count = draw(st.integers(1, 5))
    fewest = draw(st.sampled_from((0, 1, 1, 1)))
    held: dict[int, list[Tensor]] = {rank: [] for rank in range(count)}
    for box in pieces(draw, model, 3):
        for rank in draw(st.sets(st.integers(0, count - 1), min_size=fewest, max_size=3)):
            held[rank].append(tensor("kv", box))
    sources = {rank: layout(tensors) for rank, tensors in held.items()}
    wanted = draw(st.lists(st.sampled_from(pieces(draw, model, 2)), unique=True, min_size=1))
    target = layout(tensor("kv", box, optional=draw(st.booleans())) for box in wanted)
    return Case(target, sources, Roster(tp=count), 0, draw(st.integers(0, 9)))


# ---------------------------------------------------------------- the oracle


def coordinates_of(role: str, box: Iterable[Bounds]) -> set[Coordinate]:
    return {(role, *at) for at in itertools.product(*(range(*bounds) for bounds in box))}


def held_by(tensors: Iterable[Tensor]) -> set[Coordinate]:
    held: set[Coordinate] = set()
    for each in tensors:
        held |= coordinates_of(each.role, [each.range(axis) for axis in AXES])
    return held


def part_coordinates(part: Part) -> set[Coordinate]:
    assert [axis for axis, _, _ in part.ranges] == list(AXES)
    return coordinates_of(part.role, [part.range(axis) for axis in AXES])


def needed(case: Case, held: set[Coordinate]) -> set[Coordinate]:
    """What must be written: all but the optional tensors of which nothing is held."""
    tensors = case.target.groups[0].tensors
    return held_by(each for each in tensors if not each.optional or held & held_by([each]))


def check(case: Case) -> None:
    """Each coordinate once per block, from a rank of the dp group that holds it."""
    held = {
        rank: held_by(source.groups[0].tensors)
        for rank, source in case.sources.items()
        if case.roster.coordinates(rank).dp == case.dp
    }
    need = needed(case, set().union(*held.values()))
    written: dict[tuple[int, int], Counter[Coordinate]] = {}
    legs = case.assign()
    assert [leg.rank for leg in legs] == sorted({leg.rank for leg in legs})
    for leg in legs:
        assert leg.parts
        assert leg.stride == (case.roster.coordinates(leg.rank).cp, case.roster.cp)
        for part in leg.parts:
            mine = part_coordinates(part)
            assert mine <= held[leg.rank]
            written.setdefault(leg.stride, Counter()).update(mine)
    for each in written.values():
        assert each == Counter(need)
    if need:
        owners = Counter(at for phase, step in written for at in range(phase, 30, step))
        assert owners == Counter(range(30))


# ---------------------------------------------------------------- the properties


@given(instances())
def test_every_coordinate_is_written_once_by_a_rank_that_holds_it(case: Case) -> None:
    check(case)


@given(any_boxes())
def test_odd_boxes_are_covered_once_or_refused(case: Case) -> None:
    held = held_by(each for source in case.sources.values() for each in source.groups[0].tensors)
    if needed(case, held) <= held:
        check(case)
    else:
        with pytest.raises(Refused, match="no source rank holds layer"):
            case.assign()
