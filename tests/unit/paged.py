"""Small layouts for caches under test: one tensor per group, `TOKEN_BYTES` per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.engine.layout import Group, GroupKind, Layout, Pool
from kvferry.engine.tensors import Axis, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOKEN_BYTES = 512


def make_group(
    name: str, kind: GroupKind = "full", tokens: int = 4, window: int = 0, pool: str = ""
) -> Group:
    """A group in the pool of its own name, or in another's."""
    axes = (Axis("token", 0, tokens, TOKEN_BYTES), Axis("dim", 0, TOKEN_BYTES, 1))
    return Group(name, kind, tokens, (Tensor("kv", pool or name, 0, axes, 1, "u8"),), window)


def make_layout(
    groups: Sequence[Group],
    slots: int = 16,
    reserved: tuple[int, ...] = (),
    addresses: Mapping[str, int] | None = None,
) -> Layout:
    """Pools of `slots` slots for these groups, far apart or at `addresses`."""
    pools = []
    for index, name in enumerate(pool_names(groups)):
        address = (index + 1) << 32 if addresses is None else addresses[name]
        pools.append(Pool(name, address, stride(groups, name), slots, reserved=reserved))
    return Layout(tuple(pools), tuple(groups), "m").check()


def pool_names(groups: Sequence[Group]) -> list[str]:
    """The pools that the groups lie in."""
    return list(dict.fromkeys(group.tensors[0].pool for group in groups))


def stride(groups: Sequence[Group], pool: str) -> int:
    """Bytes of a slot: the largest block in it."""
    return max(group.block_bytes for group in groups if group.tensors[0].pool == pool)
