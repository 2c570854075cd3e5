"""What the demo's parent and its two processes say to each other: JSON lines over pipes.

Values only. Two rules: every command gets exactly one answer, and only `Progress` comes without
having been asked for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .pattern import NOBODY

Step = Literal["open", "prepare", "move", "check", "close"]


class Command(msgspec.Struct, frozen=True):
    """Do one step. first, stop: the requests of the round. source: the prefill engine's address."""

    step: Step
    first: int = 0
    stop: int = 0
    source: str = ""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The engine is up. address: where it listens, empty where it does not."""

    address: str
    transport: str
    lane: str


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The round's slots are taken and hold what they must before the transfers."""


class Difference(msgspec.Struct, frozen=True):
    """The first element of one slot owner that is not what it must be, and how many there are.

    request: whose slot it is, `NOBODY` for a slot that no request ever held; its token is
    then counted over the pool. needed: False for a slot into which nothing may have been written.
    """

    request: int
    slot: int
    layer: int
    kind: str
    head: int
    token: int
    dim: int
    expected: int
    got: int
    elements: int
    needed: bool

    def __str__(self) -> str:
        if self.needed:
            what = f"request {self.request}, slot {self.slot}"
        elif self.request == NOBODY:
            what = f"slot {self.slot}, never used, was changed"
        else:
            what = f"slot {self.slot}, last used for request {self.request}, was changed"
        more = f", and {self.elements - 1} more elements" if self.elements > 1 else ""
        return (
            f"{what}: layer {self.layer}, kind {self.kind}, head {self.head}, "
            f"token {self.token}, dim {self.dim}: expected 0x{self.expected:04x}, "
            f"got 0x{self.got:04x}{more}"
        )


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The round's transfers have ended on this side. Only decode fills the second paragraph.

    lags_ms: how late the 1 ms ticker was, each time. cpu_s: of this process while moving.

    seconds: from the first receive to the last done. latencies_ms: receive to done, per request.
    bytes: in place at the target. in_flight: most transfers at once.
    """

    lags_ms: list[float]
    cpu_s: float
    failures: list[str]
    seconds: float = 0
    latencies_ms: list[float] = []
    bytes: int = 0
    in_flight: int = 0


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Every byte of the pool was compared."""

    differences: list[Difference] = []


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The engine is closed. faults: slots that never came back and the like."""

    cpu_s: float
    peak_bytes: int
    faults: list[str]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """So many more transfers are done."""

    done: int


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """The process can't go on, and why."""

    text: str


Answer = Opened | Prepared | Moved | Checked | Closed
Message = Answer | Progress | Trouble
