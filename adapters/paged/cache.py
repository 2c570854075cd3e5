"""The cache manager of one rank: block tables per request and group over shared slots.

Two rules: a call that raises has changed nothing that its caller could miss; what a transfer holds
is given up by the engine's word alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...engine.blocks import check_at_least, check_slots, show
from ...engine.errors import UsageError
from ...engine.spans import Span
from ...engine.trims import needed
from .facts import PagedFacts
from .slots import Slots
from .tables import HOLE, OFFLOADED, Request, Table, blocks_of, first_live

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ...engine.layout import Group, Layout
    from ...engine.trims import Extent
    from .slots import Counts

    Int64Array = NDArray[np.int64]


class _Prefix(NamedTuple):
    tokens: int
    tables: dict[str, Table]


class PagedCache:
    """Block tables of one rank's requests. Single-threaded, and never waits. See the package.

    layout: as given to the engine; groups, windows, pools and reserved slots come from it.
    sinks: {group: its first tokens, which stay beside its window}.
    seed: None lends slots in ascending order, a number in a scattered one; always the same.
    """

    def __init__(
        self, layout: Layout, *, sinks: Mapping[str, int] | None = None, seed: int | None = None
    ) -> None:
        self._layout = layout
        self._sinks = {group.name: 0 for group in layout.groups}
        for name, tokens in (sinks or {}).items():
            if layout.group(name).kind != "window":
                raise UsageError(f"sinks has group {name!r}, which has no window")
            check_at_least(f"sinks of group {name!r}", tokens, 0)
            self._sinks[name] = tokens
        # Only whole blocks of every group are reused: what all block sizes divide.
        paged = [group for group in layout.groups if group.kind != "state"]
        self._unit = math.lcm(*(group.tokens_per_block for group in paged))
        self._has_state = len(paged) < len(layout.groups)
        self._slots = Slots(layout, seed)
        self._requests: dict[str, Request] = {}
        self._prefixes: dict[str, _Prefix] = {}

    # ------------------------------------------------------------ requests that compute

    def start(self, request: str, tokens: int, *, prefix: str | None = None) -> int:
        """Begin a request with a prompt of `tokens`; return how many of them are reused.

        prefix: what `commit` kept under that name is reused, in whole blocks, if its tokens are
        the first ones of this prompt; the caller knows that. At least one token is left to
        compute, and with a state all are. An unknown prefix is a miss. No block is allocated.

        Raises UsageError for a request that is there.
        """
        check_at_least("tokens", tokens, 0)
        cached, tables = self._reuse(prefix, 0 if self._has_state else tokens - 1)
        made = self._add(request, tables)
        made.tokens = made.cached_tokens = cached
        return cached

    def append(self, request: str, tokens: int, *, lookahead: int = 0) -> None:
        """Give the next `tokens` tokens blocks to be computed into; a chunk, or one at a time.

        Blocks that none of them attends to leave the window first.
        lookahead: tokens of scratch behind them, for speculation; they are not counted, and the
        next append takes their blocks over.

        Raises OutOfBlocks, having evicted and nothing else; UsageError for an unknown request,
        one that waits for its blocks, or has some of them in host memory.
        """
        check_at_least("tokens", tokens, 0)
        check_at_least("lookahead", lookahead, 0)
        held = self._in_place(request)
        wanted = {}
        for group in self._layout.groups:
            table = held.tables[group.name]
            sinks = blocks_of(group, self._sinks[group.name])
            self._drop(group.name, table.evict(sinks, first_live(group, held.tokens)))
            held.check_not_away(group.name, 0, table.slots.size)
            blocks = blocks_of(group, held.tokens + tokens + lookahead)
            wanted[group.name] = max(0, blocks - table.slots.size)
        for name, slots in self._slots.take(wanted).items():
            held.tables[name].grow(slots)
        held.tokens += tokens

    def free(self, request: str) -> None:
        """The host is done with a request, in any state.

        What a transfer still reads or writes becomes free when the engine releases it.
        Raises UsageError for an unknown request.
        """
        held = self._find(request)
        for name, table in held.tables.items():
            self._drop(name, table.resident())
        held.freed = True
        del self._requests[request]

    def tokens(self, request: str) -> int:
        """How many tokens of a request are computed, or are to be received."""
        return self._find(request).tokens

    def cached_tokens(self, request: str) -> int:
        """How many of them a request began with: reused, neither computed nor received."""
        return self._find(request).cached_tokens

    def table(self, request: str, group: str) -> Span:
        """The resident blocks of a request, scratch included: where the model reads and writes."""
        self._layout.group(group)
        return self._find(request).tables[group].span()

    # ------------------------------------------------------------ the source's end

    def facts(self, request: str, tokens: int) -> PagedFacts:
        """What a send reads: `engine.send(request, cache.facts(request, tokens))`.

        tokens: how many the send promises. One per send: two sends of a request each hold what
        they read.
        """
        check_at_least("tokens", tokens, 0)
        return PagedFacts(self._in_place(request), tokens, self._layout, self._slots)

    # ------------------------------------------------------------ the target's end

    def need(self, request: str, tokens: int, *, prefix: str | None = None) -> dict[str, Span]:
        """Begin a request whose first `tokens` tokens come by a transfer: {group: span}.

        The result is what `engine.receive` takes as `need`, window and reuse applied; its slots
        are leased to the transfer, and only `on_released` ends that, whatever else is called.
        prefix: see `start`; here the whole prompt may be reused, unless there is a state.

        Raises OutOfBlocks, having taken nothing; UsageError for a request that is there.
        """
        check_at_least("tokens", tokens, 1)
        cached, tables = self._reuse(prefix, tokens - 1 if self._has_state else tokens)
        self._check_new(request)
        ordinals = {
            group.name: _ordinals(self._needed(group, tokens, cached))
            for group in self._layout.groups
        }
        taken = self._slots.take({name: wanted.size for name, wanted in ordinals.items()})
        held = self._add(request, tables)
        held.tokens, held.cached_tokens = tokens, cached
        held.need = {}
        for group in self._layout.groups:
            name, table = group.name, held.tables[group.name]
            lacking = blocks_of(group, tokens) - table.slots.size
            table.grow(np.full(lacking, HOLE, dtype=np.int64))
            table.slots[ordinals[name]] = taken[name]
            self._slots.hold("receive", name, taken[name])
            held.need[name] = Span.from_blocks(ordinals[name], taken[name])
        return dict(held.need)

    def filled(self, request: str, tokens: int) -> None:
        """The transfer is done: the first `tokens` (its `got.tokens`) are in the request's blocks.

        From here on the request is like one that computed them. Blocks behind them, of a transfer
        that brought fewer than were asked for, leave.

        Raises UsageError when nothing is awaited, and when these tokens need a block that was
        not asked for: a window that ends earlier reaches further back.
        """
        held = self._waiting(request)
        if not 1 <= tokens <= held.tokens:
            raise UsageError(
                f"request {request!r}: {tokens} tokens are filled, of {held.tokens} asked for"
            )
        for group in self._layout.groups:
            table, extents = held.tables[group.name], self._needed(group, tokens)
            ordinals = _ordinals(extents)
            lacking = ordinals[table.slots[ordinals] < 0]
            if lacking.size:
                raise UsageError(
                    f"request {request!r}, group {group.name!r}: {tokens} tokens need ordinals "
                    f"{show(lacking)}, which {held.tokens} did not"
                )
        for group in self._layout.groups:
            table = held.tables[group.name]
            self._drop(group.name, table.cut(blocks_of(group, tokens)))
        held.tokens, held.need = tokens, None
        held.cached_tokens = min(held.cached_tokens, tokens)

    def on_released(self, slots: Mapping[str, Int64Array], evidence: str) -> None:
        """The engine's word that nothing can write to these slots any more: pass it to `receive`.

        Slots whose request was freed become free; the others are their request's alone.
        Raises UsageError for a slot that is not leased; nothing was changed then.
        """
        for group, array in slots.items():
            self._layout.check_slots(group, array)
            check_slots(array)
            wrong = array[~self._slots.leased(group, array)]
            if wrong.size:
                raise UsageError(
                    f"group {group!r}: slot {int(wrong[0])} was released before, or never leased "
                    f"(evidence {evidence!r})"
                )
        for group, array in slots.items():
            self._slots.drop("receive", group, array)

    def withdraw(self, request: str) -> None:
        """Free a request whose need the engine never took: entering its receive raised.

        Never say it of one that was entered, however it ended: `free` it, and its slots follow
        when the engine releases them.
        Raises UsageError when nothing is awaited, or some of it was released already.
        """
        need = self._waiting(request).need
        assert need is not None
        self.on_released({name: span.slots() for name, span in need.items()}, "never-exposed")
        self.free(request)

    # ------------------------------------------------------------ prefixes

    def commit(self, request: str, prefix: str) -> int:
        """Keep the whole blocks of a request's tokens for others that begin with the same ones.

        Returns how many tokens are kept; 0, and nothing is, when a block that they need has left
        its window or its slot. States are not kept: they stand for one count of tokens alone.

        Raises UsageError for a prefix that is kept already, and as `append` for the request.
        """
        if prefix in self._prefixes:
            raise UsageError(f"prefix {prefix!r} is kept already: `forget` it first")
        held = self._in_place(request)
        tokens, tables = self._parts(held.tables, held.tokens)
        if tokens:
            self._prefixes[prefix] = _Prefix(tokens, tables)
            self._hold(tables)
        return tokens

    def forget(self, prefix: str) -> None:
        """A prefix is kept no more; requests that reuse it keep their blocks.

        Raises UsageError for an unknown one.
        """
        if prefix not in self._prefixes:
            raise UsageError(f"no prefix {prefix!r} is kept")
        for name, table in self._prefixes.pop(prefix).tables.items():
            self._drop(name, table.resident())

    # ------------------------------------------------------------ host memory

    def offload(self, request: str, group: str, first: int, stop: int) -> None:
        """The blocks [first, stop) were copied to host memory: they give up their slots.

        Until `onboard` they can be neither sent nor computed with. Holes stay holes.
        Raises UsageError for ordinals that the table has not, and as `append` for the request.
        """
        self._layout.group(group)
        slots = self._in_place(request).tables[group].slots
        if not 0 <= first <= stop <= slots.size:
            raise UsageError(
                f"request {request!r}, group {group!r}: ordinals {first}..{stop - 1} are "
                f"offloaded, the table has {slots.size} blocks"
            )
        part = slots[first:stop]
        self._drop(group, part[part >= 0])
        part[part >= 0] = OFFLOADED

    def onboard(self, request: str, group: str) -> Span:
        """Give every offloaded block of a group a slot again: copy them to these.

        Raises OutOfBlocks, having taken nothing; UsageError as `append` for the request.
        """
        self._layout.group(group)
        slots = self._in_place(request).tables[group].slots
        ordinals = np.flatnonzero(slots == OFFLOADED)
        slots[ordinals] = self._slots.take({group: ordinals.size})[group]
        return Span.from_blocks(ordinals, slots[ordinals])

    # ------------------------------------------------------------ looking

    def counts(self, group: str) -> Counts:
        """Where the slots of a group are now."""
        self._layout.group(group)
        return self._slots.counts(group)

    @property
    def all_free(self) -> bool:
        """True when no request, prefix or transfer holds any slot."""
        return self._slots.all_free

    def check(self) -> None:
        """Raise AssertionError unless every slot is accounted for, once. For tests. Slow."""
        held = [
            *(request.tables for request in self._requests.values()),
            *(prefix.tables for prefix in self._prefixes.values()),
        ]
        self._slots.check(
            (name, table.resident()) for tables in held for name, table in tables.items()
        )

    # ------------------------------------------------------------ inside

    def _check_new(self, request: str) -> None:
        if request in self._requests:
            raise UsageError(f"request {request!r} is in the cache already: `free` it first")

    def _find(self, request: str) -> Request:
        if request not in self._requests:
            raise UsageError(f"no request {request!r} is in the cache")
        return self._requests[request]

    def _in_place(self, request: str) -> Request:
        held = self._find(request)
        held.check_in_place()
        return held

    def _waiting(self, request: str) -> Request:
        held = self._find(request)
        if held.need is None:
            raise UsageError(f"request {request!r} waits for no transfer")
        return held

    def _add(self, request: str, tables: dict[str, Table]) -> Request:
        self._check_new(request)
        self._hold(tables)
        every = {group.name: tables.get(group.name) or Table() for group in self._layout.groups}
        held = self._requests[request] = Request(request, every)
        return held

    def _needed(self, group: Group, tokens: int, cached: int = 0) -> tuple[Extent, ...]:
        return needed(
            group.kind,
            tokens,
            group.tokens_per_block,
            window=group.window,
            cached_tokens=cached,
            sink_tokens=self._sinks[group.name],
        )

    def _reuse(self, prefix: str | None, most: int) -> tuple[int, dict[str, Table]]:
        """The first tokens of a prefix, at most `most`: as `_parts`."""
        known = None if prefix is None else self._prefixes.get(prefix)
        if known is None:
            return 0, {}
        return self._parts(known.tables, min(known.tokens, most))

    def _parts(self, tables: Mapping[str, Table], tokens: int) -> tuple[int, dict[str, Table]]:
        """(whole blocks of `tokens`, in tokens; tables of what they need), or (0, {})."""
        tokens = max(0, tokens) // self._unit * self._unit
        parts = {}
        for group in self._layout.groups if tokens else ():
            if group.kind == "state":
                continue
            extents, blocks = self._needed(group, tokens), blocks_of(group, tokens)
            slots = tables[group.name].part(extents, blocks)
            if slots is None:
                return 0, {}
            parts[group.name] = Table(slots)
        return tokens, parts

    def _hold(self, tables: Mapping[str, Table]) -> None:
        for name, table in tables.items():
            self._slots.hold("table", name, table.resident())

    def _drop(self, group: str, slots: Int64Array) -> None:
        self._slots.drop("table", group, slots)


def _ordinals(extents: tuple[Extent, ...]) -> Int64Array:
    parts = [np.arange(first, stop, dtype=np.int64) for first, stop in extents]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
