"""The simulated network: order, pieces, backpressure, and faults as sockets show them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import pytest
from anyio.abc import ByteStream

from tests.sim.loop import SimLoop, run
from tests.sim.network import CAPACITY_BYTES, Internet, SimNetwork, SimStream
from tests.sim.options import Fault, Options, draw

CALM = replace(draw(random.Random(0)), latency_s=0.001, shred=0.0, dial_refused=0.0, dial_slow=0.0)

Scene = Callable[[Internet, SimStream, SimStream], Awaitable[None]]


def play(scene: Scene, options: Options = CALM, seed: int = 0) -> list[Fault]:
    """Run `scene` with a connection from "a" to "b"; return the faults that fired."""
    fired: list[Fault] = []

    async def main(loop: SimLoop) -> None:
        internet = Internet(
            loop, random.Random(seed), options, fired.append, lambda pipe, data: None
        )
        listener = await SimNetwork(internet, "b").listen("127.0.0.1:7400")
        near = await SimNetwork(internet, "a").dial("127.0.0.1:7400")
        far = await listener.accept()
        assert isinstance(near, SimStream)
        assert isinstance(far, SimStream)
        await scene(internet, near, far)

    run(main, SimLoop(random.Random(seed), disorder=0.5, steps_max=100_000))
    return fired


async def drain(stream: ByteStream) -> bytes:
    data = b""
    try:
        while True:
            data += await stream.receive()
    except anyio.EndOfStream:
        return data


def test_bytes_arrive_in_order_and_in_pieces() -> None:
    sent = random.Random(1).randbytes(20_000)

    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        reader = asyncio.ensure_future(drain(far))
        for start in range(0, len(sent), 700):
            await near.send(sent[start : start + 700])
        await near.aclose()
        assert await reader == sent

    for seed in range(5):
        assert Fault.SHRED in play(scene, replace(CALM, shred=0.5), seed)


def test_sender_waits_for_a_reader_that_does_not_read() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        sender = asyncio.ensure_future(near.send(bytes(CAPACITY_BYTES + 1)))
        await asyncio.sleep(100.0)
        assert not sender.done()
        await far.receive(1)
        await sender

    play(scene)


def test_a_close_ends_the_stream_and_later_breaks_the_other_side() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        await near.send(b"last words")
        await near.aclose()
        assert await drain(far) == b"last words"
        await asyncio.sleep(1.0)
        with pytest.raises(anyio.BrokenResourceError):
            await far.send(b"hello?")
        with pytest.raises(anyio.ClosedResourceError):
            await near.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await near.send(b"x")

    play(scene)


def test_half_a_connection_can_be_ended() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        await near.send_eof()
        with pytest.raises(anyio.ClosedResourceError):
            await near.send(b"x")
        assert await drain(far) == b""
        await far.send(b"still here")
        assert await near.receive() == b"still here"

    play(scene)


def test_bytes_take_their_time() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        start_s = internet.loop.time()
        for _ in range(20):
            await near.send(b"x")
            await far.receive()
        assert internet.loop.time() - start_s > 20 * CALM.latency_s / 3

    play(scene)


@pytest.mark.parametrize("both", [True, False])
def test_a_reset_breaks_waiting_readers(both: bool) -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        reader = asyncio.ensure_future(near.receive())
        other = asyncio.ensure_future(far.receive())
        await asyncio.sleep(1.0)
        near.reset(both=both)
        with pytest.raises(anyio.BrokenResourceError):
            await reader
        with pytest.raises(anyio.BrokenResourceError):
            await near.send(b"x")
        await asyncio.sleep(1.0)
        assert other.done() == both
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    play(scene)


def test_a_cut_path_holds_bytes_one_way_until_it_heals() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        internet.cut("a", "b", 60.0)
        await near.send(b"held")
        await far.send(b"passes")
        assert await near.receive() == b"passes"
        reader = asyncio.ensure_future(far.receive())
        await asyncio.sleep(59.0)
        assert not reader.done()
        assert await reader == b"held"

    play(scene)


def test_two_readers_are_refused() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        reader = asyncio.ensure_future(near.receive())
        await asyncio.sleep(1.0)
        with pytest.raises(anyio.BusyResourceError):
            await near.receive()
        await far.send(b"x")
        assert await reader == b"x"

    play(scene)


def test_dials_fail_with_os_errors() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        with pytest.raises(ConnectionRefusedError):
            await internet.dial("a", "127.0.0.1:1")
        internet.cut("b", "a", 60.0)
        with pytest.raises(TimeoutError):
            await internet.dial("a", "127.0.0.1:7400")
        internet.kill("b")
        with pytest.raises(ConnectionRefusedError):
            await internet.dial("a", "127.0.0.1:7400")

    play(scene)


def test_a_killed_process_is_seen_as_end_of_stream() -> None:
    async def scene(internet: Internet, near: SimStream, far: SimStream) -> None:
        internet.kill("b")
        with pytest.raises(anyio.EndOfStream):
            await near.receive()

    play(scene)
