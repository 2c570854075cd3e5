"""Plans by hand-computed addresses: folding, merging, cutting, and every refusal's words."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.engine.errors import InternalError, Refused, UsageError
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.plan import Copies, Cut, plan
from kvferry.engine.template import Template, make_template
from kvferry.engine.tensors import Axis, Tensor

replace = msgspec.structs.replace

EXTENTS = {"layer": 2, "kind": 2, "token": 4, "head": 2, "dim": 64}  # of 2 bytes: 4 KiB a block


def box(order: str, low: dict[str, int] | None = None, **extents: int) -> tuple[Axis, ...]:
    """Axes of a dense box in storage order."""
    axes: list[Axis] = []
    stride = 2
    for name in reversed(order.split()):
        extent, start = {**EXTENTS, **extents}[name], (low or {}).get(name, 0)
        axes.append(Axis(name, start, start + extent, stride))
        stride *= extent
    return tuple(reversed(axes))


def one_pool(order: str = "layer kind token head dim", **pool: Any) -> Layout:
    tensor = Tensor("kv", "p", 0, box(order), 2, "bfloat16")
    made = replace(Pool("p", 100_000, 4096, 16), **pool)
    return Layout((made,), (Group("full", "full", 4, (tensor,)),)).check()


def pool_per_layer(base: int = 500_000, layers: range = range(2)) -> Layout:
    pools = tuple(Pool(f"l{at}", base + 100_000 * at, 2048, 16) for at in layers)
    tensors = tuple(
        Tensor(
            "kv",
            f"l{at}",
            0,
            box("layer kind token head dim", {"layer": at}, layer=1),
            2,
            "bfloat16",
        )
        for at in layers
    )
    return Layout(pools, (Group("full", "full", 4, tensors),)).check()


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def listed(copies: Copies) -> list[tuple[int, int, int]]:
    return list(
        zip(copies.source.tolist(), copies.target.tolist(), copies.lengths.tolist(), strict=True)
    )


def template_of(source: Layout, target: Layout, **options: Any) -> Template:
    return make_template(source, "full", target, "full", **options)


# ---------------------------------------------------------------- folding and merging


def test_equal_storage_is_one_copy_per_block() -> None:
    template = template_of(one_pool(), one_pool(address=900_000))
    assert template.fragments_per_block == 1
    assert template.block_bytes == 4096
    assert template.mean_fragment_bytes == 4096
    (flow,) = plan(template, array(3, 9), array(5, 2))
    assert listed(flow.copies) == [
        (100_000 + 3 * 4096, 900_000 + 5 * 4096, 4096),
        (100_000 + 9 * 4096, 900_000 + 2 * 4096, 4096),
    ]
    assert flow.copies.bytes == 8192


def test_neighbours_merge_where_both_sides_step_together() -> None:
    template = template_of(one_pool(address=0), one_pool(address=0))
    (flow,) = plan(template, array(6, 2, 1, 3, 5, 9), array(3, 8, 7, 9, 5, 4))
    blocks = [(s // 4096, t // 4096, length // 4096) for s, t, length in listed(flow.copies)]
    assert blocks == [(1, 7, 3), (5, 5, 1), (6, 3, 1), (9, 4, 1)]


def test_padding_on_either_side_keeps_blocks_apart() -> None:
    for source, target in ((5000, 4096), (4096, 5000), (5000, 5000)):
        template = template_of(one_pool(stride=source), one_pool(stride=target))
        (flow,) = plan(template, array(0, 1), array(0, 1))
        assert [length for _, _, length in listed(flow.copies)] == [4096, 4096]


def test_token_major_against_head_major_goes_head_by_head() -> None:
    template = template_of(one_pool(), one_pool("layer kind head token dim"), fragment_bytes_min=0)
    # 4 tokens x 2 heads in each of 4 planes; the last of a plane touches the first of the next.
    assert template.fragments_per_block == 4 * 8 - 3
    assert template.mean_fragment_bytes == 4096 // 29


def test_layers_in_one_tensor_meet_layers_in_many() -> None:
    template = template_of(one_pool(), pool_per_layer())
    assert template.fragments_per_block == 2
    (flow,) = plan(template, array(1), array(4))
    assert sorted(listed(flow.copies)) == [
        (104_096, 500_000 + 4 * 2048, 2048),
        (104_096 + 2048, 600_000 + 4 * 2048, 2048),
    ]
    back = template_of(pool_per_layer(), one_pool())
    assert sorted(listed(plan(back, array(4), array(1))[0].copies)) == sorted(
        (target, source, length) for source, target, length in listed(flow.copies)
    )


def test_pools_that_are_dense_merge_pool_by_pool() -> None:
    template = template_of(pool_per_layer(), pool_per_layer(2_000_000))
    (flow,) = plan(template, array(2, 3, 4), array(7, 8, 9))
    assert listed(flow.copies) == [
        (500_000 + 2 * 2048, 2_000_000 + 7 * 2048, 3 * 2048),
        (600_000 + 2 * 2048, 2_100_000 + 7 * 2048, 3 * 2048),
    ]


def test_a_target_with_fewer_layers_takes_its_own() -> None:
    template = template_of(one_pool(), pool_per_layer(layers=range(1, 2)))
    assert template.block_bytes == 2048
    (flow,) = plan(template, array(0), array(0))
    assert listed(flow.copies) == [(100_000 + 2048, 600_000, 2048)]


def test_memories_come_apart_into_flows() -> None:
    target = pool_per_layer()
    target = replace(
        target, pools=(target.pools[0], replace(target.pools[1], memory="vram", device=3))
    )
    flows = plan(template_of(one_pool(), target), array(0), array(0))
    assert [
        (f.source_memory, f.source_device, f.target_memory, f.target_device) for f in flows
    ] == [
        ("dram", 0, "dram", 0),
        ("dram", 0, "vram", 3),
    ]
    assert [listed(flow.copies) for flow in flows] == [
        [(100_000, 500_000, 2048)],
        [(102_048, 600_000, 2048)],
    ]


def test_nothing_to_copy_is_no_flow() -> None:
    assert plan(template_of(one_pool(), one_pool()), array(), array()) == ()


# ---------------------------------------------------------------- refusals


def changed(layout: Layout, **group: Any) -> Layout:
    return replace(layout, groups=(replace(layout.groups[0], **group),))


def retensored(layout: Layout, **tensor: Any) -> Layout:
    (one,) = layout.groups[0].tensors
    return changed(layout, tensors=(replace(one, **tensor),))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (changed(one_pool(), kind="latent"), "kind is 'full' at the source and 'latent' at the t"),
        (changed(one_pool(), kind="full", window=8), "window is 0 at the source and 8 at the tar"),
        (
            retensored(one_pool(), dtype="float8"),
            "tensor 'kv' of layers 0..1: dtype is 'bfloat16' at the source and 'float8' at the t",
        ),
        (retensored(one_pool(), item_bytes=1), "item_bytes is 2 at the source and 1 at the targ"),
        (
            retensored(one_pool(), axes=box("layer kind token head dim", {"head": 2})),
            "axis 'head' covers 0..1 at the source and 2..3 at the target",
        ),
        (
            retensored(one_pool(), axes=box("layer kind token head dim", dim=65)),
            "axis 'dim' covers 0..63 at the source and 0..64 at the target",
        ),
        (
            retensored(one_pool(), axes=box("layer kind token head dim", {"layer": 1})),
            "tensor 'kv' of layers 1..2 is not all held by the source: axis 'layer' covers 0..1 "
            "at the source and 1..2 at the target",
        ),
        (retensored(one_pool(), role="indexer"), "'indexer' of layers 0..1 has no source; the "),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(target: Layout, message: str) -> None:
    with pytest.raises(Refused) as caught:
        template_of(one_pool(), target)
    assert message in str(caught.value)
    assert str(caught.value).startswith("group 'full' to 'full': ")
    assert (caught.value.by, caught.value.code) == ("peer", "geometry")
    assert not caught.value.retry_safe


def test_an_optional_tensor_may_be_absent_but_not_in_part() -> None:
    draft = Tensor("draft", "d", 0, box("layer token dim"), 2, "bfloat16", optional=True)
    whole = one_pool()
    target = Layout(
        (*whole.pools, Pool("d", 700_000, 1024, 16)),
        (replace(whole.groups[0], tensors=(*whole.groups[0].tensors, draft)),),
    ).check()
    assert template_of(one_pool(), target).block_bytes == 4096
    half = replace(draft, axes=box("layer token dim", layer=1))
    source = replace(target, groups=(replace(target.groups[0], tensors=(half,)),))
    with pytest.raises(Refused, match=r"tensor 'draft' of layers 0\.\.1 is not all held"):
        template_of(source, changed(target, tensors=(draft,)))
    with pytest.raises(Refused, match="nothing to copy"):
        template_of(one_pool(), changed(target, tensors=(draft,)))


def test_small_fragments_are_refused_unless_allowed() -> None:
    head_major = one_pool("layer kind head token dim")
    message = r"29 fragments of 141 bytes on average, the least allowed is 512"
    with pytest.raises(Refused, match=message) as e:
        template_of(one_pool(), head_major)
    assert (e.value.by, e.value.code) == ("peer", "fragments")
    assert template_of(one_pool(), head_major, fragment_bytes_min=141).fragments_per_block == 29


def test_a_geometry_that_explodes_is_refused_before_it_is_expanded() -> None:
    def huge(order: str) -> Layout:
        axes = box(order, token=2**16, head=2**20, dim=1, layer=1, kind=1)
        tensor = Tensor("kv", "p", 0, axes, 2, "bfloat16")
        pool = Pool("p", 0, 2**41, 2)
        return Layout((pool,), (Group("full", "full", 2**16, (tensor,)),)).check()

    with pytest.raises(Refused, match="more than 65536 fragments per block"):
        template_of(huge("token head dim"), huge("head token dim"))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (array(16), array(0), r"group 'full': source slot 16 is not in 0\.\.15"),
        (array(0), array(16), r"group 'full': target slot 16 is not in 0\.\.15"),
        (array(3, -1), array(0, 1), "source slot -1 is not in"),
        (array(0, 1), array(1, -7), "target slot -7 is not in"),
        (array(1, 2), array(1), "2 source slots and 1 target slots"),
    ],
)
def test_slots_outside_the_pool_are_refused(source: Any, target: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(template_of(one_pool(), one_pool()), source, target)


def test_an_unchecked_layout_does_not_get_an_address_out() -> None:
    """The planner's own check of addresses, which a layout's `check` makes unreachable."""
    short = replace(one_pool(), pools=(Pool("p", 100_000, 4096, 16, size=4096 * 15),))
    for source, target, side in ((short, one_pool(), "source"), (one_pool(), short, "target")):
        template = template_of(source, target)
        plan(template, array(14), array(14))
        with pytest.raises(InternalError, match=f"planned {side} addresses .* leave their pool"):
            plan(template, array(15), array(15))


# ---------------------------------------------------------------- writes


def copies_of(*lengths: int) -> Copies:
    sizes = array(*lengths)
    begins = np.cumsum(sizes) - sizes
    return Copies(1000 + 2 * begins, 9000 + 3 * begins, sizes)


@pytest.mark.parametrize(
    ("lengths", "descriptors_max", "bytes_max", "expected"),
    [
        ((), 4, 100, []),
        ((10, 20, 30), 4, 100, [[10, 20, 30]]),
        ((10, 20, 30), 2, 100, [[10, 20], [30]]),
        ((10, 20, 30), 4, 30, [[10, 20], [30]]),
        ((10, 20, 30), 4, 59, [[10, 20], [30]]),
        ((10, 20, 30), 4, 60, [[10, 20, 30]]),
        ((250,), 4, 100, [[100], [100], [50]]),
        ((10, 250, 10), 4, 100, [[10], [100], [100], [50, 10]]),
        ((100, 100), 4, 100, [[100], [100]]),
        ((3,), 1, 1, [[1], [1], [1]]),
    ],
)
def test_cut_fills_each_write_up_to_its_bounds(
    lengths: tuple, descriptors_max: int, bytes_max: int, expected: list
) -> None:
    writes = list(Cut(copies_of(*lengths), descriptors_max, bytes_max))
    assert [write.lengths.tolist() for write in writes] == expected


def test_cut_continues_a_copy_where_its_last_piece_ended() -> None:
    copies = Copies(array(1000, 5000), array(9000, 7000), array(25, 10))
    writes = list(Cut(copies, 4, 10))
    assert [listed(write) for write in writes] == [
        [(1000, 9000, 10)],
        [(1010, 9010, 10)],
        [(1020, 9020, 5)],
        [(5000, 7000, 10)],
    ]


def test_cut_handles_a_state_of_hundreds_of_megabytes() -> None:
    size = 460_000_000
    writes = list(Cut(Copies(array(1 << 40), array(1 << 41), array(size)), 512, 8 << 20))
    assert len(writes) == 55
    assert sum(write.bytes for write in writes) == size
    assert int(writes[-1].source[0] + writes[-1].lengths[0]) == (1 << 40) + size


@pytest.mark.parametrize(("descriptors_max", "bytes_max"), [(0, 10), (10, 0), (-1, 10)])
def test_cut_without_room_is_refused(descriptors_max: int, bytes_max: int) -> None:
    with pytest.raises(UsageError, match=f"descriptors_max is {descriptors_max} and bytes_max"):
        Cut(copies_of(1), descriptors_max, bytes_max)
