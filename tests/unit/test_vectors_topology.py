"""TensorRT-LLM's vectors on topology and region mappers: the same bytes from one algorithm.

H1 to H34 number the cases of its tests for rank overlap, region mappers and transfer matrices.
Theirs come from a mapper per kind of storage; here, both sides are described as boxes, the target
assigns, and every leg is planned. A vector lists (source, target, bytes) and must be met byte by
byte; joining more than they did is allowed. `LIFTED` names the cases whose expectation is a limit
that does not exist here, `ELSEWHERE` those that are about something else.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pytest

from kvferry.engine.align import align
from kvferry.engine.errors import Refused
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.plan import Copies, plan
from kvferry.engine.spans import Span, blocks_for
from kvferry.engine.template import make_template
from kvferry.engine.tensors import AxisName, Tensor, dense_tensor
from kvferry.engine.topology import Coordinates, Roster, assign, shard_heads, shard_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIFTED: Final = {
    "H3": "the ranks are the same, but all four cp ranks count, not two: ordinals are dealt out "
    "in turn, so each of them holds blocks of the target",
    "H8": "unequal block sizes plan in every storage order, 16 against 24 too: blocks are paired "
    "by the tokens that they share",
    "H15": "nothing is divided: a box has strides, and the odd byte is padding",
    "H16": "unequal block sizes plan in token-major storage too",
    "H20": "layers match by their global ids, one by one: a layer that is left out is a gap",
    "H21": "packed elements are counted in bytes; only a cut inside of a byte is refused",
    "H22": "the number is the same, but what is warned of is the mean fragment in bytes, for "
    "every kind of storage",
}

ELSEWHERE: Final = {
    "H28": "adapters: from block ids to slots, negative ones left out",
    "H30": "a layout's wire form: tests/unit/test_layout.py",
    "H33": "adapters: offloaded blocks",
}

Ranges = dict[AxisName, tuple[int, int]]


def tensor(
    axes: str, ranges: Ranges, *, item: int = 1, role: str = "kv", offset: int = 0
) -> Tensor:
    """Without padding; axes in storage order, outermost first."""
    return dense_tensor(role, "p", axes, ranges, item_bits=8 * item, dtype="any", offset=offset)


def rank(*tensors: Tensor, base: int = 0, kind: Any = "full", tokens: int = 1) -> Layout:
    """A rank with one pool, whose slots are as large as what they hold."""
    stride = max(each.stop for each in tensors)
    return Layout((Pool("p", base, stride, 8),), (Group("g", kind, tokens, tensors),)).check()


def moved(
    target: Layout, sources: Sequence[Layout], roster: Roster, group: str = "g", **options: Any
) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """Plan block 0 to block 0: {rank: {target byte: source byte}}, {rank: number of copies}."""
    bytes_of: dict[int, dict[int, int]] = {}
    copies_of: dict[int, int] = {}
    slot = np.zeros(1, dtype=np.int64)
    for leg in assign(target, group, dict(enumerate(sources)), roster=roster, **options):
        template = make_template(
            sources[leg.rank], group, target, group, parts=leg.parts, fragment_bytes_min=0
        )
        (flow,) = plan(template, slot, slot)
        bytes_of[leg.rank] = expand(triples(flow.copies))
        copies_of[leg.rank] = len(flow.copies)
    return bytes_of, copies_of


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    arrays = copies.source, copies.target, copies.lengths
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def expand(copies: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """{target byte: source byte}; fails on a byte that is written twice."""
    found: dict[int, int] = {}
    for source, target, length in copies:
        for byte in range(length):
            assert target + byte not in found
            found[target + byte] = source + byte
    return found


# ---------------------------------------------------------------- H1 to H7: which ranks overlap


def holders(target: Layout, sources: Sequence[Layout], roster: Roster, dp: int = 0) -> list[int]:
    """Every rank that holds something of the target: each replica is the choice of some target."""
    found = {
        leg.rank
        for target_rank in range(roster.size)
        for leg in assign(
            target, "g", dict(enumerate(sources)), roster=roster, dp=dp, target_rank=target_rank
        )
    }
    return sorted(found)


def shard(layers: tuple[int, int], heads: tuple[int, int] = (0, 1)) -> Layout:
    return rank(tensor("layer head", {"layer": layers, "head": heads}))


def instance(roster: Roster, layers: Sequence[int], heads: int, shards: int = 0) -> list[Layout]:
    """Ranks of an instance by the usual rules; with `shards`, fewer shards than tp ranks."""
    places = [roster.coordinates(at) for at in range(roster.size)]
    shards = shards or roster.tp
    return [
        shard(shard_layers(layers, at.pp), shard_heads(heads, shards, at.tp * shards // roster.tp))
        for at in places
    ]


# Two heads on every rank, four heads in all: each is on two of the four tp ranks.
LARGE = Roster(tp=4, pp=4, cp=4)
LARGE_RANKS = instance(LARGE, [1, 1, 1, 1], 4, shards=2)
TO_LARGE = shard(shard_layers([1, 2], 1), shard_heads(4, 2, 1))

OVERLAPS: Final = {
    "H1": (shard((0, 2)), Roster(pp=2), instance(Roster(pp=2), [1, 1], 1), 0, [0, 1]),
    "H2": (
        Layout((), (Group("g", "full", 1, ()),)),  # a stage of no layers
        Roster(pp=2), instance(Roster(pp=2), [1, 1], 1), 0, [],
    ),
    "H4": (shard((0, 1), (2, 4)), Roster(tp=4), instance(Roster(tp=4), [1], 4), 0, [2, 3]),
    "H5": (shard((0, 1), (3, 4)), Roster(tp=2), instance(Roster(tp=2), [1], 4), 0, [1]),
    "H6": (shard((0, 1)), Roster(dp=4), instance(Roster(dp=4), [1], 1), 3, [3]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "roster", "sources", "dp", "ranks"), OVERLAPS.values(), ids=OVERLAPS
)
def test_overlapping_ranks(
    target: Layout, roster: Roster, sources: Sequence[Layout], dp: int, ranks: list[int]
) -> None:
    assert holders(target, sources, roster, dp) == ranks


def test_h3_ranks_are_numbered_with_cp_innermost() -> None:
    found = holders(TO_LARGE, LARGE_RANKS, LARGE)
    places = [LARGE.coordinates(at) for at in found]
    assert {(at.pp, at.tp) for at in places} == {(1, 2), (1, 3), (2, 2), (2, 3)}
    assert len(found) == 16
    listed = [at for at, place in zip(found, places, strict=True) if place.cp in (2, 3)]
    assert listed == [26, 27, 30, 31, 42, 43, 46, 47]


@pytest.mark.parametrize("target_rank", range(2))
def test_h7_one_of_two_duplicates_writes(target_rank: int) -> None:
    legs = assign(
        TO_LARGE, "g", dict(enumerate(LARGE_RANKS)), roster=LARGE, target_rank=target_rank
    )
    assert [(LARGE.coordinates(leg.rank), leg.stride) for leg in legs] == [
        (Coordinates(0, pp, 2 + target_rank, cp), (cp, 4)) for pp in (1, 2) for cp in range(4)
    ]


# ---------------------------------------------------------------- H8 to H10: what pairs, who writes


def block(axes: str, tokens: int, heads: int = 2, kind: Any = "full") -> Layout:
    return rank(
        tensor(axes, {"head": (0, heads), "token": (0, tokens), "dim": (0, 4)}),
        tokens=tokens,
        kind=kind,
    )


STORAGE: Final = {
    "HND": ("head token dim", 2, "full"),
    "NHD": ("token head dim", 2, "full"),
    "REPLICATED": ("token dim", 1, "latent"),
}


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 24), (2, 4)], ids=str)
@pytest.mark.parametrize(("axes", "heads", "kind"), STORAGE.values(), ids=STORAGE)
def test_h8_h16_blocks_of_unequal_sizes_are_written_whole(
    axes: str, heads: int, kind: Any, sizes: tuple[int, int]
) -> None:
    source, target = (block(axes, tokens, heads, kind) for tokens in sizes)
    (leg,) = assign(target, "g", {0: source}, roster=Roster())
    template = make_template(source, "g", target, "g", parts=leg.parts, fragment_bytes_min=0)
    tokens = 96 if sizes != (2, 4) else 4
    have, need = (Span.from_slots(range(blocks_for(tokens, size))) for size in sizes)
    pairs = align(have, sizes[0], need, sizes[1])
    (flow,) = plan(template, pairs.source_slots, pairs.target_slots, pairs.shift)
    written = expand(triples(flow.copies))
    assert sorted(written) == list(range(tokens * heads * 4))


def test_h9_latent_and_full_attention_do_not_pair() -> None:
    latent, full = (block("token dim", 4, 1, kind) for kind in ("latent", "full"))
    with pytest.raises(Refused, match="kind is 'latent' at source rank 0 and 'full' at the target"):
        assign(full, "g", {0: latent}, roster=Roster())


@pytest.mark.parametrize("target_rank", range(8))
def test_h10_one_replica_serves_each_attention_rank(target_rank: int) -> None:
    """Theirs is the first for all targets, later the one of the target's own dp rank."""
    latents = [block("token dim", 4, 1, "latent")] * 8
    written, _ = moved(latents[0], latents, Roster(tp=8), target_rank=target_rank)
    owners = [at in written for at in range(8)]
    if target_rank == 0:
        assert owners == [True] + [False] * 7
    assert owners == [at == target_rank for at in range(8)]


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_h10_duplicated_heads_are_written_by_the_rule_of_dp_ranks(heads: int) -> None:
    """A rank writes when `dp_rank % duplicates == tp_rank % duplicates`."""
    sources = instance(Roster(tp=8), [1], heads)
    for dp_rank in range(8):
        written, _ = moved(shard((0, 1), (0, heads)), sources, Roster(tp=8), target_rank=dp_rank)
        duplicates = 8 // heads
        assert list(written) == [at for at in range(8) if at % duplicates == dp_rank % duplicates]


# ---------------------------------------------------------------- H11 to H27: bytes of one pair


class Vector(NamedTuple):
    """One source rank and one target; `copies` are (source address, target address, bytes)."""

    target: Layout
    sources: Sequence[Layout]
    copies: Sequence[tuple[int, int, int]]
    roster: Roster = Roster()
    rank: int = 0
    target_rank: int = 0


def heads_vector(
    heads: int, source: tuple[int, int], target: tuple[int, int], offsets: tuple[int, int],
    *, item: int = 1, kind: Any = "full", target_rank: int = 0,
) -> Vector:  # fmt: skip
    """(tp size, tp rank) of both sides, and where their shared heads begin."""

    def held(size: int, at: int) -> Layout:
        return rank(tensor("head", {"head": shard_heads(heads, size, at)}, item=item), kind=kind)

    length = item * max(1, heads // max(source[0], target[0]))
    return Vector(
        target=held(*target),
        sources=[held(source[0], at) for at in range(source[0])],
        copies=[(*offsets, length)],
        roster=Roster(tp=source[0]),
        rank=source[1],
        target_rank=target_rank,
    )


def paged(
    axes: str, heads: tuple[int, int], tokens: int, dims: int, item: int, base: int,
    layers: tuple[int, int] = (0, 1),
) -> Layout:  # fmt: skip
    ranges: Ranges = {
        "layer": layers, "kind": (0, 2), "head": heads, "token": (0, tokens), "dim": (0, dims),
    }  # fmt: skip
    return rank(tensor(f"layer kind {axes}", ranges, item=item), base=base, tokens=tokens)


def mixed_pool(heads: tuple[int, int], base: int) -> Layout:
    """4 bytes per token and head in token-major order, then 4 bytes that are on every rank."""
    keys = tensor("token head", {"head": heads, "token": (0, 2)}, item=4)
    rows = tensor("token", {"token": (0, 2)}, item=2, role="indexer_k", offset=keys.stop)
    return rank(keys, rows, base=base, tokens=2)


def layered(layers: Sequence[int], layer_bytes: int, base: int = 0) -> Layout:
    """Layers in the order in which they lie in the slot."""
    return rank(
        *(
            tensor("dim", {"layer": (layer, layer + 1), "dim": (0, layer_bytes)}, offset=at)
            for layer, at in zip(layers, itertools.count(0, layer_bytes))
        ),
        base=base,
    )


def ssm(layers: Sequence[int], heads: tuple[int, int]) -> Layout:
    size = 16 * (heads[1] - heads[0])
    return rank(
        *(
            tensor("head dim", {"layer": (layer, layer + 1), "head": heads, "dim": (0, 16)},
                   role="ssm", offset=at)
            for layer, at in zip(layers, itertools.count(0, size))
        ),
        kind="state",
    )  # fmt: skip


def conv(sections: Sequence[int], size: int, at: int, layers: Sequence[int] = (0,)) -> Layout:
    """Sections of these bytes in all, each shared out over `size` ranks, side by side."""
    tensors, offset = [], 0
    for layer in layers:
        begin = 0
        for section in sections:
            mine = section // size
            bounds = (begin + at * mine, begin + (at + 1) * mine)
            tensors.append(
                tensor("dim", {"layer": (layer, layer + 1), "dim": bounds},
                       role="conv", offset=offset)
            )  # fmt: skip
            begin, offset = begin + section, offset + mine
    return rank(*tensors, kind="state")


def convs(sections: Sequence[int], size: int) -> list[Layout]:
    return [conv(sections, size, at) for at in range(size)]


def strided(heads: tuple[int, int], slot_bytes: int, base: int) -> Layout:
    """Token-major, 1 byte per token and head, in a slot of any size."""
    one = tensor("kind token head", {"kind": (0, 2), "head": heads, "token": (0, 4)})
    return Layout((Pool("p", base, slot_bytes, 4),), (Group("g", "full", 4, (one,)),)).check()


def packed(heads: tuple[int, int]) -> Layout:
    """4-bit elements, 32 of a head are 16 bytes."""
    ranges: Ranges = {"head": heads, "token": (0, 4), "dim": (0, 32)}
    one = dense_tensor("kv", "p", "head token dim", ranges, item_bits=4, dtype="int4")
    return rank(one, tokens=4)


HND = "head token dim"
NHD = "token head dim"

BYTES: Final = {
    "H11 tp1 to rank 1 of tp2": heads_vector(4, (1, 0), (2, 1), (2, 0)),
    "H11 tp2 to rank 2 of tp4": heads_vector(8, (2, 1), (4, 2), (0, 0)),
    "H11 tp2 to rank 3 of tp4": heads_vector(8, (2, 1), (4, 3), (2, 0)),
    "H11 rank 3 of tp4 to tp2": heads_vector(8, (4, 3), (2, 1), (0, 2)),
    "H11 tp1 to rank 5 of tp8": heads_vector(4, (1, 0), (8, 5), (2, 0)),
    "H11 rank 5 of tp8 to tp1": heads_vector(4, (8, 5), (1, 0), (0, 2), target_rank=1),
    "H12": Vector(
        paged(HND, (2, 4), 4, 2, 1, 5000, (1, 3)),
        [paged(HND, (0, 4), 4, 2, 1, 1000, (0, 3))],
        [(1080, 5000, 16), (1112, 5016, 16), (1144, 5032, 16), (1176, 5048, 16)],
    ),
    "H13 rank 0": Vector(
        paged(NHD, (0, 1), 2, 1, 4, 2000),
        [paged(NHD, (0, 2), 2, 1, 4, 1000)],
        [(1000 + 8 * at, 2000 + 4 * at, 4) for at in range(4)],
    ),
    "H13 rank 1": Vector(
        paged(NHD, (1, 2), 2, 1, 4, 2000),
        [paged(NHD, (0, 2), 2, 1, 4, 1000)],
        [(1004 + 8 * at, 2000 + 4 * at, 4) for at in range(4)],
    ),
    "H14": Vector(
        paged(NHD, (0, 1), 2, 1, 1, 2000),
        [paged(NHD, (0, 2), 2, 1, 1, 1000)],
        [(1000 + 2 * at, 2000 + at, 1) for at in range(4)],
    ),
    "H15": Vector(
        strided((0, 1), 9, 2000),
        [strided((0, 2), 17, 1000)],
        [(1000 + 2 * at, 2000 + at, 1) for at in range(8)],
    ),
    "H17": Vector(
        layered([0, 1, 2], 128, 2000), [layered([0, 1, 2], 128, 1000)], [(1000, 2000, 384)]
    ),
    "H18": Vector(
        mixed_pool((0, 1), 2000),
        [mixed_pool((0, 2), 1000)],
        [(1000, 2000, 4), (1008, 2004, 4), (1016, 2008, 4)],
    ),
    "H19": Vector(layered([3], 512), [layered([5, 3], 512)], [(512, 0, 512)]),
    "H20": Vector(
        layered([0, 2], 100), [layered([0, 1, 2], 100)], [(0, 0, 100), (200, 100, 100)]
    ),
    "H21": Vector(packed((1, 2)), [packed((0, 2))], [(64, 0, 64)]),
    **{
        f"H23 rank {source[1]} of tp{source[0]} to rank {target[1]} of tp{target[0]}": heads_vector(
            4, source, target, offsets, item=32, kind="state"
        )
        for source, target, offsets in (
            ((2, 0), (4, 1), (32, 0)),
            ((2, 0), (4, 0), (0, 0)),
            ((2, 1), (4, 3), (32, 0)),
            ((4, 1), (2, 0), (0, 32)),
            ((4, 0), (2, 0), (0, 0)),
            ((4, 3), (2, 1), (0, 32)),
            ((2, 1), (2, 1), (0, 0)),
        )
    },
    "H24": Vector(
        ssm([2, 4, 5], (4, 8)),
        [ssm([0, 1, 4, 5], (0, 8)), ssm([2, 3], (0, 8))],
        [(2 * 128 + 64, 64, 64), (3 * 128 + 64, 128, 64)],
        Roster(pp=2),
    ),
    "H25 tp2 to rank 1 of tp4": Vector(
        conv([128, 128, 256], 4, 1),
        convs([128, 128, 256], 2),
        [(32, 0, 32), (96, 32, 32), (192, 64, 64)],
        Roster(tp=2),
    ),
    "H25 rank 3 of tp4 to tp2": Vector(
        conv([128, 128, 256], 2, 1),
        convs([128, 128, 256], 4),
        [(0, 32, 32), (32, 96, 32), (64, 192, 64)],
        Roster(tp=4),
        rank=3,
    ),
    "H26": Vector(
        conv([128, 32, 32], 2, 0),
        convs([128, 32, 32], 1),
        [(0, 0, 64), (128, 64, 16), (160, 80, 16)],
    ),
    "H27": Vector(
        conv([64, 64, 128], 1, 0, layers=(0, 1)),
        [conv([64, 64, 128], 1, 0, layers=(0,)), conv([64, 64, 128], 1, 0, layers=(1,))],
        [(0, 256, 64), (64, 320, 64), (128, 384, 128)],
        Roster(pp=2),
        rank=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("vector", BYTES.values(), ids=BYTES)
def test_the_same_bytes_move(vector: Vector) -> None:
    written, copies = moved(
        vector.target, vector.sources, vector.roster, target_rank=vector.target_rank
    )
    assert written[vector.rank] == expand(vector.copies)
    assert copies[vector.rank] <= len(vector.copies)


def test_h22_four_descriptors_per_token() -> None:
    """Two layers, K and V, token-major storage, and heads that are split."""
    target, source = paged(NHD, (0, 1), 8, 4, 2, 0, (0, 2)), paged(NHD, (0, 2), 8, 4, 2, 0, (0, 2))
    template = make_template(source, "g", target, "g", fragment_bytes_min=0)
    assert template.fragments_per_block == 8 * 4
    assert template.mean_fragment_bytes == 8


@pytest.mark.parametrize("at", range(4))
def test_h23_states_are_sharded_over_tp_and_cp_together(at: int) -> None:
    """Rank `tp_rank * cp + cp_rank` of `tp * cp`, which is how ranks are numbered."""
    roster = Roster(tp=2, cp=2)
    place = roster.coordinates(at)
    assert at == place.tp * 2 + place.cp
    shards = [ssm([0], shard_heads(4, 4, each)) for each in range(4)]
    written, _ = moved(ssm([0], (0, 4)), shards, roster)
    assert written[at] == expand([(0, 16 * at, 16)])


# ---------------------------------------------------------------- H29, H31, H32: sizes of pools


def test_h29_slots_of_a_pool_from_its_tokens() -> None:
    assert blocks_for(3200, 64) == 50


def test_h31_states_of_two_roles_and_layers_share_a_slot() -> None:
    states = [
        tensor("dim", {"layer": (layer, layer + 1), "dim": (0, 64)}, role=role, offset=offset)
        for (layer, role), offset in zip(
            itertools.product(range(2), ("conv", "ssm")), range(0, 256, 64), strict=True
        )
    ]
    layout = rank(*states, kind="state")
    assert layout.block_bytes("g") == 256
    assert [region.size for region in layout.regions()] == [2048]


def test_h32_layer_major_states_are_a_pool_per_layer() -> None:
    pools, groups = [], []
    for role, slots, size, base in (("conv", 10, 128, 0), ("ssm", 8, 256, 1 << 20)):
        tensors = []
        for at in range(3):
            pools.append(Pool(f"{role} {at}", base + at * slots * size, size, slots))
            ranges: Ranges = {"layer": (at, at + 1), "dim": (0, size)}
            one = dense_tensor(role, f"{role} {at}", "dim", ranges, item_bits=8, dtype="any")
            tensors.append(one)
        groups.append(Group(role, "state", 1, tuple(tensors)))
    layout = Layout(tuple(pools), tuple(groups)).check()
    assert [region.size for region in layout.regions()] == [3 * 10 * 128, 3 * 8 * 256]


# ---------------------------------------------------------------- H34: whole instances


class Size(NamedTuple):
    """tp, pp, and whether the tp ranks are attention dp ranks instead."""

    tp: int
    pp: int
    dp: bool = False

    @property
    def roster(self) -> Roster:
        return Roster(dp=self.tp, pp=self.pp) if self.dp else Roster(tp=self.tp, pp=self.pp)

    def __str__(self) -> str:
        return f"{'dp' if self.dp else 'tp'}{self.tp}pp{self.pp}"


MATRIX: Final = [
    (Size(1, 1), Size(1, 1), 4), (Size(1, 1), Size(1, 2), 4),
    (Size(1, 2), Size(1, 1), 4), (Size(1, 2), Size(1, 2), 4), (Size(1, 2), Size(2, 1), 4),
    (Size(2, 1), Size(1, 2), 4), (Size(4, 1), Size(2, 2), 4), (Size(1, 4), Size(2, 2), 4),
    (Size(2, 1, dp=True), Size(2, 1, dp=True), 4), (Size(2, 1, dp=True), Size(1, 2), 4),
    (Size(1, 4), Size(2, 2, dp=True), 4),
    (Size(2, 1), Size(2, 1, dp=True), 1), (Size(2, 1, dp=True), Size(2, 1), 1),
]  # fmt: skip


def model_rank(size: Size, at: int, heads: int) -> Layout:
    """4 layers, every second one with a window; a stage of one layer has one of the two groups."""
    place = size.roster.coordinates(at)
    layers = range(*shard_layers([4 // size.pp] * size.pp, place.pp))
    groups, pools = [], []
    for name, mine, window in (
        ("whole", [layer for layer in layers if layer % 2 == 0], 0),
        ("window", [layer for layer in layers if layer % 2], 24),
    ):
        ranges: Ranges = {
            "kind": (0, 1 if heads == 1 else 2),
            "head": shard_heads(heads, size.roster.tp, place.tp),
            "token": (0, 8),
            "dim": (0, 128),
        }
        tensors: list[Tensor] = []
        for layer in mine:
            one = dense_tensor(
                "kv", name, "kind head token dim", {"layer": (layer, layer + 1), **ranges},
                item_bits=16, dtype="float16", offset=tensors[-1].stop if tensors else 0,
            )  # fmt: skip
            tensors.append(one)
        if tensors:
            kind: Any = "window" if window else ("latent" if heads == 1 else "full")
            groups.append(Group(name, kind, 8, tuple(tensors), window))
            pools.append(Pool(name, 0, tensors[-1].stop, 4))
    return Layout(tuple(pools), tuple(groups)).check()


@pytest.mark.parametrize(
    ("ctx", "gen", "heads"), MATRIX, ids=[f"{c} to {g}, {h} heads" for c, g, h in MATRIX]
)
def test_h34_every_block_of_every_rank_is_covered_once(ctx: Size, gen: Size, heads: int) -> None:
    sources = [model_rank(ctx, at, heads) for at in range(ctx.roster.size)]
    for dp, at in itertools.product(range(ctx.roster.dp), range(gen.roster.size)):
        target = model_rank(gen, at, heads)
        for group in target.groups:
            written, _ = moved(target, sources, ctx.roster, group.name, dp=dp, target_rank=at)
            every = [byte for leg in written.values() for byte in leg]
            assert sorted(every) == list(range(group.block_bytes))


# ---------------------------------------------------------------- completeness


def test_every_vector_is_here_or_said_to_be_elsewhere() -> None:
    named = {word for name in globals() if name.startswith("test_h") for word in name.split("_")}
    numbered = {word.upper() for word in named if word[:1] == "h" and word[1:].isdigit()}
    tested = numbered | {name.split()[0] for name in (*OVERLAPS, *BYTES)}
    assert tested & ELSEWHERE.keys() == set()
    assert tested | ELSEWHERE.keys() == {f"H{number}" for number in range(1, 35)}
    assert LIFTED.keys() <= tested
