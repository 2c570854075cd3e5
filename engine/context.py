"""What the roles of one engine share: who it is, what it holds, and where effects go.

Pure. One rule: it is filled once, before the first event.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from . import wire
from .session import Introduction
from .transfer import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .config import Config
    from .effects import Effect
    from .layout import Layout
    from .ports import ProcessIdentity, WriteBounds


@dataclass(slots=True)
class Context:
    """One engine's facts. `metadata[i]` is agent i's; `entropy` gives fresh bytes."""

    config: Config
    layout: Layout
    incarnation: str
    transport: str
    bounds: WriteBounds
    metadata: Sequence[bytes]
    process: ProcessIdentity
    entropy: Callable[[int], bytes]
    effects: deque[Effect] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    wake_at: int | None = None

    def emit(self, effect: Effect) -> None:
        """Ask for something to be done."""
        self.effects.append(effect)

    def remind(self, when: int) -> None:
        """Something has to be done at `when`, unless it was done before."""
        if self.wake_at is None or when < self.wake_at:
            self.wake_at = when

    def agent_for(self, peer_name: str) -> int:
        """Which agent serves a peer; the same over restarts of either side."""
        return zlib.crc32(peer_name.encode()) % len(self.metadata)

    def introduction(self, metadata_for: str | None) -> Introduction:
        """What to tell a peer; memory metadata only to the one that will write here."""
        metadata = b"" if metadata_for is None else self.metadata[self.agent_for(metadata_for)]
        geometry = wire.Geometry(self.layout, 1, self.transport, self.process, metadata)
        return Introduction(self.config.name, self.incarnation, geometry)

    def deadlines(
        self,
        match_s: float | None = None,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> Deadlines:
        """Deadlines in ns, from seconds; None takes the configured default."""
        config = self.config
        return Deadlines(
            nanoseconds(config.match_s if match_s is None else match_s),
            nanoseconds(config.stall_s if stall_s is None else stall_s),
            nanoseconds(config.total_s if total_s is None else total_s),
        )


def nanoseconds(seconds: float) -> int:
    """Seconds as integer nanoseconds."""
    return int(seconds * 1_000_000_000)
