"""The seam for faults: what a fate may be, and what the fabric carries without its poster."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine.ports import BackendError, NotPosted, Post, Progress, Region
from kvferry.transports.memory import Fabric, Fate, MemoryBackend, Piece, ProcessMemory, Report

ONE = np.ones(1, dtype=np.int64)


def piece(at: int) -> Piece:
    return Piece(at, ONE, ONE, ONE)


@pytest.mark.parametrize(
    "reports",
    [
        (Report(9, Progress.DONE),),
        (Report(9, Progress.FAILED),),
        (Report(10, Progress.DONE), Report(11, Progress.DOUBT)),
        (Report(20, Progress.PENDING), Report(15, Progress.DONE)),
    ],
)
def test_a_fate_that_settles_before_something_follows_is_refused(
    reports: tuple[Report, ...],
) -> None:
    with pytest.raises(ValueError, match=r"settles|order"):
        Fate((piece(10), piece(3)), reports)


def test_a_poll_hears_the_last_report_whose_time_has_come() -> None:
    fate = Fate((piece(30),), (Report(20, Progress.DOUBT, "why"), Report(30, Progress.DONE)))
    heard = [fate.progress(now)[0] for now in (0, 19, 20, 29, 30, 99)]
    assert heard == ["pending", "pending", "doubt", "doubt", "done", "done"]
    assert Fate((), ()).progress(99) == ("pending", "")


class TornCourier:
    """First half at 100, second half at 200; done is told at 300, or never."""

    lost = False

    def carry(self, source: str, target: str, post: Post, now: int) -> Fate:
        size = int(post.lengths[0]) // 2
        half = np.array([size], dtype=np.int64)
        pieces = (
            Piece(200, post.source + size, post.target + size, half),
            Piece(100, post.source, post.target, half),
        )
        return Fate(pieces, () if self.lost else (Report(300, Progress.DONE),))


class Bench:
    def __init__(self) -> None:
        self.now = 0
        self.fabric = Fabric(lambda: self.now)
        self.courier = TornCourier()
        self.pools = [np.full(64, 7, dtype=np.uint8), np.zeros(64, dtype=np.uint8)]
        self.near, self.far = (
            MemoryBackend(
                name,
                [Region(pool.ctypes.data, 64)],
                fabric=self.fabric,
                memory=ProcessMemory(),
                courier=self.courier,
            )
            for name, pool in zip(("near", "far"), self.pools, strict=True)
        )
        self.near.open()
        self.near.connect("p", self.far.open())

    def post(self) -> object:
        source, target = (np.array([pool.ctypes.data], dtype=np.int64) for pool in self.pools)
        handle, progress, _ = self.near.post(
            Post(1, "p", source, target, np.array([64], dtype=np.int64), 2**62)
        )
        assert progress == "pending"
        return handle

    def landed(self) -> int:
        return int(np.count_nonzero(self.pools[1]))


def test_torn_writes_land_piece_by_piece_while_they_are_polled() -> None:
    bench = Bench()
    handle = bench.post()
    seen = []
    for bench.now in (99, 100, 200, 299, 300):
        seen.append((bench.near.poll(handle)[0], bench.landed()))
    assert seen == [("pending", 0), ("pending", 32), ("pending", 64), ("pending", 64), ("done", 64)]


def test_bytes_of_an_agent_that_ended_still_land() -> None:
    bench = Bench()
    bench.post()
    bench.near.close(["the write"])
    assert bench.fabric.next_landing() == 100
    bench.now = 200
    bench.fabric.advance()
    assert bench.landed() == 64
    assert bench.fabric.next_landing() is None


def test_a_lost_completion_stays_pending() -> None:
    bench = Bench()
    bench.courier.lost = True
    handle = bench.post()
    bench.now = 10**12
    assert bench.near.poll(handle)[0] == "pending"
    assert bench.landed() == 64


def test_severing_drops_what_has_not_landed_fails_it_and_lasts_until_connected_again() -> None:
    bench = Bench()
    handle = bench.post()
    bench.now = 150
    bench.fabric.sever("near", "far", "cut")
    bench.now = 500
    assert bench.near.poll(handle) == ("failed", "cut")
    assert bench.landed() == 32
    with pytest.raises(NotPosted, match="cut"):
        bench.post()
    bench.near.disconnect("p")
    with pytest.raises(BackendError, match="can't be read"):
        bench.near.connect("p", b"?")
    bench.now = 0
    bench.near.connect("p", bytes([0x81]) + b"\xa5agent\xa3far")
    bench.post()
