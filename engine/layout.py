"""Layout: where a rank's cache lies in memory, and which part of the model's cache that is.

Owns pools, groups and the validation of a whole layout; the classes are the wire form too. Pure.
Two rules: a layout that passed `check` has every byte of every slot inside its pool, and no byte
of a block belongs to two coordinates of its group; addresses never decide whether two layouts
fit.

A position's address is `pool.address + slot * pool.stride + tensor.offset + sum over the axes of
(index - axis.start) * axis.stride`. What lies outside the slot axis in memory (K and V of a
`[2, num_blocks, ...]` tensor, layers of a `[layers, num_blocks, ...]` one) is a pool of its own.
"""

from __future__ import annotations

import hashlib
import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec
import numpy as np

from .boxes import Box, fold
from .errors import UsageError
from .ports import MemoryKind, Region
from .tensors import ADDRESS_MAX, AXIS_NAMES, Tensor, check_axes, check_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

GroupKind = Literal["full", "window", "chunk", "latent", "indexer", "state"]

GROUP_KINDS: Final[tuple[GroupKind, ...]] = get_args(GroupKind)
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)

# A layout also comes from a peer: what it makes us compute is bounded.
POOLS_MAX: Final = 4096
GROUPS_MAX: Final = 64
GROUP_TENSORS_MAX: Final = 2048
TOKENS_PER_BLOCK_MAX: Final = 2**16
FRAGMENTS_PER_BLOCK_MAX: Final = 2**16


class Pool(msgspec.Struct, frozen=True):
    """Equally spaced slots of one memory: slot s begins at `address + s * stride` bytes.

    size: bytes of the allocation from `address` on, 0 for `slots * stride`. Less than that when
    the last slot's padding is not there, as in a view of every second block.
    reserved: slots that never hold a request's block (padding, null).
    """

    name: str
    address: int
    stride: int
    slots: int
    memory: MemoryKind = "dram"
    device: int = 0
    reserved: tuple[int, ...] = ()
    size: int = 0

    @property
    def stop(self) -> int:
        """The first address behind the pool."""
        return self.address + (self.size or self.slots * self.stride)


class Group(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    tokens_per_block: tokens of one block; 1 for a `state`, which is a point.
    window: tokens of the window or of the attention chunk; 0 for the other kinds.
    """

    name: str
    kind: GroupKind
    tokens_per_block: int
    tensors: tuple[Tensor, ...]
    window: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes that one block holds over all tensors, padding not counted."""
        return sum(tensor.block_bytes for tensor in self.tensors)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """What one rank registers: its pools, and the groups that lie in them.

    model: fingerprint of the model; sessions compare it for equality. Fields that this version
    does not know are ignored when a layout is read from the wire.
    """

    pools: tuple[Pool, ...]
    groups: tuple[Group, ...]
    model: str = ""

    def check(self) -> Layout:
        """Return self when everything about it is valid. Does not modify.

        Raises: UsageError naming pool or group, tensor, axis or field, and the values.
        """
        check_bounds("layout.pools", len(self.pools), 1, POOLS_MAX)
        check_bounds("layout.groups", len(self.groups), 1, GROUPS_MAX)
        _check_names("pool", [pool.name for pool in self.pools])
        _check_names("group", [group.name for group in self.groups])
        for pool in self.pools:
            _check_pool(pool)
        for group in self.groups:
            _check_group(group, self._pools)
        return self

    def group(self, name: str) -> Group:
        """The group of that name. Raises UsageError."""
        try:
            return self._groups[name]
        except KeyError:
            raise UsageError(f"no group {name!r}; the layout has {sorted(self._groups)}") from None

    def pool(self, name: str) -> Pool:
        """The pool of that name. Raises UsageError."""
        try:
            return self._pools[name]
        except KeyError:
            raise UsageError(f"no pool {name!r}; the layout has {sorted(self._pools)}") from None

    def block_bytes(self, group: str) -> int:
        """Bytes that one block of the group holds over all its tensors, padding not counted."""
        return self.group(group).block_bytes

    def regions(self) -> tuple[Region, ...]:
        """The address ranges to register, ascending per device.

        Overlapping pools become one region, and so do touching ones in host memory. Touching
        device pools stay apart: they may be two allocations, and a device allocation can't be
        exported for RDMA together with its neighbour.
        """
        merged: list[Region] = []
        for pool in sorted(self.pools, key=lambda p: (p.memory, p.device, p.address)):
            last = merged[-1] if merged else None
            joined = last is not None and (last.memory, last.device) == (pool.memory, pool.device)
            if joined and last is not None and _touch(last, pool):
                size = max(last.address + last.size, pool.stop) - last.address
                merged[-1] = Region(last.address, size, last.memory, last.device)
            else:
                size = pool.stop - pool.address
                merged.append(Region(pool.address, size, pool.memory, pool.device))
        return tuple(merged)

    def fingerprint(self) -> str:
        """A digest of what is held, not of where: 32 hex digits.

        Equal for two sides that hold the same coordinates of the same model in the same element
        types, block sizes and kinds, tensor by tensor: such sides always plan. Pools, addresses,
        offsets, strides, storage order and slot counts do not count. Sides that differ may still
        plan (layers as one tensor or as many); only `make_template` can say.
        """
        held = [
            (
                group.name,
                group.kind,
                group.tokens_per_block,
                group.window,
                sorted(
                    (t.role, [t.range(axis) for axis in AXIS_NAMES], t.item_bytes, t.dtype)
                    for t in group.tensors
                ),
            )
            for group in sorted(self.groups, key=lambda group: group.name)
        ]
        return hashlib.sha256(msgspec.json.encode((self.model, held))).hexdigest()[:32]

    def slots(self, group: str) -> int:
        """How many slots the group can use: the fewest of its pools, reserved ones included."""
        return self._bounds[self.group(group).name][0]

    def check_slots(self, group: str, slots: Int64Array) -> None:
        """Check that a request's block may lie in each of `slots` (int64[n]).

        Raises: UsageError naming the group, the first bad slot and the bound or "reserved".
        """
        bound, reserved = self._bounds[self.group(group).name]
        bad = np.flatnonzero((slots < 0) | (slots >= bound))
        if bad.size:
            raise UsageError(f"group {group!r}: slot {int(slots[bad[0]])} is not in 0..{bound - 1}")
        if reserved.size:
            bad = np.flatnonzero(np.isin(slots, reserved))
            if bad.size:
                raise UsageError(f"group {group!r}: slot {int(slots[bad[0]])} is reserved")

    # Derived once: a layout never changes, and these are asked for every request.

    @cached_property
    def _pools(self) -> dict[str, Pool]:
        return {pool.name: pool for pool in self.pools}

    @cached_property
    def _groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def _bounds(self) -> dict[str, tuple[int, Int64Array]]:
        """{group: (slots, reserved slots)} over the pools that the group lies in."""
        bounds = {}
        for group in self.groups:
            pools = [self.pool(name) for name in {tensor.pool for tensor in group.tensors}]
            reserved = sorted({slot for pool in pools for slot in pool.reserved})
            bounds[group.name] = (
                min(pool.slots for pool in pools),
                np.array(reserved, dtype=np.int64),
            )
        return bounds


# ---------------------------------------------------------------- validation


def _touch(region: Region, pool: Pool) -> bool:
    end = region.address + region.size
    return pool.address < end or (pool.address == end and pool.memory == "dram")


def _check_names(what: str, names: Sequence[str]) -> None:
    seen = set()
    for name in names:
        if not name:
            raise UsageError(f"a {what} has an empty name")
        if name in seen:
            raise UsageError(f"two {what}s are named {name!r}")
        seen.add(name)


def _check_pool(pool: Pool) -> None:
    where = f"pool {pool.name!r}"
    if pool.memory not in MEMORY_KINDS:
        raise UsageError(f"{where}: memory is {pool.memory!r}, must be one of {MEMORY_KINDS}")
    check_bounds(f"{where}: device", pool.device, 0, 2**31 - 1)
    check_bounds(f"{where}: address", pool.address, 0, ADDRESS_MAX)
    check_bounds(f"{where}: stride", pool.stride, 1, ADDRESS_MAX)
    check_bounds(f"{where}: slots", pool.slots, 1, 2**31)
    check_bounds(f"{where}: size", pool.size, 0, ADDRESS_MAX)
    check_bounds(f"{where}: end address", pool.stop, 0, ADDRESS_MAX)
    check_bounds(
        f"{where}: end of its slots", pool.address + pool.slots * pool.stride, 0, ADDRESS_MAX
    )
    for slot in pool.reserved:
        check_bounds(f"{where}: reserved slot", slot, 0, pool.slots - 1)


def _check_group(group: Group, pools: dict[str, Pool]) -> None:
    where = f"group {group.name!r}"
    if group.kind not in GROUP_KINDS:
        raise UsageError(f"{where}: kind is {group.kind!r}, must be one of {GROUP_KINDS}")
    check_bounds(f"{where}: number of tensors", len(group.tensors), 1, GROUP_TENSORS_MAX)
    check_bounds(f"{where}: tokens_per_block", group.tokens_per_block, 1, TOKENS_PER_BLOCK_MAX)
    if group.kind == "state" and group.tokens_per_block != 1:
        raise UsageError(
            f"{where}: tokens_per_block is {group.tokens_per_block}, must be 1: a state is a point"
        )
    if group.kind in ("window", "chunk"):
        check_bounds(f"{where}: window", group.window, 1, 2**31 - 1)
    elif group.window:
        raise UsageError(f"{where}: window is {group.window}, must be 0 for kind {group.kind!r}")
    for tensor in group.tensors:
        _check_tensor(f"{where}: {tensor}", tensor, group, pools)
    _check_apart(where, group.tensors)
    for name in {tensor.pool for tensor in group.tensors}:
        _check_aliases(f"{where}, pool {name!r}", [t for t in group.tensors if t.pool == name])


def _check_tensor(where: str, tensor: Tensor, group: Group, pools: dict[str, Pool]) -> None:
    if not tensor.role:
        raise UsageError(f"{where}: role is empty")
    pool = pools.get(tensor.pool)
    if pool is None:
        raise UsageError(f"{where}: there is no pool {tensor.pool!r}; there are {sorted(pools)}")
    check_bounds(f"{where}: item_bytes", tensor.item_bytes, 1, ADDRESS_MAX)
    check_bounds(f"{where}: offset", tensor.offset, 0, ADDRESS_MAX)
    check_axes(where, tensor)
    tokens = 1 if tensor.per_block else group.tokens_per_block
    if tensor.range("token") != (0, tokens):
        low, high = tensor.range("token")
        raise UsageError(
            f"{where}: axis 'token' covers {low}..{high - 1}, "
            f"but {'a tensor per block has' if tensor.per_block else 'a block of the group has'} "
            f"tokens 0..{tokens - 1}"
        )
    if tensor.stop > pool.stride:
        raise UsageError(
            f"{where}: a block ends {tensor.stop} bytes into its slot, "
            f"but slots of pool {pool.name!r} are {pool.stride} bytes apart"
        )
    end = pool.address + (pool.slots - 1) * pool.stride + tensor.stop
    if end > pool.stop:
        raise UsageError(
            f"{where}: the last slot of pool {pool.name!r} ends {end - pool.address} bytes into "
            f"the pool, which has {pool.stop - pool.address}"
        )


def _check_apart(where: str, tensors: Sequence[Tensor]) -> None:
    """No coordinate (role, layer, kind, head, token, dim) is held by two tensors."""
    for role in {tensor.role for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.role == role]
        ranges = np.array([[t.range(axis) for axis in AXIS_NAMES] for t in same], dtype=np.int64)
        low, high = ranges[:, :, 0], ranges[:, :, 1]
        shared = np.ones((len(same), len(same)), dtype=np.bool_)
        for axis in range(len(AXIS_NAMES)):
            shared &= low[:, None, axis] < high[None, :, axis]
            shared &= low[None, :, axis] < high[:, None, axis]
        np.fill_diagonal(shared, val=False)
        if shared.any():
            one, two = np.argwhere(shared)[0].tolist()
            raise UsageError(
                f"{where}: {same[one]} in pool {same[one].pool!r} and {same[two]} in pool "
                f"{same[two].pool!r} both hold the same coordinates"
            )


def _check_aliases(where: str, tensors: Sequence[Tensor]) -> None:
    """No byte of a slot belongs to two tensors of one group."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    if all(one.stop <= two.offset for one, two in itertools.pairwise(ordered)):
        return
    boxes = [
        Box(
            t.offset,
            t.offset,
            *fold(t.item_bytes, [(a.extent, a.stride, a.stride) for a in t.axes]),
        )
        for t in ordered
    ]
    if sum(box.count for box in boxes) > FRAGMENTS_PER_BLOCK_MAX:
        raise UsageError(
            f"{where}: interleaved tensors have more than {FRAGMENTS_PER_BLOCK_MAX} fragments "
            "per block"
        )
    begin = np.concatenate([box.fragments().source for box in boxes])
    end = begin + np.repeat([box.length for box in boxes], [box.count for box in boxes])
    order = np.argsort(begin, kind="stable")
    shared = np.flatnonzero(begin[order][1:] < end[order][:-1])
    if shared.size:
        owners = np.repeat(np.arange(len(boxes)), [box.count for box in boxes])[order]
        one, two = ordered[owners[shared[0]]], ordered[owners[shared[0] + 1]]
        raise UsageError(
            f"{where}: {one} (offset {one.offset}) and {two} (offset {two.offset}) share byte "
            f"{int(begin[order][shared[0] + 1])} of each slot"
        )
