"""The source's end: what a send may read of a request, and what keeps it from being overwritten.

Two rules: whatever is extracted is held until it is released, whatever happens to the request
meanwhile; facts are reported, and no window or reuse rule is applied to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...engine.blocks import check_at_least, check_slots
from ...engine.errors import UsageError
from ...engine.spans import Span, blocks_for
from .tables import HOLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ...engine.layout import Group, Layout
    from .slots import Slots
    from .tables import Request

    Int64Array = NDArray[np.int64]


class PagedFacts:
    """Implements `CacheFacts` for one send of one request. Made by `PagedCache.facts`.

    tokens: what the send promises. Blocks beyond them, decode's and scratch, are never given.
    """

    def __init__(self, request: Request, tokens: int, layout: Layout, slots: Slots) -> None:
        self.tokens = tokens
        self._request = request
        self._layout = layout
        self._slots = slots
        self._out: dict[str, set[int]] = {group.name: set() for group in layout.groups}

    def extract(self, group: str, first: int, stop: int) -> Span:
        """The resident blocks of `group` with ordinals in [first, stop), held from now on.

        Evicted blocks are holes. A state is ordinal 0, and is there when exactly the promised
        tokens are computed. What is out already is given again, and still held once.

        Raises UsageError for blocks that are not computed, are in host memory, or belong to a
        request that was freed or waits for them; for a state when the promise is passed.
        """
        check_at_least("first ordinal", first, 0)
        self._request.check_in_place()
        ready = self._ready(self._layout.group(group))
        if stop > ready and self._layout.group(group).kind != "state":
            raise UsageError(
                f"request {self._request.name!r}, group {group!r}: ordinal {stop - 1} is asked "
                f"for, but of {self._request.tokens} computed and {self.tokens} promised tokens "
                f"{ready} blocks are ready: `append` before advance"
            )
        stop = max(first, min(stop, ready))
        self._request.check_not_away(group, first, stop)
        span = Span.from_table(self._request.tables[group].slots[first:stop], first, HOLE)
        new = set(span.slots().tolist()) - self._out[group]
        self._slots.hold("send", group, np.array(sorted(new), dtype=np.int64))
        self._out[group] |= new
        return span

    def released(self, slots: Mapping[str, Int64Array], evidence: str) -> None:
        """These blocks are read no more. The engine calls it, with each slot once.

        Raises UsageError for a slot that is not out; nothing was changed then.
        """
        for group, array in slots.items():
            check_slots(array)
            wrong = set(array.tolist()) - self._out.get(group, set())
            if wrong:
                raise UsageError(
                    f"request {self._request.name!r}, group {group!r}: slot {min(wrong)} was "
                    f"released before, or never extracted (evidence {evidence!r})"
                )
        for group, array in slots.items():
            self._out[group] -= set(array.tolist())
            self._slots.drop("send", group, array)

    def _ready(self, group: Group) -> int:
        """How many blocks can be given: whole ones; the last one when the promise is reached."""
        computed = self._request.tokens
        if group.kind != "state":
            if computed >= self.tokens:
                return blocks_for(self.tokens, group.tokens_per_block)
            return computed // group.tokens_per_block
        if computed > self.tokens:
            raise UsageError(
                f"request {self._request.name!r}, group {group.name!r}: its state is at token "
                f"{computed}, the send promises {self.tokens}: advance before `append` passes it"
            )
        return min(1, computed) if computed == self.tokens else 0
