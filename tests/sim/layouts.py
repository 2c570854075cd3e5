"""A simulated process's pools, told to the engine in its own terms: the public `Layout`.

The one place where the simulator's geometry becomes the engine's. Two rules: one tensor per layer
(layers of a group need not be neighbours), and the same numbers as `geometry` computes with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.tensors import Axis, Tensor

if TYPE_CHECKING:
    from .arena import Space
    from .geometry import SimGroup


def layout_of(space: Space) -> Layout:
    """The layout of one process's memory."""
    pools = tuple(
        Pool(name, space.address(name), group.stride, space.slots[name])
        for name, group in space.groups.items()
    )
    groups = tuple(_group(group) for group in space.groups.values())
    return Layout(pools, groups, model="simulated").check()


def _group(group: SimGroup) -> Group:
    tensors = tuple(
        Tensor(
            role="kv",
            pool=group.name,
            offset=position * group.strides["layer"],
            axes=tuple(_axis(group, name, layer) for name in group.order),
            item_bytes=1,
            dtype="uint8",
        )
        for position, layer in enumerate(group.layers)
    )
    kind = "window" if group.window else "full"
    return Group(group.name, kind, group.tokens_per_block, tensors, window=group.window)


def _axis(group: SimGroup, name: str, layer: int) -> Axis:
    if name == "layer":
        return Axis("layer", layer, layer + 1, group.strides["layer"])
    return Axis(name, 0, group.extents[name], group.strides[name])  # type: ignore[arg-type]
