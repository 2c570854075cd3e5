"""The paged cache against a slow model that knows, of each slot, everybody who holds it.

The model works out by single tokens which ordinals a table must have; which slots they get is the
cache's choice, and right when nobody held them. About 5 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.adapters.paged import Counts, OutOfBlocks, PagedCache, PagedFacts
from kvferry.engine.layout import Group
from kvferry.engine.spans import Span
from tests.conftest import HISTORIES
from tests.unit.paged import make_group, make_layout

SLOTS = 20
SINKS = 3  # of a group "sinks"
AWAY = -2  # in a model's table: in host memory
LAYOUTS = {
    "windows": [
        make_group("full", tokens=4),
        make_group("near", "window", 2, 5),
        make_group("sinks", "window", 2, 4),
    ],
    "one pool": [
        make_group("full", tokens=2),
        make_group("near", "window", 2, 3, pool="full"),
        make_group("chunk", "chunk", 3, 6),
    ],
    "state": [make_group("full", tokens=3), make_group("state", "state", 1, pool="full")],
}

Table = dict[int, int]  # ordinal -> slot, or AWAY
Tables = dict[str, Table]
Place = tuple[str, int]  # pool, slot


# ---------------------------------------------------------------- one token at a time


def blocks_of(group: Group, tokens: int) -> int:
    if group.kind == "state":
        return 1 if tokens else 0
    return len({token // group.tokens_per_block for token in range(tokens)})


def stays(group: Group, ordinal: int, next_token: int) -> bool:
    """Whether the next token, or one after it, attends to anything in the block."""
    places = range(ordinal * group.tokens_per_block, (ordinal + 1) * group.tokens_per_block)
    if group.kind == "window":
        sinks = SINKS if group.name == "sinks" else 0
        return any(place > next_token - group.window or place < sinks for place in places)
    if group.kind == "chunk":
        return any(place // group.window >= next_token // group.window for place in places)
    return True


def needed(group: Group, tokens: int) -> set[int]:
    return {o for o in range(blocks_of(group, tokens)) if stays(group, o, tokens)}


# ---------------------------------------------------------------- the model


@dataclass
class Held:
    """A request or a prefix: what it holds, as the owner `number`."""

    number: int
    tokens: int
    tables: Tables
    blocks: dict[str, int] = field(default_factory=dict)  # of each table, with its holes
    lease: int | None = None  # what it waits for

    @property
    def is_away(self) -> bool:
        return any(AWAY in table.values() for table in self.tables.values())


@dataclass
class Sending:
    """A send of a request, and the (group, slot) that it has extracted and not given back."""

    facts: PagedFacts
    held: Held
    number: int
    out: set[tuple[str, int]] = field(default_factory=set)


class Model:
    """Who holds each slot: numbers of requests, prefixes, sends and leases."""

    def __init__(self, groups: list[Group], reserved: tuple[int, ...]) -> None:
        self.groups = {group.name: group for group in groups}
        self.paged = [group for group in groups if group.kind != "state"]
        usable = [slot for slot in range(SLOTS) if slot not in reserved]
        self.owners: dict[Place, set[int]] = {
            (self.pool(name), slot): set() for name in self.groups for slot in usable
        }
        self.kinds: dict[int, str] = {}

    def pool(self, group: str) -> str:
        return self.groups[group].tensors[0].pool

    def number(self, kind: str) -> int:
        self.kinds[len(self.kinds)] = kind
        return len(self.kinds) - 1

    def own(self, group: str, slots: list[int], owner: int) -> None:
        for slot in slots:
            assert owner not in self.owners[self.pool(group), slot]
            self.owners[self.pool(group), slot].add(owner)

    def disown(self, group: str, slots: list[int], owner: int) -> None:
        for slot in slots:
            self.owners[self.pool(group), slot].remove(owner)

    def hold(self, held: Held) -> None:
        for group, table in held.tables.items():
            self.own(group, list(table.values()), held.number)

    def let_go(self, held: Held) -> None:
        for group, table in held.tables.items():
            self.disown(group, [slot for slot in table.values() if slot != AWAY], held.number)

    def counts(self, group: str) -> Counts:
        kinds = [
            {self.kinds[owner] for owner in owners}
            for (pool, _), owners in self.owners.items()
            if pool == self.pool(group)
        ]
        leased = sum("lease" in each for each in kinds)
        pinned = sum("send" in each and "lease" not in each for each in kinds)
        free = sum(not each for each in kinds)
        return Counts(free, len(kinds) - free - pinned - leased, pinned, leased)

    def fits(self, wanted: dict[str, set[int]]) -> bool:
        total: dict[str, int] = {}
        for group, ordinals in wanted.items():
            total[self.pool(group)] = total.get(self.pool(group), 0) + len(ordinals)
        return all(
            count <= sum(pool == p and not owners for (p, _), owners in self.owners.items())
            for pool, count in total.items()
        )

    def part(self, held: Held | None, most: int) -> tuple[int, Tables]:
        """What can be reused of a prefix or a request: (tokens, what they need)."""
        nothing: Tables = {name: {} for name in self.groups}
        tokens = 0 if held is None else max(0, min(held.tokens, most))
        while any(tokens % group.tokens_per_block for group in self.paged):
            tokens -= 1
        if held is None or not tokens:
            return 0, nothing
        parts = {
            g.name: {o: held.tables[g.name].get(o, AWAY) for o in needed(g, tokens)}
            for g in self.paged
        }
        if any(AWAY in table.values() for table in parts.values()):
            return 0, nothing
        return tokens, {**nothing, **parts}


# ---------------------------------------------------------------- the machine


NAMES = ("a", "b", "c")
PREFIXES = st.sampled_from(["p", "q"])


class CacheMachine(RuleBasedStateMachine):
    """Every call, in any order. The engine's part is played too: releases come when they like."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        reserved=st.sampled_from([(), (0,), (3, 13)]),
        seed=st.sampled_from([None, 1]),
    )
    def make(self, layout: str, reserved: tuple[int, ...], seed: int | None) -> None:
        groups = LAYOUTS[layout]
        self.model = Model(groups, reserved)
        sinks = {group.name: SINKS for group in groups if group.name == "sinks"}
        self.cache = PagedCache(make_layout(groups, SLOTS, reserved), sinks=sinks, seed=seed)
        self.requests: dict[str, Held] = {}
        self.prefixes: dict[str, Held] = {}
        self.sends: list[Sending] = []
        self.leases: dict[int, dict[str, Span]] = {}

    def pick(self, data: st.DataObject, names: list) -> object:
        return data.draw(st.sampled_from(names))

    def in_place(self) -> list[str]:
        return sorted(name for name, held in self.requests.items() if held.lease is None)

    def at_hand(self) -> list[str]:
        return [name for name in self.in_place() if not self.requests[name].is_away]

    def unused(self) -> list[str]:
        return [name for name in NAMES if name not in self.requests]

    def waiting(self) -> list[str]:
        return sorted(name for name, held in self.requests.items() if held.lease is not None)

    def add(self, name: str, cached: int, tables: Tables) -> Held:
        held = Held(self.model.number("table"), cached, {g: dict(t) for g, t in tables.items()})
        held.blocks = {g.name: blocks_of(g, cached) for g in self.model.paged}
        held.blocks = {**dict.fromkeys(self.model.groups, 0), **held.blocks}
        self.model.hold(held)
        self.requests[name] = held
        return held

    def accept(self, name: str, wanted: dict[str, set[int]]) -> None:
        """The cache chose slots for these ordinals: nobody may have held them."""
        held = self.requests[name]
        for group, ordinals in wanted.items():
            table = by_ordinal(self.cache.table(name, group))
            for ordinal in ordinals:
                place = (self.model.pool(group), table[ordinal])
                assert not self.model.owners[place], f"{place} is lent, and held"
                held.tables[group][ordinal] = table[ordinal]
                self.model.own(group, [table[ordinal]], held.number)

    # ------------------------------------------------------------ requests that compute

    @precondition(lambda self: self.unused())
    @rule(data=st.data(), tokens=st.integers(0, 14), prefix=PREFIXES)
    def start(self, data: st.DataObject, tokens: int, prefix: str) -> None:
        name = self.pick(data, self.unused())
        most = 0 if "state" in self.model.groups else tokens - 1
        cached, tables = self.model.part(self.prefixes.get(prefix), most)
        assert self.cache.start(name, tokens, prefix=prefix) == cached
        self.add(name, cached, tables)
        self.grow(name, tokens - cached, 0)

    @precondition(lambda self: self.at_hand())
    @rule(data=st.data(), tokens=st.integers(0, 7), lookahead=st.sampled_from([0, 0, 3]))
    def append(self, data: st.DataObject, tokens: int, lookahead: int) -> None:
        self.grow(self.pick(data, self.at_hand()), tokens, lookahead)

    def grow(self, name: str, tokens: int, lookahead: int) -> None:
        held = self.requests[name]
        for group, table in held.tables.items():
            described = self.model.groups[group]
            gone = [ordinal for ordinal in table if not stays(described, ordinal, held.tokens)]
            self.model.disown(group, [table.pop(ordinal) for ordinal in gone], held.number)
        behind = held.tokens + tokens + lookahead
        wanted = {
            name: set(range(held.blocks[name], blocks_of(group, behind)))
            for name, group in self.model.groups.items()
        }
        if not self.model.fits(wanted):
            with pytest.raises(OutOfBlocks):
                self.cache.append(name, tokens, lookahead=lookahead)
            return
        self.cache.append(name, tokens, lookahead=lookahead)
        self.accept(name, wanted)
        for group, ordinals in wanted.items():
            held.blocks[group] += len(ordinals)
        held.tokens += tokens

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.pick(data, sorted(self.requests))
        self.cache.free(name)
        self.model.let_go(self.requests.pop(name))

    # ------------------------------------------------------------ sends

    @precondition(lambda self: self.in_place())
    @rule(data=st.data(), more=st.sampled_from([0, 0, 0, -3, 5]))
    def facts(self, data: st.DataObject, more: int) -> None:
        """A send that promises as much as is computed, or less, or more; its first blocks."""
        name = self.pick(data, self.in_place())
        facts = self.cache.facts(name, max(0, self.requests[name].tokens + more))
        self.sends.append(Sending(facts, self.requests[name], self.model.number("send")))
        for index, group, ready in self.readable():
            if index == len(self.sends) - 1:
                self.read(index, group, 0, data.draw(st.integers(0, ready)))

    def readable(self) -> list[tuple[int, str, int]]:
        """(send, group, blocks that it can give)."""
        alive = {held.number for held in self.requests.values()}
        found = []
        for index, send in enumerate(self.sends):
            held, promised = send.held, send.facts.tokens
            for group in self.model.groups.values():
                ready = held.tokens // group.tokens_per_block
                if held.tokens >= promised:
                    ready = blocks_of(group, promised)
                if group.kind == "state":
                    ready = int(0 < held.tokens == promised)
                if ready and held.number in alive:
                    found.append((index, group.name, ready))
        return found

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        index, group, ready = self.pick(data, self.readable())
        first = data.draw(st.integers(0, ready - 1))
        self.read(index, group, first, data.draw(st.integers(first, ready)))

    def read(self, index: int, group: str, first: int, stop: int) -> None:
        send = self.sends[index]
        expected = {o: slot for o, slot in send.held.tables[group].items() if first <= o < stop}
        if AWAY in expected.values():
            return
        assert by_ordinal(send.facts.extract(group, first, stop)) == expected
        new = [slot for slot in expected.values() if (group, slot) not in send.out]
        self.model.own(group, new, send.number)
        send.out |= {(group, slot) for slot in new}

    @precondition(lambda self: any(send.out for send in self.sends))
    @rule(data=st.data(), whole=st.booleans())
    def settle(self, data: st.DataObject, whole: bool) -> None:
        """The engine has read some of what a send holds, or all of it."""
        send = self.sends[self.pick(data, [i for i, s in enumerate(self.sends) if s.out])]
        given = sorted(send.out) if whole else [self.pick(data, sorted(send.out))]
        released: dict[str, list[int]] = {}
        for group, slot in given:
            released.setdefault(group, []).append(slot)
        send.facts.released({g: np.array(slots) for g, slots in released.items()}, "settled")
        send.out -= set(given)
        for group, slots in released.items():
            self.model.disown(group, slots, send.number)

    # ------------------------------------------------------------ receives

    @precondition(lambda self: self.unused())
    @rule(data=st.data(), tokens=st.integers(1, 14), prefix=PREFIXES)
    def need(self, data: st.DataObject, tokens: int, prefix: str) -> None:
        name = self.pick(data, self.unused())
        most = tokens - 1 if "state" in self.model.groups else tokens
        cached, tables = self.model.part(self.prefixes.get(prefix), most)
        wanted = {
            group.name: {
                ordinal
                for ordinal in needed(group, tokens)
                if group.kind == "state" or (ordinal + 1) * group.tokens_per_block > cached
            }
            for group in self.model.groups.values()
        }
        if not self.model.fits(wanted):
            with pytest.raises(OutOfBlocks):
                self.cache.need(name, tokens, prefix=prefix)
            return
        need = self.cache.need(name, tokens, prefix=prefix)
        assert {g: set(span.ordinals().tolist()) for g, span in need.items()} == wanted
        held = self.add(name, cached, tables)
        self.accept(name, wanted)
        held.tokens, held.lease = tokens, self.model.number("lease")
        held.blocks = {g.name: blocks_of(g, tokens) for g in self.model.groups.values()}
        self.leases[held.lease] = need
        for group, span in need.items():
            self.model.own(group, span.slots().tolist(), held.lease)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        name = self.pick(data, self.waiting())
        self.cache.filled(name, self.requests[name].tokens)
        self.requests[name].lease = None

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """The engine has evidence for what a receive was lent; its request may be long gone."""
        lease = self.pick(data, sorted(self.leases))
        need = self.leases.pop(lease)
        self.cache.on_released({group: span.slots() for group, span in need.items()}, "drained")
        for group, span in need.items():
            self.model.disown(group, span.slots().tolist(), lease)

    # ------------------------------------------------------------ prefixes, host memory

    def long_enough(self) -> list[str]:
        return [name for name in self.in_place() if self.requests[name].tokens >= 4]

    @precondition(lambda self: self.long_enough() and len(self.prefixes) < 2)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        prefix = "p" if "p" not in self.prefixes else "q"
        name = self.pick(data, self.long_enough())
        held = self.requests[name]
        tokens, tables = self.model.part(held, held.tokens)
        assert self.cache.commit(name, prefix) == tokens
        if tokens:
            self.prefixes[prefix] = Held(self.model.number("table"), tokens, tables)
            self.model.hold(self.prefixes[prefix])

    @precondition(lambda self: len(self.prefixes) == 2)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        prefix = self.pick(data, sorted(self.prefixes))
        self.cache.forget(prefix)
        self.model.let_go(self.prefixes.pop(prefix))

    @precondition(lambda self: self.in_place())
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        name = self.pick(data, self.in_place())
        group = self.pick(data, sorted(self.model.groups))
        held = self.requests[name]
        edges = st.integers(0, held.blocks[group])
        first, stop = sorted(data.draw(st.tuples(edges, edges)))
        self.cache.offload(name, group, first, stop)
        for ordinal, slot in held.tables[group].items():
            if first <= ordinal < stop and slot != AWAY:
                self.model.disown(group, [slot], held.number)
                held.tables[group][ordinal] = AWAY

    @precondition(lambda self: any(self.requests[name].is_away for name in self.in_place()))
    @rule(data=st.data())
    def onboard(self, data: st.DataObject) -> None:
        name = self.pick(data, [n for n in self.in_place() if self.requests[n].is_away])
        for group, table in self.requests[name].tables.items():
            wanted = {group: {ordinal for ordinal, slot in table.items() if slot == AWAY}}
            if not self.model.fits(wanted):
                with pytest.raises(OutOfBlocks):
                    self.cache.onboard(name, group)
                return
            span = self.cache.onboard(name, group)
            assert set(span.ordinals().tolist()) == wanted[group]
            self.accept(name, wanted)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def every_slot_is_where_the_model_says(self) -> None:
        self.cache.check()
        for group in self.model.groups:
            assert self.cache.counts(group) == self.model.counts(group)

    @invariant()
    def tables_are_the_models(self) -> None:
        for name, held in self.requests.items():
            assert self.cache.tokens(name) == held.tokens
            for group, table in held.tables.items():
                expected = {o: slot for o, slot in table.items() if slot != AWAY}
                assert by_ordinal(self.cache.table(name, group)) == expected

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in sorted(self.requests):
            self.cache.free(name)
        for prefix in sorted(self.prefixes):
            self.cache.forget(prefix)
        for send in self.sends:
            for group, slot in sorted(send.out):
                send.facts.released({group: np.array([slot])}, "settled")
        for need in self.leases.values():
            self.cache.on_released({g: span.slots() for g, span in need.items()}, "drained")
        assert self.cache.all_free
        self.cache.check()


def by_ordinal(span: Span) -> Table:
    return dict(zip(span.ordinals().tolist(), span.slots().tolist(), strict=True))


TestCache = CacheMachine.TestCase
TestCache.settings = settings(HISTORIES, stateful_step_count=30)
