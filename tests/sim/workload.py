"""Which requests a seed has: who sends what to whom, when, and what goes wrong on each side.

Everything is drawn before the run. Two rules: a request is data and does nothing, and what one
request draws never depends on what happens to another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvferry.engine.limits import PRIORITY_MAX

if TYPE_CHECKING:
    from .options import Options

TOKENS_MAX = 26
MATCH_S = 2.0
STALL_S = 4.0
TOTAL_S = 10.0


class Manner(StrEnum):
    """How a caller behaves on one side of a request."""

    GOOD = "good"
    CANCELS = "cancels at some moment"
    LEAVES = "leaves its scope at some moment"
    DIES = "its task is cancelled at some moment"
    ABSENT = "never comes"
    SHORT = "pushes too little"
    SEALS = "finishes, leaves and looks later"


TARGET_MANNERS = (Manner.CANCELS, Manner.CANCELS, Manner.LEAVES, Manner.DIES, Manner.ABSENT)
SOURCE_MANNERS = (*TARGET_MANNERS, Manner.SHORT, Manner.SEALS)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `number` names it, everything else is what the callers will do."""

    number: int
    source: str
    target: str
    tokens: int
    target_tokens: int
    min_tokens: int | None
    chunks: int
    source_at_s: float
    target_at_s: float
    gap_s: float
    source_manner: Manner
    target_manner: Manner
    source_moment_s: float
    target_moment_s: float
    tries: int
    overlap: bool
    advances: bool
    aux_bytes: int
    nested: bool
    priority: int

    @property
    def name(self) -> str:
        return f"r{self.number}"


def draw_requests(
    prng: random.Random, priorities: random.Random, options: Options, names: list[str]
) -> list[Request]:
    """The requests of a seed."""
    return [
        _draw_request(prng, priorities.randint(-PRIORITY_MAX, PRIORITY_MAX), options, names, number)
        for number in range(options.transfers)
    ]


def _draw_request(
    prng: random.Random, priority: int, options: Options, names: list[str], number: int
) -> Request:
    source, target = prng.sample(names, 2)
    tokens = prng.randint(1, TOKENS_MAX)
    start = prng.uniform(0.0, options.spread_s)
    near = prng.choice((0.0, 0.001, 0.02, 1.0))
    wants_other = prng.random() < 0.2
    gap_s = prng.choice((0.0, 0.0005, 0.02, 0.3, 0.9))

    def manner(kinds: tuple[Manner, ...]) -> Manner:
        drawn = prng.choice(kinds)
        return drawn if prng.random() < options.cancel else Manner.GOOD

    def moment() -> float:
        return prng.expovariate(1.0 / prng.choice((0.0005, 0.005, 0.1, 1.0)))

    return Request(
        number=number,
        source=source,
        target=target,
        tokens=tokens,
        target_tokens=max(1, tokens + prng.randint(-5, 3)) if wants_other else tokens,
        min_tokens=prng.choice((None, 1)),
        chunks=prng.choice((1, 2, 4, 6)),
        source_at_s=start + prng.uniform(0.0, near),
        target_at_s=start + prng.uniform(0.0, near),
        gap_s=gap_s,
        source_manner=manner(SOURCE_MANNERS),
        target_manner=manner(TARGET_MANNERS),
        source_moment_s=moment(),
        target_moment_s=moment(),
        tries=prng.choice((1, 1, 2, 3)),
        overlap=prng.random() < 0.2,
        advances=prng.random() < 0.4,
        aux_bytes=prng.choice((0, 20, 20, 60_000)),
        nested=prng.random() < 0.2,
        priority=priority,
    )
