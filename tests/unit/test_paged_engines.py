"""Two engines over paged caches, as servers would run them: chunks, windows, prefixes, cancels.

Every element of a cache follows from whose prompt it belongs to and where, so both sides work it
out for themselves. Writes take a while, and pools are small: what is lent too early is overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvferry as kv
from kvferry.adapters.paged import OutOfBlocks, PagedCache
from kvferry.engine.errors import Cancelled
from kvferry.transports.memory import Fabric, PromptCourier, memory
from tests.unit.loops import on_both_loops
from tests.unit.paged import TOKEN_BYTES, make_group, make_layout, pool_names, stride

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 30
TOGETHER = 8
WRITE_NS = 200_000
MODELS = {
    "windows": [
        make_group("full", tokens=8),
        make_group("near", "window", 4, 14),
        make_group("sinks", "window", 4, 9, pool="near"),
        make_group("local", "chunk", 4, 16),
    ],
    "state": [make_group("full", tokens=4), make_group("state", "state", 1)],
}
SINKS = {"windows": {"sinks": 5}, "state": {}}
PREFIXES = {"short": 16, "long": 32}


@dataclass(frozen=True)
class Prompt:
    """The first tokens may be another's."""

    request: str
    tokens: int
    prefix: str | None

    def text(self, place: int) -> str:
        """Whose token it is."""
        shared = self.prefix is not None and place < PREFIXES[self.prefix]
        return f"{self.prefix if shared else self.request}/{place}"


@functools.cache
def value_of(text: str) -> np.ndarray:
    """The bytes that the model computes for a token of a group."""
    return np.frombuffer(hashlib.shake_128(text.encode()).digest(TOKEN_BYTES), dtype=np.uint8)


class Side:
    """One engine, its pools, and the cache that manages them."""

    def __init__(self, name: str, model: str, slots: int, fabric: Fabric, seed: int) -> None:
        self.groups = MODELS[model]
        self.pools = {
            pool: np.zeros((slots, stride(self.groups, pool)), dtype=np.uint8)
            for pool in pool_names(self.groups)
        }
        addresses = {pool: array.ctypes.data for pool, array in self.pools.items()}
        layout = make_layout(self.groups, slots, (0,), addresses)
        self.cache = PagedCache(layout, sinks=SINKS[model], seed=seed)
        self.engine = kv.Engine(
            kv.Config(name=name, listen="127.0.0.1:0"),
            layout=layout,
            transport=memory(fabric, courier=PromptCourier(WRITE_NS)),
            owners=list(self.pools.values()),
        )

    def places(
        self, prompt: Prompt, first: int, stop: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(the bytes of a token, what they must be) for tokens [first, stop) that are resident."""
        for group in self.groups:
            span = self.cache.table(prompt.request, group.name)
            slots = dict(zip(span.ordinals().tolist(), span.slots().tolist(), strict=True))
            pool = self.pools[group.tensors[0].pool]
            state = group.kind == "state"
            for token in [stop - 1] if state else range(first, stop):
                ordinal, inside = (0, 0) if state else divmod(token, group.tokens_per_block)
                if ordinal in slots:
                    at = inside * TOKEN_BYTES
                    value = value_of(f"{group.name}/{prompt.text(token)}")
                    yield pool[slots[ordinal], at : at + TOKEN_BYTES], value

    def compute(self, prompt: Prompt, tokens: int) -> None:
        """The next tokens, into blocks that the cache gives them."""
        first = self.cache.tokens(prompt.request)
        self.cache.append(prompt.request, tokens)
        for place, value in self.places(prompt, first, first + tokens):
            place[:] = value

    def check(self, prompt: Prompt) -> int:
        """Every resident byte of a request; return how many."""
        places = list(self.places(prompt, 0, self.cache.tokens(prompt.request)))
        for place, expected in places:
            assert np.array_equal(place, expected)
        return len(places) * TOKEN_BYTES

    def check_over(self) -> None:
        for prefix in PREFIXES:
            with contextlib.suppress(kv.UsageError):
                self.cache.forget(prefix)
        self.cache.check()
        assert self.cache.all_free
        assert not any(pool[0].any() for pool in self.pools.values()), "the null block was written"


async def room(take: object) -> object:
    """Call until there are blocks: others are giving theirs back meanwhile."""
    while True:
        try:
            return take()
        except OutOfBlocks:
            await asyncio.sleep(0)


class Load:
    """Requests that go from prefill to decode; some are cancelled, on either side, at any time."""

    def __init__(self, model: str) -> None:
        fabric = Fabric()
        self.chance = random.Random(model)
        self.prefill = Side("prefill", model, 160, fabric, 1)
        self.decode = Side("decode", model, 64, fabric, 2)
        self.entered: dict[str, list[kv.Send | kv.Receive]] = {}
        self.given_up: set[str] = set()
        self.ended: dict[str, int] = {"done": 0, "cancelled": 0}
        self.reused = {"prefill": 0, "decode": 0}
        self.checked = 0

    async def run(self) -> None:
        together = asyncio.Semaphore(TOGETHER)

        async def one(number: int) -> None:
            async with together:
                prefix = self.chance.choice([None, *PREFIXES])
                least = 1 if prefix is None else PREFIXES[prefix]
                # The first of a prefix are the prefix: they are what is kept of it.
                most = 60 if prefix is None or number > TOGETHER else least
                prompt = Prompt(f"r{number}", self.chance.randint(least, most), prefix)
                ended = await asyncio.gather(self.compute(prompt), self.fetch(prompt))
            self.ended["done" if all(ended) else "cancelled"] += 1

        async with self.prefill.engine, self.decode.engine:
            await asyncio.gather(*(one(number) for number in range(REQUESTS)))
            for side in (self.prefill, self.decode):
                stats = side.engine.stats()
                assert stats.internal_errors == stats.callback_errors == stats.slots_lent == 0
        for side in (self.prefill, self.decode):
            side.check_over()

    async def compute(self, prompt: Prompt) -> bool:
        """What a prefill server does with a request; False when it was cancelled."""
        side, request, patience = self.prefill, prompt.request, self.patience()
        side.cache.start(request, prompt.tokens, prefix=prompt.prefix)
        self.reused["prefill"] += side.cache.cached_tokens(request)
        facts = side.cache.facts(request, prompt.tokens)
        async with side.engine.send(request, facts) as tx:
            self.enter(request, tx)
            while (left := prompt.tokens - side.cache.tokens(request)) > 0:
                step = min(self.chance.randint(1, 20), left)
                await room(lambda step=step: side.compute(prompt, step))
                if (patience := patience - 1) == 0:
                    tx.cancel("preempted")
                    self.give_up(request)
                tx.advance(side.cache.tokens(request))
                await asyncio.sleep(0)
            tx.finish()
        self.keep(side, prompt)
        self.checked += side.check(prompt)
        side.cache.free(request)
        with contextlib.suppress(Cancelled):
            await tx
            await tx.released()
            return True
        await tx.released()
        return False

    async def fetch(self, prompt: Prompt) -> bool:
        """What a decode server does with a request; False when it was cancelled."""
        side, request, patience = self.decode, prompt.request, self.patience()
        need = await room(lambda: side.cache.need(request, prompt.tokens, prefix=prompt.prefix))
        self.reused["decode"] += side.cache.cached_tokens(request)
        rx = side.engine.receive(
            kv.Key(request),
            source=kv.Peer("prefill", self.prefill.engine.address),
            need=need,
            tokens=prompt.tokens,
            on_released=side.cache.on_released,
        )
        try:
            async with rx:
                self.enter(request, rx)
                for _ in range(patience):
                    await asyncio.sleep(0)
                if patience:
                    rx.cancel("its client left")
                    self.give_up(request)
                got = await rx
        except Cancelled:
            side.cache.free(request)
            await rx.released()
            return False
        side.cache.filled(request, got.tokens)
        self.checked += side.check(prompt)
        self.keep(side, prompt)
        with contextlib.suppress(OutOfBlocks):  # then its answer is short
            for _ in range(self.chance.randint(0, 20)):
                side.compute(prompt, 1)
                await asyncio.sleep(0)
        self.checked += side.check(prompt)
        side.cache.free(request)
        await rx.released()
        return True

    def enter(self, request: str, transfer: kv.Send | kv.Receive) -> None:
        """A router knows who is at it, and tells whoever comes late."""
        self.entered.setdefault(request, []).append(transfer)
        if request in self.given_up:
            transfer.cancel("it was given up")

    def give_up(self, request: str) -> None:
        """A router tells the other side too: the engines may not have met yet."""
        self.given_up.add(request)
        for transfer in self.entered[request]:
            transfer.cancel("it was given up")

    def patience(self) -> int:
        """After how many steps a request is cancelled; 0 for never."""
        return self.chance.randint(1, 6) if self.chance.random() < 0.25 else 0

    def keep(self, side: Side, prompt: Prompt) -> None:
        """Commit the prefix, the first time that a request ends with it."""
        if prompt.prefix is not None and prompt.tokens == PREFIXES[prompt.prefix]:
            with contextlib.suppress(kv.UsageError):
                side.cache.commit(prompt.request, prompt.prefix)


@on_both_loops
@pytest.mark.parametrize("model", MODELS)
async def test_every_byte_arrives_and_every_block_comes_back(model: str) -> None:
    load = Load(model)
    await load.run()
    assert load.ended["done"] > 5
    assert load.ended["cancelled"] > 2
    assert load.reused["decode"] > 0
    assert load.checked > 100_000
