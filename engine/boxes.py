"""Boxes: strided regions folded into fragments, the arithmetic below layouts and plans.

Owns numbers only, no names: extents, strides and offsets go in, arrays of fragments come out.
Pure. Two rules: a fragment is contiguous on both sides; nothing is expanded before its size was
asked (`Box.count`), because strides may come from a peer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

SharedAxis = tuple[int, int, int]
"""(extent, source stride, target stride) of one axis that two boxes share."""


class Fragments(NamedTuple):
    """Pieces of a pair of blocks: five int64[f].

    Offsets into the slots on both sides, bytes, and by how many bytes an offset moves per token
    where blocks of the two sides begin at different tokens (else 0).
    """

    source: Int64Array
    target: Int64Array
    lengths: Int64Array
    source_token: Int64Array
    target_token: Int64Array


@dataclass(frozen=True, slots=True)
class Box:
    """What two sides share of a block, folded: `length` bytes at every index of `outer`.

    source_token, target_token: see `Fragments`.
    """

    source_offset: int
    target_offset: int
    length: int
    outer: tuple[SharedAxis, ...]
    source_token: int = 0
    target_token: int = 0

    @property
    def count(self) -> int:
        """The number of fragments."""
        return math.prod(axis[0] for axis in self.outer)

    @property
    def bytes(self) -> int:
        """Bytes of all fragments."""
        return self.length * self.count

    def fragments(self) -> Fragments:
        """Every fragment, the last outer axis varying fastest. O(count) memory."""
        return Fragments(
            self.source_offset + spread((extent, stride) for extent, stride, _ in self.outer),
            self.target_offset + spread((extent, stride) for extent, _, stride in self.outer),
            np.full(self.count, self.length, dtype=np.int64),
            np.full(self.count, self.source_token, dtype=np.int64),
            np.full(self.count, self.target_token, dtype=np.int64),
        )


def fold(item_bytes: int, axes: Iterable[SharedAxis]) -> tuple[int, tuple[SharedAxis, ...]]:
    """Fold a box of `item_bytes` elements into its longest runs contiguous on both sides.

    Returns the bytes of one run, and the axes that remain, outermost on the source first: there
    is one run at each of their index combinations.
    """
    length = item_bytes
    outer = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1:], reverse=True)
    while True:
        inner = next((axis for axis in outer if axis[1] == axis[2] == length), None)
        if inner is None:
            return length, tuple(outer)
        outer.remove(inner)
        length *= inner[0]


def spread(axes: Iterable[tuple[int, int]]) -> Int64Array:
    """The offset of every index combination of (extent, stride) axes: int64[product]."""
    offsets = np.zeros(1, dtype=np.int64)
    for extent, stride in axes:
        steps = np.arange(extent, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps[None, :]).ravel()
    return offsets


def join(parts: Sequence[Fragments]) -> Fragments:
    """Sort all fragments by source offset and join neighbours that touch on both sides.

    They must also move alike from token to token: else they touch at one token only.
    """
    together = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    order = np.argsort(together[0], kind="stable")
    source, target, lengths, source_token, target_token = (array[order] for array in together)
    apart = (source[:-1] + lengths[:-1] != source[1:]) | (target[:-1] + lengths[:-1] != target[1:])
    apart |= (np.diff(source_token) != 0) | (np.diff(target_token) != 0)
    begins = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Fragments(
        source[begins],
        target[begins],
        np.add.reduceat(lengths, begins),
        source_token[begins],
        target_token[begins],
    )
