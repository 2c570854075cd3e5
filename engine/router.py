"""The whole decision of an engine: events in, effects out. Pure.

A thin union of the two roles: it knows which connection belongs to which side. The driver calls
one method per event and then carries out every `next_effect()`. Two rules: every method takes the
time as an argument, and a peer's mistake never raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .effects import Report
from .errors import Failed
from .ports import Stopped
from .source import SourceSide
from .target import TargetSide

if TYPE_CHECKING:
    from . import wire
    from .context import Context
    from .effects import Effect
    from .ports import Event
    from .transfer import Deadlines


class Router:
    """Events to machines. `target` and `source` are also what the API calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.target = TargetSide(context)
        self.source = SourceSide(context)
        self.broken = ""

    # ------------------------------------------------------------ events

    def accepted(self, connection: int, now: int) -> None:
        """A peer has connected."""
        self.source.sessions.accepted(connection)

    def dialled(self, link: int, connection: int, now: int) -> None:
        """A `Dial` succeeded."""
        self.target.links.dialled(link, connection)

    def dial_failed(self, link: int, text: str, now: int) -> None:
        """A `Dial` failed."""
        self.target.links.dial_failed(link, text, now)

    def received(self, connection: int, message: wire.AnyMessage, now: int) -> None:
        """A message came; one of a connection that was given up is void."""
        if self.target.links.owns(connection):
            self.target.received(connection, message, now)
        elif self.source.sessions.owns(connection):
            self.source.received(connection, message, now)

    def lost(self, connection: int, text: str, now: int) -> None:
        """A connection ended, or broke the protocol's framing."""
        self.target.links.end(connection, "session-lost", text, now)
        self.source.sessions.end(connection, text, now)

    def handshake_expired(self, connection: int, now: int) -> None:
        """A connection had its time to become a session."""
        if not self.target.links.is_live(connection) and not self.source.sessions.is_live(
            connection
        ):
            self.lost(connection, "the handshake took too long", now)

    def worker_event(self, agent: int, event: Event, now: int) -> None:
        """What one agent's worker reports."""
        if isinstance(event, Stopped):
            self._stopped(agent, event, now)
        else:
            self.source.worker_event(event, now)

    def _stopped(self, agent: int, event: Stopped, now: int) -> None:
        text = event.text or "the agent was closed"
        self.source.mover.transport_stopped(agent, event.unsettled, text, now)
        if event.text:
            self.broken = event.text
            self._context.emit(Report(logging.ERROR, f"the transport stopped: {event.text}"))
            failure = Failed(
                f"the transport stopped: {event.text}", by="transport", code="transport-stopped"
            )
            self.close(now, failure)

    def process_ended(self, incarnation: str, now: int) -> None:
        """A watched source's process has ended, and nothing of it can land any more."""
        self.target.process_ended(incarnation, now)

    def tick(self, now: int) -> None:
        """Do what is due, and find out when something is due next."""
        self.target.tick(now)
        self.source.tick(now)
        moments = [*self.target.reminders(now), *self.source.reminders(now)]
        self._context.wake_at = min(moments, default=None)

    def pump(self, now: int) -> bool:
        """Hand over some writes; True when more could be."""
        return self.source.mover.pump(now)

    # ------------------------------------------------------------ the driver's questions

    @property
    def wake_at(self) -> int | None:
        """When to `tick`, None when nothing is due."""
        return self._context.wake_at

    @property
    def has_effects(self) -> bool:
        """True when something is to be done."""
        return bool(self._context.effects)

    def next_effect(self) -> Effect | None:
        """What is to be done next, None when nothing is."""
        return self._context.effects.popleft() if self._context.effects else None

    def deadlines(
        self, match_s: float | None, stall_s: float | None, total_s: float | None
    ) -> Deadlines:
        """Deadlines from seconds; None takes the configured default."""
        return self._context.deadlines(match_s, stall_s, total_s)

    def check_usable(self) -> None:
        """Raise Failed when the transport has stopped."""
        if self.broken:
            raise Failed(
                f"the transport stopped: {self.broken}; close this engine and make a new one",
                by="transport",
                code="transport-stopped",
            )

    def close(self, now: int, failure: Failed | None = None) -> None:
        """End every transfer, cancelled or with `failure`; refuse what comes. Idempotent."""
        self.target.close(now, failure)
        self.source.close(now, failure)

    def check_integrity(self) -> None:
        """Raise AssertionError when any table contradicts another."""
        self.target.check_integrity()
        self.source.check_integrity()
