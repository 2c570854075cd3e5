"""Block tables: which slot holds the block at each ordinal of one request.

Owns what a request is and when a block leaves its window. Two rules: a table is indexed by
ordinal from 0 on, and a block that has no slot leaves a mark in its place; what was computed is
counted in tokens, never by the length of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ...engine.blocks import show
from ...engine.errors import UsageError
from ...engine.spans import Span, blocks_for
from ...engine.trims import stale_chunk, stale_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...engine.layout import Group
    from ...engine.trims import Extent

    Int64Array = NDArray[np.int64]

HOLE: Final = -1  # never allocated here, or evicted
OFFLOADED: Final = -2  # its bytes are in host memory


def blocks_of(group: Group, tokens: int) -> int:
    """The blocks of a group that hold `tokens` tokens; a state is one, once there is a token."""
    return min(tokens, 1) if group.kind == "state" else blocks_for(tokens, group.tokens_per_block)


def first_live(group: Group, tokens: int) -> int:
    """The first ordinal that the token at position `tokens` or a later one attends to."""
    if group.kind == "window":
        return stale_window(tokens, group.window, group.tokens_per_block)
    if group.kind == "chunk":
        return stale_chunk(tokens, group.window, group.tokens_per_block)
    return 0


class Table:
    """One group of one request: int64[blocks] by ordinal, a slot, HOLE or OFFLOADED each.

    evicted: the blocks that have left the window; sinks below it stay.
    """

    __slots__ = ("evicted", "slots")

    def __init__(self, slots: Int64Array | None = None) -> None:
        self.slots = np.zeros(0, dtype=np.int64) if slots is None else slots
        self.evicted = 0

    def resident(self) -> Int64Array:
        """The slots that it holds: int64[n]."""
        return self.slots[self.slots >= 0]

    def span(self) -> Span:
        """The same with their ordinals."""
        ordinals = np.flatnonzero(self.slots >= 0)
        return Span.from_blocks(ordinals, self.slots[ordinals])

    def grow(self, slots: Int64Array) -> None:
        """Append blocks."""
        self.slots = np.concatenate((self.slots, slots))

    def evict(self, sinks: int, live: int) -> Int64Array:
        """The blocks between the sinks and the first live one leave; return their slots."""
        passed = self.slots[max(sinks, self.evicted) : live]
        slots = passed[passed >= 0]
        passed[:] = HOLE
        self.evicted = max(self.evicted, live)
        return slots

    def cut(self, blocks: int) -> Int64Array:
        """The blocks from ordinal `blocks` on leave; return their slots."""
        tail, self.slots = self.slots[blocks:], self.slots[:blocks].copy()
        return tail[tail >= 0]

    def part(self, extents: tuple[Extent, ...], blocks: int) -> Int64Array | None:
        """A table of `blocks` with the extents' slots and holes else; None when one lacks."""
        slots = np.full(blocks, HOLE, dtype=np.int64)
        for first, stop in extents:
            slots[first:stop] = self.slots[first:stop]
            if (slots[first:stop] < 0).any():
                return None
        return slots


@dataclass(slots=True, eq=False)
class Request:
    """One request's tables.

    tokens: how many are computed, or are to be once `need` has come.
    cached_tokens: how many of them it began with.
    need: what a transfer is to bring, None when nothing is awaited.
    """

    name: str
    tables: dict[str, Table]
    tokens: int = 0
    cached_tokens: int = 0
    need: dict[str, Span] | None = None
    freed: bool = False

    def check_in_place(self) -> None:
        """Raise UsageError while the blocks may not be there yet, or any more."""
        if self.freed:
            raise UsageError(f"request {self.name!r} was freed")
        if self.need is not None:
            raise UsageError(
                f"request {self.name!r} waits for its blocks: say `filled` once its receive is done"
            )

    def check_not_away(self, group: str, first: int, stop: int) -> None:
        """Raise UsageError when a block of these ordinals is in host memory."""
        away = np.flatnonzero(self.tables[group].slots[first:stop] == OFFLOADED)
        if away.size:
            raise UsageError(
                f"request {self.name!r}, group {group!r}: ordinals {show(first + away)} are in "
                "host memory, without slots: `onboard` them and copy them back first"
            )
