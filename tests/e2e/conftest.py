"""A pair of living processes per lane, and in each a fresh engine per test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.pair import Pair
from tests.e2e.process import LANES, Process

if TYPE_CHECKING:
    from collections.abc import Iterator


class Lane:
    """Both processes of one lane: UCX reads its settings once per process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._both = self._start()

    def _start(self) -> tuple[Process, Process]:
        return Process(self._name), Process(self._name)

    def processes(self) -> tuple[Process, Process]:
        """Both, alive: a test that lost one costs the next test nothing."""
        if any(process.ended for process in self._both):
            self.kill()
            self._both = self._start()
        return self._both

    def kill(self) -> None:
        for process in self._both:
            process.kill()


@pytest.fixture(scope="session", params=LANES)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    lane = Lane(request.param)
    yield lane
    codes = [process.exit(0) for process in lane.processes()]
    lane.kill()
    assert codes == [0, 0]


@pytest.fixture
def pair(lane: Lane) -> Iterator[Pair]:
    pair = Pair(*lane.processes())
    pair.open()
    yield pair
    pair.close()
