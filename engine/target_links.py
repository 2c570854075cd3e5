"""The target's sessions: which sources it speaks to, and how it finds them again.

Pure. One `Link` per source that is spoken to. Two rules: a link is dialled only while something
needs it, and a source that lends our slots and goes silent loses its session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import wire
from .context import nanoseconds
from .effects import Dial, HangUp, Transmit
from .errors import UsageError
from .limits import REDIAL_DELAY_MAX_S, REDIAL_DELAY_MIN_S
from .session import SessionMachine, SessionRefused, TargetPermit
from .template import Template, make_template
from .transitions import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .context import Context
    from .keys import Key, Peer
    from .layout import Layout
    from .transfer import TargetTransfer

    OnLive = Callable[["Link", int], None]
    OnLost = Callable[["Link", str, str, int], None]


@dataclass(slots=True, eq=False)
class Link:
    """One source, as this target knows it. `transfers`: until their slots are released."""

    number: int
    peer: Peer
    transfers: dict[Key, TargetTransfer] = field(default_factory=dict)
    connection: int | None = None
    session: SessionMachine | None = None
    permit: TargetPermit | None = None
    dialling: bool = False
    redial_at: int | None = None
    redial_delay_ns: int = 0
    templates: dict[str, Template] = field(default_factory=dict)

    def template(self, ours: Layout, group: str) -> Template:
        """How the live source's blocks of `group` map onto ours. Raises Refused, UsageError."""
        assert self.session is not None
        assert self.session.peer_geometry is not None
        template = self.templates.get(group)
        if template is None:
            theirs = self.session.peer_geometry.layout
            template = self.templates[group] = make_template(theirs, group, ours, group)
        return template

    @property
    def live(self) -> bool:
        """True while transfers may be offered."""
        return self.session is not None and self.session.live

    @property
    def incarnation(self) -> str:
        """The source's life that the session is with, "" without one."""
        return self.session.peer_incarnation if self.session is not None else ""

    @property
    def waits(self) -> bool:
        """True while an offer has not left yet."""
        return any(t.lease.state is Lease.GRANTED for t in self.transfers.values())

    @property
    def lends(self) -> bool:
        """True while this session's incarnation holds a lease: its silence counts."""
        incarnation = self.incarnation
        return any(t.owed and t.exposed_to == incarnation for t in self.transfers.values())


class TargetLinks:
    """Every link of this engine.

    on_live(link, now): a session has begun. on_lost(link, code, text, now): a link has no session
    any more, or could not get one; what it needs next is decided after this returns.
    """

    def __init__(self, context: Context, on_live: OnLive, on_lost: OnLost) -> None:
        self._context = context
        self._emit = context.emit
        self._on_live = on_live
        self._on_lost = on_lost
        self._links: dict[Peer, Link] = {}
        self._by_number: dict[int, Link] = {}
        self._by_connection: dict[int, Link] = {}
        self._ttl_ns = nanoseconds(context.config.permit_ttl_s)

    # ------------------------------------------------------------ looking

    def owns(self, connection: int) -> bool:
        """True when this connection was dialled here and is not over."""
        return connection in self._by_connection

    def is_live(self, connection: int) -> bool:
        """True when this connection has become a session."""
        link = self._by_connection.get(connection)
        return link is not None and link.live

    def find(self, peer: Peer) -> Link | None:
        """The link to `peer`, if there is one."""
        return self._links.get(peer)

    def all(self) -> list[Link]:
        """Every link."""
        return list(self._by_number.values())

    # ------------------------------------------------------------ opening and ending

    def need(self, peer: Peer, now: int) -> Link:
        """The link to `peer`, made and dialled if need be.

        Raises UsageError when the same engine is spoken to under another address right now: two
        sessions of one pair would end each other.
        """
        link = self._links.get(peer) or self._readdress(peer, now)
        if link is None:
            link = Link(next(self._context.numbers), peer)
            self._links[peer] = self._by_number[link.number] = link
        self._dial(link)
        return link

    def _readdress(self, peer: Peer, now: int) -> Link | None:
        """Take over a link to the same engine at an older address, with the slots it has out."""
        link = next((one for one in self.all() if one.peer.name == peer.name), None)
        if link is None:
            return None
        if any(not transfer.ended for transfer in link.transfers.values()):
            raise UsageError(
                f"peer {peer.name!r} is spoken to at {link.peer.address}, not at {peer.address}: "
                "use one address per peer"
            )
        if link.connection is not None:
            self.end(link.connection, "moved", f"it is now at {peer.address}", now)
        if self._by_number.get(link.number) is not link:
            return None  # nothing of it was out: it is gone with its session
        del self._links[link.peer], self._by_number[link.number]
        # A new number: a dial of the old address that is still on its way answers to nobody.
        link.number, link.peer = next(self._context.numbers), peer
        link.dialling, link.redial_at = False, None
        self._links[peer] = self._by_number[link.number] = link
        return link

    def _dial(self, link: Link) -> None:
        if link.connection is None and not link.dialling:
            link.dialling = True
            link.redial_at = None
            self._emit(Dial(link.number, link.peer))

    def dialled(self, number: int, connection: int) -> None:
        """A connection to a link's source is up: speak first."""
        link = self._by_number.get(number)
        if link is None or not link.dialling:
            self._emit(HangUp(connection, "nothing needs this connection any more"))
            return
        link.dialling = False
        link.connection = connection
        introduction = self._context.introduction(link.peer.name)
        nonce = self._context.entropy(16)
        link.session = SessionMachine("target", introduction, nonce, link.peer.name)
        self._by_connection[connection] = link
        for message in link.session.start():
            self._emit(Transmit(connection, message))

    def dial_failed(self, number: int, text: str, now: int) -> None:
        """A link's source can't be reached."""
        link = self._by_number.get(number)
        if link is not None and link.dialling:
            link.dialling = False
            self._on_lost(link, "unreachable", text, now)
            self._rest(link, now)

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> Link | None:
        """Take a message; return the link when it is about transfers, else handle it."""
        link = self._by_connection[connection]
        session = link.session
        assert session is not None
        if not session.live or isinstance(message, wire.Goodbye | wire.Refuse):
            self._shake_hands(connection, link, session, message, now)
            return None
        if isinstance(message, wire.Renew):
            assert link.permit is not None
            self._emit(Transmit(connection, link.permit.receive(message, now)))
            return None
        return link

    def _shake_hands(
        self,
        connection: int,
        link: Link,
        session: SessionMachine,
        message: wire.AnyMessage,
        now: int,
    ) -> None:
        was_live = session.live
        try:
            answers = session.receive(message)
        except SessionRefused as refused:
            if refused.refusal is not None:
                self._emit(Transmit(connection, refused.refusal))
            code = "session-lost" if was_live else f"refused-{refused.code}"
            self.end(connection, code, refused.text, now)
            return
        for answer in answers:
            self._emit(Transmit(connection, answer))
        if session.live and not was_live:
            link.redial_delay_ns = 0
            link.permit = TargetPermit(self._ttl_ns, now)
            self._context.remind(link.permit.runs_out_at)
            self._on_live(link, now)

    def end(self, connection: int, code: str, text: str, now: int) -> None:
        """A connection is over, or has to be. Idempotent."""
        link = self._by_connection.pop(connection, None)
        if link is None:
            return
        assert link.session is not None
        self._emit(HangUp(connection, text))
        link.session.end()
        link.connection = link.session = link.permit = None
        link.templates = {}
        self._on_lost(link, code, text, now)
        self._rest(link, now)

    def _rest(self, link: Link, now: int) -> None:
        """No session: forget the source, or come back for evidence after a growing delay."""
        if not link.transfers:
            del self._links[link.peer], self._by_number[link.number]
            return
        if not any(transfer.owed for transfer in link.transfers.values()):
            return  # it has said all it can
        delay_max = nanoseconds(REDIAL_DELAY_MAX_S)
        delay = link.redial_delay_ns * 2 or nanoseconds(REDIAL_DELAY_MIN_S)
        link.redial_delay_ns = min(delay, delay_max)
        link.redial_at = now + link.redial_delay_ns
        self._context.remind(link.redial_at)

    # ------------------------------------------------------------ time

    def expect(self, link: Link, now: int) -> None:
        """An offer is made: from now on the source's silence counts."""
        assert link.permit is not None
        link.permit.expect(now)
        self._context.remind(link.permit.runs_out_at)

    def tick(self, now: int) -> None:
        """Dial again, and end the sessions of sources that went silent with our slots."""
        for link in self.all():
            if link.redial_at is not None and now >= link.redial_at:
                self._dial(link)
            elif link.permit is not None and now >= link.permit.runs_out_at and link.lends:
                assert link.connection is not None
                text = "it went silent: its permit ran out"
                self.end(link.connection, "permit", text, now)

    def reminders(self, now: int) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for link in self._by_number.values():
            if link.redial_at is not None:
                yield link.redial_at
            elif link.permit is not None and link.lends:
                yield link.permit.runs_out_at
            elif link.permit is not None and link.waits:
                # Offers that have not left yet: nobody says when they do, so look again.
                yield now + self._ttl_ns

    def close(self) -> None:
        """Say goodbye on every session."""
        for link in self._by_number.values():
            if link.live and link.connection is not None:
                self._emit(Transmit(link.connection, wire.Goodbye("the engine closes")))
