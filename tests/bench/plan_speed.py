"""How long does planning take, per block and layer, and how long is the longest step of it?

    pytest tests/bench/plan_speed.py

Needs the `bench` extra. 128k tokens in blocks of 32, 80 layers of 8 heads, a pool per layer with K
and V of a block side by side in one slot. Slots are already paired. *whole* plans all of them at
once; *stepwise* in steps of bounded size, as the pipeline does; *plain* is numpy without templates
and merging. Times are the thread's own, so that other work on the machine counts less. Figures
stand in docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import statistics
import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from kvferry.engine.align import Pairs, align, steps
from kvferry.engine.limits import PLAN_STEP_DESCRIPTORS_MAX
from kvferry.engine.plan import Copies, Cut, plan
from kvferry.engine.spans import Span
from kvferry.engine.template import Template, make_template
from tests.geometries import MODELS, rank_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvferry.engine.layout import Layout
    from tests.geometries import Order

    Int64Array = NDArray[np.int64]

LAYERS: Final = 80
MODEL: Final = next(model for model in MODELS if model.name == "Llama-3.1-70B")
WRITE: Final = (512, 2 << 20)  # descriptors and bytes of a write, where cma may copy

pytestmark = pytest.mark.benchmark(timer=time.thread_time)


@dataclass(frozen=True)
class Case:
    """A cache of `tokens` tokens on its way from one rank to another.

    scattered: the share of the blocks that lie in random slots on both sides, behind the others.
    """

    name: str
    scattered: float = 1.0
    tokens: int = 128 * 1024
    block_tokens: tuple[int, int] = (32, 32)
    target_tp: int = 1
    order: Order = "NHD"

    @property
    def block_layers(self) -> int:
        """Target blocks of single layers."""
        return self.tokens // self.block_tokens[1] * LAYERS

    def layouts(self) -> tuple[Layout, Layout]:
        source, target = (
            rank_layout(
                replace(MODEL, tokens_per_block=tokens), tp, 0, self.order,
                slots=self.tokens // tokens,
            )
            for tokens, tp in zip(self.block_tokens, (1, self.target_tp), strict=True)
        )  # fmt: skip
        return source, target

    def template(self) -> Template:
        source, target = self.layouts()
        return make_template(source, "full", target, "full", fragment_bytes_min=0)

    def spans(self) -> tuple[Span, Span]:
        random = np.random.default_rng(0)
        source, target = (self._slots(self.tokens // each, random) for each in self.block_tokens)
        return Span.from_slots(source), Span.from_slots(target)

    def pairs(self) -> Pairs:
        have, need = self.spans()
        return align(have, self.block_tokens[0], need, self.block_tokens[1])

    def _slots(self, blocks: int, random: np.random.Generator) -> Int64Array:
        slots = np.arange(blocks)
        random.shuffle(slots[round(blocks * (1 - self.scattered)) :])
        return slots

    def __str__(self) -> str:
        return self.name


CASES: Final = (
    Case("contiguous", 0),
    Case("half scattered", 0.5),
    Case("scattered"),
    Case("heads split, HND", target_tp=2, order="HND"),
    Case("heads split, NHD", target_tp=2, tokens=16 * 1024),
    Case("blocks 16 to 32", block_tokens=(16, 32)),
    Case("blocks 32 to 16", block_tokens=(32, 16)),
)
LONG: Final = (
    *(replace(case, tokens=2**20, block_tokens=(16, 16)) for case in CASES[:5]),
    *(replace(case, tokens=2**20) for case in CASES[5:]),
    Case("blocks of 128", tokens=2**20, block_tokens=(128, 128)),
)


# ---------------------------------------------------------------- ways to plan


def whole(template: Template, pairs: Pairs) -> int:
    flows = plan(template, pairs.source_slots, pairs.target_slots, pairs.shift)
    return sum(len(flow.copies) for flow in flows)


def stepwise(template: Template, pairs: Pairs) -> int:
    return sum(whole(template, part) for part in sliced(template, pairs))


def sliced(template: Template, pairs: Pairs) -> Iterator[Pairs]:
    sizes = template.target_tokens, template.source_tokens
    return steps(pairs, *sizes, max(1, PLAN_STEP_DESCRIPTORS_MAX // template.fragments_per_block))


def cut(copies: Copies) -> list[Copies]:
    return list(Cut(copies, *WRITE))


def plain(template: Template, pairs: Pairs) -> int:
    """An array per layer and fragment. What a block falls into is taken from the template."""
    ((stack,),) = template.stacks.values()
    source_token, target_token = pairs.shift[:2] if pairs.shift else (0, 0)
    sources, targets, lengths = [], [], []
    for at, fragment in np.ndindex(LAYERS, stack.lengths.shape[1]):
        for slots, token, end, found in (
            (pairs.source_slots, source_token, stack.source, sources),
            (pairs.target_slots, target_token, stack.target, targets),
        ):
            begin = end.base[at, fragment] + slots * end.stride[at]
            found.append(begin + token * end.token_stride[at, fragment])
        lengths.append(np.full(pairs.ordinals.size, stack.lengths[at, fragment]))
    copies = Copies(*map(np.concatenate, (sources, targets, lengths)))
    return len(copies)


# ---------------------------------------------------------------- benchmarks


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Print a row of figures at once, past pytest's capture."""

    def write(*cells: object) -> None:
        with capsys.disabled():
            print(f"\n| {' | '.join(map(str, cells))} |", end="")

    return write


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", [whole, stepwise, plain], ids=lambda way: way.__name__)
def test_plan(case: Case, way: Callable[[Template, Pairs], int], benchmark, say) -> None:
    template, pairs = case.template(), case.pairs()
    tracemalloc.start()
    way(template, pairs)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    descriptors = benchmark.pedantic(way, (template, pairs), rounds=15, warmup_rounds=2)
    low, median = _each(benchmark, case.block_layers, 1e9)
    benchmark.extra_info.update(ns_min=low, ns=median, descriptors=descriptors, peak_mib=peak)
    say(case, way.__name__, f"{low:.1f}", f"{median:.1f}", f"{descriptors:,}", f"{peak:.1f}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut(case: Case, benchmark, say) -> None:
    """Per write: cutting has a Python step for each."""
    template, pairs = case.template(), next(sliced(case.template(), case.pairs()))
    (flow,) = plan(template, pairs.source_slots, pairs.target_slots, pairs.shift)
    writes = benchmark.pedantic(cut, (flow.copies,), rounds=50, warmup_rounds=5)
    low, median = _each(benchmark, len(writes), 1e6)
    benchmark.extra_info.update(us_min=low, us=median, writes=len(writes))
    say(case, f"{low:.2f}", f"{median:.2f}", f"{len(writes)} writes of {flow.copies.bytes} bytes")


@pytest.mark.parametrize("case", LONG, ids=str)
def test_the_longest_step(case: Case, benchmark, say) -> None:
    """All steps of a prompt of a million tokens, each up to its first write; five times over."""
    template, (have, need) = case.template(), case.spans()
    aligned, stepped = [], []

    def timed() -> None:
        clock = [time.thread_time()]
        pairs = align(have, template.source_tokens, need, template.target_tokens)
        clock.append(time.thread_time())
        for part in sliced(template, pairs):
            for flow in plan(template, part.source_slots, part.target_slots, part.shift):
                next(Cut(flow.copies, *WRITE))  # one at a time, as transfers do
            clock.append(time.thread_time())
        first, *others = (1e3 * (late - early) for early, late in itertools.pairwise(clock))
        aligned.append(first)
        stepped.append(others)

    benchmark.pedantic(timed, rounds=5)
    longest = [max(run) for run in stepped]
    usual = statistics.median(itertools.chain(*stepped))
    benchmark.extra_info.update(align_ms=aligned, usual_step_ms=usual, longest_step_ms=longest)
    figures = (min(aligned), usual, min(longest), statistics.median(longest))
    say(case, f"{len(stepped[0]):,} steps", *(f"{each:.2f}" for each in figures))


def _each(benchmark, number: int, unit: float) -> tuple[float, float]:
    """(least, median) time of one of so many."""
    stats = benchmark.stats.stats
    return unit * stats.min / number, unit * stats.median / number
