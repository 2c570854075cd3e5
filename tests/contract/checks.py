"""What every transport promises, as functions that know nothing of how it moves bytes.

A check gets what makes near ends, and a far end that all checks of a run share. It raises
AssertionError when the promise is broken.
"""

from __future__ import annotations

import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.engine.errors import UsageError
from kvferry.engine.ports import (
    Close,
    Connect,
    ConnectFailed,
    Disconnect,
    Opened,
    Posted,
    Revoke,
    Revoked,
    Settled,
    Stopped,
    Withdraw,
)

from .ends import POOL_BYTES, End

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from .ends import Far, Make

    Check = Callable[[Make, Far], Awaitable[None]]

CHECKS: dict[str, Check] = {}
SEED = 20260101


def check(function: Check) -> Check:
    """Register a check under its name."""
    CHECKS[function.__name__] = function
    return function


@asynccontextmanager
async def near_end(make: Make, far: Far) -> AsyncIterator[End]:
    """A connected near end with random bytes, over a far end of zeros."""
    await far.fill(0)
    end = End(make)
    end.pool[:] = np.random.default_rng(SEED).integers(1, 256, POOL_BYTES, dtype=np.uint8)
    await end.connect(far.metadata)
    yield end
    assert await end.close() == Stopped("", ())
    end.results()


def blocks(size: int, number: int, order: int) -> np.ndarray:
    """Offsets of `number` distinct blocks of `size` bytes in a scattered order."""
    slots = np.random.default_rng(SEED + order).permutation(POOL_BYTES // size)
    return slots[:number].astype(np.int64) * size


@check
async def opening_is_answered_and_happens_once(make: Make, far: Far) -> None:
    end = End(make)
    opened = await end.first(Opened)
    assert isinstance(opened, Opened)
    assert opened.metadata
    assert end.events == [(0, opened)]
    with pytest.raises(UsageError, match="started before"):
        end.transport.start("again", end.regions, lambda _agent, _events: None)
    assert end.transport.describe().startswith(end.transport.name)
    await end.close()


@check
async def a_scattered_write_is_byte_exact_and_changes_nothing_else(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        rng = np.random.default_rng(SEED)
        source, target = blocks(8192, 300, 1), blocks(8192, 300, 2)
        lengths = rng.integers(1, 8193, 300)
        expected = np.zeros(POOL_BYTES, dtype=np.uint8)
        for from_, to, size in zip(source, target, lengths, strict=True):
            expected[to : to + size] = near.pool[from_ : from_ + size]
        write = near.post(source, target, lengths, to=far.base)
        near.submit(write)
        assert await near.settled(write) == ["done"]
        assert np.array_equal(await far.read(), expected)


@check
async def the_largest_write_within_bounds_is_done(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        bounds = near.transport.bounds
        size = bounds.bytes_max // bounds.descriptors_max
        offsets = blocks(size, bounds.descriptors_max, 3)
        write = near.post(offsets, offsets, [size] * len(offsets), to=far.base)
        near.submit(write)
        assert await near.settled(write) == ["done"]
        written = (await far.read()).reshape(-1, size)[offsets // size]
        assert np.array_equal(written, near.pool.reshape(-1, size)[offsets // size])


@check
async def many_writes_in_flight_all_arrive(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        size = 65536
        offsets = blocks(size, POOL_BYTES // size, 4)
        posts = [near.post([offset], [offset], [size], to=far.base) for offset in offsets]
        near.submit(*posts)
        assert set(await near.settled(*posts)) == {"done"}
        assert np.array_equal(await far.read(), near.pool)


@check
async def an_expired_write_is_never_posted(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        late = near.post([0], [0], [4096], to=far.base, not_after=time.monotonic_ns())
        good = near.post([4096], [4096], [4096], to=far.base)
        near.submit(late, good)
        assert await near.settled(late, good) == ["expired", "done"]
        got = await far.read()
        assert not got[:4096].any()
        assert got[4096:8192].all()


@check
async def withdrawing_is_answered_once_and_truthfully(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        size = 65536
        posts = [near.post([i * size], [i * size], [size], to=far.base) for i in range(64)]
        near.submit(*posts[:32], *(Withdraw(post.write) for post in posts[16:32]))
        near.submit(*posts[32:])
        await near.settled(posts[0])
        near.submit(*(Withdraw(post.write) for post in posts * 2))
        results = await near.settled(*posts)
        assert results[16:32] == ["withdrawn"] * 16
        assert set(results) <= {"done", "withdrawn"}
        landed = (await far.read())[: 64 * size].reshape(64, size)
        for i, result in enumerate(results):
            assert landed[i].all() if result == "done" else not landed[i].any()


@check
async def a_write_to_an_unconnected_peer_fails_alone(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        lost = near.post([0], [0], [4096], to=far.base, peer="stranger")
        good = near.post([4096], [4096], [4096], to=far.base)
        near.submit(lost, good)
        assert await near.settled(lost, good) == ["refused", "done"]
        assert Posted(lost.write) not in near.of(Posted)
        assert not (await far.read())[:4096].any()


@check
async def a_write_outside_registered_memory_fails_alone(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        wild = near.post([0], [POOL_BYTES], [4096], to=far.base)
        foreign = near.post([POOL_BYTES - 1], [0], [4096], to=far.base)
        good = near.post([4096], [4096], [4096], to=far.base)
        near.submit(wild, foreign, good)
        assert await near.settled(wild, foreign, good) == ["refused", "refused", "done"]
        assert near.of(Posted) in ([], [Posted(good.write)])
        assert not (await far.read())[:4096].any()


@check
async def garbage_metadata_fails_one_connect_and_nothing_else(make: Make, far: Far) -> None:
    await far.fill(0)
    near = End(make)
    near.pool[:] = 7
    garbage = [b"", b"\x00" * 64, b"\xff" * 500, far.metadata[:-3]]
    for i in range(0, len(far.metadata), max(len(far.metadata) // 40, 1)):
        flipped = bytearray(far.metadata)
        flipped[i] ^= 0xFF
        garbage.append(bytes(flipped))
    for peer, times in (("before", 1), ("after", 2)):
        for i, metadata in enumerate(garbage):
            near.submit(Connect(f"{peer}-{i}", metadata))
        await near.until(lambda: len(near.of(ConnectFailed)) == len(garbage) * times)  # noqa: B023
        if peer == "before":
            await near.connect(far.metadata)
    assert all(isinstance(e, ConnectFailed) and e.text for e in near.of(ConnectFailed))
    good = near.post([0], [0], [4096], to=far.base)
    bad = near.post([8192], [8192], [4096], to=far.base, peer="before-0")
    near.submit(good, bad)
    assert await near.settled(good, bad) == ["done", "refused"]
    assert np.count_nonzero(await far.read()) == 4096
    await near.close()


@check
async def a_peer_can_be_forgotten_and_connected_again(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        first = near.post([0], [0], [4096], to=far.base)
        near.submit(first)
        assert await near.settled(first) == ["done"]
        between = near.post([4096], [4096], [4096], to=far.base)
        near.submit(Disconnect("far"), between)
        assert await near.settled(between) == ["refused"]
        await near.connect(far.metadata)
        again = near.post([8192], [8192], [4096], to=far.base)
        near.submit(again)
        assert await near.settled(again) == ["done"]
        assert np.count_nonzero(await far.read()) == 8192


@check
async def revoking_is_answered(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        near.submit(Revoke("far"))
        revoked = await near.first(Revoked)
        assert isinstance(revoked, Revoked)
        assert revoked.proven or revoked.text


@check
async def closing_with_nothing_posted_stops_cleanly(make: Make, far: Far) -> None:
    end = End(make)
    await end.metadata()
    assert await end.close() == Stopped("", ())
    assert len(end.of(Stopped)) == 1


@check
async def closing_answers_every_write_and_then_nothing_more(make: Make, far: Far) -> None:
    await far.fill(0)
    end = End(make)
    await end.connect(far.metadata)
    posts = [end.post([0], [i * 65536], [65536], to=far.base) for i in range(100)]
    end.submit(*posts[:50])
    await end.settled(posts[0])
    end.submit(*posts[50:], Close(time.monotonic_ns() + 5_000_000_000))
    stopped = await end.first(Stopped)
    assert stopped == Stopped("", ())
    assert end.events[-1] == (0, stopped)
    assert set(end.results()) == {post.write for post in posts}
    assert set(end.results().values()) <= {"done", "withdrawn"}


@check
async def events_keep_their_order_and_come_on_the_loop(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        posts = [near.post([0], [i * 4096], [4096], to=far.base) for i in range(200)]
        near.submit(*posts)
        await near.settled(*posts)
        kinds = [type(event) for _, event in near.events]
        assert kinds[0] is Opened
        where = {
            (type(event), event.write): i
            for i, (_, event) in enumerate(near.events)
            if isinstance(event, Posted | Settled)
        }
        for (kind, write), i in where.items():
            assert kind is Settled or i < where[Settled, write]
    assert isinstance(near.events[-1][1], Stopped)
    assert near.delivered_on == {threading.get_ident()}


@check
async def the_backend_runs_on_one_thread_that_is_not_the_loops(make: Make, far: Far) -> None:
    async with near_end(make, far) as near:
        write = near.post([0], [0], [4096], to=far.base)
        near.submit(write)
        await near.settled(write)
    assert len(near.stepped_on) == 1
    assert threading.get_ident() not in near.stepped_on


@check
async def each_agent_opens_connects_and_writes_by_itself(make: Make, far: Far) -> None:
    await far.fill(0)
    end = End(make, agents=2)
    end.pool[:] = 7
    assert await end.metadata(0) != await end.metadata(1)
    for agent in range(2):
        await end.connect(far.metadata, agent=agent)
        write = end.post([0], [agent * 4096], [4096], to=far.base)
        end.submit(write, agent=agent)
        assert await end.settled(write) == ["done"]
    assert len(end.stepped_on) == 2
    assert await end.close() == Stopped("", ())
    assert np.count_nonzero(await far.read() == 7) == 8192
