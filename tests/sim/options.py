"""Which faults a seed has, and how often: one frozen struct, drawn swarm-wise.

Each fault is first switched on or off, and only then gets its rate; a seed with every fault at a
mean rate would never show what one of them does alone. Two rules: rates are drawn here and
nowhere else, and a fault that is counted in `Fault` must fire within the 200 seeds of the test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Every kind of fault that the world can inject. Each has its counter."""

    DISORDER = "ready callbacks in any order"
    DRIFT = "clocks of different rates"
    SHRED = "bytes in arbitrary pieces"
    RESET = "connection reset at both ends"
    HALF_RESET = "connection reset at one end"
    EOF = "end of stream out of the blue"
    DIAL_REFUSED = "dial refused"
    DIAL_SLOW = "slow dial"
    PARTITION = "silent partition"
    PARTITION_ONE_WAY = "silent one-way partition"
    WORKER_BLOCKED = "I/O thread blocked in a call"
    WORKER_PAUSED = "I/O thread stopped and continued"
    PROCESS_PAUSED = "process stopped and continued"
    PROCESS_CRASHED = "process killed"
    ENGINE_CLOSED = "engine closed under load and started again"
    WRITE_TORN = "bytes of a write in any order"
    WRITE_LATE = "bytes of a write late"
    WRITE_REFUSED = "post refused"
    WRITE_FAILED = "write ended by an error, part of it in place"
    BUFFER_LATE = "bytes of a failed write out of a buffer, late"
    WRITE_DOUBTED = "write in doubt, and landed later"
    COMPLETION_LATE = "completion late"
    COMPLETION_LOST = "completion lost"


@dataclass(frozen=True, slots=True)
class Options:
    """The drawn world of one seed. Rates are chances per occasion, `_s` are virtual seconds."""

    faults: frozenset[Fault]
    engines: int
    agents: int
    transfers: int
    disorder: float
    latency_s: float
    drift: float
    shred: float
    dial_refused: float
    dial_slow: float
    network_every_s: float
    process_every_s: float
    worker_blocked: float
    write_torn: float
    write_late: float
    write_late_s: float
    write_refused: float
    write_failed: float
    write_doubted: float
    completion_late: float
    spread_s: float
    slots: int
    window: int
    window_bytes: int
    offers_max: int
    transfers_max: int
    cancel: float

    def has(self, fault: Fault) -> bool:
        return fault in self.faults


def draw(prng: random.Random) -> Options:
    """The options of a seed; every fourth seed or so has few faults or none."""
    share = prng.choice((0.0, 0.1, 0.3, 0.5, 0.8))
    faults = frozenset(fault for fault in Fault if prng.random() < share)

    def rate(fault: Fault, low: float, high: float) -> float:
        drawn = prng.uniform(low, high)  # drawn always: one switch leaves the others' rates alone
        return drawn if fault in faults else 0.0

    return Options(
        faults=faults,
        engines=prng.choice((2, 2, 2, 3, 4)),
        agents=prng.choice((1, 1, 2)),
        transfers=prng.randrange(20, 28),
        disorder=rate(Fault.DISORDER, 0.05, 1.0),
        latency_s=prng.choice((0.0001, 0.001, 0.02, 0.15)),
        drift=rate(Fault.DRIFT, 0.001, 0.009),
        shred=rate(Fault.SHRED, 0.05, 0.5),
        dial_refused=rate(Fault.DIAL_REFUSED, 0.05, 0.5),
        dial_slow=rate(Fault.DIAL_SLOW, 0.05, 0.5),
        network_every_s=prng.uniform(0.2, 5.0),
        process_every_s=prng.uniform(0.2, 5.0),
        worker_blocked=rate(Fault.WORKER_BLOCKED, 0.02, 0.2),
        write_torn=rate(Fault.WRITE_TORN, 0.1, 1.0),
        write_late=rate(Fault.WRITE_LATE, 0.02, 0.3),
        write_late_s=prng.uniform(0.1, 8.0),
        write_refused=rate(Fault.WRITE_REFUSED, 0.01, 0.1),
        write_failed=rate(Fault.WRITE_FAILED, 0.01, 0.1),
        write_doubted=rate(Fault.WRITE_DOUBTED, 0.01, 0.1),
        completion_late=rate(Fault.COMPLETION_LATE, 0.05, 0.5),
        spread_s=prng.choice((0.05, 1.0, 6.0)),
        slots=prng.choice((12, 16, 24)),
        window=prng.choice((1, 4, 32)),
        offers_max=prng.choice((2, 4096, 4096)),
        transfers_max=prng.choice((3, 1000, 1000)),
        cancel=prng.choice((0.0, 0.2, 0.5)),
        window_bytes=prng.choice((1500, 6000, 2**25)),  # a write has 1300 at most
    )
