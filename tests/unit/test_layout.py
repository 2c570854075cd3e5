"""Layouts: geometry that is accepted, geometry that is refused, and what is derived from it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.adapters.torch_layout import paged_layout
from kvferry.engine.errors import UsageError
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.ports import Region
from kvferry.engine.tensors import Axis, Tensor

replace = msgspec.structs.replace

# Two layers, K and V, 4 tokens, 2 heads, 8 dims of 2 bytes: 512 bytes in slots of 512.
AXES = (
    Axis("layer", 0, 2, 256),
    Axis("kind", 0, 2, 128),
    Axis("token", 0, 4, 32),
    Axis("head", 0, 2, 16),
    Axis("dim", 0, 8, 2),
)
TENSOR = Tensor("kv", "p", 0, AXES, 2, "bfloat16")
POOL = Pool("p", 4096, 512, 10)
GROUP = Group("full", "full", 4, (TENSOR,))
LAYOUT = Layout((POOL,), (GROUP,), "model")


def with_pool(**changes: Any) -> Layout:
    return replace(LAYOUT, pools=(replace(POOL, **changes),))


def with_group(**changes: Any) -> Layout:
    return replace(LAYOUT, groups=(replace(GROUP, **changes),))


def with_tensor(**changes: Any) -> Layout:
    return with_group(tensors=(replace(TENSOR, **changes),))


def with_axis(at: int, **changes: Any) -> Layout:
    axes = list(AXES)
    axes[at] = replace(axes[at], **changes)
    return with_tensor(axes=tuple(axes))


def test_a_valid_layout_checks_and_answers() -> None:
    assert LAYOUT.check() is LAYOUT
    assert LAYOUT.group("full") is GROUP
    assert LAYOUT.pool("p") is POOL
    assert LAYOUT.block_bytes("full") == 512
    assert LAYOUT.slots("full") == 10
    assert LAYOUT.regions() == (Region(4096, 5120),)


def test_the_structs_are_the_wire_form() -> None:
    LAYOUT.check_slots("full", np.array([1]))  # fills what is derived
    raw = msgspec.msgpack.encode(LAYOUT)
    read = msgspec.msgpack.decode(raw, type=Layout)
    assert read == LAYOUT
    assert read.check().block_bytes("full") == 512


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (replace(LAYOUT, pools=()), "layout.pools is 0"),
        (replace(LAYOUT, groups=()), "layout.groups is 0"),
        (replace(LAYOUT, pools=(POOL, POOL)), "two pools are named 'p'"),
        (replace(LAYOUT, groups=(GROUP, GROUP)), "two groups are named 'full'"),
        (with_pool(name=""), "a pool has an empty name"),
        (with_pool(memory="hbm"), "pool 'p': memory is 'hbm'"),
        (with_pool(device=-1), "pool 'p': device is -1"),
        (with_pool(address=-1), "pool 'p': address is -1"),
        (with_pool(address=2**63 - 100), "pool 'p': end address is"),
        (with_pool(stride=0), "pool 'p': stride is 0"),
        (with_pool(slots=0), "pool 'p': slots is 0"),
        (with_pool(slots=2**31, stride=2**40, size=1), "pool 'p': end of its slots is"),
        (with_pool(reserved=(10,)), "pool 'p': reserved slot is 10, must be 0 to 9"),
        (with_pool(stride=500), "ends 512 bytes into its slot, but slots of pool 'p' are 500"),
        (with_pool(size=5119), "last slot of pool 'p' ends 5120 bytes into the pool, which has 5"),
        (with_group(kind="ring"), "group 'full': kind is 'ring'"),
        (with_group(tensors=()), "group 'full': number of tensors is 0"),
        (with_group(tokens_per_block=0), "group 'full': tokens_per_block is 0"),
        (with_group(tokens_per_block=8), r"axis 'token' covers 0\.\.3, but .* tokens 0\.\.7"),
        (with_group(kind="window"), "group 'full': window is 0"),
        (with_group(window=4), "group 'full': window is 4, must be 0 for kind 'full'"),
        (with_group(kind="state"), "tokens_per_block is 4, must be 1: a state is a point"),
        (with_tensor(role=""), "role is empty"),
        (with_tensor(pool="q"), "no pool 'q'"),
        (with_tensor(item_bytes=0), "item_bytes is 0"),
        (with_tensor(offset=-1), "offset is -1"),
        (with_tensor(offset=1), "ends 513 bytes into its slot"),
        (with_axis(3, name="hidden"), "axis 'hidden' is unknown"),
        (with_axis(3, name="dim"), "axis 'dim' is listed twice"),
        (with_axis(3, start=2), "axis 'head' stop is 2, must be 3"),
        (with_axis(3, start=-1), "axis 'head' start is -1"),
        (with_axis(3, stride=14), "axis 'head': stride 14 is less than the 16 bytes inside it"),
        (with_axis(4, stride=1), "axis 'dim': stride 1 is less than the 2 bytes"),
        (with_tensor(axes=AXES[::-1]), "not listed outermost first"),
    ],
)
def test_bad_geometry_is_refused_with_field_and_value(layout: Layout, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layout.check()


def test_a_coordinate_has_one_home() -> None:
    twice = with_group(tensors=(TENSOR, replace(TENSOR, pool="q")))
    layout = replace(twice, pools=(POOL, replace(POOL, name="q", address=9999)))
    with pytest.raises(UsageError, match=r"in pool 'p' and .* in pool 'q' both hold the same"):
        layout.check()
    replace(  # another role is another coordinate
        layout, groups=(replace(GROUP, tensors=(TENSOR, replace(TENSOR, pool="q", role="x"))),)
    ).check()


def test_a_byte_has_one_tensor() -> None:
    """K and V of each token interleave legally; moved by one element they collide."""
    inner = (Axis("token", 0, 4, 32), Axis("dim", 0, 8, 2))
    k = Tensor("kv", "p", 0, (Axis("kind", 0, 1, 0), *inner), 2, "bfloat16")
    v = replace(k, offset=16, axes=(Axis("kind", 1, 2, 0), *inner))
    with_group(tensors=(k, v)).check()
    with pytest.raises(UsageError, match=r"offset 0\) and .*offset 14\) share byte 14 of each"):
        with_group(tensors=(k, replace(v, offset=14))).check()


def test_two_groups_may_share_the_memory_of_a_pool() -> None:
    window = replace(GROUP, name="window", kind="window", window=8)
    replace(LAYOUT, groups=(GROUP, window)).check()


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"no group 'swa'; the layout has \['full'\]"):
        LAYOUT.group("swa")
    with pytest.raises(UsageError, match=r"no pool 'q'; the layout has \['p'\]"):
        LAYOUT.pool("q")


def test_regions_merge_what_overlaps_and_touching_host_memory() -> None:
    def layout(*pools: tuple[int, str, int]) -> Layout:
        named = [
            Pool(f"p{i}", address, 512, 10, memory=memory, device=device)
            for i, (address, memory, device) in enumerate(pools)
        ]
        return replace(LAYOUT, pools=tuple(named))

    assert layout((5120, "dram", 0), (0, "dram", 0)).regions() == (Region(0, 10240),)
    assert layout((0, "dram", 0), (5121, "dram", 0)).regions() == (
        Region(0, 5120),
        Region(5121, 5120),
    )
    assert layout((0, "vram", 0), (512, "vram", 0)).regions() == (Region(0, 5632, "vram"),)
    assert len(layout((0, "vram", 0), (5120, "vram", 0)).regions()) == 2
    assert len(layout((0, "vram", 0), (0, "vram", 1)).regions()) == 2
    inside = replace(POOL, name="q", slots=2)  # lies inside the first pool
    assert replace(LAYOUT, pools=(POOL, inside)).regions() == (Region(4096, 5120),)


def test_slots_outside_the_smallest_pool_and_reserved_ones_are_refused() -> None:
    pools = (replace(POOL, reserved=(0,)), Pool("q", 90000, 512, 8, reserved=(3,)))
    second = replace(TENSOR, role="x", pool="q")
    layout = replace(LAYOUT, pools=pools, groups=(replace(GROUP, tensors=(TENSOR, second)),))
    layout.check().check_slots("full", np.array([1, 2, 7]))
    layout.check_slots("full", np.array([], dtype=np.int64))
    for slot, message in ((8, r"slot 8 is not in 0\.\.7"), (-1, "slot -1 is not in")):
        with pytest.raises(UsageError, match=f"group 'full': {message}"):
            layout.check_slots("full", np.array([1, slot]))
    for slot in (0, 3):
        with pytest.raises(UsageError, match=f"group 'full': slot {slot} is reserved"):
            layout.check_slots("full", np.array([1, slot]))


def test_fingerprint_is_of_what_is_held_not_where() -> None:
    transposed = (AXES[0], AXES[1], replace(AXES[3], stride=64), replace(AXES[2], stride=16))
    same = [
        with_pool(address=8192, slots=3, stride=600, reserved=(1,), memory="vram", name="p"),
        with_tensor(axes=(*transposed, AXES[4])),
    ]
    for layout in same:
        assert layout.check().fingerprint() == LAYOUT.fingerprint()
    different = [
        replace(LAYOUT, model="other"),
        with_tensor(dtype="float16"),
        with_tensor(role="x"),
        with_axis(3, start=2, stop=4),
        with_group(kind="window", window=8),
        with_group(name="g"),
    ]
    for layout in different:
        assert layout.check().fingerprint() != LAYOUT.fingerprint()


# ---------------------------------------------------------------- from tensors

torch = pytest.importorskip("torch")


def address_of(layout: Layout, slot: int, **coordinate: int) -> int:
    """The address of one element, from the layout's definition."""
    for tensor in layout.groups[0].tensors:
        if all(low <= coordinate.get(name, 0) < high for name, (low, high) in ranges(tensor)):
            pool = layout.pool(tensor.pool)
            return (
                pool.address
                + slot * pool.stride
                + tensor.offset
                + sum((coordinate[a.name] - a.start) * a.stride for a in tensor.axes)
            )
    raise AssertionError(f"nobody holds {coordinate}")


def ranges(tensor: Tensor) -> list[tuple[str, tuple[int, int]]]:
    return [(name, tensor.range(name)) for name in ("layer", "kind", "head", "token", "dim")]


@pytest.mark.parametrize(
    ("axes", "shape", "order", "pools"),
    [
        ("kind block token head dim", (2, 5, 4, 3, 8), None, 2),
        ("block kind head token dim", (5, 2, 3, 4, 8), None, 1),
        ("block kind token head dim", (5, 2, 4, 3, 8), (1, 0, 2, 3, 4), 2),  # K and V apart
        ("kind block token head dim", (2, 5, 4, 3, 8), (0, 1, 3, 2, 4), 2),  # HND in memory
        ("block layer kind token head dim", (5, 3, 2, 4, 3, 8), None, 1),
        ("layer block kind token head dim", (3, 5, 2, 4, 3, 8), None, 3),
        ("block token dim", (5, 4, 8), None, 1),
        ("kind block token head dim", (2, 1, 4, 3, 8), None, 1),  # a single block
    ],
)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_tensor_becomes_the_boxes_that_it_is(
    library: str, axes: str, shape: tuple, order: tuple | None, pools: int
) -> None:
    names = axes.split()
    stored = shape if order is None else tuple(shape[at] for at in order)
    back = range(len(shape)) if order is None else np.argsort(order).tolist()
    if library == "torch":
        whole = torch.zeros(stored, dtype=torch.bfloat16)
        tensor, base, item = whole.permute(*back), whole.data_ptr(), 2
    else:
        whole = np.zeros(stored, dtype=np.float32)
        tensor, base, item = whole.transpose(*back), whole.ctypes.data, 4
    heads = (6, 9) if "head" in names else None
    layers = [7, 8, 9][: shape[names.index("layer")] if "layer" in names else 1]
    layout = paged_layout(tensor, axes, heads=heads, layers=layers)
    assert len(layout.pools) == pools
    assert layout.groups[0].tensors[0].dtype == ("bfloat16" if library == "torch" else "float32")
    assert layout.regions() == (Region(base, int(np.prod(shape)) * item),)
    strides = tensor.stride() if library == "torch" else [s // item for s in tensor.strides]
    rng = np.random.default_rng(5)
    for _ in range(20):
        index = dict(zip(names, rng.integers(0, shape).tolist(), strict=True))
        expected = base + item * sum(i * s for i, s in zip(index.values(), strides, strict=True))
        slot = index.pop("block")
        starts = {"head": 6 if heads else 0, "layer": 7}
        found = {name: at + starts.get(name, 0) for name, at in index.items()}
        found.setdefault("layer", 7)
        listed = {name: found.get(name, 0) for name in ("layer", "kind", "head", "token", "dim")}
        assert address_of(layout, slot, **listed) == expected


def test_one_tensor_per_layer_gets_its_global_id() -> None:
    caches = [np.zeros((2, 6, 4, 2, 8), np.float16) for _ in range(3)]
    layout = paged_layout(caches, "kind block token head dim", layers=[4, 6, 8], reserved=[0])
    assert [pool.name for pool in layout.pools[:2]] == ["full/layer4/kind0", "full/layer4/kind1"]
    assert sorted({tensor.range("layer") for tensor in layout.groups[0].tensors}) == [
        (4, 5),
        (6, 7),
        (8, 9),
    ]
    assert layout.block_bytes("full") == 3 * 2 * 4 * 2 * 8 * 2
    with pytest.raises(UsageError, match="slot 0 is reserved"):
        layout.check_slots("full", np.array([0]))


def test_a_view_of_every_second_block_stays_inside_its_allocation() -> None:
    whole = np.zeros((8, 4, 2, 8), np.float16)
    layout = paged_layout(whole[1::2], "block token head dim")
    assert layout.pools[0].slots == 4
    assert layout.pools[0].stride == 2 * 128
    assert layout.pools[0].stop == whole.ctypes.data + whole.nbytes


class CudaTensor:
    """What the adapter reads of a CUDA tensor."""

    class device:  # noqa: N801
        type = "cuda"
        index = 3

    dtype = "torch.float8_e4m3fn"
    shape = (5, 4, 8)

    def data_ptr(self) -> int:
        return 0x7F0000000000

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return (32, 8, 1)


def test_a_cuda_tensor_is_device_memory() -> None:
    layout = paged_layout(CudaTensor(), "block token dim")
    assert layout.regions() == (Region(0x7F0000000000, 160, "vram", 3),)
    assert layout.groups[0].tensors[0].dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("given", "axes", "options", "message"),
    [
        ([], "block token dim", {}, "no tensors"),
        (np.zeros((2, 3)), "block token dim", {}, r"name 3 dimensions .* shape \[2, 3\]"),
        (np.zeros((2, 3)), "block hidden", {}, "axis 'hidden' is unknown"),
        (np.zeros((2, 3)), "block block", {}, "axis 'block' is named twice"),
        (np.zeros((2, 3)), "token dim", {}, "do not name 'block'"),
        (np.zeros((2, 0)), "block dim", {}, "axis 'dim' of the tensor is empty"),
        ([np.zeros((2, 3)), np.zeros((3, 3))], "block token", {}, "tensor 1 has 3 blocks of 3"),
        (np.zeros((2, 3)), "block token", {"layers": [1, 2]}, "layers lists 2 ids"),
        (np.zeros((2, 2)), "block layer", {"layers": [1, 3]}, "must be consecutive"),
        ([np.zeros((2, 2))] * 2, "block layer", {}, "2 tensors were given, must be one"),
        (np.zeros((2, 3)), "block head", {"heads": (0, 4)}, "are 4, the tensor has 3"),
        (np.zeros((2, 3))[:, ::-1], "block token", {}, "axis 'token' stride is -8"),
        (np.broadcast_to(np.zeros(3), (2, 3)), "block token", {}, "stride is 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    given: Any, axes: str, options: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        paged_layout(given, axes, **options)
