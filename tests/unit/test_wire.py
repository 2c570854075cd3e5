"""Control messages: what comes out is what went in, and any bytes give a message or WireError."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine import wire
from kvferry.engine.keys import Key
from kvferry.engine.limits import OFFER_BYTES_MAX, SMALL_MESSAGE_BYTES_MAX
from kvferry.engine.ports import ProcessIdentity
from tests.unit.pair import make_layout

text = st.text(max_size=20)
binary = st.binary(max_size=40)
integers = st.integers(-(2**63), 2**64 - 1)
keys = st.builds(Key, text, integers, integers)
needs = st.lists(st.builds(wire.Need, text, binary, binary, binary), max_size=3)
identities = st.builds(ProcessIdentity, text, text, text, integers, integers)

MESSAGES = st.one_of(
    st.builds(wire.Hello, text, text, integers, integers, binary, text),
    st.builds(wire.Prove, text, binary),
    st.builds(wire.Geometry, st.just(make_layout(1 << 32)), integers, text, identities, binary),
    st.builds(wire.Refuse, text, text),
    st.builds(wire.Goodbye, text),
    st.builds(wire.Renew, integers),
    st.builds(wire.Granted, integers, integers),
    st.builds(
        wire.Offer,
        keys,
        integers,
        integers,
        needs,
        integers,
        integers,
        integers,
        integers,
        text,
    ),
    st.builds(wire.Cancel, keys, text),
    st.builds(wire.Moving, keys, integers),
    st.builds(wire.Done, keys, integers, integers, binary),
    st.builds(wire.Failed, keys, text, text, text, st.booleans(), st.booleans()),
    st.builds(wire.Drained, keys),
    st.builds(wire.Unsettled, st.lists(keys, max_size=4)),
)


def test_every_kind_is_in_the_union() -> None:
    union = {kind.__name__ for kind in wire.AnyMessage.__args__}
    assert union == {kind.__name__ for kind in wire.KINDS.values()}
    assert union == {kind.__name__ for kind in wire.Message.__subclasses__()}


@given(MESSAGES)
def test_decode_gives_what_was_encoded(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_nothing_or_a_wire_error(body: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        message = wire.decode(body)
        assert message is None or type(message) in wire.KINDS.values()


values = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | text | binary,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(wire.KINDS)),
    st.dictionaries(
        st.sampled_from(["key", "tokens", "needs", "reason", "keys", "layout", "number", "name"]),
        values,
    ),
)
def test_ill_typed_fields_give_a_message_or_a_wire_error(tag: str, fields: dict) -> None:
    body = msgspec.msgpack.encode({"t": tag, **fields})
    try:
        message = wire.decode(body)
    except wire.WireError:
        return
    assert type(message) is wire.KINDS[tag]


@given(MESSAGES, st.data())
def test_any_damage_to_a_message_gives_a_message_or_a_wire_error(
    message: wire.Message, data: st.DataObject
) -> None:
    body = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    with contextlib.suppress(wire.WireError):
        wire.decode(bytes(body))


@pytest.mark.parametrize("shape", ["array", "map"])
def test_nesting_of_any_depth_is_a_wire_error(shape: str) -> None:
    nested = b"\x91" * 100_000 if shape == "array" else b"\x81\xa1x" * 100_000
    before = b"\x82\xa1x" + nested + b"\xc0\xa1t\xa5offer"
    after = b"\x82\xa1t\xa5offer\xa1x" + nested
    for body in (nested, before, after):
        with pytest.raises(wire.WireError):
            wire.decode(body + b"\xc0")


def test_unknown_fields_are_ignored_and_unknown_kinds_are_skipped() -> None:
    body = msgspec.msgpack.encode({"t": "renew", "number": 3, "colour": ["new", {"a": 1}]})
    assert wire.decode(body) == wire.Renew(3)
    assert wire.decode(msgspec.msgpack.encode({"t": "teleport", "number": 3})) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80", b"\xc0", msgspec.msgpack.encode({"t": 3}), msgspec.msgpack.encode(["t"])],
    ids=["empty", "no tag", "nil", "number as tag", "array"],
)
def test_bytes_without_a_tag_are_a_wire_error(body: bytes) -> None:
    with pytest.raises(wire.WireError, match="tag"):
        wire.decode(body)


def test_bounds_hold_on_both_sides() -> None:
    reason = "x" * SMALL_MESSAGE_BYTES_MAX
    with pytest.raises(ValueError, match="bound"):
        wire.encode(wire.Goodbye(reason))
    body = msgspec.msgpack.encode({"t": "goodbye", "reason": reason})
    with pytest.raises(wire.WireError, match="bound"):
        wire.decode(body)
    big = [wire.Need("g", b"", b"", bytes(SMALL_MESSAGE_BYTES_MAX))]
    offer = wire.Offer(Key("r"), 0, 0, big, 1, 1, 1)
    assert wire.decode(wire.encode(offer)) == offer
    bigger = wire.Offer(Key("r"), 0, 0, [wire.Need("g", b"", b"", bytes(OFFER_BYTES_MAX))], 1, 1, 1)
    with pytest.raises(ValueError, match="bound"):
        wire.encode(bigger)
