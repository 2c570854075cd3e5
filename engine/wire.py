"""Control messages: their fields, their size limits, their encoding. Pure.

MessagePack maps with a tag, so that a newer peer's unknown fields are ignored and its unknown
messages can be counted and skipped. Two rules: no message means anything before its last frame,
and a field from the wire is checked here or by its machine before it is used.

Durations are relative milliseconds; ordinals are always the target's.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .errors import KvferryError
from .keys import Key
from .layout import Layout
from .limits import (
    GEOMETRY_BYTES_MAX,
    OFFER_BYTES_MAX,
    SMALL_MESSAGE_BYTES_MAX,
)
from .ports import ProcessIdentity


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Root of every control message."""


# ---------------------------------------------------------------- opening a session


class Hello(Message, frozen=True, tag="hello"):
    """First message of both sides: who speaks, to whom, and which wire versions it knows.

    role: what the speaker is on this connection; the target dials.
    incarnation: one life of one engine process, 32 hex digits.
    """

    name: str
    incarnation: str
    version_min: int
    version_max: int
    nonce: bytes
    role: str


class Prove(Message, frozen=True, tag="prove"):
    """Proof of identity. Without configured authentication both sides say method "none"."""

    method: str = "none"
    proof: bytes = b""


class Geometry(Message, frozen=True, tag="geometry"):
    """What a side's memory looks like, told only after `Prove`.

    metadata: the transport's memory metadata; only from the side whose memory is touched.
    epoch: which registration of its pools this is.
    """

    layout: Layout
    epoch: int
    transport: str
    process: ProcessIdentity
    metadata: bytes = b""


class Refuse(Message, frozen=True, tag="refuse"):
    """The session can't be: why, which field, and both values as text."""

    code: str
    text: str


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The speaker starts nothing new on this session."""

    reason: str = ""


# ---------------------------------------------------------------- permit


class Renew(Message, frozen=True, tag="renew"):
    """Source: let me post; I count from the moment I sent this."""

    number: int


class Granted(Message, frozen=True, tag="granted"):
    """Target: renewal `number` is granted for `ttl_ms`; I count from this answer."""

    number: int
    ttl_ms: int


# ---------------------------------------------------------------- transfers


class Need(msgspec.Struct, frozen=True, array_like=True):
    """What the target needs of one group, as runs: what `Span.to_wire` gives.

    firsts, counts: int32 per run; slots: int32 per block, in ordinal order. Little-endian.
    """

    group: str
    firsts: bytes
    counts: bytes
    slots: bytes


class Offer(Message, frozen=True, tag="offer"):
    """Target: put the blocks of `key` into these slots.

    tokens: how many the target wants; min_tokens: how few it accepts.
    initiator: who posts; "source" is the only one in this wire version.
    """

    key: Key
    tokens: int
    min_tokens: int
    needs: list[Need]
    match_ms: int
    stall_ms: int
    total_ms: int
    priority: int = 0
    initiator: str = "source"


class Cancel(Message, frozen=True, tag="cancel"):
    """Target: end `key`, in any state. Answered by Done, Failed with drained, or Drained."""

    key: Key
    reason: str


class Moving(Message, frozen=True, tag="moving"):
    """Source: `key` is matched with its send, and will move `tokens`."""

    key: Key
    tokens: int


class Done(Message, frozen=True, tag="done"):
    """Source: every needed byte is in place, and nothing of `key` moves any more."""

    key: Key
    tokens: int
    bytes_moved: int
    aux: bytes = b""


class Failed(Message, frozen=True, tag="failed"):
    """Source: `key` ends without success. drained, clean: see `Drained`; it is said with this.

    outcome: "failed", "cancelled", "timed out" or "refused".
    """

    key: Key
    outcome: str
    code: str
    text: str
    retry_safe: bool
    drained: bool
    clean: bool = True


class Drained(Message, frozen=True, tag="drained"):
    """Source: nothing of `key` is queued, posted or in doubt, nor will be.

    clean: none of its posted writes ended by an error. Else bytes that the target's host has taken
    may still land, and this is no evidence for the target.
    """

    key: Key
    clean: bool = True


class Unsettled(Message, frozen=True, tag="unsettled"):
    """Target, after a lost session: which of these still move? Each is answered by Drained."""

    keys: list[Key]


AnyMessage = (
    Hello
    | Prove
    | Geometry
    | Refuse
    | Goodbye
    | Renew
    | Granted
    | Offer
    | Cancel
    | Moving
    | Done
    | Failed
    | Drained
    | Unsettled
)

KINDS: Final[dict[str, type[Message]]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        Hello,
        Prove,
        Geometry,
        Refuse,
        Goodbye,
        Renew,
        Granted,
        Offer,
        Cancel,
        Moving,
        Done,
        Failed,
        Drained,
        Unsettled,
    )
}

_SIZE_MAX: Final[dict[str, int]] = {"offer": OFFER_BYTES_MAX, "geometry": GEOMETRY_BYTES_MAX}
MESSAGE_BYTES_MAX: Final = max(_SIZE_MAX.values())

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class _Tagged(msgspec.Struct):
    t: str


# Nesting without end is met while unknown fields are skipped.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)


class WireError(KvferryError):
    """The peer sent bytes that are no message: its session ends, nothing else does."""

    def __init__(self, message: str) -> None:
        super().__init__(message, by="peer", code="wire", retry_safe=True)


def encode(message: Message) -> bytes:
    """The message as MessagePack. Raises ValueError when it is over its kind's bound."""
    body = _encoder.encode(message)
    tag = str(type(message).__struct_config__.tag)
    size_max = _SIZE_MAX.get(tag, SMALL_MESSAGE_BYTES_MAX)
    if len(body) > size_max:
        raise ValueError(f"message {tag} has {len(body)} bytes, its bound is {size_max}")
    return body


def decode(body: bytes) -> AnyMessage | None:
    """The message, or None for a kind that this version does not know.

    Raises WireError when the bytes are no message, ill-typed or over their kind's bound.
    """
    try:
        tag = _tag_decoder.decode(body).t
    except _UNREADABLE as error:
        raise WireError(f"message without a readable tag: {error}") from None
    if tag not in KINDS:
        return None
    size_max = _SIZE_MAX.get(tag, SMALL_MESSAGE_BYTES_MAX)
    if len(body) > size_max:
        raise WireError(f"message {tag} has {len(body)} bytes, its bound is {size_max}")
    try:
        return _decoder.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"message {tag}: {error}") from None
