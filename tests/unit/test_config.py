"""Settings and names: every field out of bounds is named."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvferry.engine.config import Config
from kvferry.engine.errors import UsageError
from kvferry.engine.host import split_address
from kvferry.engine.keys import Key

DURATIONS = ["match_s", "stall_s", "total_s", "permit_ttl_s", "dial_s"]
COUNTS = [
    "peer_posted_bytes_max",
    "peer_posted_writes_max",
    "sends_max",
    "receives_max",
    "offers_waiting_max",
]


@pytest.mark.parametrize("field", DURATIONS)
@pytest.mark.parametrize("value", [0, -1, 1e6, math.inf, math.nan])
def test_durations(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"config.{field}"):
        Config(name="a", **{field: value})


@pytest.mark.parametrize("value", [-0.1, 1e6, math.nan])
def test_close_may_not_wait_at_all(value: float) -> None:
    assert Config(name="a", close_s=0).close_s == 0
    with pytest.raises(UsageError, match=r"config\.close_s"):
        Config(name="a", close_s=value)


@pytest.mark.parametrize("field", COUNTS)
def test_counts(field: str) -> None:
    with pytest.raises(UsageError, match=f"config.{field}"):
        Config(name="a", **{field: 0})


@pytest.mark.parametrize("name", ["", "x" * 129, "é" * 65])
def test_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"config\.name"):
        Config(name=name)


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:1", ":1", "10.0.0.9:7400", "[::]:1", "127.evil.example:1", "128.0.0.1:1", "nonsense"],
)
def test_listening_beyond_loopback_needs_a_word(listen: str) -> None:
    with pytest.raises(UsageError, match="allow_unauthenticated"):
        Config(name="a", listen=listen)
    Config(name="a", listen=listen, allow_unauthenticated=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "localhost:1", "[::1]:1", None])
def test_loopback_needs_none(listen: str | None) -> None:
    Config(name="a", listen=listen)


def test_unknown_fields_and_changes_are_refused() -> None:
    with pytest.raises(TypeError):
        Config(name="a", lisen="127.0.0.1:1")  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Config(name="a").name = "b"  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "lisen": "x"}, Config)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (Key(""), "request id"),
        (Key("x" * 129), "request id"),
        (Key("\udc80"), "UTF-8"),
        (Key(b"r"), "request id"),  # type: ignore[arg-type]
        (Key("r", -1), "attempt"),
        (Key("r", 2**32), "attempt"),
        (Key("r", 1.5), "attempt"),  # type: ignore[arg-type]
        (Key("r", True), "attempt"),
        (Key("r", "1"), "attempt"),  # type: ignore[arg-type]
        (Key("r", 0, 2**16), "branch"),
        (Key("r", 0, None), "branch"),  # type: ignore[arg-type]
    ],
)
def test_keys(key: Key, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        key.check()
    assert not key.is_valid


def test_good_keys() -> None:
    key = Key("é" * 64, 2**32 - 1, 2**16 - 1)
    assert key.check() is key
    assert key.is_valid
    assert Key("a", 2) < Key("a", 10)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.5:7400", ("10.0.0.5", 7400)),
        ("[::1]:0", ("::1", 0)),
        (":80", ("0.0.0.0", 80)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:65536", "host:-1", "h:²"])
def test_ill_addresses(address: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        split_address(address)
