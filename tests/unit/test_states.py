"""Recurrent states: one slot per request, which is that of all tokens and is sent last."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

import kvferry as kv
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.tensors import dense_tensor
from kvferry.transports.memory import Fabric, memory

BLOCK, TOKENS, SLOTS = 1024, 4, 8


@dataclass
class Facts:
    """A cache manager that remembers what it was asked for."""

    tokens: int = 10
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def extract(self, group: str, first: int, stop: int) -> kv.Span:
        self.asked.append((group, first, stop))
        return kv.Span.from_slots(range(first + 1, stop + 1), first)

    def released(self, slots: dict, evidence: str) -> None:
        pass


def make_engine(name: str, fabric: Fabric) -> tuple[kv.Engine, np.ndarray]:
    """Attention blocks in the first half of the memory, states in the second."""
    cache = np.zeros((2, SLOTS, BLOCK), dtype=np.uint8)
    pools = tuple(
        Pool(group, cache[at].ctypes.data, BLOCK, SLOTS) for at, group in enumerate(("full", "ssm"))
    )
    kv_tensor = dense_tensor(
        "kv", "full", "token dim", {"token": (0, TOKENS), "dim": (0, BLOCK // TOKENS)},
        item_bits=8, dtype="u8",
    )  # fmt: skip
    state = dense_tensor("state", "ssm", "dim", {"dim": (0, BLOCK)}, item_bits=8, dtype="u8")
    groups = (
        Group("full", "full", TOKENS, (kv_tensor,)),
        Group("ssm", "state", 1, (state,)),
    )
    config = kv.Config(name=name, listen="127.0.0.1:0")
    engine = kv.Engine(
        config, layout=Layout(pools, groups), transport=memory(fabric), owners=(cache,)
    )
    return engine, cache


def need_of(tokens: int) -> dict[str, kv.Span]:
    blocks = -(-tokens // TOKENS)
    return {"full": kv.Span.from_slots(range(5, 5 + blocks)), "ssm": kv.Span.from_slots([7])}


@pytest.mark.asyncio
async def test_a_state_is_asked_for_and_sent_with_the_last_token() -> None:
    fabric = Fabric()
    (source, sent), (target, got) = (make_engine(name, fabric) for name in ("s", "t"))
    sent[:] = np.arange(2 * SLOTS).reshape(2, SLOTS, 1)
    facts = Facts()
    async with source, target:
        rx = target.receive(
            kv.Key("r"), source=kv.Peer("s", source.address or ""), need=need_of(10), tokens=10,
            on_released=lambda *_: None,
        )  # fmt: skip
        async with rx, source.send("r", facts) as tx:
            tx.advance(4)
            tx.advance(9)
            assert facts.asked == [("full", 0, 1), ("full", 1, 2)]
            tx.advance(10)
            assert facts.asked[2:] == [("full", 2, 3), ("ssm", 0, 1)]
            tx.finish()
            assert (await rx).tokens == 10
    assert (got[0, 5:] == sent[0, 1:4]).all()
    assert (got[1, 7] == sent[1, 1]).all()
    assert not got[1, :7].any()


@pytest.mark.asyncio
async def test_the_state_after_more_tokens_than_wanted_is_refused() -> None:
    """Attention blocks of 10 tokens serve who wants 8; the state after 10 does not."""
    fabric = Fabric()
    (source, _), (target, got) = (make_engine(name, fabric) for name in ("s", "t"))
    async with source, target:
        peer = kv.Peer("s", source.address or "")
        for request, groups in (("r", ("full", "ssm")), ("q", ("full",))):
            need = {group: span for group, span in need_of(8).items() if group in groups}
            rx = target.receive(
                kv.Key(request), source=peer, need=need, tokens=8, on_released=lambda *_: None
            )
            async with rx, source.send(request, Facts()) as tx:
                tx.advance(10)
                tx.finish()
                if request == "q":
                    assert (await rx).tokens == 8
                    continue
                with pytest.raises(kv.Refused, match="'ssm' is the state after 10 tokens, it is"):
                    await rx
    assert not got[1].any()


@pytest.mark.asyncio
async def test_a_state_has_one_ordinal() -> None:
    engine, _ = make_engine("t", Fabric())
    async with engine:
        with pytest.raises(kv.UsageError, match="ordinal 1 is needed, but a state is ordinal 0"):
            engine.receive(
                kv.Key("r"), source=kv.Peer("s", "127.0.0.1:1"), tokens=10,
                need={"ssm": kv.Span.from_slots([3], first=1)}, on_released=lambda *_: None,
            )  # fmt: skip
