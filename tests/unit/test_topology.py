"""Rosters, the usual sharding, and who writes what: every rule of the assignment by example.

Tests of many random instances are in tests/property; bytes are in the vectors beside this file.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.engine.errors import Refused, UsageError
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.tensors import AxisName, Part, Tensor, dense_tensor
from kvferry.engine.topology import (
    RANKS_MAX,
    Assignment,
    Coordinates,
    Roster,
    assign,
    shard_heads,
    shard_layers,
)

TOKENS = 4
Ranges = dict[AxisName, tuple[int, int]]


def kv(
    layer: tuple[int, int] = (0, 4),
    head: tuple[int, int] = (0, 1),
    *,
    role: str = "kv",
    kind: tuple[int, int] = (0, 1),
    dim: tuple[int, int] = (0, 2),
    tokens: int = TOKENS,
    item_bytes: int = 2,
    **more: Any,
) -> Tensor:
    more.setdefault("dtype", "bfloat16")
    ranges: Ranges = {
        "layer": layer, "kind": kind, "head": head, "token": (0, tokens), "dim": dim,
    }  # fmt: skip
    return dense_tensor(role, role, " ".join(ranges), ranges, item_bits=8 * item_bytes, **more)


def layout(*tensors: Tensor, kind: Any = "full", tokens: int = TOKENS, name: str = "g") -> Layout:
    """Every tensor in a pool of its own."""
    kept = [
        msgspec.structs.replace(each, pool=f"{each.role} {at}") for at, each in enumerate(tensors)
    ]
    pools = [Pool(each.pool, at << 30, each.stop, 4) for at, each in enumerate(kept)]
    return Layout(tuple(pools), (Group(name, kind, tokens, tuple(kept)),)).check()


def ranks_of(assignments: tuple[Assignment, ...]) -> list[int]:
    return [each.rank for each in assignments]


def boxes_of(assignments: tuple[Assignment, ...], *axes: str) -> dict[int, list[dict[str, Any]]]:
    """{rank: for each part its role and the ranges of `axes`}."""
    return {
        each.rank: [
            {"role": part.role, **{a: (low, high) for a, low, high in part.ranges if a in axes}}
            for part in each.parts
        ]
        for each in assignments
    }


# ---------------------------------------------------------------- rosters


@pytest.mark.parametrize(
    ("roster", "rank", "at"),
    [
        (Roster(), 0, Coordinates()),
        (Roster(tp=4, cp=2), 5, Coordinates(tp=2, cp=1)),
        (Roster(tp=4, pp=2), 5, Coordinates(pp=1, tp=1)),
        (Roster(dp=3, pp=2), 3, Coordinates(dp=1, pp=1)),
        (Roster(tp=2, pp=3, cp=2, dp=2), 23, Coordinates(dp=1, pp=2, tp=1, cp=1)),
    ],
)
def test_ranks_are_numbered_with_cp_innermost_and_dp_outermost(
    roster: Roster, rank: int, at: Coordinates
) -> None:
    assert roster.coordinates(rank) == at
    assert roster.rank(at) == rank


def test_every_rank_stands_somewhere_else() -> None:
    roster = Roster(tp=2, pp=3, cp=2, dp=2).check()
    places = [roster.coordinates(rank) for rank in range(roster.size)]
    assert places == sorted(set(places))
    assert [roster.rank(at) for at in places] == list(range(24))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Roster(tp=0).check(), "roster.tp is 0"),
        (lambda: Roster(pp=-1).check(), "roster.pp is -1"),
        (lambda: Roster(cp=True).check(), "roster.cp is True"),
        (lambda: Roster(dp=RANKS_MAX + 1).check(), f"roster.dp is {RANKS_MAX + 1}"),
        (lambda: Roster(tp=RANKS_MAX, dp=2).check(), f"roster.size is {2 * RANKS_MAX}"),
        (lambda: Roster(tp=2).coordinates(2), "rank is 2, must be 0 to 1"),
        (lambda: Roster(tp=2).coordinates(-1), "rank is -1"),
        (lambda: Roster(tp=2).rank(Coordinates(tp=2)), "tp is 2, must be 0 to 1"),
        (lambda: Roster(tp=2).rank(Coordinates(cp=1)), "cp is 1, must be 0 to 0"),
        (lambda: shard_heads(6, 4, 0), "6 heads don't divide over 4 ranks"),
        (lambda: shard_heads(4, 6, 0), "4 heads don't divide over 6 ranks"),
        (lambda: shard_heads(0, 1, 0), "heads is 0"),
        (lambda: shard_heads(4, 2, 2), "tp rank is 2"),
        (lambda: shard_layers([2, 2], 2), "stage is 2, must be 0 to 1"),
        (lambda: shard_layers([2, -1], 0), "layers of stage 1 is -1"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_rosters_and_assignments_are_their_wire_form() -> None:
    roster = Roster(tp=2, cp=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(roster), type=Roster) == roster
    one = Assignment(3, (Part("kv", (("layer", 1, 2),)),), (1, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Assignment) == one


@pytest.mark.parametrize(
    ("heads", "size", "held"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_are_shared_out_or_replicated(heads: int, size: int, held: Any) -> None:
    assert [shard_heads(heads, size, rank) for rank in range(size)] == held


def test_layers_may_be_spread_unevenly() -> None:
    assert [shard_layers([3, 0, 5], stage) for stage in range(3)] == [(0, 3), (3, 3), (3, 8)]


# ---------------------------------------------------------------- who writes what


def test_a_stage_writes_its_layers_and_a_shard_its_heads() -> None:
    roster = Roster(tp=2, pp=2)
    sources = {
        rank: layout(kv(shard_layers([3, 1], at.pp), shard_heads(4, 2, at.tp)))
        for rank in range(4)
        for at in [roster.coordinates(rank)]
    }
    everything = assign(layout(kv(head=(0, 4))), "g", sources, roster=roster)
    assert boxes_of(everything, "layer", "head") == {
        0: [{"role": "kv", "layer": (0, 3), "head": (0, 2)}],
        1: [{"role": "kv", "layer": (0, 3), "head": (2, 4)}],
        2: [{"role": "kv", "layer": (3, 4), "head": (0, 2)}],
        3: [{"role": "kv", "layer": (3, 4), "head": (2, 4)}],
    }
    assert {each.stride for each in everything} == {(0, 1)}
    some = assign(layout(kv((2, 4), (1, 2))), "g", sources, roster=roster)
    assert boxes_of(some, "layer", "head") == {
        0: [{"role": "kv", "layer": (2, 3), "head": (1, 2)}],
        2: [{"role": "kv", "layer": (3, 4), "head": (1, 2)}],
    }


def test_a_part_lists_every_axis_but_the_token() -> None:
    (one,) = assign(layout(kv(kind=(0, 2))), "g", {0: layout(kv(kind=(0, 2)))}, roster=Roster())
    assert one.parts == (
        Part("kv", (("layer", 0, 4), ("kind", 0, 2), ("head", 0, 1), ("dim", 0, 2))),
    )


def test_tensors_of_one_layer_and_kind_become_one_part() -> None:
    single = [kv((at, at + 1), kind=(of, of + 1)) for at in range(4) for of in range(2)]
    for target, source in ((layout(*single), layout(kv(kind=(0, 2)))), (layout(*single),) * 2):
        (one,) = assign(target, "g", {0: source}, roster=Roster())
        assert boxes_of((one,), "layer", "kind") == {
            0: [{"role": "kv", "layer": (0, 4), "kind": (0, 2)}]
        }


def test_layers_with_gaps_between_them_are_parts_of_their_own() -> None:
    target = layout(kv((1, 2)), kv((2, 3)), kv((5, 7)))
    (one,) = assign(target, "g", {0: layout(kv((0, 8)))}, roster=Roster())
    assert boxes_of((one,), "layer") == {
        0: [{"role": "kv", "layer": (1, 3)}, {"role": "kv", "layer": (5, 7)}]
    }


def test_a_rank_that_lacks_the_group_holds_nothing_of_it() -> None:
    sources = {0: layout(kv(), name="other"), 1: layout(kv(), name="full")}
    got = assign(layout(kv()), "g", sources, roster=Roster(pp=2), source_group="full")
    assert ranks_of(got) == [1]


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize("target_rank", range(9))
def test_targets_use_replicas_in_turn(target_rank: int) -> None:
    sources = {rank: layout(kv()) for rank in range(4)}
    got = assign(layout(kv()), "g", sources, roster=Roster(tp=4), target_rank=target_rank)
    assert ranks_of(got) == [target_rank % 4]


def test_replicas_of_each_stage_and_head_are_taken_in_turn() -> None:
    """Two heads on four ranks and two stages: of each pair of replicas, one writes."""
    roster = Roster(tp=4, pp=2)
    sources = {
        rank: layout(kv(shard_layers([2, 2], at.pp), shard_heads(2, 4, at.tp)))
        for rank in range(8)
        for at in [roster.coordinates(rank)]
    }
    got = [
        ranks_of(assign(layout(kv(head=(0, 2))), "g", sources, roster=roster, target_rank=rank))
        for rank in range(2)
    ]
    assert [len(each) for each in got] == [4, 4]
    assert sorted(got[0] + got[1]) == list(range(8))


@pytest.mark.parametrize("target_rank", range(4))
def test_a_rank_that_writes_anyway_writes_what_is_replicated_too(target_rank: int) -> None:
    """Heads are sharded, the indexer's rows are on every rank."""
    rows = kv(role="indexer_k", dim=(0, 8))
    sources = {rank: layout(kv(head=shard_heads(4, 4, rank)), rows) for rank in range(4)}
    target = layout(kv(head=(2, 4)), rows)
    got = boxes_of(
        assign(target, "g", sources, roster=Roster(tp=4), target_rank=target_rank), "head"
    )
    assert list(got) == [2, 3]
    writers = [rank for rank, boxes in got.items() if "indexer_k" in [box["role"] for box in boxes]]
    assert writers == [2 + target_rank % 2]


@pytest.mark.parametrize("target_rank", range(3))
def test_the_rank_that_holds_most_spares_others_the_work(target_rank: int) -> None:
    """No layer is held by one rank alone, yet one rank can write them all."""
    sources = {rank: layout(kv(layers)) for rank, layers in enumerate([(0, 2), (0, 4), (2, 4)])}
    got = assign(layout(kv()), "g", sources, roster=Roster(tp=3), target_rank=target_rank)
    assert ranks_of(got) == [1]


def test_an_assignment_does_not_depend_on_the_order_of_the_mapping() -> None:
    sources = {rank: layout(kv(head=shard_heads(2, 4, rank))) for rank in range(4)}
    backwards = dict(reversed(sources.items()))
    target = layout(kv(head=(0, 2)))
    assert assign(target, "g", sources, roster=Roster(tp=4)) == assign(
        target, "g", backwards, roster=Roster(tp=4)
    )


# ---------------------------------------------------------------- dp and cp


def test_only_ranks_of_the_requests_dp_group_write() -> None:
    roster = Roster(tp=2, dp=3)
    sources = {rank: layout(kv(head=shard_heads(2, 2, rank % 2))) for rank in range(6)}
    target = layout(kv(head=(0, 2)))
    for dp in range(3):
        assert ranks_of(assign(target, "g", sources, roster=roster, dp=dp)) == [2 * dp, 2 * dp + 1]
    with pytest.raises(UsageError, match="dp is None, but the source has 3 dp ranks"):
        assign(target, "g", sources, roster=roster)
    with pytest.raises(UsageError, match="dp is 3, must be 0 to 2"):
        assign(target, "g", sources, roster=roster, dp=3)


def test_each_cp_coordinate_writes_its_ordinals_of_everything() -> None:
    roster = Roster(tp=2, cp=2)
    sources = {
        rank: layout(kv(head=shard_heads(2, 2, roster.coordinates(rank).tp))) for rank in range(4)
    }
    got = assign(layout(kv(head=(0, 2))), "g", sources, roster=roster)
    assert [(each.rank, each.stride) for each in got] == [
        (0, (0, 2)), (1, (1, 2)), (2, (0, 2)), (3, (1, 2)),
    ]  # fmt: skip
    heads = {rank: box["head"] for rank, (box,) in boxes_of(got, "head").items()}
    assert heads == {0: (0, 1), 1: (0, 1), 2: (1, 2), 3: (1, 2)}
    del sources[1]
    with pytest.raises(
        Refused, match=r"group 'g': no source rank of cp 1 holds layers 0\.\.3, head 0 of 'kv'"
    ):
        assign(layout(kv(head=(0, 2))), "g", sources, roster=roster)


def test_a_state_is_not_dealt_out_over_cp_ranks() -> None:
    """It is one point, so that cp ranks share it as they share heads."""
    state = [kv(role="ssm", head=shard_heads(4, 4, rank), tokens=1) for rank in range(4)]
    sources = {rank: layout(state[rank], kind="state", tokens=1) for rank in range(4)}
    target = layout(kv(role="ssm", head=(0, 4), tokens=1), kind="state", tokens=1)
    got = assign(target, "g", sources, roster=Roster(tp=2, cp=2))
    assert [(each.rank, each.stride) for each in got] == [(rank, (0, 1)) for rank in range(4)]


def test_block_sizes_may_differ_unless_cp_ranks_count_in_blocks() -> None:
    target = layout(kv(tokens=8), tokens=8)
    sources = {0: layout(kv()), 1: layout(kv())}
    assert ranks_of(assign(target, "g", {0: layout(kv())}, roster=Roster())) == [0]
    with pytest.raises(
        Refused,
        match="group 'g' under context parallelism of 2: tokens_per_block is 4 at source rank 0 "
        "and 8 at the target",
    ) as caught:
        assign(target, "g", sources, roster=Roster(cp=2))
    assert (caught.value.by, caught.value.code) == ("peer", "geometry")


# ---------------------------------------------------------------- what is optional, what is refused


def test_an_optional_tensor_without_any_source_is_skipped() -> None:
    draft = kv((4, 5), optional=True)
    got = assign(layout(kv(), draft), "g", {0: layout(kv())}, roster=Roster())
    assert boxes_of(got, "layer") == {0: [{"role": "kv", "layer": (0, 4)}]}
    alone = layout(draft)
    assert assign(alone, "g", {0: layout(kv())}, roster=Roster()) == ()
    assert assign(alone, "g", {0: layout(kv(), name="other")}, roster=Roster()) == ()


def test_an_optional_tensor_with_a_source_is_written_whole_or_refused() -> None:
    draft = kv((4, 6), optional=True)
    sources = {0: layout(kv()), 1: layout(kv((4, 6)))}
    got = assign(layout(kv(), draft), "g", sources, roster=Roster(pp=2))
    assert boxes_of(got, "layer") == {
        0: [{"role": "kv", "layer": (0, 4)}],
        1: [{"role": "kv", "layer": (4, 6)}],
    }
    sources[1] = layout(kv((4, 5)))
    with pytest.raises(Refused, match="no source rank holds layer 5 of 'kv'"):
        assign(layout(kv(), draft), "g", sources, roster=Roster(pp=2))


@pytest.mark.parametrize(
    ("target", "sources", "message"),
    [
        (
            layout(kv((0, 48))),
            [layout(kv((0, 40)))],
            r"group 'g': no source rank holds layers 40\.\.47 of 'kv'$",
        ),
        (
            layout(kv(head=(0, 4))),
            [layout(kv(head=(0, 2))), layout(kv(head=(3, 4)))],
            r"no source rank holds layers 0\.\.3, head 2 of 'kv'$",
        ),
        (
            layout(kv(dim=(0, 8), kind=(0, 2))),
            [layout(kv(dim=(0, 8))), layout(kv(dim=(2, 8), kind=(1, 2)))],
            r"no source rank holds layers 0\.\.3, kind 1, dims 0\.\.1 of 'kv'$",
        ),
        (
            layout(kv((0, 6))),
            [layout(kv((1, 2)), kv((4, 5)))],
            r"no source rank holds layer 0 of 'kv' \(and 2 boxes more\)$",
        ),
        (
            layout(kv(), kv(role="indexer_k")),
            [layout(kv())],
            r"no source rank holds layers 0\.\.3 of 'indexer_k'$",
        ),
        (layout(kv()), [layout(kv(), name="other")], r"no source rank holds layers 0\.\.3 of 'kv'"),
        (layout(kv()), [], r"no source rank holds layers 0\.\.3 of 'kv'"),
        (
            layout(kv()),
            [layout(kv(dtype="float8"))],
            r"group 'g': layers 0\.\.3 of 'kv': dtype is 'float8' at source rank 0 and "
            "'bfloat16' at the target",
        ),
        (
            layout(kv()),
            [layout(kv((0, 2))), layout(kv((2, 4), item_bytes=4))],
            "layers 0..3 of 'kv': item_bytes is 4 at source rank 1 and 2 at the target",
        ),
        (
            layout(kv((0, 2)), kv((2, 4), dtype="float8")),
            [layout(kv())],
            r"layers 2\.\.3 of 'kv': dtype is 'bfloat16' at source rank 0 and 'float8'",
        ),
        (
            layout(kv(tokens=1), kind="state", tokens=1),
            [layout(kv(tokens=1), tokens=1)],
            "group 'g': kind is 'full' at source rank 0 and 'state' at the target",
        ),
        (
            layout(kv(optional=True)),
            [layout(kv(dtype="float8"))],
            "dtype is 'float8' at source rank 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    target: Layout, sources: list[Layout], message: str
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        assign(target, "g", dict(enumerate(sources)), roster=Roster(tp=max(1, len(sources))))
    assert (caught.value.by, caught.value.code) == ("peer", "geometry")


def test_element_types_may_differ_from_layer_to_layer_and_where_nothing_is_shared() -> None:
    mixed = [kv((0, 2)), kv((2, 4), dtype="float8")]
    sources = {0: layout(*mixed), 1: layout(kv((4, 9), dtype="float8"))}
    (one,) = assign(layout(*mixed), "g", sources, roster=Roster(pp=2))
    assert boxes_of((one,), "layer") == {
        0: [{"role": "kv", "layer": (0, 2)}, {"role": "kv", "layer": (2, 4)}]
    }


def test_callers_mistakes_are_named() -> None:
    target = layout(kv())
    with pytest.raises(UsageError, match="no group 'other'"):
        assign(target, "other", {0: target}, roster=Roster())
    with pytest.raises(UsageError, match="rank is 2, must be 0 to 1"):
        assign(target, "g", {2: target}, roster=Roster(tp=2))


def test_boxes_that_cut_each_other_into_too_many_cells_are_refused() -> None:
    """A diagonal: each of 200 tensors has edges of its own on three axes."""
    diagonal = [kv((i, i + 1), (i, i + 1), dim=(i, i + 1)) for i in range(200)]
    target = layout(kv((0, 200), (0, 200), dim=(0, 200)))
    with pytest.raises(Refused, match="1 source ranks cut 'kv' into 8000000 cells"):
        assign(target, "g", {0: layout(*diagonal)}, roster=Roster())
