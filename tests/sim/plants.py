"""Bugs planted into product code, to prove that the checkers see them.

Each plant patches one decision of the engine or its I/O worker while it is entered. Two rules: a
plant changes product code only, never the simulator; and it is undone when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvferry.engine import wire
from kvferry.engine.lease import Evidence
from kvferry.engine.pipeline import Pipeline
from kvferry.engine.source_sessions import SourceSessions
from kvferry.engine.target import TargetSide
from kvferry.engine.transfer import SourceTransfer
from kvferry.engine.transitions import Lease
from kvferry.transports.worker import Worker


@contextmanager
def release_before_evidence() -> Iterator[None]:
    """The target frees its slots when the caller is told, as if an outcome were evidence."""
    end = TargetSide._end

    def end_and_free(
        self: TargetSide, link: Any, transfer: Any, event: Any, error: Any, now: int, **more: Any
    ) -> None:
        end(self, link, transfer, event, error, now, **more)
        if transfer.lease.state is Lease.DRAINING:
            self._prove(link, transfer, Evidence.DRAINED, now)

    with patch.object(TargetSide, "_end", end_and_free):
        yield


@contextmanager
def post_after_permit() -> Iterator[None]:
    """The I/O worker posts whatever it was handed, however late it gets to it."""
    queue = Worker._queue

    def queue_for_ever(self: Worker, command: Any) -> None:
        queue(self, replace(command, not_after=2**63 - 1))

    with patch.object(Worker, "_queue", queue_for_ever):
        yield


@contextmanager
def drop_drained() -> Iterator[None]:
    """The source never says `Drained`."""
    tell = SourceSessions.tell

    def tell_others(self: SourceSessions, target: Any, message: Any, key: Any) -> None:
        if not isinstance(message, wire.Drained):
            tell(self, target, message, key)

    with patch.object(SourceSessions, "tell", tell_others):
        yield


@contextmanager
def done_before_settled() -> Iterator[None]:
    """The source reports done when its last write is handed over instead of when it settled."""
    ready = property(lambda self: self.sealed and self.pipeline and not self.pipeline.has_work)
    with (
        patch.object(SourceTransfer, "complete", ready),
        patch.object(Pipeline, "missing", lambda self: {}),
    ):
        yield


@contextmanager
def doubt_taken_for_failure() -> Iterator[None]:
    """The I/O worker takes an error that proves nothing for the end of the write."""
    doubt = Worker._doubt

    def end_it(self: Worker, flight: Any, text: str, now: int) -> None:
        doubt(self, flight, text, now)
        del self._doubtful[flight.post.write]
        self._end(flight, "failed", text, posted=True)

    with patch.object(Worker, "_doubt", end_it):
        yield


@contextmanager
def error_taken_for_evidence() -> Iterator[None]:
    """The target takes the source's word for its slots even after a write ended by an error."""
    end = TargetSide._end

    def end_clean(self: TargetSide, *positional: Any, clean: bool = True, **more: Any) -> None:
        end(self, *positional, clean=True, **more)

    with patch.object(TargetSide, "_end", end_clean):
        yield


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    plant.__name__: plant
    for plant in (
        release_before_evidence,
        post_after_permit,
        drop_drained,
        done_before_settled,
        doubt_taken_for_failure,
        error_taken_for_evidence,
    )
}
