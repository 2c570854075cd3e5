"""Tensors: what one block holds of one cached tensor, as a box of global indices with strides.

Owns axes, tensors, parts of them and their construction from numbers; the classes are the wire
form too. Pure. Two rules: an index is global, the same coordinate of the model on every rank;
no byte of a tensor belongs to two of its coordinates (`check_axes`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

import msgspec

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

AxisName = Literal["layer", "kind", "head", "token", "dim"]

AXIS_NAMES: Final[tuple[AxisName, ...]] = get_args(AxisName)
ADDRESS_MAX: Final = 2**63 - 1  # addresses are int64 in every array of the planner


class Axis(msgspec.Struct, frozen=True):
    """One axis of a tensor: the global indices `[start, stop)`, `stride` bytes apart."""

    name: AxisName
    start: int
    stop: int
    stride: int

    @property
    def extent(self) -> int:
        """The number of indices."""
        return self.stop - self.start


class Tensor(msgspec.Struct, frozen=True):
    """A box: what one block holds of one cached tensor, `offset` bytes into its slot.

    role: names the tensor in the model ("kv", "latent", "indexer_k", "conv"); with the global
    layer id it says what matches what between two sides.
    axes: outermost first. An axis that is not listed has the one index 0.
    item_bytes: of one element; `dense_tensor` says how sub-byte elements are described.
    optional: a target may go without it when no source holds it.
    per_block: it holds something of a block, not of its tokens (a scale, a page whose inside is
      not known): it has no token axis, and moves only between equal block sizes.
    """

    role: str
    pool: str
    offset: int
    axes: tuple[Axis, ...]
    item_bytes: int
    dtype: str
    optional: bool = False
    per_block: bool = False

    def range(self, axis: AxisName) -> tuple[int, int]:
        """The global index range `[start, stop)` of one axis."""
        for mine in self.axes:
            if mine.name == axis:
                return mine.start, mine.stop
        return 0, 1

    def stride(self, axis: AxisName) -> int:
        """Bytes between neighbours of one axis; 0 for an axis that is not listed."""
        return next((mine.stride for mine in self.axes if mine.name == axis), 0)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block holds of this tensor, padding not counted."""
        return self.item_bytes * math.prod(axis.extent for axis in self.axes)

    @property
    def stop(self) -> int:
        """The offset behind the tensor's last byte in its slot."""
        reach = sum((axis.extent - 1) * axis.stride for axis in self.axes)
        return self.offset + reach + self.item_bytes

    def __str__(self) -> str:
        low, high = self.range("layer")
        layers = f"layer {low}" if high == low + 1 else f"layers {low}..{high - 1}"
        return f"tensor {self.role!r} of {layers}"


class Part(msgspec.Struct, frozen=True):
    """Part of what a group holds: a box of global indices.

    role: of the tensors that are meant, "" for all.
    ranges: (axis, start, stop) of what is meant; an axis that is not listed is meant whole.
    """

    role: str = ""
    ranges: tuple[tuple[AxisName, int, int], ...] = ()

    def range(self, axis: AxisName) -> tuple[int, int]:
        """The global index range `[start, stop)` that is meant of one axis."""
        for name, start, stop in self.ranges:
            if name == axis:
                return start, stop
        return 0, 2**31


def dense_tensor(
    role: str,
    pool: str,
    axes: str,
    ranges: Mapping[AxisName, tuple[int, int]],
    *,
    item_bits: int,
    dtype: str,
    offset: int = 0,
    optional: bool = False,
    per_block: bool = False,
) -> Tensor:
    """A tensor without padding, from numbers alone.

    axes: in storage order, outermost first, such as "kind head token dim"; the others have the
    one index that `ranges` gives them, or 0. ranges: the global `[start, stop)` of each axis.
    item_bits: of one element. Elements of less than a byte are packed along the innermost axis,
    whose indices then count bytes on both sides.

    Raises: UsageError naming the axis and the values, for an axis without a range and for packed
    elements that do not begin and end on a byte.
    """
    for name in (*axes.split(), *ranges):
        if name not in AXIS_NAMES:
            raise UsageError(f"axis {name!r} is unknown, must be one of {AXIS_NAMES}")
    names = cast("list[AxisName]", axes.split())
    lacking = [name for name in names if name not in ranges]
    if lacking:
        raise UsageError(f"tensor {role!r}: axis {lacking[0]!r} has no range")
    check_bounds(f"tensor {role!r}: item_bits", item_bits, 1, 2**31 - 1)
    bounds = dict(ranges)
    if item_bits % 8:
        packed = names[-1] if names else "dim"
        bounds[packed] = _in_bytes(role, packed, bounds.get(packed, (0, 1)), item_bits)
    item_bytes = stride = 1 if item_bits % 8 else item_bits // 8
    listed: list[Axis] = []
    for name in reversed(names):
        axis = Axis(name, *bounds[name], stride)
        listed.append(axis)
        stride *= axis.extent
    fixed = [Axis(name, *bounds[name], 0) for name in bounds if name not in names]
    return Tensor(
        role, pool, offset, (*fixed, *reversed(listed)), item_bytes, dtype, optional, per_block
    )


def _in_bytes(
    role: str, axis: AxisName, bounds: tuple[int, int], item_bits: int
) -> tuple[int, int]:
    """The range of a packed axis, counted in bytes."""
    start, stop = (index * item_bits for index in bounds)
    if start % 8 or stop % 8 or axis == "token":
        raise UsageError(
            f"tensor {role!r}: axis {axis!r} covers {bounds[0]}..{bounds[1] - 1} of {item_bits} "
            "bits each; packed elements must lie along another axis than 'token', and begin and "
            "end on a byte"
        )
    return start // 8, stop // 8


def check_bounds(field: str, value: int, low: int, high: int) -> None:
    """Raise UsageError naming the field when `value` is no integer in `low..high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{field} is {value!r}, must be an integer")
    if not low <= value <= high:
        raise UsageError(f"{field} is {value}, must be {low} to {high}")


def check_axes(where: str, tensor: Tensor) -> None:
    """Every axis is known, listed once, not empty, and steps over all that is inside it."""
    reach = tensor.item_bytes
    seen = set()
    for axis in reversed(tensor.axes):
        at = f"{where}: axis {axis.name!r}"
        if axis.name not in AXIS_NAMES:
            raise UsageError(f"{at} is unknown, must be one of {AXIS_NAMES}")
        if axis.name in seen:
            raise UsageError(f"{at} is listed twice")
        seen.add(axis.name)
        check_bounds(f"{at} start", axis.start, 0, 2**31 - 1)
        check_bounds(f"{at} stop", axis.stop, axis.start + 1, 2**31)
        check_bounds(f"{at} stride", axis.stride, 0, ADDRESS_MAX)
        if axis.extent > 1 and axis.stride < reach:
            raise UsageError(
                f"{at}: stride {axis.stride} is less than the {reach} bytes inside it: "
                "positions would share bytes, or the axes are not listed outermost first"
            )
        reach += (axis.extent - 1) * axis.stride
