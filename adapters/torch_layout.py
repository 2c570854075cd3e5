"""Layouts from the paged KV-cache tensors of a serving engine, torch or numpy.

Owns the translation from shapes and strides to pools and boxes. Two rules: torch is never
imported (tensors are read by their attributes, so numpy arrays and a machine without torch work
too); a layout holds addresses only, so the caller keeps the tensors alive while it is in use.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import numpy as np

from ..engine.errors import UsageError
from ..engine.layout import Group, GroupKind, Layout, Pool
from ..engine.tensors import Axis, AxisName, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.ports import MemoryKind

_AXES: Final[tuple[str, ...]] = ("block", *get_args(AxisName))
_MEMORY: Final[dict[str, MemoryKind]] = {"cpu": "dram", "cuda": "vram"}


def paged_layout(
    tensors: Sequence[Any] | Any,
    axes: str,
    *,
    group: str = "full",
    kind: GroupKind = "full",
    role: str = "kv",
    layers: Sequence[int] | None = None,
    heads: tuple[int, int] | None = None,
    window: int = 0,
    reserved: Sequence[int] = (),
    model: str = "",
) -> Layout:
    """One layer group from its cache tensors. Does not modify them, copies nothing.

    tensors: one tensor per layer, or one tensor with a layer axis.
    axes: the name of each dimension, outermost first, of block, layer, kind, head, token, dim:
      "kind block token head dim" for `[2, num_blocks, tokens_per_block, heads, head_dim]`,
      "block kind head token dim" for `[num_blocks, 2, heads, tokens_per_block, head_dim]`,
      "block layer kind token head dim" for one tensor with all layers. Strides are taken from
      the tensors, so views and permuted tensors are described as they lie in memory.
    layers: global ids, in the order of the tensors or consecutive along the layer axis; counted
      from 0 by default.
    heads: global range `[start, stop)` of the KV heads on this rank; all by default.
    reserved: slots that never hold a request's block.

    What varies slower than the block in memory (kind in the first example) gets a pool per
    index, named "group/layer0/kind1".

    Raises: UsageError naming the tensor, the axis and both values for names that don't fit the
    shape, unequal block counts, strides that alias, and devices other than cpu and cuda.
    """
    names = _axis_names(axes)
    views = [_View.of(tensor, names) for tensor in _as_sequence(tensors, names)]
    if not views:
        raise UsageError("no tensors were given")
    ranges = _layer_ranges(views, "layer" in names, layers)
    pools: list[Pool] = []
    boxes: list[Tensor] = []
    for index, (view, layer) in enumerate(zip(views, ranges, strict=True)):
        if view.slots != views[0].slots or view.tokens != views[0].tokens:
            raise UsageError(
                f"tensor {index} has {view.slots} blocks of {view.tokens} tokens, "
                f"tensor 0 has {views[0].slots} of {views[0].tokens}; both must be equal"
            )
        starts = {"layer": layer[0], "head": _head_start(view, heads)}
        for pool, box in view.split(group, role, starts, reserved):
            pools.append(pool)
            boxes.append(box)
    return Layout(
        pools=tuple(pools),
        groups=(Group(group, kind, views[0].tokens, tuple(boxes), window),),
        model=model,
    ).check()


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor's place in memory: address, byte strides and extent per named axis."""

    address: int
    memory: MemoryKind
    device: int
    dtype: str
    item_bytes: int
    extents: dict[str, int]
    strides: dict[str, int]

    @classmethod
    def of(cls, tensor: Any, names: tuple[str, ...]) -> _View:
        shape = tuple(int(extent) for extent in tensor.shape)
        if len(shape) != len(names):
            raise UsageError(
                f"axes name {len(names)} dimensions ({' '.join(names)}), "
                f"the tensor has shape {list(shape)}"
            )
        if 0 in shape:
            raise UsageError(f"axis {names[shape.index(0)]!r} of the tensor is empty: {shape}")
        if isinstance(tensor, np.ndarray):
            address, item_bytes = int(tensor.ctypes.data), tensor.itemsize
            strides: tuple[int, ...] = tensor.strides
            memory, device = _MEMORY["cpu"], 0
        else:
            address, item_bytes = int(tensor.data_ptr()), int(tensor.element_size())
            strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
            memory, device = _place(tensor.device)
        if "layer" not in names:  # one tensor per layer: an axis with the layer's one index
            names, shape, strides = ("layer", *names), (1, *shape), (0, *strides)
        return cls(
            address=address,
            memory=memory,
            device=device,
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item_bytes,
            extents=dict(zip(names, shape, strict=True)),
            strides=dict(zip(names, strides, strict=True)),
        )

    @property
    def slots(self) -> int:
        return self.extents["block"]

    @property
    def tokens(self) -> int:
        return self.extents.get("token", 1)

    def split(
        self, group: str, role: str, starts: dict[str, int], reserved: Sequence[int]
    ) -> list[tuple[Pool, Tensor]]:
        """One pool and box per index of the axes that lie outside the block axis.

        starts: the first global index of an axis, 0 where it is not listed.
        """
        rest = [name for name in self.extents if name != "block"]
        outer = [
            name
            for name in rest
            if self.slots > 1
            and self.extents[name] > 1
            and self.strides[name] > self.strides["block"]
        ]
        inner = sorted(
            (name for name in rest if name not in outer),
            key=lambda name: (self.extents[name] > 1, self.strides[name]),
            reverse=True,
        )
        used = self.item_bytes + sum((self.extents[n] - 1) * self.strides[n] for n in inner)
        stride = self.strides["block"] if self.slots > 1 else used
        parts = []
        for indices in itertools.product(*(range(self.extents[name]) for name in outer)):
            at = dict(zip(outer, indices, strict=True))
            label = {"layer": 0, **at} if self.extents["layer"] == 1 else at
            pool = Pool(
                name="/".join([group, *(f"{n}{starts.get(n, 0) + i}" for n, i in label.items())]),
                address=self.address + sum(i * self.strides[name] for name, i in at.items()),
                stride=stride,
                slots=self.slots,
                memory=self.memory,
                device=self.device,
                reserved=tuple(reserved),
                size=(self.slots - 1) * stride + used,
            )
            ordered = [*outer, *inner]
            box = Tensor(
                role=role,
                pool=pool.name,
                offset=0,
                axes=tuple(self._axis(name, starts.get(name, 0), at) for name in ordered),
                item_bytes=self.item_bytes,
                dtype=self.dtype,
            )
            parts.append((pool, box))
        return parts

    def _axis(self, name: str, start: int, fixed: dict[str, int]) -> Axis:
        """The axis inside a pool: one index of it where it selects the pool."""
        low = start + fixed.get(name, 0)
        extent = 1 if name in fixed else self.extents[name]
        stride = self.strides[name] if extent > 1 else 0
        return Axis(cast("AxisName", name), low, low + extent, stride)


def _axis_names(axes: str) -> tuple[str, ...]:
    names = tuple(axes.split())
    for name in names:
        if name not in _AXES:
            raise UsageError(f"axis {name!r} is unknown, must be one of {_AXES}")
        if names.count(name) > 1:
            raise UsageError(f"axis {name!r} is named twice in {axes!r}")
    if "block" not in names:
        raise UsageError(f"axes {axes!r} do not name 'block'")
    return names


def _as_sequence(tensors: Sequence[Any] | Any, names: tuple[str, ...]) -> Sequence[Any]:
    given = [tensors] if hasattr(tensors, "shape") else list(tensors)
    if "layer" in names and len(given) != 1:
        raise UsageError(f"axes name 'layer', but {len(given)} tensors were given, must be one")
    return given


def _layer_ranges(
    views: Sequence[_View], one_tensor: bool, layers: Sequence[int] | None
) -> list[tuple[int, int]]:
    """The global layer range of each tensor."""
    count = views[0].extents["layer"] if one_tensor else len(views)
    ids = list(range(count)) if layers is None else [int(layer) for layer in layers]
    if len(ids) != count:
        raise UsageError(f"layers lists {len(ids)} ids, the tensors hold {count} layers")
    if not one_tensor:
        return [(layer, layer + 1) for layer in ids]
    if ids != list(range(ids[0], ids[0] + count)):
        raise UsageError(f"layers along an axis must be consecutive, not {ids}")
    return [(ids[0], ids[0] + count)]


def _head_start(view: _View, heads: tuple[int, int] | None) -> int:
    count = view.extents.get("head", 1)
    start, stop = heads or (0, count)
    if stop - start != count:
        raise UsageError(f"heads {start}..{stop - 1} are {stop - start}, the tensor has {count}")
    return start


def _place(device: Any) -> tuple[MemoryKind, int]:
    """(memory, device id) of a torch device."""
    memory = _MEMORY.get(device.type)
    if memory is None:
        raise UsageError(f"a tensor lies on device {device.type!r}, must be cpu or cuda")
    return memory, int(device.index or 0)
