"""What the pure core wants done. The driver does it, in order.

Two rules: an effect is a value, and carrying one out never changes a decision already made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import wire
    from .errors import KvferryError
    from .keys import Key, Peer
    from .lease import Evidence, Slots
    from .ports import Command, ProcessIdentity


@dataclass(frozen=True, slots=True)
class Transmit:
    """Queue a message on a connection. `gate`: asked directly before its first byte leaves."""

    connection: int
    message: wire.Message
    key: Key | None = None
    gate: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to `peer`; answer with `Router.dialled` or `Router.dial_failed`."""

    link: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class HangUp:
    """Send what is queued on this connection, then close it. Its later messages are void."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Give a command to one of the transport's agents."""

    agent: int
    command: Command


@dataclass(frozen=True, slots=True)
class Received:
    """A target transfer is done: what its caller gets."""

    tokens: int
    bytes_moved: int
    aux: bytes
    waiting_ns: int
    moving_ns: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A source transfer is done: what its caller gets."""

    key: Key
    tokens: int
    bytes_moved: int
    waiting_ns: int
    moving_ns: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer's outcome is known. Exactly once per transfer."""

    transfer: int
    result: Received | Sent | None
    error: KvferryError | None


@dataclass(frozen=True, slots=True)
class Release:
    """Give slots back to their owner. Each slot exactly once."""

    transfer: int
    slots: Slots
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Fenced:
    """Nothing of this transfer can touch memory any more. Exactly once, after its `Ended`."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Watch:
    """See to it that the end of a source's process is heard; answer with `Router.process_ended`."""

    incarnation: str
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Nothing depends on the end of this incarnation's process any more."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Report:
    """Something an operator should read, once."""

    level: int
    text: str


Effect = Transmit | Dial | HangUp | Submit | Ended | Release | Fenced | Watch | Unwatch | Report
