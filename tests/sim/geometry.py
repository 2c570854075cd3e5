"""Where a coordinate lies in a simulated pool, computed without the engine's layout, spans or plan.

A coordinate (request, group, layer, kind, head, token, dim) is one int64 *tag*; a slot's tags are
a template plus (request, ordinal). Two rules: nothing here imports the engine, and two different
coordinates never have the same tag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

NOTHING = -1  # tag of a byte that belongs to no coordinate

_DIM, _HEAD, _KIND, _LAYER, _GROUP, _TOKEN, _REQUEST = 0, 6, 9, 10, 16, 20, 40


@dataclass(frozen=True)
class SimGroup:
    """One layer group as one process stores it.

    order: the block's axes, outermost first; one byte per element.
    padding: bytes between two slots that belong to nobody.
    window: how many of the last tokens are needed, and one block of sinks; 0 for all tokens.
    """

    name: str
    index: int
    layers: tuple[int, ...]
    kinds: int
    heads: int
    tokens_per_block: int
    dims: int
    order: tuple[str, ...] = ("layer", "kind", "head", "token", "dim")
    padding: int = 0
    window: int = 0

    @property
    def extents(self) -> dict[str, int]:
        return {
            "layer": len(self.layers),
            "kind": self.kinds,
            "head": self.heads,
            "token": self.tokens_per_block,
            "dim": self.dims,
        }

    @cached_property
    def strides(self) -> dict[str, int]:
        """Bytes between neighbours of each axis, of a packed block."""
        strides, step = {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= self.extents[axis]
        return strides

    @cached_property
    def block_bytes(self) -> int:
        return math.prod(self.extents.values())

    @property
    def stride(self) -> int:
        return self.block_bytes + self.padding

    @cached_property
    def template(self) -> NDArray[np.int64]:
        """Tags of a slot's bytes (int64[stride]) at request 0, ordinal 0."""
        tags = np.full(self.stride, NOTHING, dtype=np.int64)
        extents, strides = self.extents, self.strides
        for layer, kind, head, token, dim in product(
            *(range(extents[axis]) for axis in ("layer", "kind", "head", "token", "dim"))
        ):
            offset = (
                layer * strides["layer"]
                + kind * strides["kind"]
                + head * strides["head"]
                + token * strides["token"]
                + dim * strides["dim"]
            )
            tags[offset] = (
                (self.index << _GROUP)
                + (self.layers[layer] << _LAYER)
                + (kind << _KIND)
                + (head << _HEAD)
                + (token << _TOKEN)
                + (dim << _DIM)
            )
        return tags

    def tags(self, request: int, ordinal: int) -> NDArray[np.int64]:
        """Tags of a slot's bytes when it holds block `ordinal` of `request`."""
        shift = (request << _REQUEST) + (ordinal * self.tokens_per_block << _TOKEN)
        return np.where(self.template == NOTHING, NOTHING, self.template + shift)

    def judged(self, ordinal: int, tokens: int) -> NDArray[np.bool_]:
        """Which of a slot's bytes hold a token below `tokens`."""
        position = ((self.template >> _TOKEN) & 0xFFFFF) + ordinal * self.tokens_per_block
        return (self.template != NOTHING) & (position < tokens)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def needed(self, tokens: int) -> list[int]:
        """The ordinals that a request of `tokens` needs: all, or the sink block and the window."""
        last = self.blocks(tokens)
        if not self.window:
            return list(range(last))
        first = max(0, tokens - self.window) // self.tokens_per_block
        return sorted({0, *range(first, last)})


def values(tags: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The byte that belongs to each coordinate: a fixed mix of its tag."""
    mixed = tags.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)) ^ (mixed >> np.uint64(24))).astype(np.uint8)


def describe(tag: int) -> str:
    """A coordinate as text."""
    if tag < 0:
        return "nothing"
    return (
        f"request {tag >> _REQUEST} group {(tag >> _GROUP) & 0xF} layer {(tag >> _LAYER) & 0x3F} "
        f"kind {(tag >> _KIND) & 1} head {(tag >> _HEAD) & 7} "
        f"token {(tag >> _TOKEN) & 0xFFFFF} dim {tag & 0x3F}"
    )
