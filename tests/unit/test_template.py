"""Templates beyond equal storage: heads, parts, unequal block sizes, packed and opaque tensors.

Bytes are written out by hand here; tests/property proves the same against a slow oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.engine.align import Shift
from kvferry.engine.errors import Refused, UsageError
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.plan import Copies, plan
from kvferry.engine.template import Template, make_template
from kvferry.engine.tensors import Axis, AxisName, Part, Tensor, dense_tensor

SOURCE, TARGET = 1_000_000, 2_000_000
Ranges = dict[AxisName, tuple[int, int]]


def layout(base: int, *tensors: Tensor, tokens: int = 4, stride: int = 4096) -> Layout:
    return Layout((Pool("p", base, stride, 16),), (Group("g", "full", tokens, tensors),)).check()


def kv(axes: str, *, bits: int = 16, role: str = "kv", offset: int = 0, **ranges: Any) -> Tensor:
    spans: Ranges = {"head": (0, 4), "token": (0, 4), "dim": (0, 2), **ranges}
    return dense_tensor(role, "p", axes, spans, item_bits=bits, dtype="any", offset=offset)


def template_of(source: Layout, target: Layout, *parts: Part) -> Template:
    return make_template(source, "g", target, "g", parts=parts, fragment_bytes_min=0)


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def copied(template: Template, source: list[int], target: list[int], *shift: list[int]) -> list:
    """(source offset, target offset, bytes) of every copy."""
    shifts = Shift(*(array(*one) for one in shift)) if shift else None
    (flow,) = plan(template, array(*source), array(*target), shifts)
    return listed(flow.copies)


def listed(copies: Copies) -> list:
    return list(
        zip(
            (copies.source - SOURCE).tolist(),
            (copies.target - TARGET).tolist(),
            copies.lengths.tolist(),
            strict=True,
        )
    )


# ---------------------------------------------------------------- heads, layers, sections


def test_a_rank_with_half_the_heads_gets_them_per_token_when_tokens_lie_outside() -> None:
    source = layout(SOURCE, kv("token head dim"))  # 16 bytes a token
    target = layout(TARGET, kv("token head dim", head=(2, 4)))  # 8 bytes a token
    template = template_of(source, target)
    assert copied(template, [1], [0]) == [(4096 + 16 * t + 8, 8 * t, 8) for t in range(4)]
    assert (template.fragments_per_block, template.block_bytes) == (4, 32)


def test_a_rank_with_half_the_heads_gets_them_in_one_piece_when_heads_lie_outside() -> None:
    source = layout(SOURCE, kv("head token dim"))  # 16 bytes a head
    target = layout(TARGET, kv("head token dim", head=(2, 4)))
    assert copied(template_of(source, target), [1], [0]) == [(4096 + 32, 0, 32)]


def test_sections_of_a_convolution_state_are_tensors_of_one_role() -> None:
    """x, B and C are each split over the ranks: rank 1 of 4 beside a source of rank 0 of 2."""
    held = [
        kv("dim", bits=8, role="conv", offset=offset, dim=bounds, token=(0, 1), head=(0, 1))
        for offset, bounds in ((0, (0, 64)), (64, (128, 192)), (128, (256, 384)))
    ]
    wanted = [
        kv("dim", bits=8, role="conv", offset=offset, dim=bounds, token=(0, 1), head=(0, 1))
        for offset, bounds in ((0, (32, 64)), (32, (160, 192)), (64, (320, 384)))
    ]
    template = template_of(layout(SOURCE, *held, tokens=1), layout(TARGET, *wanted, tokens=1))
    assert copied(template, [0], [0]) == [(32, 0, 32), (96, 32, 32), (192, 64, 64)]


def test_only_the_meant_parts_are_planned() -> None:
    ranges: Any = {"layer": (4, 8)}
    source = layout(SOURCE, kv("layer head token dim", **ranges))  # 64 bytes a layer
    target = layout(TARGET, kv("layer head token dim", **ranges))
    whole = template_of(source, target)
    assert copied(whole, [0], [0]) == [(0, 0, 256)]
    one = Part("kv", (("layer", 5, 6),))
    half = Part("", (("layer", 6, 99), ("head", 0, 2)))
    assert copied(template_of(source, target, one), [0], [0]) == [(64, 64, 64)]
    assert copied(template_of(source, target, one, half), [0], [0]) == [
        (64, 64, 96),
        (192, 192, 32),
    ]
    with pytest.raises(Refused, match="nothing to copy"):
        template_of(source, target, Part("other"))


def test_a_part_that_the_source_does_not_hold_is_refused() -> None:
    source = layout(SOURCE, kv("head token dim", head=(0, 2)))
    target = layout(TARGET, kv("head token dim"))
    assert template_of(source, target, Part("kv", (("head", 0, 2),))).block_bytes == 32
    with pytest.raises(
        Refused, match=r"axis 'head' covers 0\.\.1 at the source and 1\.\.2 at the target"
    ) as caught:
        template_of(source, target, Part("kv", (("head", 1, 3),)))
    assert caught.value.code == "geometry"


# ---------------------------------------------------------------- unequal block sizes


def blocks(base: int, tokens: int, axes: str = "token head dim", stride: int = 0) -> Layout:
    """16 bytes a token; slots without padding by default."""
    tensor = kv(axes, token=(0, tokens))
    return layout(base, tensor, tokens=tokens, stride=stride or 16 * tokens)


def test_a_large_block_gives_its_tokens_to_several_small_ones() -> None:
    template = template_of(blocks(SOURCE, 4), blocks(TARGET, 2))
    assert (template.fragments_per_block, template.block_bytes) == (1, 32)
    # source block 1 to target blocks 5 and 3, tokens 0..1 and 2..3
    assert copied(template, [1, 1], [5, 3], [0, 2], [0, 0], [2, 2]) == [
        (64, 160, 32),
        (96, 96, 32),
    ]


def test_pieces_that_touch_on_both_sides_merge() -> None:
    template = template_of(blocks(SOURCE, 4), blocks(TARGET, 2))
    assert copied(template, [1, 1, 2], [4, 5, 6], [0, 2, 0], [0, 0, 0], [2, 2, 2]) == [
        (64, 128, 96)
    ]


def test_head_major_pieces_stay_apart_per_head() -> None:
    """A head of the source has 16 bytes in a block, of the target 8."""
    template = template_of(blocks(SOURCE, 4, "head token dim"), blocks(TARGET, 2, "head token dim"))
    assert template.fragments_per_block == 4
    assert copied(template, [0], [1], [2], [0], [2]) == [
        (16 * head + 8, 32 + 8 * head, 8) for head in range(4)
    ]


def test_block_sizes_of_which_none_divides_the_other() -> None:
    """6 and 4 tokens: pairs share 4 or 2 of them, and 12 tokens are three target blocks."""
    template = template_of(blocks(SOURCE, 6), blocks(TARGET, 4))
    assert sorted(template.stacks) == [2, 4]
    assert (template.fragments_per_block, template.block_bytes) == (2, 64)  # 4 pieces in 3 blocks
    assert copied(
        template, [0, 0, 1, 1], [0, 1, 1, 3], [0, 4, 0, 2], [0, 0, 2, 0], [4, 2, 2, 4]
    ) == [(64, 64, 64), (0, 0, 64), (128, 192, 64)]  # joined among those that share as many


def test_tensors_that_step_differently_from_token_to_token_are_not_joined() -> None:
    """The second token of role a touches the first of b on both sides, the fourth the third not."""

    def both(base: int, tokens: int, step: int) -> Layout:
        one = Tensor("a", "p", 0, (Axis("token", 0, tokens, 4),), 2, "any")
        two = Tensor("b", "p", 6, (Axis("token", 0, tokens, step),), 2, "any")
        return layout(base, one, two, tokens=tokens)

    template = template_of(both(SOURCE, 4, 8), both(TARGET, 2, 4))
    first = [(0, 0, 2), (4, 4, 2), (6, 6, 2), (14, 10, 2)]
    assert copied(template, [0], [0], [0], [0], [2]) == first
    second = [(8, 0, 2), (12, 4, 2), (22, 6, 2), (30, 10, 2)]
    assert copied(template, [0], [0], [2], [0], [2]) == second


@pytest.mark.parametrize(
    ("sizes", "shift", "message"),
    [
        ((4, 2), None, "blocks of 4 and 2 tokens are planned with a shift"),
        ((4, 4), ([0], [0], [4]), "blocks of 4 and 4 tokens are planned without a shift"),
        ((4, 2), ([0], [0], [1]), "a shift that is not of blocks of 4 and 2 tokens"),
        ((4, 2), ([3], [0], [2]), "a shift that is not of blocks of 4 and 2 tokens"),
        ((4, 2), ([0], [1], [2]), "a shift that is not of blocks of 4 and 2 tokens"),
        ((4, 2), ([-2], [0], [2]), "a shift that is not of blocks of 4 and 2 tokens"),
    ],
)
def test_a_shift_of_other_block_sizes_is_refused(sizes: Any, shift: Any, message: str) -> None:
    template = template_of(blocks(SOURCE, sizes[0]), blocks(TARGET, sizes[1]))
    with pytest.raises(UsageError, match=message):
        copied(template, [0], [0], *(shift or ()))


def test_block_sizes_that_overlap_in_too_many_ways_are_refused() -> None:
    with pytest.raises(
        Refused,
        match="tokens_per_block is 32 at the source and 33 at the target: blocks overlap in 32 d",
    ):
        template_of(blocks(SOURCE, 32), blocks(TARGET, 33))


# ---------------------------------------------------------------- whole blocks, packed elements


def page(size: int) -> Tensor:
    return dense_tensor("page", "p", "", {}, item_bits=8 * size, dtype="opaque", per_block=True)


def test_an_opaque_page_moves_whole_or_not_at_all() -> None:
    source = layout(SOURCE, page(1000))
    assert copied(template_of(source, layout(TARGET, page(1000))), [2], [1]) == [(8192, 4096, 1000)]
    with pytest.raises(Refused, match="item_bytes is 1000 at the source and 800 at the target"):
        template_of(source, layout(TARGET, page(800)))
    with pytest.raises(
        Refused,
        match="'page' of layer 0 is one per block: tokens_per_block is 4 at the source and 8 at",
    ):
        template_of(source, layout(TARGET, page(1000), tokens=8))
    whole = dense_tensor("page", "p", "", {}, item_bits=8000, dtype="opaque")
    with pytest.raises(Refused, match="per_block is True at the source and False at the target"):
        template_of(layout(SOURCE, page(1000), tokens=1), layout(TARGET, whole, tokens=1))


def test_packed_elements_are_counted_in_bytes() -> None:
    """4-bit elements: the 32 of a head are 16 bytes, and a head can be split off."""
    wide: Any = {"head": (0, 4), "token": (0, 4), "dim": (0, 32)}
    source = layout(SOURCE, kv("token head dim", bits=4, **wide))
    target = layout(TARGET, kv("token head dim", bits=4, **{**wide, "head": (3, 4)}))
    assert source.block_bytes("g") == 4 * 4 * 16
    assert copied(template_of(source, target), [0], [0]) == [
        (64 * t + 48, 16 * t, 16) for t in range(4)
    ]


@pytest.mark.parametrize(
    ("axes", "dim", "message"),
    [
        ("token head dim", (0, 3), r"axis 'dim' covers 0\.\.2 of 4 bits each"),
        ("token head dim", (1, 4), r"axis 'dim' covers 1\.\.3 of 4 bits each"),
        ("head dim token", (0, 4), r"axis 'token' covers 0\.\.3 of 4 bits each"),
        ("dim token head", (0, 4), None),
    ],
)
def test_packed_elements_begin_and_end_on_a_byte(axes: str, dim: Any, message: str | None) -> None:
    if message is None:
        assert kv(axes, bits=4, dim=dim).range("head") == (0, 2)
        return
    with pytest.raises(UsageError, match=message):
        kv(axes, bits=4, dim=dim)


@pytest.mark.parametrize(
    ("axes", "ranges", "bits", "message"),
    [
        ("token lane", {"token": (0, 4)}, 8, "axis 'lane' is unknown"),
        ("token", {"token": (0, 4), "lane": (0, 1)}, 8, "axis 'lane' is unknown"),
        ("token dim", {"token": (0, 4)}, 8, "tensor 'kv': axis 'dim' has no range"),
        ("token", {"token": (0, 4)}, 0, "tensor 'kv': item_bits is 0, must be 1 to"),
    ],
)
def test_a_tensor_from_numbers_that_make_none(
    axes: str, ranges: Any, bits: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        dense_tensor("kv", "p", axes, ranges, item_bits=bits, dtype="any")


def test_a_fixed_axis_keeps_its_global_index() -> None:
    tensor = dense_tensor(
        "kv", "p", "token dim", {"layer": (7, 8), "token": (0, 4), "dim": (0, 2)},
        item_bits=16, dtype="any",
    )  # fmt: skip
    assert (tensor.range("layer"), tensor.block_bytes, tensor.stop) == ((7, 8), 16, 16)
