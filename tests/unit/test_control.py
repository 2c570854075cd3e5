"""A framed connection over in-memory streams: what is queued, written, read, dropped. Under 1 s."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.stapled import StapledObjectStream

from kvferry.engine import wire
from kvferry.engine.control import Connection
from kvferry.engine.frames import Inbox
from kvferry.engine.keys import Key
from kvferry.engine.limits import FRAME_BYTES_MAX
from tests.unit.loops import on_both_loops


class Wire(ByteStream):
    """One end of a byte stream; `blocked` holds writes up until it is cleared."""

    def __init__(self, out: list[bytes]) -> None:
        self.out = out
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = asyncio.Event()
        self.inbound: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.broken: Exception | None = None
        self.closed = 0

    async def send(self, item: bytes) -> None:
        self.waiting.set()
        await self.open.wait()
        if self.broken is not None:
            raise self.broken
        self.out.append(bytes(item))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        item = await self.inbound.get()
        if isinstance(item, Exception):
            raise item
        assert len(item) <= max_bytes
        return item

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed += 1


def big(key: Key) -> wire.Offer:
    return wire.Offer(key, 0, 0, [wire.Need("g", b"", b"", bytes(4 * FRAME_BYTES_MAX))], 1, 1, 1)


def messages(out: list[bytes]) -> list[wire.AnyMessage]:
    return Inbox().feed(b"".join(out))


async def written(stream: Wire, connection: Connection) -> list[wire.AnyMessage]:
    connection.finish()
    assert await connection.run_writer() == "finished"
    return messages(stream.out)


@on_both_loops
async def test_what_was_queued_before_the_writer_runs_is_written() -> None:
    stream = Wire([])
    connection = Connection(stream)
    sent = [wire.Renew(1), wire.Goodbye("x")]
    for message in sent:
        connection.send(message)
    assert await written(stream, connection) == sent


@on_both_loops
async def test_small_messages_overtake_a_big_one_that_is_being_written() -> None:
    stream = Wire([])
    connection = Connection(stream)
    stream.open.clear()
    connection.send(big(Key("a")), key=Key("a"))
    writer = asyncio.create_task(connection.run_writer())
    await stream.waiting.wait()
    connection.send(wire.Cancel(Key("a"), "same key"), key=Key("a"))
    connection.send(wire.Cancel(Key("b"), "other key"), key=Key("b"))
    connection.finish()
    stream.open.set()
    assert await writer == "finished"
    assert messages(stream.out) == [
        wire.Cancel(Key("b"), "other key"),
        big(Key("a")),
        wire.Cancel(Key("a"), "same key"),
    ]
    assert max(len(piece) for piece in stream.out) < 2 * FRAME_BYTES_MAX


@on_both_loops
async def test_a_gate_is_asked_directly_before_the_first_byte() -> None:
    stream = Wire([])
    connection = Connection(stream)
    asked = []

    def gate(name: str) -> Callable[[], bool]:
        return lambda: asked.append(name) is None and name == "kept"

    stream.open.clear()
    connection.send(wire.Renew(1))
    writer = asyncio.create_task(connection.run_writer())
    await stream.waiting.wait()
    for name in ("kept", "dropped"):
        connection.send(wire.Cancel(Key(name), ""), key=Key(name), gate=gate(name))
    assert asked == [], "the socket is not ready for them"
    connection.finish()
    stream.open.set()
    await writer
    assert asked == ["kept", "dropped"]
    assert messages(stream.out) == [wire.Renew(1), wire.Cancel(Key("kept"), "")]


@on_both_loops
async def test_nothing_is_queued_after_finish() -> None:
    stream = Wire([])
    connection = Connection(stream)
    connection.send(wire.Renew(1))
    connection.finish()
    connection.send(wire.Renew(2))
    assert await written(stream, connection) == [wire.Renew(1)]


@on_both_loops
async def test_finish_wakes_an_idle_writer() -> None:
    connection = Connection(Wire([]))
    writer = asyncio.create_task(connection.run_writer())
    await asyncio.sleep(0)
    connection.finish()
    assert await writer == "finished"


@pytest.mark.parametrize(
    "error", [anyio.BrokenResourceError(), anyio.ClosedResourceError(), ConnectionResetError()]
)
@on_both_loops
async def test_a_broken_stream_ends_both_tasks_with_a_reason(error: Exception) -> None:
    stream = Wire([])
    connection = Connection(stream)
    stream.broken = error
    connection.send(wire.Renew(1))
    assert type(error).__name__ in await connection.run_writer()
    stream.inbound.put_nowait(error)
    assert type(error).__name__ in await connection.run_reader(lambda message: None)


@on_both_loops
async def test_the_reader_tells_messages_in_order_until_the_end() -> None:
    source, stream, heard = Wire([]), Wire([]), []
    sender, receiver = Connection(source), Connection(stream)
    sent = [wire.Renew(1), big(Key("a")), wire.Goodbye("x")]
    for message in sent:
        sender.send(message, key=Key("a"))
    await written(source, sender)
    data = b"".join(source.out)
    for start in range(0, len(data), 50_000):
        stream.inbound.put_nowait(data[start : start + 50_000])
    stream.inbound.put_nowait(anyio.EndOfStream())
    assert "closed the connection" in await receiver.run_reader(heard.append)
    assert heard == sent


@on_both_loops
async def test_bad_framing_is_a_wire_error_after_what_was_good_before() -> None:
    stream, heard = Wire([]), []
    source = Wire([])
    sender = Connection(source)
    sender.send(wire.Renew(1))
    await written(source, sender)
    stream.inbound.put_nowait(b"".join(source.out))
    stream.inbound.put_nowait(b"\xff" * 7)
    with pytest.raises(wire.WireError):
        await Connection(stream).run_reader(heard.append)
    assert heard == [wire.Renew(1)]


@on_both_loops
async def test_what_the_receiver_raises_comes_out() -> None:
    stream, source = Wire([]), Wire([])
    sender = Connection(source)
    sender.send(wire.Renew(1))
    await written(source, sender)
    stream.inbound.put_nowait(b"".join(source.out))

    def receive(message: wire.AnyMessage) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Connection(stream).run_reader(receive)


@on_both_loops
async def test_the_reader_goes_on_while_the_writer_is_stuck() -> None:
    stream, source = Wire([]), Wire([])
    sender = Connection(source)
    for number in range(1000):
        sender.send(wire.Renew(number))
    await written(source, sender)
    stream.open.clear()
    connection = Connection(stream)
    heard: list[wire.AnyMessage] = []

    def answer(message: wire.AnyMessage) -> None:
        heard.append(message)
        connection.send(message)

    writer = asyncio.create_task(connection.run_writer())
    for piece in source.out:
        for start in range(0, len(piece), 5000):
            stream.inbound.put_nowait(piece[start : start + 5000])
    stream.inbound.put_nowait(anyio.EndOfStream())
    await connection.run_reader(answer)
    assert len(heard) == 1000
    writer.cancel()
    await asyncio.wait([writer])
    await connection.aclose()
    assert stream.closed == 1


@on_both_loops
async def test_two_connections_over_anyio_streams() -> None:
    one_out, two_in = anyio.create_memory_object_stream[bytes](math.inf)
    two_out, one_in = anyio.create_memory_object_stream[bytes](math.inf)

    class Adapter(Wire):
        def __init__(self, both: StapledObjectStream[bytes]) -> None:
            super().__init__([])
            self.both = both

        async def send(self, item: bytes) -> None:
            await self.both.send(bytes(item))

        async def receive(self, max_bytes: int = 65536) -> bytes:
            return await self.both.receive()

        async def aclose(self) -> None:
            await self.both.aclose()

    one = Connection(Adapter(StapledObjectStream(one_out, one_in)))
    two = Connection(Adapter(StapledObjectStream(two_out, two_in)))
    heard: list[wire.AnyMessage] = []

    def reply(message: wire.AnyMessage) -> None:
        heard.append(message)
        if isinstance(message, wire.Renew):
            two.send(wire.Granted(message.number, 5))
        if isinstance(message, wire.Goodbye):
            two.finish()

    for number in range(3):
        one.send(wire.Renew(number))
    one.send(wire.Goodbye("bye"))
    one.finish()
    answers: list[wire.AnyMessage] = []
    reader = asyncio.create_task(two.run_reader(reply))
    back = asyncio.create_task(one.run_reader(answers.append))
    assert await one.run_writer() == "finished"
    assert await two.run_writer() == "finished"
    await two.aclose()
    assert "closed" in await back
    await one.aclose()
    await asyncio.wait([reader])
    assert answers == [wire.Granted(number, 5) for number in range(3)]
    assert len(heard) == 4
