"""Whole engines in one process over memory copies and loopback TCP, on both event loops. About 3 s.

Nothing here sleeps to wait for something: it awaits outcomes, releases and closings.
"""

# ruff: noqa: SIM117  engines outside, transfers inside: two things, two lines

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import kvferry as kv
from kvferry.engine.errors import Cancelled, Failed, PeerLost, Refused, TimedOut, UsageError
from kvferry.engine.keys import Key, Peer
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.ports import Posted
from kvferry.engine.service import Engine
from kvferry.engine.spans import Span
from kvferry.engine.tensors import Axis, Tensor
from kvferry.transports.memory import Fabric, Fate, PromptCourier, memory
from tests.unit.loops import on_both_loops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvferry.engine.handles import Receive, Send
    from kvferry.engine.ports import Event, Post

BLOCK = 1024
TOKENS = 4
SLOTS = 32
KEY = Key("r")


class Held:
    """A courier whose writes are under way until `let_go`."""

    def __init__(self) -> None:
        self.held = True
        self.carried = 0

    def carry(self, source: str, target: str, post: Post, now: int) -> Fate:
        self.carried += 1
        fate = PromptCourier().carry(source, target, post, now)
        return HeldFate(self, fate)  # type: ignore[return-value]


@dataclass
class HeldFate:
    held: Held
    fate: Fate

    @property
    def pieces(self) -> tuple:
        return self.fate.pieces

    def progress(self, now: int) -> tuple[str, str]:
        return ("pending", "") if self.held.held else ("done", "")


@dataclass
class Node:
    """One engine with its memory and what came back to it."""

    engine: Engine
    memory: np.ndarray
    back: list[tuple[int, str]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def on_released(self, slots: dict, evidence: str) -> None:
        self.back += [(slot, evidence) for array in slots.values() for slot in array.tolist()]
        self.released.set()

    @property
    def slots_back(self) -> list[int]:
        return sorted(slot for slot, _ in self.back)

    def receive(self, prefill: Node, key: Key = KEY, /, **changes: object) -> Receive:
        arguments: dict = {
            "source": Peer("prefill", prefill.engine.address),
            "need": {"g": Span.from_slots([5, 6, 9])},
            "tokens": 12,
            "on_released": self.on_released,
        }
        arguments = {**arguments, **changes}
        return self.engine.receive(arguments.pop("key", key), **arguments)

    def send(self, request: str = "r", /, **changes: object) -> Send:
        arguments: dict = {"tokens": 12, "on_released": self.on_released}
        arguments = {**arguments, **changes}
        return self.engine.send(arguments.pop("request", request), **arguments)


def make_node(name: str, fabric: Fabric, courier: object = None, **config: object) -> Node:
    array = np.zeros(SLOTS * BLOCK, dtype=np.uint8)
    pool = Pool("p", array.ctypes.data, BLOCK, SLOTS)
    axes = (Axis("token", 0, TOKENS, BLOCK // TOKENS), Axis("dim", 0, BLOCK // TOKENS, 1))
    group = Group("g", "full", TOKENS, (Tensor("kv", "p", 0, axes, 1, "u8"),))
    settings = kv.Config(name=name, listen="127.0.0.1:0", **config)
    engine = Engine(
        settings,
        layout=Layout((pool,), (group,), "m"),
        transport=memory(fabric, courier=courier),  # type: ignore[arg-type]
    )
    return Node(engine, array)


@contextlib.asynccontextmanager
async def two_nodes(courier: object = None, **config: object) -> AsyncIterator[tuple[Node, Node]]:
    fabric = Fabric()
    prefill = make_node("prefill", fabric, courier, **config)
    decode = make_node("decode", fabric, **config)
    async with prefill.engine, decode.engine:
        yield prefill, decode
        for node in (prefill, decode):
            node.engine.check_integrity()
            stats = node.engine.stats()
            assert stats.internal_errors == 0
    for node in (prefill, decode):
        assert node.engine._driver is not None
        assert not node.engine._driver._tasks
        assert node.engine._driver.transfers == 0


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something is so; the time limit of the test is the only other end."""
    while not condition():  # noqa: ASYNC110  what is waited for has no event of its own
        await asyncio.sleep(0)


def raises(use: Callable[[], object]) -> type[BaseException] | None:
    """The type of what a call raises."""
    try:
        use()
    except BaseException as error:  # noqa: BLE001
        return type(error)
    return None


def fill(node: Node, slots: list[int]) -> None:
    for slot in slots:
        node.memory[slot * BLOCK : (slot + 1) * BLOCK] = slot + 100


def block(node: Node, slot: int) -> set[int]:
    return set(node.memory[slot * BLOCK : (slot + 1) * BLOCK].tolist())


async def one_transfer(prefill: Node, decode: Node, key: Key = KEY) -> None:
    """Proof that both engines still work."""
    async with decode.receive(prefill, key) as rx, prefill.send(key.request) as tx:
        fill(prefill, [1, 2, 3])
        tx.push({"g": Span.from_slots([1, 2, 3])})
        tx.finish(b"aux")
        got = await rx
        sent = await tx
        await rx.released()
        await tx.released()
    assert (got.tokens, got.bytes_moved, got.aux) == (12, 3 * BLOCK, b"aux")
    assert (sent.tokens, sent.bytes_moved, sent.key) == (12, 3 * BLOCK, key)


@on_both_loops
async def test_a_transfer_moves_the_right_bytes_and_no_others() -> None:
    async with two_nodes() as (prefill, decode):
        await one_transfer(prefill, decode)
        assert [block(decode, slot) for slot in (5, 6, 9)] == [{101}, {102}, {103}]
        touched = np.flatnonzero(decode.memory.reshape(SLOTS, BLOCK).any(axis=1)).tolist()
        assert touched == [5, 6, 9]
        assert decode.back == [(5, "drained"), (6, "drained"), (9, "drained")]
        assert {evidence for _, evidence in prefill.back} == {"settled"}
        assert prefill.slots_back == [1, 2, 3]


@on_both_loops
async def test_the_story_of_a_transfer_can_be_read() -> None:
    async with two_nodes() as (prefill, decode):
        rx = decode.receive(prefill)
        assert rx.story == "not entered"
        async with rx:
            assert "created" in rx.story
            rx.cancel("x")
            assert "cancelled" in rx.story


# ---------------------------------------------------------------- bad input


BAD_RECEIVES: dict[str, dict] = {
    "slot outside": {"need": {"g": Span.from_slots([SLOTS])}},
    "no such group": {"need": {"h": Span.from_slots([1])}},
    "no span": {"need": {"g": [1, 2]}},
    "ordinal beyond tokens": {"need": {"g": Span.from_slots([1], first=3)}},
    "tokens negative": {"tokens": -1},
    "tokens a float": {"tokens": 12.0},
    "tokens too many": {"tokens": 2**40},
    "min over tokens": {"min_tokens": 13},
    "min negative": {"min_tokens": -1},
    "priority a word": {"priority": "high"},
    "priority too high": {"priority": 2**40},
    "deadline none": {"match_s": 0},
    "deadline infinite": {"total_s": float("inf")},
    "deadline nan": {"stall_s": float("nan")},
    "deadline a word": {"match_s": "1"},
    "peer a tuple": {"source": ("prefill", "127.0.0.1:1")},
    "peer without a name": {"source": Peer("", "127.0.0.1:1")},
    "peer of numbers": {"source": Peer(1, 2)},
    "not callable": {"on_released": None},
    "key too long": {"key": Key("x" * 129)},
    "key a float": {"key": Key("r", 1.5)},
    "key a bool": {"key": Key("r", True)},
}
BAD_SENDS: dict[str, dict] = {
    "facts and tokens": {"facts": object()},
    "neither": {"tokens": None},
    "nobody to give back to": {"on_released": None},
    "not callable": {"on_released": 3},
    "tokens negative": {"tokens": -1},
    "tokens a float": {"tokens": 1.5},
    "deadline negative": {"match_s": -1},
    "request empty": {"request": ""},
    "request too long": {"request": "é" * 65},
    "request bytes": {"request": b"r"},
    "request no unicode": {"request": "\ud800"},
}


@on_both_loops
async def test_bad_input_raises_in_the_caller_and_changes_nothing() -> None:
    async with two_nodes() as (prefill, decode):
        for name, changes in BAD_RECEIVES.items():
            assert raises(lambda c=changes: decode.receive(prefill, **c)) is UsageError, name
        for name, changes in BAD_SENDS.items():
            assert raises(lambda c=changes: prefill.send(**c)) is UsageError, name
        assert decode.engine.stats().transfers == prefill.engine.stats().transfers == 0
        await one_transfer(prefill, decode)


@on_both_loops
async def test_bad_pushes_raise_in_the_caller_and_change_nothing() -> None:
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1])})
            for chunk in (
                {"g": Span.from_slots([SLOTS], first=1)},
                {"g": Span.from_slots([2])},
                {"g": Span.from_slots([1], first=1)},
                {"h": Span.from_slots([2], first=1)},
                {"g": "2"},
            ):
                with pytest.raises(UsageError):
                    tx.push(chunk)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="facts"):
                tx.advance(4)
            for aux in ("text", None, bytearray(b"x"), bytes(70_000)):
                with pytest.raises(UsageError):
                    tx.finish(aux)  # type: ignore[arg-type]
            for reason in (None, 3, b"x"):
                with pytest.raises(UsageError):
                    tx.cancel(reason)  # type: ignore[arg-type]
            tx.push({"g": Span.from_slots([2, 3], first=1)})
            tx.finish()
            with pytest.raises(UsageError):
                tx.finish()
            with pytest.raises(UsageError):
                tx.push({"g": Span.from_slots([4], first=3)})
            assert (await rx).tokens == 12
            await tx.released()
        assert prefill.slots_back == [1, 2, 3]


@on_both_loops
async def test_integers_of_numpy_are_integers() -> None:
    async with two_nodes() as (prefill, decode):
        changes = {"tokens": np.int64(12), "min_tokens": np.uint32(12), "priority": np.int8(1)}
        async with decode.receive(prefill, **changes) as rx:
            async with prefill.send(tokens=np.int32(12)) as tx:
                tx.push({"g": Span.from_slots([1, 2, 3])})
                tx.finish()
            assert (await rx).tokens == 12
            await rx.released()
            await tx.released()


@on_both_loops
async def test_a_reason_that_is_no_unicode_still_reaches_the_other_side() -> None:
    async with two_nodes() as (prefill, decode):
        rx = decode.receive(prefill)
        async with rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1])})
            await until(lambda: prefill.back or prefill.engine.stats().writes_open)
            rx.cancel("file \udc80.txt")
            with pytest.raises(Cancelled, match="file"):
                await tx
            await rx.released()
            await tx.released()


# ---------------------------------------------------------------- when and where


@on_both_loops
async def test_use_before_start_after_close_and_a_second_start() -> None:
    fabric = Fabric()
    node = make_node("prefill", fabric)
    for use in (node.send, lambda: node.engine.address, node.engine.stats):
        with pytest.raises(UsageError, match="not started"):
            use()
    await node.engine.start()
    with pytest.raises(UsageError, match="started before"):
        await node.engine.start()
    before = node.send("before")
    await node.engine.aclose()
    await node.engine.aclose()
    for use in (node.send, lambda: node.engine.address, node.engine.stats):
        with pytest.raises(UsageError, match="closed"):
            use()
    with pytest.raises(UsageError, match="closed"):
        await before.__aenter__()
    with pytest.raises(UsageError):
        await node.engine.start()
    never = make_node("never", fabric)
    await never.engine.aclose()
    with pytest.raises(UsageError):
        await never.engine.start()


@on_both_loops
async def test_another_thread_is_refused_and_harms_nothing() -> None:
    async with two_nodes() as (prefill, decode), decode.receive(prefill) as rx:
        async with prefill.send() as tx:
            span = {"g": Span.from_slots([1, 2, 3])}
            uses = [
                lambda: decode.receive(prefill, source=Peer("prefill", "x:1")),
                decode.engine.stats,
                lambda: rx.cancel("x"),
                lambda: tx.push(span),
                lambda: tx.finish(),
                lambda: tx.cancel("x"),
                lambda: tx.advance(4),
                lambda: asyncio.run(decode.engine.aclose()),
                lambda: asyncio.run(asyncio.wait_for(rx.released(), 1)),
            ]
            errors: list[type[BaseException] | None] = []
            thread = threading.Thread(target=lambda: errors.extend(map(raises, uses)))
            thread.start()
            await until(lambda: not thread.is_alive())
            assert errors == [UsageError] * len(uses)
            assert not rx.ended
            tx.push(span)
            tx.finish()
            await rx
            await rx.released()
            await tx.released()


@on_both_loops
async def test_a_transfer_is_entered_once_and_used_after_entering() -> None:
    async with two_nodes() as (prefill, decode):
        rx, tx = decode.receive(prefill), prefill.send()
        for use in (lambda: rx.cancel("x"), lambda: tx.push({}), tx.finish):
            with pytest.raises(UsageError, match="enter"):
                use()
        with pytest.raises(UsageError, match="enter"):
            await rx
        with pytest.raises(UsageError, match="enter"):
            await tx.released()
        async with rx, tx:
            for again in (rx, tx):
                with pytest.raises(UsageError, match="once"):
                    await again.__aenter__()
        for again in (rx, tx):
            with pytest.raises(UsageError, match="once"):
                await again.__aenter__()
        await rx.released()
        await tx.released()


@on_both_loops
async def test_busy_starts_nothing_and_can_be_tried_again() -> None:
    async with two_nodes(sends_max=1, receives_max=1) as (prefill, decode):
        second = prefill.send("b")
        async with prefill.send("a") as first:
            with pytest.raises(kv.Busy):
                await second.__aenter__()
        await first.released()
        async with second:
            pass
        await second.released()
        async with decode.receive(prefill) as rx:
            with pytest.raises(kv.Busy):
                await decode.receive(prefill, Key("other")).__aenter__()
        await rx.released()


@on_both_loops
async def test_an_address_in_use() -> None:
    async with two_nodes() as (prefill, _):
        other = make_node("other", Fabric())
        object.__setattr__(
            other.engine,
            "_config",
            kv.Config(name="other", listen=prefill.engine.address),
        )
        with pytest.raises(OSError, match="in use"):
            await other.engine.start()
        await other.engine.aclose()
        with pytest.raises(UsageError):
            await other.engine.start()


@on_both_loops
async def test_started_in_one_task_and_closed_in_another() -> None:
    fabric = Fabric()
    prefill, decode = make_node("prefill", fabric), make_node("decode", fabric)
    for node in (prefill, decode):
        await asyncio.create_task(node.engine.start())
    await asyncio.create_task(one_transfer(prefill, decode))
    for node in (prefill, decode):
        await asyncio.create_task(node.engine.aclose())


@on_both_loops
async def test_a_cancelled_start_closes_what_it_opened() -> None:
    node = make_node("prefill", Fabric())
    starting = asyncio.create_task(node.engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await node.engine.aclose()


@on_both_loops
async def test_a_cancelled_close_goes_on_by_itself() -> None:
    node = make_node("prefill", Fabric())
    await node.engine.start()
    closing = asyncio.create_task(node.engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    await node.engine.aclose()


@on_both_loops
async def test_closing_without_evidence_tells_those_who_wait_for_release() -> None:
    courier = Held()
    fabric = Fabric()
    prefill = make_node("prefill", fabric, courier, close_s=0.05)
    decode = make_node("decode", fabric, close_s=0.05)
    async with prefill.engine, decode.engine:
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1, 2, 3])})
            await until(lambda: courier.carried)
            waiting = asyncio.create_task(rx.released())
            await asyncio.sleep(0)
    with pytest.raises(Failed, match="without evidence") as caught:
        await waiting
    assert caught.value.code == "unproven"
    assert not decode.back


# ---------------------------------------------------------------- leaving and cancelling


@on_both_loops
async def test_leaving_early_cancels_and_never_waits() -> None:
    courier = Held()
    async with two_nodes(courier) as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1, 2, 3])})
            await until(lambda: courier.carried)
        assert rx.ended
        assert not decode.back, "a write is under way"
        with pytest.raises(Cancelled, match="scope was left"):
            await rx
        with pytest.raises(Cancelled):
            await tx
        courier.held = False
        await rx.released()
        await tx.released()
        assert decode.slots_back == [5, 6, 9]
        assert prefill.slots_back == [1, 2, 3]


@on_both_loops
async def test_leaving_by_an_exception_lets_it_through() -> None:
    async with two_nodes() as (prefill, decode):
        rx, tx = decode.receive(prefill), prefill.send()
        with pytest.raises(ZeroDivisionError):
            async with rx, tx:
                raise ZeroDivisionError
        await rx.released()
        await tx.released()
        assert rx.ended
        assert tx.ended


@on_both_loops
async def test_leaving_a_sealed_send_does_not_cancel_it() -> None:
    async with two_nodes() as (prefill, decode):
        async with prefill.send() as tx:
            tx.push({"g": Span.from_slots([1, 2, 3])})
            tx.finish()
        assert not tx.ended
        async with decode.receive(prefill) as rx:
            assert (await rx).tokens == 12
        assert (await tx).tokens == 12
        await rx.released()
        await tx.released()


@on_both_loops
async def test_a_cancelled_await_only_stops_waiting() -> None:
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:

            async def wait() -> None:
                await rx

            waiters = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0)
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
            assert all(waiter.cancelled() for waiter in waiters)
            assert not rx.ended
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await rx
            tx.push({"g": Span.from_slots([1, 2, 3])})
            tx.finish()
            assert (await rx).tokens == 12
            assert (await rx).tokens == 12, "an outcome can be asked for again"
            await rx.released()
            await tx.released()


@on_both_loops
async def test_cancelling_again_and_after_the_end_is_harmless() -> None:
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            rx.cancel("first")
            rx.cancel("second")
            with pytest.raises(Cancelled, match="first"):
                await rx
            await rx.released()
            tx.cancel("x")
            tx.push({"g": Span.from_slots([1])})
            tx.finish()
            await tx.released()
        rx.cancel("third")
        tx.cancel("third")
        assert prefill.back == [(1, "never-exposed")], "what is pushed after the end comes back"


@on_both_loops
async def test_the_other_sides_reason_arrives() -> None:
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1])})
            await until(lambda: "matched" in tx.story)
            tx.cancel("preempted")
            with pytest.raises(Cancelled, match="preempted") as cancelled:
                await rx
            assert (cancelled.value.by, cancelled.value.peer) == ("peer", "prefill")
            await rx.released()
            await tx.released()


# ---------------------------------------------------------------- callbacks


@on_both_loops
async def test_a_callback_that_raises_is_counted_and_costs_nobody_else() -> None:
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)
    try:
        async with two_nodes() as (prefill, decode):

            def broken(slots: dict, evidence: str) -> None:
                raise ZeroDivisionError

            async with decode.receive(prefill, on_released=broken) as rx:
                async with prefill.send(on_released=broken) as tx:
                    tx.push({"g": Span.from_slots([1, 2, 3])})
                    tx.finish()
                assert (await rx).tokens == 12
                await rx.released()
                await tx.released()
            assert decode.engine.stats().callback_errors == 1
            assert prefill.engine.stats().callback_errors >= 1
            await one_transfer(prefill, decode, Key("next"))
    finally:
        logging.getLogger("kvferry").setLevel(logging.NOTSET)


@on_both_loops
async def test_cancelling_and_starting_from_inside_a_callback() -> None:
    async with two_nodes() as (prefill, decode):
        other = decode.receive(prefill, Key("other"), need={"g": Span.from_slots([20])}, tokens=4)
        third = decode.receive(prefill, Key("third"), need={"g": Span.from_slots([21])}, tokens=4)
        entering: list[object] = []

        def on_released(slots: dict, evidence: str) -> None:
            first.cancel("from inside")
            other.cancel("from inside")
            coroutine = third.__aenter__()
            with contextlib.suppress(StopIteration):
                coroutine.send(None)
            entering.append(coroutine)

        first = decode.receive(prefill, on_released=on_released)
        async with other:
            async with first:
                first.cancel("x")
            await other.released()
            with pytest.raises(Cancelled, match="from inside"):
                await other
        assert entering
        assert not third.ended
        third.cancel("x")
        await third.released()
        assert decode.slots_back == [20, 21]


@on_both_loops
async def test_what_a_callback_makes_ready_is_handed_over_without_another_event() -> None:
    """Blocks pushed from inside a callback must not wait for the next timer."""
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.send() as tx:
            tx.push({"g": Span.from_slots([1])})
            await until(lambda: prefill.back)  # from here on no event comes by itself

            def push_the_rest(slots: dict, evidence: str) -> None:
                tx.push({"g": Span.from_slots([2, 3], first=1)})
                tx.finish()

            helper = prefill.send("helper", on_released=push_the_rest)
            async with helper:
                helper.push({"g": Span.from_slots([7])})
                driver = prefill.engine._driver
                assert driver is not None
                if driver._timer is not None:
                    driver._timer.cancel()  # no timer may be needed for it
                helper.cancel("x")
                assert driver._settle_soon is not None
            assert (await rx).tokens == 12
            await rx.released()
            await tx.released()


# ---------------------------------------------------------------- closing


@on_both_loops
async def test_closing_with_running_transfers_ends_them_on_both_sides() -> None:
    courier = Held()
    fabric = Fabric()
    prefill = make_node("prefill", fabric, courier)
    decode = make_node("decode", fabric)
    async with decode.engine:
        async with prefill.engine:
            rx, tx = decode.receive(prefill), prefill.send()
            async with rx, tx:
                tx.push({"g": Span.from_slots([1, 2, 3])})
                await until(lambda: courier.carried)
                closing = asyncio.create_task(prefill.engine.aclose())
                with pytest.raises(Cancelled, match="closes"):
                    await tx
                with pytest.raises(Cancelled):
                    await rx
                assert not prefill.back
                courier.held = False
                await rx.released()
                await tx.released()
                await closing
        assert decode.slots_back == [5, 6, 9]
        again = decode.engine.receive(
            Key("late"), source=rx._source, need={}, tokens=0, on_released=decode.on_released
        )
        async with again:
            with pytest.raises(PeerLost):
                await again
            await again.released()


@on_both_loops
async def test_closing_is_bounded_when_a_write_never_settles() -> None:
    courier = Held()
    fabric = Fabric()
    prefill = make_node("prefill", fabric, courier, close_s=0.05)
    decode = make_node("decode", fabric, close_s=0.05)
    async with decode.engine, prefill.engine:
        rx, tx = decode.receive(prefill), prefill.send()
        async with rx, tx:
            tx.push({"g": Span.from_slots([1, 2, 3])})
            await until(lambda: courier.carried)
    assert rx.ended
    assert tx.ended
    assert not decode.back, "nothing proves that they are safe"
    for node in (prefill, decode):
        driver = node.engine._driver
        assert driver is not None
        assert driver.transfers == 1
        assert driver._timer is None or driver._timer.cancelled()
    rx.cancel("still harmless")
    tx.cancel("still harmless")


# ---------------------------------------------------------------- other sides that are not there


@on_both_loops
async def test_a_source_that_is_not_there_or_is_another() -> None:
    async with two_nodes() as (prefill, decode):
        cases = {
            "127.0.0.1:1": PeerLost,
            "no port": PeerLost,
            "a..b:80": PeerLost,
            "x" * 300 + ":80": PeerLost,
        }
        for address, error in cases.items():
            async with decode.receive(prefill, source=Peer("prefill", address)) as rx:
                with pytest.raises(error, match="reached") as lost:
                    await rx
                assert lost.value.retry_safe
                await rx.released()
        stranger = Peer("somebody", prefill.engine.address)
        async with decode.receive(prefill, source=stranger) as rx:
            with pytest.raises(Refused, match="not 'somebody'"):
                await rx
            await rx.released()
        assert {evidence for _, evidence in decode.back} == {"never-exposed"}
        await one_transfer(prefill, decode)


@on_both_loops
async def test_a_stranger_on_the_control_port_costs_nothing() -> None:
    async with two_nodes() as (prefill, decode):
        host, port = prefill.engine.address.rsplit(":", 1)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0" * 7, b"\0\0\0\5"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await one_transfer(prefill, decode)


@on_both_loops
async def test_messages_of_a_newer_version_are_skipped_and_counted() -> None:
    newer = msgspec.msgpack.encode({"t": "from-the-future", "field": 1})
    frame = struct.pack(">IHB", len(newer), 1, 0) + newer
    async with two_nodes() as (prefill, decode):
        host, port = prefill.engine.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame * 3)
        await until(lambda: prefill.engine.stats().messages_unknown == 3)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await one_transfer(prefill, decode)
        assert prefill.engine.stats().messages_unknown == 3, "counted also when it has gone"


@on_both_loops
async def test_deadlines_end_transfers_by_themselves() -> None:
    async with (
        two_nodes() as (prefill, decode),
        decode.receive(prefill, match_s=0.05) as rx,
        prefill.send("x", match_s=0.05) as tx,
    ):
        with pytest.raises(TimedOut) as late:
            await rx
        assert late.value.code == "match"
        with pytest.raises(TimedOut):
            await tx
        await rx.released()


# ---------------------------------------------------------------- facts


@dataclass
class Facts:
    """A cache whose block of ordinal o lies in slot o + 10."""

    tokens: int
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    back: list[tuple[int, str]] = field(default_factory=list)
    broken: bool = False

    def extract(self, group: str, first: int, stop: int) -> Span:
        self.asked.append((group, first, stop))
        if self.broken:
            raise ZeroDivisionError
        return Span.from_slots(range(first + 10, stop + 10), first)

    def released(self, slots: dict, evidence: str) -> None:
        self.back += [(slot, evidence) for array in slots.values() for slot in array.tolist()]


@on_both_loops
async def test_advance_reads_the_facts_of_new_blocks_and_the_partial_last_one() -> None:
    async with two_nodes() as (prefill, decode):
        facts = Facts(tokens=10)
        fill(prefill, [10, 11, 12])
        async with decode.receive(prefill, tokens=10) as rx, prefill.engine.send("r", facts) as tx:
            for tokens in (0, 3, 3, 4, 9):
                tx.advance(tokens)
            assert facts.asked == [("g", 0, 1), ("g", 1, 2)], "a block that is not full waits"
            for tokens in (8, -1, 11):
                with pytest.raises(UsageError, match="advance to"):
                    tx.advance(tokens)
            facts.broken = True
            with pytest.raises(ZeroDivisionError):
                tx.advance(10)
            facts.broken = False
            tx.advance(10)
            tx.advance(10)
            assert facts.asked[-1] == ("g", 2, 3)
            tx.finish()
            assert (await rx).tokens == 10
            await rx.released()
            await tx.released()
        assert sorted(facts.back) == [(10, "settled"), (11, "settled"), (12, "settled")]
        assert [block(decode, slot) for slot in (5, 6, 9)] == [{110}, {111}, {112}]


@on_both_loops
async def test_facts_that_hold_less_than_they_promised() -> None:
    async with two_nodes() as (prefill, decode):
        async with decode.receive(prefill) as rx, prefill.engine.send("r", Facts(12)) as tx:
            tx.advance(8)
            tx.finish()
            for side in (rx, tx):
                with pytest.raises((Failed, Refused)) as short:
                    await side
                assert short.value.code == "coverage"
            await rx.released()
            await tx.released()


# ---------------------------------------------------------------- bugs of ours


@on_both_loops
async def test_a_message_that_can_not_be_encoded_costs_its_session_only() -> None:
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)
    fabric = Fabric()
    prefill, decode = make_node("prefill", fabric), make_node("decode", fabric)
    try:
        async with prefill.engine, decode.engine:
            await one_transfer(prefill, decode)
            bad = decode.receive(prefill, Key("bad"))
            bad._priority = object()  # type: ignore[assignment]  # as a bug might
            async with bad:
                with pytest.raises(PeerLost, match="internal error"):
                    await bad
                await bad.released()
            assert decode.engine.stats().internal_errors == 1
            await one_transfer(prefill, decode, Key("next"))
    finally:
        logging.getLogger("kvferry").setLevel(logging.NOTSET)


@on_both_loops
async def test_a_bug_in_one_worker_event_does_not_lose_the_others() -> None:
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)
    fabric = Fabric()
    prefill, decode = make_node("prefill", fabric), make_node("decode", fabric)
    try:
        async with prefill.engine, decode.engine:
            driver = prefill.engine._driver
            assert driver is not None
            real, seen = driver.router.worker_event, []

            def worker_event(agent: int, event: Event, now: int) -> None:
                seen.append(event)
                if len(seen) == 1:
                    raise ZeroDivisionError
                real(agent, event, now)

            driver.router.worker_event = worker_event  # type: ignore[method-assign]
            driver._deliver(0, [Posted(98), Posted(99)])
            assert seen == [Posted(98), Posted(99)]
            assert driver.internal_errors == 1
            await one_transfer(prefill, decode)
    finally:
        logging.getLogger("kvferry").setLevel(logging.NOTSET)
