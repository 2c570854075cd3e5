"""The session machine: one authenticated connection between two incarnations, and its permit.

Pure. Two rules: nothing of ours is told before the peer has proved itself, and the source's
count of a permit always ends before the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from . import wire
from .errors import UsageError
from .limits import (
    CLOCK_RATE_ERROR,
    PEER_NAME_BYTES_MAX,
    PERMIT_RENEWALS_PER_TTL,
    PERMIT_TTL_MIN_S,
    REASON_CHARS_MAX,
    WIRE_VERSION_MAX,
    WIRE_VERSION_MIN,
)
from .transitions import SESSION, Session, SessionEvent, follow

Role = Literal["source", "target"]

_INCARNATION: Final = re.compile("[0-9a-f]{32}")
_PERMIT_TTL_MIN_NS: Final = int(PERMIT_TTL_MIN_S * 1_000_000_000)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What this engine tells of itself. `geometry` is the one for this peer."""

    name: str
    incarnation: str
    geometry: wire.Geometry


class SessionRefused(Exception):
    """The peer can't be served on this session. `refusal` is for the peer, when it may know."""

    def __init__(self, code: str, text: str, *, by_peer: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.by_peer = by_peer

    @property
    def refusal(self) -> wire.Refuse | None:
        """The message to send, None when it was the peer that refused."""
        return None if self.by_peer else wire.Refuse(self.code, self.text[:REASON_CHARS_MAX])


class SessionMachine:
    """One connection's handshake: Hello, Prove, Geometry; then live until it ends.

    The target dials and speaks first at every step.
    """

    def __init__(
        self, role: Role, me: Introduction, nonce: bytes, expected_peer: str | None = None
    ) -> None:
        self.role = role
        self.state = Session.OPENING
        self.peer_name = expected_peer or ""
        self.peer_incarnation = ""
        self.peer_geometry: wire.Geometry | None = None
        self.version = 0
        self._me = me
        self._nonce = nonce
        self._expected_peer = expected_peer

    @property
    def peer(self) -> str:
        """The peer's incarnation as transports know it: unique over restarts."""
        return f"{self.peer_name}/{self.peer_incarnation}"

    @property
    def live(self) -> bool:
        """True while transfers may be spoken of."""
        return self.state in (Session.LIVE, Session.CLOSING)

    def start(self) -> list[wire.Message]:
        """What to send when the connection is up."""
        return [self._hello()] if self.role == "target" else []

    def end(self) -> None:
        """The connection is over."""
        if self.state is not Session.ENDED:
            self.state = follow(SESSION, self.state, SessionEvent.END)

    def receive(self, message: wire.AnyMessage) -> list[wire.Message]:
        """Handle a message of the handshake or `Goodbye`; return what to answer.

        Raises SessionRefused when the session must end, leaving the state as it was.
        """
        match message:
            case wire.Refuse():
                raise SessionRefused(message.code, message.text, by_peer=True)
            case wire.Hello() if self.state is Session.OPENING:
                return self._receive_hello(message)
            case wire.Prove() if self.state is Session.PROVING:
                return self._receive_proof(message)
            case wire.Geometry() if self.state is Session.GREETING:
                return self._receive_geometry(message)
            case wire.Goodbye() if self.state is Session.LIVE:
                self.state = follow(SESSION, self.state, SessionEvent.GOODBYE)
                return []
            case wire.Goodbye() if self.state is Session.CLOSING:
                return []
            case _:
                kind = type(message).__name__
                raise SessionRefused("order", f"{kind} can't come while {self.state}")

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            self._me.name,
            self._me.incarnation,
            WIRE_VERSION_MIN,
            WIRE_VERSION_MAX,
            self._nonce,
            self.role,
        )

    def _receive_hello(self, hello: wire.Hello) -> list[wire.Message]:
        version = min(hello.version_max, WIRE_VERSION_MAX)
        if version < max(hello.version_min, WIRE_VERSION_MIN):
            raise SessionRefused(
                "version",
                f"wire versions {hello.version_min} to {hello.version_max} of the peer, "
                f"{WIRE_VERSION_MIN} to {WIRE_VERSION_MAX} here: none in common",
            )
        if hello.role == self.role:
            raise SessionRefused("role", f"both sides of this connection say {self.role}")
        if self._expected_peer is not None and hello.name != self._expected_peer:
            raise SessionRefused(
                "name",
                f"the engine at this address is {hello.name!r}, not {self._expected_peer!r}",
            )
        if not 1 <= len(hello.name.encode()) <= PEER_NAME_BYTES_MAX:
            raise SessionRefused("name", f"the peer's name has {len(hello.name)} characters")
        # Name and incarnation make one string: an incarnation with a slash could claim another's.
        if not _INCARNATION.fullmatch(hello.incarnation):
            raise SessionRefused("incarnation", "the peer's incarnation is not 32 hex digits")
        self.state = follow(SESSION, self.state, SessionEvent.HELLO)
        self.version = version
        self.peer_name = hello.name
        self.peer_incarnation = hello.incarnation
        return [wire.Prove()] if self.role == "target" else [self._hello()]

    def _receive_proof(self, proof: wire.Prove) -> list[wire.Message]:
        # The place of authentication: challenge and response over both nonces.
        if proof.method != "none":
            raise SessionRefused("auth", f"proof by {proof.method!r}, but none is configured")
        self.state = follow(SESSION, self.state, SessionEvent.PROVE)
        return [self._me.geometry] if self.role == "target" else [wire.Prove()]

    def _receive_geometry(self, theirs: wire.Geometry) -> list[wire.Message]:
        ours = self._me.geometry
        for field, mine, other in (
            ("transport", ours.transport, theirs.transport),
            ("model", ours.layout.model, theirs.layout.model),
        ):
            if mine != other:
                raise SessionRefused(
                    field, f"{field} is {other!r} at {self.peer_name}, {mine!r} at {self._me.name}"
                )
        try:
            theirs.layout.check()
        except UsageError as error:
            raise SessionRefused("layout", f"the layout of {self.peer_name}: {error}") from None
        self.state = follow(SESSION, self.state, SessionEvent.GREET)
        self.peer_geometry = theirs
        return [] if self.role == "target" else [ours]


class SourcePermit:
    """The source's count: it may post until `posts_until`, counted from sending `Renew`."""

    def __init__(self, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._granted_ns = ttl_ns
        self._number = 0
        self._sent: dict[int, int] = {}
        self.posts_until = 0
        self.answered_at = 0

    def renew(self, now: int) -> wire.Renew:
        """Ask again."""
        self._number += 1
        self._sent[self._number] = now
        return wire.Renew(self._number)

    @property
    def renewed_at(self) -> int:
        """When the latest renewal was sent; 0 before the first."""
        return self._sent.get(self._number, 0)

    def renew_at(self) -> int:
        """When the next renewal is due: by what was granted, which may be less than was asked."""
        lasts_ns = max(self._granted_ns, _PERMIT_TTL_MIN_NS)
        return self.renewed_at + lasts_ns // PERMIT_RENEWALS_PER_TTL

    def receive(self, granted: wire.Granted, now: int) -> None:
        """An answer came. One that answers nothing we asked is ignored (late or ill)."""
        sent = self._sent.get(granted.number)
        if sent is None:
            return
        ttl_ns = min(max(granted.ttl_ms, 0) * 1_000_000, self._ttl_ns)
        self._granted_ns = ttl_ns
        self.posts_until = max(self.posts_until, sent + int(ttl_ns * (1 - CLOCK_RATE_ERROR)))
        self.answered_at = now
        self._sent = {n: at for n, at in self._sent.items() if n >= granted.number}

    def silent_since(self) -> int | None:
        """When the oldest unanswered renewal was sent, None when all are answered."""
        unanswered = [at for at in self._sent.values() if at > self.answered_at]
        return min(unanswered, default=None)


class TargetPermit:
    """The target's count: it granted posting until `granted_until`, counted from its answer."""

    def __init__(self, ttl_ns: int, now: int) -> None:
        self._ttl_ns = ttl_ns
        self.granted_until = 0
        self._quiet_until = now + ttl_ns

    def receive(self, renew: wire.Renew, now: int) -> wire.Granted:
        """Grant a renewal."""
        self.granted_until = now + self._ttl_ns
        return wire.Granted(renew.number, self._ttl_ns // 1_000_000)

    def expect(self, now: int) -> None:
        """An offer is made: the source must ask for a permit within one time to live."""
        self._quiet_until = max(self._quiet_until, now + self._ttl_ns)

    @property
    def runs_out_at(self) -> int:
        """When the session must end if a lease of the peer is still held."""
        return max(self.granted_until, self._quiet_until)
