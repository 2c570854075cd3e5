"""Frames: pieces of any size re-assemble, small messages overtake, one key keeps its order."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine import wire
from kvferry.engine.frames import Inbox, Outbox
from kvferry.engine.keys import Key
from kvferry.engine.limits import FRAME_BYTES_MAX, STREAMS_OPEN_MAX

HEADER = struct.Struct(">IHB")
BIG = 3 * FRAME_BYTES_MAX


def big(key: Key, size: int = BIG) -> wire.Offer:
    return wire.Offer(key, 0, 0, [wire.Need("g", b"", b"", bytes(size))], 1, 1, 1)


def small(number: int) -> wire.Renew:
    return wire.Renew(number)


def drain(outbox: Outbox, size: int = FRAME_BYTES_MAX) -> list[wire.AnyMessage]:
    inbox, messages = Inbox(), []
    while data := outbox.take(size):
        messages += inbox.feed(data)
    assert outbox.bytes_waiting == 0
    return messages


def test_small_messages_go_ahead_of_the_rest_of_a_big_one() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(big(Key("a")), key=Key("a"))
    assert inbox.feed(outbox.take(1)) == []
    outbox.put(small(1))
    outbox.put(wire.Cancel(Key("b"), "now"), key=Key("b"))
    assert inbox.feed(outbox.take(1)) == [small(1)]
    assert inbox.feed(outbox.take(1)) == [wire.Cancel(Key("b"), "now")]
    assert inbox.feed(outbox.take(BIG * 2)) == [big(Key("a"))]


def test_messages_of_one_key_keep_their_order() -> None:
    key, outbox = Key("a"), Outbox()
    first, last = wire.Cancel(key, "first"), wire.Cancel(key, "last")
    for message in (first, big(key), last):
        outbox.put(message, key=key)
    outbox.put(small(1))
    assert drain(outbox, 1) == [first, small(1), big(key), last]
    outbox.put(last, key=key)
    outbox.put(small(2))
    assert drain(outbox) == [last, small(2)], (
        "nothing big is left of the key: back in the fast lane"
    )


def test_a_gate_is_asked_once_directly_before_the_first_byte() -> None:
    asked: list[str] = []

    def gate(name: str, answer: bool) -> bool:
        asked.append(name)
        return answer

    outbox, inbox = Outbox(), Inbox()
    outbox.put(big(Key("a")), key=Key("a"), gate=lambda: gate("a", answer=True))
    outbox.put(big(Key("b")), key=Key("b"), gate=lambda: gate("b", answer=False))
    outbox.put(small(1), gate=lambda: gate("s", answer=False))
    assert asked == []
    outbox.take(1)
    assert asked == ["s", "a"]
    while outbox.take(1):
        pass
    assert asked == ["s", "a", "b"]
    assert outbox.bytes_waiting == 0
    assert inbox.unknown == 0


def test_a_dropped_big_message_frees_its_key() -> None:
    key, outbox = Key("a"), Outbox()
    outbox.put(big(key), key=key, gate=lambda: False)
    outbox.put(small(0), key=key)
    assert drain(outbox) == [small(0)]
    outbox.put(big(Key("x")), key=Key("x"))
    outbox.put(small(1), key=key)
    assert drain(outbox)[0] == small(1)


def test_a_message_over_its_bound_is_not_queued() -> None:
    outbox = Outbox()
    with pytest.raises(ValueError, match="bound"):
        outbox.put(wire.Goodbye("x" * 300_000))
    assert outbox.bytes_waiting == 0
    assert outbox.take(1) == b""


def test_a_big_message_survives_any_number_of_small_ones() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(big(Key("a")), key=Key("a"))
    inbox.feed(outbox.take(1))
    count = 2**16 + 10  # more than there are stream ids
    for number in range(count):
        outbox.put(small(number))
    messages = inbox.feed(outbox.take(2**30))
    assert len(messages) == count + 1
    assert messages[-1] == big(Key("a"))


@given(st.data())
def test_pieces_of_any_size_give_the_same_messages(data: st.DataObject) -> None:
    outbox = Outbox()
    sizes = data.draw(st.lists(st.sampled_from([0, 10, FRAME_BYTES_MAX, BIG]), max_size=6))
    for number, size in enumerate(sizes):
        outbox.put(big(Key(f"k{number}"), size), key=Key(f"k{number}"))
    stream = outbox.take(2**30)
    whole = Inbox().feed(stream)
    assert len(whole) == len(sizes)
    inbox, pieces, at = Inbox(), [], 0
    while at < len(stream):
        size = data.draw(st.sampled_from([1, 2, 6, 7, 8, 1000, FRAME_BYTES_MAX, 2**20]))
        pieces += inbox.feed(stream[at : at + size])
        at += size
        if size < 1000:
            pieces += inbox.feed(stream[at : at + 50_000])
            at += 50_000
    assert pieces == whole


@pytest.mark.parametrize("seed", range(30))
def test_order_under_random_putting_and_taking(seed: int) -> None:
    rng = random.Random(seed)
    outbox, inbox = Outbox(), Inbox()
    put: list[wire.Message] = []
    got: list[wire.Message] = []
    for number in range(120):
        key = Key(f"k{rng.randrange(4)}", number)
        name = Key(key.request)
        if rng.random() < 0.3:
            message: wire.Message = big(key, rng.choice([FRAME_BYTES_MAX, BIG]))
        else:
            message = wire.Cancel(key, "x")
        outbox.put(message, key=name)
        put.append(message)
        if rng.random() < 0.6:
            got += inbox.feed(outbox.take(rng.choice([1, FRAME_BYTES_MAX])))
    got += inbox.feed(outbox.take(2**30))
    assert sorted(m.key.attempt for m in got) == list(range(120)), f"seed {seed}"
    for request in {m.key.request for m in put}:
        order = [m.key.attempt for m in got if m.key.request == request]
        assert order == sorted(order), f"seed {seed}: {request} was overtaken by its own"


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (HEADER.pack(FRAME_BYTES_MAX + 1, 0, 0), "bound"),
        (HEADER.pack(0, 0, 2), "flags"),
        (HEADER.pack(1, 0, 0) + b"\xc1", "tag"),
        (HEADER.pack(0, 0, 0), "tag"),
    ],
    ids=["size", "flags", "body", "empty"],
)
def test_bad_framing_is_a_wire_error(frame: bytes, text: str) -> None:
    with pytest.raises(wire.WireError, match=text):
        Inbox().feed(frame)


def test_half_sent_messages_are_bounded_in_number() -> None:
    inbox = Inbox()
    for stream in range(STREAMS_OPEN_MAX):
        inbox.feed(HEADER.pack(1, stream, 1) + b"x")
    with pytest.raises(wire.WireError, match="half sent"):
        inbox.feed(HEADER.pack(1, STREAMS_OPEN_MAX, 1) + b"x")


def test_half_sent_messages_are_bounded_together_in_bytes() -> None:
    inbox = Inbox()
    frames = wire.MESSAGE_BYTES_MAX // FRAME_BYTES_MAX
    for number in range(frames):
        inbox.feed(HEADER.pack(FRAME_BYTES_MAX, number % 60, 1) + bytes(FRAME_BYTES_MAX))
    with pytest.raises(wire.WireError, match="half sent"):
        inbox.feed(HEADER.pack(1, 61, 1) + b"x")


def test_unknown_messages_are_counted() -> None:
    inbox = Inbox()
    body = b"\x81\xa1t\xa3new"
    assert inbox.feed(HEADER.pack(len(body), 0, 0) + body) == []
    assert inbox.unknown == 1


@given(st.binary(max_size=300))
def test_any_bytes_give_messages_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        Inbox().feed(data)
