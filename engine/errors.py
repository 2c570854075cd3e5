"""Exceptions: who is at fault, and whether trying again is safe.

One root, seven leaves that a caller meets, one for our own bugs. Every leaf carries the facts
of the transfer it ended, as far as they are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .keys import Key

By = Literal["caller", "peer", "transport", "deadline", "engine"]


class KvferryError(Exception):
    """Root of everything that kvferry raises.

    key: the transfer, None when none is concerned.
    peer: the other side's name, "" when none is concerned.
    by: who caused it.
    code: a stable word for programs; the message is for people.
    retry_safe: True when the same request may be tried again (with a higher attempt).
    """

    def __init__(
        self,
        message: str,
        *,
        key: Key | None = None,
        peer: str = "",
        by: By = "engine",
        code: str = "",
        retry_safe: bool = False,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.peer = peer
        self.by = by
        self.code = code or type(self).__name__.lower()
        self.retry_safe = retry_safe


class UsageError(KvferryError, ValueError):
    """The caller's mistake: nothing was changed, and repeating it fails again."""

    def __init__(self, message: str, *, code: str = "usage", key: Key | None = None) -> None:
        super().__init__(message, key=key, by="caller", code=code)


class Busy(KvferryError):
    """A bound is reached; nothing was started. Try again after `retry_after_s` seconds."""

    def __init__(
        self, message: str, *, retry_after_s: float, key: Key | None = None, peer: str = ""
    ) -> None:
        super().__init__(message, key=key, peer=peer, by="engine", code="busy", retry_safe=True)
        self.retry_after_s = retry_after_s


class Refused(KvferryError):
    """The two sides do not fit: another try with the same input is refused again."""


class PeerLost(KvferryError):
    """The other side can't be reached, or its session ended."""


class Failed(KvferryError):
    """The transfer failed on one of the sides."""


class Cancelled(KvferryError):
    """The transfer was cancelled, by the caller or by the other side."""


class TimedOut(KvferryError):
    """One of the transfer's own deadlines passed: `match`, `stall` or `total`."""


class InternalError(KvferryError):
    """An invariant of kvferry broke: a bug, with the story of the transfer in its message."""
