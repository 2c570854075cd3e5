"""What a demo run showed: the figures of its rounds, and whether that is enough.

Two rules: `reasons` is empty exactly when the run is verified; throughput counts the time from
the first receive to the last done of each round, and nothing of preparing or comparing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from .messages import Checked, Closed, Difference, Moved
    from .workload import Settings, Workload

# What a run must have moved before it may call itself verified.
REQUESTS_MIN: Final = 64
BYTES_MIN: Final = 512 * 1024 * 1024
IN_FLIGHT_MIN: Final = 8


@dataclass(slots=True)
class Side:
    """One process. lags_ms and cpu_moving_s: while bytes moved; cpu_s: from its start to its end.

    peak_bytes: the most memory it had resident.
    """

    lags_ms: list[float] = field(default_factory=list)
    cpu_moving_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    def add(self, moved: Moved) -> None:
        """Count one round."""
        self.lags_ms += moved.lags_ms
        self.cpu_moving_s += moved.cpu_s

    def close(self, closed: Closed) -> None:
        """Take what only the end of a process tells."""
        self.cpu_s, self.peak_bytes = closed.cpu_s, closed.peak_bytes


@dataclass(slots=True)
class Outcome:
    """A run so far. seconds: while bytes moved. requests: done, and compared since."""

    settings: Settings
    workload: Workload
    transport: str = ""
    lane: str = ""
    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    failures: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    closed: bool = False

    def add_round(self, sent: Moved, received: Moved, checked: Checked) -> None:
        """Count one round."""
        self.prefill.add(sent)
        self.decode.add(received)
        self.requests += len(received.latencies_ms)
        self.bytes += received.bytes
        self.seconds += received.seconds
        self.in_flight = max(self.in_flight, received.in_flight)
        self.latencies_ms += received.latencies_ms
        self.failures += sent.failures + received.failures
        self.differences += [d for d in checked.differences if d not in self.differences]

    def close(self, prefill: Closed, decode: Closed) -> None:
        """Both processes have closed their engines."""
        self.prefill.close(prefill)
        self.decode.close(decode)
        self.failures += prefill.faults + decode.faults
        self.closed = True

    @property
    def verified(self) -> bool:
        """Every needed byte is in place, no other byte changed, and enough was moved to say so."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why this run is not verified; empty when it is."""
        reasons = [str(difference) for difference in self.differences] + self.failures
        if self.requests < self.settings.requests:
            reasons.append(f"only {self.requests} of {self.settings.requests} requests are done")
        if self.bytes != self._bytes_expected():
            reasons.append(f"{self.bytes} bytes were moved, {self._bytes_expected()} are needed")
        if not self.closed:
            reasons.append("the run did not come to its end")
        return reasons + self._too_little()

    def _bytes_expected(self) -> int:
        """Whole blocks of every request."""
        blocks = sum(self.workload.blocks(i) for i in range(self.settings.requests))
        return blocks * self.workload.geometry.block_bytes

    def _too_little(self) -> list[str]:
        least = []
        if self.requests < REQUESTS_MIN:
            least.append(f"{self.requests} requests are too few, verifying takes {REQUESTS_MIN}")
        if self.bytes < BYTES_MIN:
            least.append(
                f"{self.bytes / 2**20:.0f} MiB are too few, verifying takes "
                f"{BYTES_MIN // 2**20} MiB: more --requests or a larger --scale"
            )
        if self.in_flight < IN_FLIGHT_MIN:
            least.append(
                f"{self.in_flight} in flight at once are too few, verifying takes {IN_FLIGHT_MIN}"
            )
        return least

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second while bytes moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


def percentiles(values: list[float], *wanted: int) -> dict[str, float]:
    """{"p50": ...} of some values, and "max"; zeros when there are none."""
    known = np.asarray(values or [0.0])
    found = {f"p{q}": round(float(np.percentile(known, q)), 3) for q in wanted}
    return found | {"max": round(float(known.max()), 3)}
