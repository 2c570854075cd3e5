"""The lease machine: permission to touch one transfer's slots, and the evidence that ends it.

Pure. Two rules: slots leave a lease only together with evidence, and each slot leaves once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from .transitions import LEASE, Lease, LeaseEvent, follow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .ports import Int64Array

Slots = dict[str, "Int64Array"]


class Evidence(StrEnum):
    """Why a slot may be used again. Nothing else frees one.

    NEVER_EXPOSED (F0): the other side was never told of it, or it was never handed to a write.
    DRAINED (F1): the source's word that every write of the key has settled, and that each one that
        was posted was done: what ended by an error may leave bytes that are still to land.
    ENDED (F2): the source's process ended on this host, and of what it had sent nothing is still
        to be read out of the kernel here.
    SETTLED: the source's own writes that read from it have settled.
    """

    NEVER_EXPOSED = "never-exposed"
    DRAINED = "drained"
    ENDED = "source-ended"
    SETTLED = "settled"


class LeaseMachine:
    """One transfer's lease on one side, holding the slots that are not released yet."""

    def __init__(self, slots: Mapping[str, Int64Array] | None = None) -> None:
        self.state = Lease.GRANTED
        self._held: dict[str, list[Int64Array]] = {}
        if slots is not None:
            self.hold(slots)

    @property
    def fenced(self) -> bool:
        """True once nothing of this lease can be touched any more."""
        return self.state is Lease.FENCED

    @property
    def slots_held(self) -> int:
        """Slots that wait for evidence."""
        return sum(len(part) for parts in self._held.values() for part in parts)

    def hold(self, slots: Mapping[str, Int64Array]) -> None:
        """Add slots to the lease."""
        for group, array in slots.items():
            self._held.setdefault(group, []).append(array)

    def handle(self, event: LeaseEvent) -> None:
        """Change state. Raises IllegalTransition, leaving everything as it was.

        `PROVE` is not accepted here: evidence comes with `prove`.
        """
        if event is LeaseEvent.PROVE:
            raise ValueError("evidence is given by prove()")
        self.state = follow(LEASE, self.state, event)

    def prove(self) -> Slots:
        """Evidence came for the whole lease: fence it and return every slot that it held."""
        self.state = follow(LEASE, self.state, LeaseEvent.PROVE)
        released = {
            group: parts[0] if len(parts) == 1 else np.concatenate(parts)
            for group, parts in self._held.items()
            if parts
        }
        self._held = {}
        return released
