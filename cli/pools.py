"""One side's KV cache in the demo: paged tensors, a fragmented free list, and what must be where.

Two rules: what a slot must hold follows from this side's own block table and `pattern` alone, and
a slot is handed out again only after it was given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from ..adapters.torch_layout import paged_layout
from ..engine.errors import UsageError
from . import pattern
from .messages import Difference
from .models import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ..engine.layout import Layout
    from .models import Geometry

    Int64Array = NDArray[np.int64]

GROUP = "full"


class FreeSlots:
    """The free slots of a pool in random order. Raises UsageError for a slot given back twice."""

    def __init__(self, slots: int, random: np.random.Generator) -> None:
        self._random = random
        self._free = random.permutation(slots).astype(np.int64)
        self._taken = np.zeros(slots, dtype=np.bool_)

    @property
    def taken(self) -> int:
        """Slots that are out."""
        return int(self._taken.sum())

    def first(self) -> int:
        """A slot that is free now."""
        return int(self._free[0])

    def take(self, count: int) -> Int64Array:
        """`count` slots at random. Returns int64[count]."""
        slots, self._free = self._free[:count], self._free[count:]
        assert len(slots) == count, "a round never needs more slots than the pool has"
        self._taken[slots] = True
        return slots

    def give_back(self, slots: Int64Array) -> None:
        """These slots may be taken again, in another order than they came."""
        if not self._taken[slots].all():
            again = slots[~self._taken[slots]]
            raise UsageError(f"slot {int(again[0])} was given back, but it is not out")
        self._taken[slots] = False
        self._free = self._random.permutation(np.concatenate([self._free, slots]))


class CachePool:
    """Every layer's cache, `[kind, slot, token, head, dim]` in bf16, and who holds which slot.

    A new pool holds the values of `pattern.NOBODY` in every element, so that a write anywhere is
    seen.
    """

    def __init__(self, geometry: Geometry, slots: int, seed: int, model: str) -> None:
        self.geometry = geometry
        self._seed = seed
        self._model = model
        shape = (
            geometry.layers,
            len(KINDS),
            slots,
            geometry.tokens_per_block,
            geometry.kv_heads,
            geometry.head_dim,
        )
        self._tensors = torch.empty(shape, dtype=torch.bfloat16)
        # The same memory: [layer, kind, slot, token, head, four dims].
        self._words = self._tensors.view(torch.int16).numpy().view(np.uint64)
        self.free = FreeSlots(slots, np.random.default_rng([seed, slots]))
        self._holders = np.full(slots, pattern.NOBODY, dtype=np.int64)
        self._ordinals = np.arange(slots, dtype=np.int64)
        every = np.arange(slots, dtype=np.int64)
        for part in np.array_split(every, -(-slots // 64)):
            self.write(pattern.NOBODY, part, part)

    def layout(self) -> Layout:
        """Tensor per layer, blocks inside K and V: how vLLM keeps its cache."""
        return paged_layout(
            list(self._tensors), "kind block token head dim", group=GROUP, model=self._model
        )

    def own(self, request: int, slots: Int64Array) -> None:
        """From now on the block of ordinal i of `request` is in `slots[i]`."""
        self._holders[slots] = request
        self._ordinals[slots] = np.arange(len(slots))

    def write(self, request: int, slots: Int64Array, ordinals: Int64Array, skip: int = 0) -> None:
        """Compute these blocks of a request, as prefill does; without the first `skip` tokens.

        Shapes: slots, ordinals int64[n], n of them. Modifies the pool.
        """
        for layer in range(self.geometry.layers):
            values = self._values(request, layer, ordinals)
            self._words[layer][:, slots, skip:] = values[:, :, skip:]

    def flip_byte(self, slot: int) -> None:
        """Change one byte in the middle of a slot. Modifies the pool."""
        middle = [extent // 2 for extent in self._words.shape]
        middle[2] = slot
        self._words[tuple(middle)] ^= np.uint64(0xFF)

    def check(self, first: int, stop: int) -> Iterator[Difference | None]:
        """Compare every byte of the pool with what it must hold; one step per slot owner.

        first, stop: the requests that were written since the last check.
        """
        for request in np.unique(self._holders):
            yield self._check_holder(int(request), needed=bool(first <= request < stop))

    def _values(self, request: int, layer: int, ordinals: Int64Array) -> pattern.Words:
        """Shapes: ordinals int64[n]; returns uint64[2, n, token, head, four dims]."""
        size, heads = self.geometry.tokens_per_block, self.geometry.kv_heads
        tokens = (ordinals[:, None] * size + np.arange(size)).ravel()
        flat = pattern.words(self._seed, request, layer, tokens, heads, self.geometry.head_dim)
        return flat.reshape(len(KINDS), len(ordinals), size, heads, -1)

    def _check_holder(self, request: int, *, needed: bool) -> Difference | None:
        slots = np.flatnonzero(self._holders == request)
        ordinals = self._ordinals[slots]
        first: Difference | None = None
        elements = 0
        for layer in range(self.geometry.layers):
            expected = self._values(request, layer, ordinals)
            got = self._words[layer][:, slots]
            if np.array_equal(expected, got):
                continue
            wrong = expected.view(np.uint16) != got.view(np.uint16)
            elements += int(wrong.sum())
            if first is None:
                where = tuple(int(axis[0]) for axis in np.nonzero(wrong))
                kind, block, token, head, dim = where
                first = Difference(
                    request=request,
                    slot=int(slots[block]),
                    layer=layer,
                    kind=KINDS[kind],
                    head=head,
                    token=int(ordinals[block]) * self.geometry.tokens_per_block + token,
                    dim=dim,
                    expected=int(expected.view(np.uint16)[where]),
                    got=int(got.view(np.uint16)[where]),
                    elements=0,
                    needed=needed,
                )
        return first and msgspec.structs.replace(first, elements=elements)
