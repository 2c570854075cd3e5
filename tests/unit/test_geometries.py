"""Public models' caches between instances of unequal size: all of a target block has a source.

Which bytes they are is what tests/property proves, on smaller caches.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from kvferry.engine.plan import plan
from kvferry.engine.template import make_template
from kvferry.engine.topology import Roster, assign
from kvferry.engine.trims import needed
from tests.bench.descriptors import state_table, token_table
from tests.geometries import MODELS, PROMPTS, rank_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine.layout import Layout
    from kvferry.engine.plan import Copies
    from tests.geometries import Model, Order

DOC: Final = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text()


def tp_pairs(model: Model) -> list[tuple[int, int]]:
    """(source, target): the smallest usual TP and two others, in both directions."""
    tp = model.tps[0]
    others = (tp // 2, 2 * tp) if tp > 1 else (2, 4)
    return [pair for other in others for pair in ((tp, other), (other, tp))]


def shallow(model: Model) -> Model:
    """The model with two layers in each group, to be quick: the tables plan all of them."""
    return replace(model, groups={name: replace(g, layers=2) for name, g in model.groups.items()})


CASES: Final = [
    pytest.param(small, *pair, id=f"{small.name}-{pair[0]}to{pair[1]}")
    for small in map(shallow, MODELS)
    for pair in tp_pairs(small)
]


def copied(model: Model, group: str, source_tp: int, target: Layout, rank: int) -> list[Copies]:
    """What each source rank copies into one block of target rank `rank`."""
    sources = {at: rank_layout(model, source_tp, at) for at in range(source_tp)}
    slot = np.array([1])
    legs = []
    for leg in assign(target, group, sources, roster=Roster(tp=source_tp), target_rank=rank):
        template = make_template(
            sources[leg.rank], group, target, group, parts=leg.parts, fragment_bytes_min=0
        )
        (flow,) = plan(template, slot, slot)
        assert flow.copies.bytes == template.block_bytes
        legs.append(flow.copies)
    return legs


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("model", "source_tp", "target_tp"), CASES)
def test_the_legs_of_a_target_rank_fill_its_blocks_once(
    model: Model, source_tp: int, target_tp: int, order: Order
) -> None:
    for rank in range(target_tp):
        target = rank_layout(model, target_tp, rank, order)
        for group in model.groups:
            legs = copied(model, group, source_tp, target, rank)
            begins = np.concatenate([copies.target for copies in legs])
            ends = begins + np.concatenate([copies.lengths for copies in legs])
            assert (ends - begins).sum() == target.block_bytes(group)
            begins.sort()
            ends.sort()
            assert (ends[:-1] <= begins[1:]).all()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_what_a_prompt_needs_is_as_many_bytes_as_is_known_of_the_model(model: Model) -> None:
    """Prompts a token short, so that chunked attention is at a chunk's end; blocks move whole."""
    layout = rank_layout(model, 1, 0)
    for prompt, known in zip(PROMPTS, model.request_bytes, strict=True):
        found = 0
        for group in layout.groups:
            extents = needed(group.kind, prompt - 1, group.tokens_per_block, window=group.window)
            found += sum(stop - first for first, stop in extents) * group.block_bytes
        assert found == known


@pytest.mark.parametrize("table", [token_table, state_table], ids=["tokens", "states"])
def test_the_tables_in_the_docs_are_what_the_planner_says(table: Callable[[], str]) -> None:
    assert table() in DOC, "run python -m tests.bench.descriptors, and put it there"


def test_the_example_in_the_docs_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    assert "assert same.fingerprint()" in example
    exec(example, {})
