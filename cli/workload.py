"""What a demo run consists of: which requests, in which rounds, in pools of how many slots.

Pure: both processes work it out for themselves from the same settings. Two rules: the same
settings give the same workload, and a round fits into the pools.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import msgspec
import numpy as np

from ..engine.errors import UsageError
from .models import MODELS, Geometry

Plant = Literal["", "wrong-anchor", "flip-byte", "extra-byte"]
PLANTS: Final[tuple[Plant, ...]] = get_args(Plant)

PROMPT_TOKENS_MIN: Final = 512  # of a request at scale 1
PROMPT_TOKENS_MAX: Final = 2048
REQUEST_BYTES_MEAN: Final = 10 * 1024 * 1024  # what the default scale aims at
ROUND_BYTES: Final = 256 * 1024 * 1024
SPARE_SLOTS: Final = 0.25  # of a pool: never all of it is in use, as in a serving engine


class Settings(msgspec.Struct, frozen=True):
    """What the user chose. `scale` reduces layers and tokens; `plant` plants one fault."""

    model: str
    scale: float
    requests: int
    seed: int
    in_flight: int
    plant: Plant = ""


class Workload(msgspec.Struct, frozen=True):
    """The requests of a run.

    geometry: scaled. tokens: of each request. rounds: (first, stop) of the requests that are
    prepared together, moved together and verified together. slots: of each side's pool.
    planted: the request that a planted fault hits, the longest one.
    """

    geometry: Geometry
    tokens: list[int]
    rounds: list[tuple[int, int]]
    slots: int
    planted: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of one side's pool."""
        return self.slots * self.geometry.block_bytes

    def blocks(self, request: int) -> int:
        """Blocks of one request."""
        return self.geometry.blocks(self.tokens[request])


def default_scale(model: str) -> float:
    """The scale at which an average request has `REQUEST_BYTES_MEAN` bytes, at most 1."""
    full = MODELS[model].token_bytes * (PROMPT_TOKENS_MIN + PROMPT_TOKENS_MAX) / 2
    # Layers and tokens shrink alike, so bytes go with the square.
    return min(1.0, round(math.sqrt(REQUEST_BYTES_MEAN / full), 2))


def make_workload(settings: Settings) -> Workload:
    """The workload of these settings. Raises UsageError that names the setting out of bounds."""
    for name, value in (("requests", settings.requests), ("in-flight", settings.in_flight)):
        if value < 1:
            raise UsageError(f"--{name} is {value}, must be at least 1")
    if not 0 < settings.scale <= 1:
        raise UsageError(f"--scale is {settings.scale}, must be over 0 and at most 1")
    if settings.seed < 0:
        raise UsageError(f"--seed is {settings.seed}, must be at least 0")
    geometry = MODELS[settings.model].scaled(settings.scale)
    random = np.random.default_rng(settings.seed)
    full = random.integers(PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX, settings.requests, endpoint=True)
    tokens = [max(1, round(int(count) * settings.scale)) for count in full]
    mean = geometry.token_bytes * sum(tokens) / len(tokens)
    size = max(settings.in_flight, int(ROUND_BYTES / mean))
    rounds = [
        (first, min(first + size, settings.requests)) for first in range(0, settings.requests, size)
    ]
    used = max(sum(geometry.blocks(tokens[i]) for i in range(*both)) for both in rounds)
    return Workload(
        geometry=geometry,
        tokens=tokens,
        rounds=rounds,
        slots=math.ceil(used * (1 + SPARE_SLOTS)),
        planted=max(range(settings.requests), key=tokens.__getitem__),
    )
