"""EngineThread over real threads, memory copies and loopback TCP. About 3 s.

Nothing here sleeps: the tests wait for a host's descriptor, as hosts do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import select
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
import uvloop

import kvferry as kv
from kvferry.engine.tensors import Axis, Tensor
from kvferry.transports.memory import Fabric, memory
from tests.unit.test_api import BLOCK, SLOTS, TOKENS, Facts, Held, make_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = kv.Key("r")
NEED = [5, 6, 9]
NEVER = "never-exposed"
PATIENCE_S = 20  # a test that waits so long for an event has failed


@dataclass
class Host:
    """One engine thread, its memory, and every event that was drained so far."""

    thread: kv.EngineThread
    memory: np.ndarray
    events: list = field(default_factory=list)

    def receive(self, prefill: Host, key: kv.Key = KEY, /, **changes: object) -> None:
        source = kv.Peer("prefill", prefill.thread.address)
        arguments: dict = {"source": source, "need": {"g": spans(NEED)}, "tokens": 12}
        self.thread.receive(key, **{**arguments, **changes})

    def until(self, condition: Callable[[], object]) -> None:
        """Drain as hosts do, until something is so."""
        while not condition():
            readable, _, _ = select.select([self.thread], [], [], PATIENCE_S)
            assert readable, f"nothing came after {self.events}"
            self.events += self.thread.drain()

    def until_over(self, name: kv.Key | str, slots: int) -> kv.Ended:
        """Until a transfer has ended and so many of its slots are back."""
        self.until(lambda: self.ended(name) and len(self.back(name)) == slots)
        (ended,) = self.ended(name)
        return ended

    def of(self, name: kv.Key | str) -> list:
        return [event for event in self.events if event.transfer == name]

    def ended(self, name: kv.Key | str) -> list[kv.Ended]:
        return [event for event in self.of(name) if isinstance(event, kv.Ended)]

    def back(self, name: kv.Key | str, kind: type = kv.Released) -> list[int]:
        return [
            slot
            for event in self.of(name)
            if isinstance(event, kind)
            for array in event.slots.values()
            for slot in array.tolist()
        ]

    def evidence(self, name: kv.Key | str) -> set[str]:
        return {event.evidence for event in self.of(name) if isinstance(event, kv.Released)}

    def fill(self, slots: list[int]) -> None:
        self.memory.reshape(SLOTS, BLOCK)[slots] = np.array(slots, dtype=np.uint8)[:, None] + 100

    def blocks(self, slots: list[int]) -> list[list[int]]:
        return [np.unique(self.memory.reshape(SLOTS, BLOCK)[slot]).tolist() for slot in slots]


def spans(slots: list[int], first: int = 0) -> kv.Span:
    return kv.Span.from_slots(slots, first)


def make_host(name: str, fabric: Fabric, courier: object = None, **options: object) -> Host:
    array = np.zeros(SLOTS * BLOCK, dtype=np.uint8)
    axes = (Axis("token", 0, TOKENS, BLOCK // TOKENS), Axis("dim", 0, BLOCK // TOKENS, 1))
    pool = kv.Pool("p", array.ctypes.data, BLOCK, SLOTS)
    group = kv.Group("g", "full", TOKENS, (Tensor("kv", "p", 0, axes, 1, "u8"),))
    loop_factory = options.pop("loop_factory", None)
    config = kv.Config(**{"name": name, "listen": "127.0.0.1:0", **options})
    thread = kv.EngineThread(
        config,
        layout=kv.Layout((pool,), (group,), "m"),
        transport=memory(fabric, courier=courier),
        owners=[array],
        loop_factory=loop_factory,
    )
    return Host(thread, array)


@contextlib.contextmanager
def two_hosts(courier: object = None, **options: object) -> Iterator[tuple[Host, Host]]:
    fabric = Fabric()
    prefill = make_host("prefill", fabric, courier, **options)
    decode = make_host("decode", fabric, **options)
    with prefill.thread, decode.thread:
        yield prefill, decode


def one_transfer(prefill: Host, decode: Host, key: kv.Key) -> None:
    """Proof that both hosts still work."""
    prefill.fill([1, 2, 3])
    decode.receive(prefill, key)
    prefill.thread.send(key.request, tokens=12)
    prefill.thread.push(key.request, {"g": spans([1, 2, 3])})
    prefill.thread.finish(key.request, b"aux")
    got = decode.until_over(key, 3).result
    sent = prefill.until_over(key.request, 3).result
    assert got is not None
    assert sent is not None
    assert (got.tokens, got.bytes_moved, got.aux) == (12, 3 * BLOCK, b"aux")
    assert (sent.tokens, sent.bytes_moved, sent.key) == (12, 3 * BLOCK, key)
    assert decode.blocks(NEED) == [[101], [102], [103]]


def in_thread(use: Callable[[], object]) -> object:
    """What a call in another thread returns or raises."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(use())
        except BaseException as error:  # noqa: BLE001
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


def is_readable(host: Host) -> bool:
    return bool(select.select([host.thread], [], [], 0)[0])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def quiet() -> Iterator[None]:
    """For internal errors that are meant."""
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvferry").setLevel(logging.NOTSET)


# ---------------------------------------------------------------- moving


class WatchedFacts(Facts):
    """Facts that know which threads ask them."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.threads: set[int] = set()

    def extract(self, group: str, first: int, stop: int) -> kv.Span:
        self.threads.add(threading.get_ident())
        return super().extract(group, first, stop)


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_streamed_transfer_moves_the_right_bytes_and_no_others(loop_factory: object) -> None:
    with two_hosts(loop_factory=loop_factory) as (prefill, decode):
        facts = WatchedFacts(10)
        decode.receive(prefill, tokens=10)
        prefill.thread.send("r", facts)
        for tokens, slots in ((3, []), (4, [10]), (9, [11]), (10, [12])):
            prefill.fill(slots)
            prefill.thread.advance("r", tokens)
        prefill.thread.finish("r", b"first token")
        got = decode.until_over(KEY, 3).result
        assert got is not None
        assert (got.tokens, got.aux) == (10, b"first token")
        prefill.until_over("r", 3)
        assert facts.threads == {threading.get_ident()}
        assert facts.asked == [("g", 0, 1), ("g", 1, 2), ("g", 2, 3)]
        assert facts.back == [], "they come in events"
        assert decode.blocks(NEED) == [[110], [111], [112]]
        touched = np.flatnonzero(decode.memory.reshape(SLOTS, BLOCK).any(axis=1)).tolist()
        assert touched == NEED
        assert [type(event) for event in decode.events] == [kv.Ended, kv.Released]
        assert (sorted(decode.back(KEY)), decode.evidence(KEY)) == (NEED, {"drained"})
        assert (sorted(prefill.back("r")), prefill.evidence("r")) == ([10, 11, 12], {"settled"})


def test_an_engine_thread_serves_an_engine_and_is_watched_by_a_loop() -> None:
    async def main() -> None:
        decode = make_node("decode", fabric)
        drained = asyncio.Event()

        def drain() -> None:
            prefill.events += prefill.thread.drain()
            if prefill.ended("r") and len(prefill.back("r")) == 3:
                drained.set()

        asyncio.get_running_loop().add_reader(prefill.thread.fileno(), drain)
        async with decode.engine:
            rx = decode.engine.receive(
                KEY,
                source=kv.Peer("prefill", prefill.thread.address),
                need={"g": spans(NEED)},
                tokens=12,
                on_released=decode.on_released,
            )
            async with rx:
                prefill.thread.send("r", tokens=12)
                prefill.thread.push("r", {"g": spans([1, 2, 3])})
                prefill.thread.finish("r")
                assert (await rx).tokens == 12
                await rx.released()
            await drained.wait()
        assert [set(decode.memory[s * BLOCK : (s + 1) * BLOCK].tolist()) for s in NEED] == [
            {101},
            {102},
            {103},
        ]

    fabric = Fabric()
    prefill = make_host("prefill", fabric)
    prefill.fill([1, 2, 3])
    with prefill.thread:
        asyncio.run(main())


def test_several_threads_send_at_once_each_in_its_order() -> None:
    with two_hosts() as (prefill, decode):
        names = [f"{thread}-{number}" for thread in range(3) for number in range(8)]

        def serve(thread: int) -> None:
            for name in names[thread * 8 : thread * 8 + 8]:
                slot = names.index(name)
                prefill.thread.send(name, tokens=4)
                prefill.thread.push(name, {"g": spans([slot])})
                prefill.thread.finish(name, name.encode())

        prefill.fill(list(range(24)))
        threads = [threading.Thread(target=serve, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for slot, name in enumerate(names):
            decode.receive(prefill, kv.Key(name), need={"g": spans([slot])}, tokens=4)
        for thread in threads:
            thread.join()
        for name in names:
            got = decode.until_over(kv.Key(name), 1).result
            assert got is not None
            assert got.aux == name.encode()
            prefill.until_over(name, 1)
        assert decode.blocks(list(range(24))) == [[slot + 100] for slot in range(24)]


# ---------------------------------------------------------------- events


def test_it_is_readable_while_there_are_events() -> None:
    with two_hosts() as (prefill, decode):
        assert not is_readable(decode)
        assert decode.thread.drain() == []
        for name in ("a", "b"):
            decode.receive(prefill, kv.Key(name))
            decode.thread.cancel(kv.Key(name), "x")
            decode.until_over(kv.Key(name), 3)
            assert not is_readable(decode), "drained"
        assert decode.thread.drain() == []
    assert decode.thread.drain() == []


def test_a_cancel_from_another_thread_ends_both_sides() -> None:
    courier = Held()
    with two_hosts(courier) as (prefill, decode):
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1, 2])})
        while not courier.carried:
            pass
        assert in_thread(lambda: decode.thread.cancel(KEY, "client left")) is None
        decode.until(lambda: decode.ended(KEY))
        prefill.until(lambda: prefill.ended("r"))
        assert not decode.back(KEY), "a write is under way"
        for host, name in ((decode, KEY), (prefill, "r")):
            (ended,) = host.ended(name)
            assert isinstance(ended.error, kv.Cancelled)
            assert "client left" in str(ended.error)
            host.thread.cancel(name, "again")
        courier.held = False
        assert sorted(decode.until_over(KEY, 3) and decode.back(KEY)) == NEED
        assert sorted(prefill.until_over("r", 2) and prefill.back("r")) == [1, 2]


def test_blocks_that_are_pushed_after_an_end_that_was_not_drained_come_back() -> None:
    with two_hosts() as (prefill, _):
        facts = Facts(12)
        prefill.thread.send("r", facts)
        prefill.thread.cancel("r", "x")
        assert select.select([prefill.thread], [], [], PATIENCE_S)[0]
        prefill.thread.advance("r", 8)
        prefill.thread.finish("r")
        prefill.until_over("r", 2)
        assert facts.back == []
        assert [type(event) for event in prefill.events] == [kv.Ended, kv.Released]
        assert prefill.evidence("r") == {NEVER}
        with pytest.raises(kv.UsageError, match="not sent"):
            prefill.thread.push("r", {"g": spans([3], 2)})


def test_a_name_is_free_when_the_engine_can_take_it_again() -> None:
    courier = Held()
    with two_hosts(courier) as (prefill, decode):
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1, 2])})
        while not courier.carried:
            pass
        for host in (decode, prefill):
            with pytest.raises(kv.UsageError, match="in use"):
                decode.receive(prefill) if host is decode else prefill.thread.send("r", tokens=12)
        decode.thread.cancel(KEY, "x")
        decode.until(lambda: decode.ended(KEY))
        with pytest.raises(kv.UsageError, match="slots are not back"):
            decode.receive(prefill)
        prefill.until(lambda: prefill.ended("r"))
        prefill.thread.send("r", tokens=8)  # its blocks may be out still
        courier.held = False
        prefill.until(lambda: len(prefill.back("r")) == 2)
        prefill.thread.push("r", {"g": spans([1, 2])})
        prefill.thread.finish("r")
        decode.until_over(KEY, 3)
        again = kv.Key("r", attempt=1)
        decode.receive(prefill, again, tokens=8, need={"g": spans([5, 6])})
        assert decode.until_over(again, 2).error is None
        decode.receive(prefill)  # the engine would raise if it were too early
        decode.thread.cancel(KEY, "x")
        decode.until(lambda: len(decode.back(KEY)) == 6)


def test_busy_is_raised_in_the_caller_until_there_is_room_and_it_was_drained() -> None:
    with two_hosts(sends_max=1, receives_max=1) as (prefill, decode):
        other = kv.Key("other")
        uses = [
            (decode, KEY, 3, lambda: decode.receive(prefill, other), other),
            (prefill, "r", 0, lambda: prefill.thread.send("other", tokens=4), "other"),
        ]
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        for host, name, slots, use, second in uses:
            with pytest.raises(kv.Busy) as busy:
                use()
            assert busy.value.retry_after_s > 0
            host.thread.cancel(name, "x")
            assert select.select([host.thread], [], [], PATIENCE_S)[0]
            with pytest.raises(kv.Busy):
                use()
            host.until_over(name, slots)
            use()
            host.thread.cancel(second, "x")
            host.until_over(second, slots)


# ---------------------------------------------------------------- errors in the caller


BAD: dict[str, Callable[[Host, Host], object]] = {
    "receive: a str for a key": lambda p, d: d.receive(p, "r"),  # type: ignore[arg-type]
    "receive: slot outside": lambda p, d: d.receive(p, kv.Key("x"), need={"g": spans([SLOTS])}),
    "receive: tokens a float": lambda p, d: d.receive(p, kv.Key("x"), tokens=1.5),
    "receive: name taken": lambda p, d: d.receive(p),
    "send: neither facts nor tokens": lambda p, d: p.thread.send("x"),
    "send: request empty": lambda p, d: p.thread.send("", tokens=1),
    "send: deadline negative": lambda p, d: p.thread.send("x", tokens=1, match_s=-1),
    "send: name taken": lambda p, d: p.thread.send("r", tokens=12),
    "push: not sent": lambda p, d: p.thread.push("x", {"g": spans([4], 2)}),
    "push: a key": lambda p, d: p.thread.push(KEY, {"g": spans([4], 2)}),  # type: ignore[arg-type]
    "push: a list": lambda p, d: p.thread.push([], {}),  # type: ignore[arg-type]
    "push: no such group": lambda p, d: p.thread.push("r", {"h": spans([4], 2)}),
    "push: slot outside": lambda p, d: p.thread.push("r", {"g": spans([SLOTS], 2)}),
    "push: ordinal again": lambda p, d: p.thread.push("r", {"g": spans([4, 5], 1)}),
    "push: slot again": lambda p, d: p.thread.push("r", {"g": spans([1], 2)}),
    "advance: without facts": lambda p, d: p.thread.advance("r", 4),
    "advance: not sent": lambda p, d: p.thread.advance("x", 4),
    "advance: backwards": lambda p, d: p.thread.advance("facts", 3),
    "advance: beyond the promise": lambda p, d: p.thread.advance("facts", 13),
    "finish: not sent": lambda p, d: p.thread.finish("x"),
    "finish: no bytes": lambda p, d: p.thread.finish("r", "aux"),  # type: ignore[arg-type]
    "finish: too many bytes": lambda p, d: p.thread.finish("r", bytes(70_000)),
    "finish: again": lambda p, d: p.thread.finish("sealed"),
    "push: after finish": lambda p, d: p.thread.push("sealed", {"g": spans([8])}),
    "cancel: no name": lambda p, d: p.thread.cancel(3, "x"),  # type: ignore[arg-type]
    "cancel: no reason": lambda p, d: p.thread.cancel("r", None),  # type: ignore[arg-type]
}


def test_what_is_wrong_raises_in_the_caller_and_changes_nothing() -> None:
    with two_hosts() as (prefill, decode):
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1, 2])})
        prefill.thread.send("facts", Facts(12))
        prefill.thread.advance("facts", 4)
        prefill.thread.send("sealed", tokens=0)
        prefill.thread.finish("sealed")
        for name, use in BAD.items():
            error = in_thread(functools.partial(use, prefill, decode))
            assert isinstance(error, kv.UsageError), f"{name}: {error!r}"
        prefill.thread.cancel("never heard of", "may have ended")
        prefill.thread.push("r", {"g": spans([3], 2)})
        prefill.thread.finish("r")
        assert decode.until_over(KEY, 3).error is None
        assert sorted(prefill.until_over("r", 3) and prefill.back("r")) == [1, 2, 3]
        for name, slots in (("facts", 1), ("sealed", 0)):
            prefill.thread.cancel(name, "x")
            assert isinstance(prefill.until_over(name, slots).error, kv.Cancelled)


def test_facts_that_raise_raise_in_the_caller_and_nothing_is_taken() -> None:
    with two_hosts() as (prefill, decode):
        facts = Facts(12)
        decode.receive(prefill)
        prefill.thread.send("r", facts)
        prefill.thread.advance("r", 4)
        facts.broken = True
        with pytest.raises(ZeroDivisionError):
            prefill.thread.advance("r", 8)
        facts.broken = False
        prefill.thread.advance("r", 12)
        assert facts.asked[-1] == ("g", 1, 3)
        prefill.thread.finish("r")
        assert decode.until_over(KEY, 3).error is None
        prefill.until_over("r", 3)


def test_one_request_can_not_be_advanced_twice_at_once() -> None:
    with two_hosts() as (prefill, decode):

        class Slow(Facts):
            """While the first advance reads, another thread is faster."""

            def extract(self, group: str, first: int, stop: int) -> kv.Span:
                if not self.asked:
                    self.asked.append((group, first, stop))
                    assert in_thread(lambda: prefill.thread.advance("r", 8)) is None
                return super().extract(group, first, stop)

        decode.receive(prefill)
        prefill.thread.send("r", Slow(12))
        with pytest.raises(kv.UsageError, match="elsewhere"):
            prefill.thread.advance("r", 12)
        prefill.thread.advance("r", 12)
        prefill.thread.finish("r")
        assert decode.until_over(KEY, 3).error is None
        prefill.until_over("r", 3)


def test_what_the_engine_refuses_on_entering_ends_and_gives_back() -> None:
    with two_hosts() as (prefill, decode):
        for host in (prefill, decode):
            host.thread._engine._driver.router.broken = "as if its transport had stopped"
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1])})
        assert select.select([prefill.thread], [], [], PATIENCE_S)[0]  # refused, not drained yet
        prefill.thread.push("r", {"g": spans([2, 3], 1)})
        prefill.thread.finish("r")
        for host, name, slots in ((decode, KEY, NEED), (prefill, "r", [1, 2, 3])):
            ended = host.until_over(name, 3)
            assert (ended.error.code, host.events[0]) == ("transport-stopped", ended)
            assert (sorted(host.back(name)), host.evidence(name)) == (slots, {NEVER})
        decode.receive(prefill)  # its name is free
        decode.until(lambda: len(decode.back(KEY)) == 6)


# ---------------------------------------------------------------- when and where


def uses_of(host: Host) -> dict[str, Callable[[], object]]:
    return {
        "receive": lambda: host.thread.receive(
            kv.Key("late"), source=kv.Peer("p", "127.0.0.1:1"), need={}, tokens=0
        ),
        "send": lambda: host.thread.send("late", tokens=1),
        "push": lambda: host.thread.push("r", {}),
        "advance": lambda: host.thread.advance("r", 1),
        "finish": lambda: host.thread.finish("r"),
        "cancel": lambda: host.thread.cancel("r", "x"),
        "address": lambda: host.thread.address,
    }


def test_use_before_start_after_close_and_a_second_start() -> None:
    host = make_host("prefill", Fabric())
    for use in (*uses_of(host).values(), host.thread.drain, host.thread.fileno):
        with pytest.raises(kv.UsageError, match="not started"):
            use()
    with host.thread, pytest.raises(kv.UsageError, match="started before"):
        host.thread.start()
    host.thread.close()
    for use in uses_of(host).values():
        with pytest.raises(kv.UsageError) as closed:
            use()
        assert closed.value.code == "closed"
    assert host.thread.drain() == []
    assert not is_readable(host)
    never = make_host("never", Fabric())
    never.thread.close()
    for thread in (host.thread, never.thread):
        with pytest.raises(kv.UsageError, match="make a new one"):
            thread.start()


def test_a_start_that_fails_raises_in_the_caller() -> None:
    fabric = Fabric()
    first = make_host("first", fabric)
    with first.thread:
        second = make_host("second", fabric, listen=first.thread.address)
        with pytest.raises(OSError, match="in use"):
            second.thread.start()
    with pytest.raises(kv.UsageError):
        second.thread.drain()
    second.thread.close()


def test_a_forked_child_is_refused_even_while_a_lock_is_held() -> None:
    with two_hosts() as (prefill, decode), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of such forks
        host = prefill
        uses = [*uses_of(host).values(), host.thread.drain, host.thread.fileno, host.thread.close]
        locked, done = threading.Event(), threading.Event()

        def hold() -> None:
            with host.thread._lock:
                locked.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            refused = 0
            for use in uses:
                with contextlib.suppress(kv.UsageError):
                    use()
                    continue
                refused += 1
            os._exit(refused)
        done.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
        one_transfer(prefill, decode, KEY)


# ---------------------------------------------------------------- closing and crashing


def test_closing_ends_transfers_in_flight_and_says_which_slots_are_not_proven() -> None:
    courier = Held()
    with two_hosts(courier, close_s=0.05) as (prefill, decode):
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1, 2])})
        while not courier.carried:
            pass
        prefill.thread.send("waiting", tokens=12)
        prefill.thread.push("waiting", {"g": spans([7])})
    for host in (decode, prefill):
        host.events += host.thread.drain()
        assert host.thread.drain() == []
        assert not is_readable(host)
    for host, name, slots in ((decode, KEY, NEED), (prefill, "r", [1, 2])):
        (ended,) = host.ended(name)
        assert isinstance(ended.error, kv.Cancelled)
        assert host.of(name)[0] is ended
        assert host.back(name, kv.Quarantined) == slots
        assert not host.back(name)
    assert [type(event) for event in prefill.of("waiting")] == [kv.Ended, kv.Released]
    assert prefill.back("waiting") == [7]


def raise_bug() -> None:
    raise ZeroDivisionError("a bug")


def assert_crashed(host: Host) -> None:
    for use in (*uses_of(host).values(), host.thread.drain, host.thread.close):
        with pytest.raises(kv.Failed, match="a bug") as crashed:
            use()
        assert crashed.value.code == "crashed"
        assert isinstance(crashed.value.__cause__, ZeroDivisionError)
    assert is_readable(host), "hosts that only wait for it must hear of it"


def test_a_crash_is_told_to_everybody_who_calls(quiet: None) -> None:
    host = make_host("prefill", Fabric())
    host.thread.start()
    with host.thread._lock:
        host.thread._loop.post(raise_bug)
    with pytest.raises(kv.Failed, match="a bug"):
        host.until(lambda: False)
    assert_crashed(host)


def test_a_crash_ends_what_runs_and_what_was_accepted_behind_it(quiet: None) -> None:
    courier = Held()
    fabric = Fabric()
    prefill = make_host("prefill", fabric, courier, close_s=0.05)
    decode = make_host("decode", fabric, close_s=0.05)
    prefill.thread.start()
    with decode.thread:
        decode.receive(prefill)
        prefill.thread.send("r", tokens=12)
        prefill.thread.push("r", {"g": spans([1])})
        while not courier.carried:
            pass
        prefill.thread.send("over", tokens=12)
        prefill.thread.cancel("over", "x")
        assert select.select([prefill.thread], [], [], PATIENCE_S)[0]
        gate = threading.Event()

        def raise_bug_later() -> None:
            gate.wait()
            raise_bug()

        with prefill.thread._lock:
            prefill.thread._loop.post(raise_bug_later)
        prefill.thread.push("r", {"g": spans([2], 1)})
        prefill.thread.send("behind", tokens=12)
        prefill.thread.push("behind", {"g": spans([7])})
        prefill.thread.push("over", {"g": spans([9])})
        gate.set()
        with pytest.raises(kv.Failed, match="a bug"):
            prefill.until(lambda: False)
        assert prefill.back("r", kv.Quarantined) == [1, 2]
        assert not prefill.back("r")
        (behind,) = prefill.ended("behind")
        assert behind.error.code == "crashed"
        for name, slots in (("behind", [7]), ("over", [9])):
            assert (prefill.back(name), prefill.evidence(name)) == (slots, {NEVER})
        assert len(prefill.ended("r")) == 1
        assert_crashed(prefill)


def test_a_crash_is_raised_on_leaving_unless_the_host_raised_itself(quiet: None) -> None:
    def crash(raised: BaseException | None) -> None:
        with make_host("prefill", Fabric()).thread as thread:
            with thread._lock:
                thread._loop.post(raise_bug)
            if raised is not None:
                raise raised

    with pytest.raises(kv.Failed, match="a bug"):
        crash(None)
    with pytest.raises(KeyError):
        crash(KeyError())


def test_an_interrupt_of_the_loop_itself_is_a_crash(quiet: None) -> None:
    host = make_host("prefill", Fabric())

    def interrupt() -> None:
        raise SystemExit("a bug")

    host.thread.start()
    host.thread.send("r", tokens=4)
    with host.thread._lock:
        host.thread._loop.post(interrupt)
    with pytest.raises(kv.Failed, match="a bug"):
        host.until(lambda: False)
    assert len(host.ended("r")) == 1
    with pytest.raises(kv.Failed, match="a bug"):
        host.thread.close()
