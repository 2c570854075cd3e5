"""The source's sessions: who may be written to, over which connection, under which permit.

Pure. Two rules: a newer session of a target ends the older one before anything else happens on
it, and nothing may be posted to a target without a running permit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from . import wire
from .context import nanoseconds
from .effects import HangUp, Submit, Transmit
from .limits import PERMIT_LINGER_S, REASON_CHARS_MAX, UNCLEAN_KEYS_MAX
from .ports import Connect, Disconnect
from .session import SessionMachine, SessionRefused, SourcePermit
from .template import Template, make_template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .context import Context
    from .keys import Key
    from .layout import Layout
    from .scheduler import Scheduler
    from .transfer import SourceTransfer

    OnLost = Callable[["Target", str, int], None]

_LINGER_NS: Final = nanoseconds(PERMIT_LINGER_S)


@dataclass(slots=True, eq=False)
class Target:
    """One target incarnation. `connection` and `permit` are None between sessions.

    connected: the transport can write to it. transfers: matched ones, until they are fenced.
    """

    peer: str
    name: str
    agent: int
    layout: Layout
    connected: bool = False
    connection: int | None = None
    permit: SourcePermit | None = None
    idle_since: int = 0
    templates: dict[str, Template] = field(default_factory=dict)
    transfers: dict[Key, SourceTransfer] = field(default_factory=dict)

    def template(self, ours: Layout, group: str) -> Template:
        """How blocks of `group` map onto this target's. Raises Refused, UsageError."""
        template = self.templates.get(group)
        if template is None:
            template = self.templates[group] = make_template(ours, group, self.layout, group)
        return template


class SourceSessions:
    """Every inbound connection of this engine, and the targets behind them.

    on_lost: called when a target has no session any more, after it is out of the tables.
    """

    def __init__(self, context: Context, scheduler: Scheduler, on_lost: OnLost) -> None:
        self._context = context
        self._emit = context.emit
        self._scheduler = scheduler
        self._on_lost = on_lost
        self._machines: dict[int, SessionMachine] = {}
        self._live: dict[int, Target] = {}
        self._targets: dict[str, Target] = {}
        self._latest: dict[str, Target] = {}  # by name: the incarnation that spoke last
        self._unclean: set[tuple[str, Key]] = set()
        self._unclean_full = False
        self._ttl_ns = nanoseconds(context.config.permit_ttl_s)

    # ------------------------------------------------------------ looking

    def owns(self, connection: int) -> bool:
        """True when this connection was accepted and is not over."""
        return connection in self._machines

    def is_live(self, connection: int) -> bool:
        """True when this connection has become a session."""
        return connection in self._live

    def target(self, peer: str) -> Target | None:
        """The target incarnation `peer`, while anything may still be written to it."""
        return self._targets.get(peer)

    def live_targets(self) -> list[Target]:
        """The targets that have a session."""
        return list(self._live.values())

    # ------------------------------------------------------------ opening and ending

    def accepted(self, connection: int) -> None:
        """A target has connected; it speaks first."""
        self._machines[connection] = SessionMachine(
            "source", self._context.introduction(None), self._context.entropy(16)
        )

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> Target | None:
        """Take a message; return the target when it is about transfers, else handle it."""
        machine = self._machines[connection]
        if not machine.live or isinstance(message, wire.Goodbye | wire.Refuse):
            self._shake_hands(connection, machine, message, now)
            return None
        target = self._live[connection]
        if isinstance(message, wire.Granted):
            assert target.permit is not None
            target.permit.receive(message, now)
            self._context.remind(target.permit.renew_at())
            self.allow(target, now)
            return None
        return target

    def _shake_hands(
        self, connection: int, machine: SessionMachine, message: wire.AnyMessage, now: int
    ) -> None:
        was_live = machine.live
        try:
            answers = machine.receive(message)
        except SessionRefused as refused:
            if refused.refusal is not None:
                self._emit(Transmit(connection, refused.refusal))
            self.end(connection, refused.text, now)
            return
        if machine.live and not was_live:
            self._begin(connection, machine, now)
        for answer in answers:
            self._emit(Transmit(connection, answer))
        if machine.live and not was_live:
            self._renew(self._live[connection], now)

    def _begin(self, connection: int, machine: SessionMachine, now: int) -> None:
        older = self._latest.pop(machine.peer_name, None)
        if older is not None:
            if older.connection is not None:
                self.end(older.connection, "a newer session of the same target came", now)
            if older.peer != machine.peer:
                self.forget(older)
        geometry = machine.peer_geometry
        assert geometry is not None
        target = self._targets.get(machine.peer)
        if target is None:
            agent = self._context.agent_for(machine.peer_name)
            target = Target(machine.peer, machine.peer_name, agent, geometry.layout)
            self._targets[machine.peer] = target
            self._emit(Submit(agent, Connect(machine.peer, geometry.metadata)))
        self._latest[machine.peer_name] = target
        self._live[connection] = target
        target.connection = connection
        target.permit = SourcePermit(self._ttl_ns)
        target.idle_since = now

    def end(self, connection: int, text: str, now: int) -> None:
        """A connection is over, or has to be. Idempotent."""
        machine = self._machines.pop(connection, None)
        if machine is None:
            return
        machine.end()
        self._emit(HangUp(connection, text))
        target = self._live.pop(connection, None)
        if target is not None:
            target.connection = target.permit = None
            target.idle_since = now
            self._context.remind(now + _LINGER_NS)
            self._scheduler.permit(target.peer, may_post=False)
            self._on_lost(target, text, now)

    def connected(self, peer: str, now: int) -> None:
        """The transport can write to `peer` from now on."""
        target = self._targets.get(peer)
        if target is not None:
            target.connected = True
            self.allow(target, now)

    def connect_failed(self, peer: str, text: str, now: int) -> None:
        """The transport can't use what `peer` told of its memory."""
        target = self._targets.pop(peer, None)
        if target is not None and target.connection is not None:
            refuse = wire.Refuse("metadata", text[:REASON_CHARS_MAX])
            self._emit(Transmit(target.connection, refuse))
            self.end(target.connection, text, now)
        if target is not None:
            self._drop(target)

    def remember_unclean(self, target: Target, key: Key) -> None:
        """A write of `key` ended by an error: to be told also after its transfer is forgotten."""
        if len(self._unclean) < UNCLEAN_KEYS_MAX:
            self._unclean.add((target.peer, key))
        else:
            self._unclean_full = True

    def is_clean(self, target: Target, key: Key) -> bool:
        """False when a write of a forgotten key ended by an error, or that is not known."""
        return not self._unclean_full and (target.peer, key) not in self._unclean

    def forget(self, target: Target) -> None:
        """Let a target go for good, if a newer incarnation took its place and nothing moves."""
        if self._latest.get(target.name) is not target and not target.transfers:
            self._drop(target)
        elif target.connection is None:
            self._context.remind(target.idle_since + _LINGER_NS)

    def _drop(self, target: Target) -> None:
        if self._targets.pop(target.peer, None) is not None:
            self._emit(Submit(target.agent, Disconnect(target.peer)))
        if self._latest.get(target.name) is target:
            del self._latest[target.name]
        self._scheduler.forget(target.peer)

    def _is_gone(self, target: Target, now: int) -> bool:
        """True when a target has left and was waited for long enough."""
        left = target.connection is None and not target.transfers
        return left and now >= target.idle_since + _LINGER_NS

    def tell(self, target: Target, message: wire.Message, key: Key) -> None:
        """Send a message about `key`, if there is a session to send it over."""
        if target.connection is not None:
            self._emit(Transmit(target.connection, message, key=key))

    # ------------------------------------------------------------ permit

    def allow(self, target: Target, now: int) -> None:
        """Let the scheduler know whether anything may be posted to `target` now."""
        may_post = (
            target.connected and target.permit is not None and now < target.permit.posts_until
        )
        self._scheduler.permit(target.peer, may_post=may_post)

    def touch(self, target: Target, now: int) -> None:
        """Something of this target starts: make sure that a permit is there or on its way."""
        target.idle_since = now
        if target.permit is not None and now >= target.permit.renew_at():
            self._renew(target, now)

    def tick(self, now: int, *, offered: Callable[[Target], bool]) -> None:
        """Renew permits of targets that something is moving or `offered` for; end silent ones.

        Forget targets that left and did not come back.
        """
        for target in self.live_targets():
            permit, connection = target.permit, target.connection
            assert permit is not None
            assert connection is not None
            silent_since = permit.silent_since()
            if silent_since is not None and now >= silent_since + self._ttl_ns:
                self.end(connection, "it went silent: renewals are not answered", now)
                continue
            self.allow(target, now)
            if now >= permit.renew_at() and self._wants_permit(target, now, offered):
                self._renew(target, now)
        for target in [t for t in self._targets.values() if self._is_gone(t, now)]:
            self._drop(target)

    def reminders(self, now: int, *, offered: Callable[[Target], bool]) -> Iterator[int]:
        """Every moment at which `tick` has something to do."""
        for target in self._live.values():
            assert target.permit is not None
            silent_since = target.permit.silent_since()
            if silent_since is not None:
                yield silent_since + self._ttl_ns
            if self._wants_permit(target, now, offered):
                yield target.permit.renew_at()
        for target in self._targets.values():
            if target.connection is None and not target.transfers:
                yield target.idle_since + _LINGER_NS

    def _renew(self, target: Target, now: int) -> None:
        assert target.permit is not None
        assert target.connection is not None
        self._emit(Transmit(target.connection, target.permit.renew(now)))
        self._context.remind(target.permit.renew_at())

    def _wants_permit(self, target: Target, now: int, offered: Callable[[Target], bool]) -> bool:
        lingering = now < target.idle_since + _LINGER_NS
        return lingering or bool(target.transfers) or offered(target)

    def close(self) -> None:
        """Say goodbye on every session."""
        for connection in self._live:
            self._emit(Transmit(connection, wire.Goodbye("the engine closes")))
