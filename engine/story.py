"""The flight recorder of one transfer: its last events, to be printed with every internal error.

Pure; bounded.
"""

from __future__ import annotations

from collections import deque

from .limits import STORY_EVENTS_MAX


class Story:
    """What happened to a transfer, latest last; the oldest events are forgotten first."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._events: deque[tuple[int, str]] = deque(maxlen=STORY_EVENTS_MAX)

    def note(self, now: int, text: str) -> None:
        """Remember an event at `now` (ns)."""
        self._events.append((now, text))

    def __str__(self) -> str:
        if not self._events:
            return f"{self._title}: nothing happened"
        start = self._events[0][0]
        lines = [f"  {(now - start) / 1e6:10.3f} ms  {text}" for now, text in self._events]
        return "\n".join([f"{self._title}:", *lines])
