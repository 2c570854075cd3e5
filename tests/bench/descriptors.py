"""How many descriptors does a model's cache need? Prints the tables of docs/geometry.md.

    python -m tests.bench.descriptors

Counts what the planner makes, moves nothing. Of a pair of TP sizes, one rank pair is shown: the
target's rank 0 and the first source rank that writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvferry.engine.plan import plan
from kvferry.engine.template import FRAGMENT_BYTES_MIN, FRAGMENT_BYTES_WARN, make_template
from kvferry.engine.topology import Roster, assign
from tests.geometries import MODELS, Rows, rank_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.engine.template import Template
    from tests.geometries import Model, Order

TOKENS: Final = 1024
ORDERS: Final[tuple[Order, ...]] = ("NHD", "HND")


@dataclass(frozen=True)
class Count:
    """What one rank pair copies: of `TOKENS` tokens, or of one state.

    descriptors: when no two blocks touch. merged: when all blocks lie side by side, on both sides.
    """

    descriptors: int
    merged: int
    bytes: int
    mean: int

    @property
    def verdict(self) -> str:
        """Bytes of a mean fragment, and what the planner says to it."""
        if self.mean < FRAGMENT_BYTES_MIN:
            return f"{self.mean:,} refused"
        return f"{self.mean:,} warned" if self.mean < FRAGMENT_BYTES_WARN else f"{self.mean:,}"


def tp_pairs(model: Model, group: str) -> list[tuple[int, int]]:
    """(source, target): the largest usual TP to itself, to half and to double of it.

    What every rank holds whole is the same for all of them, and listed once.
    """
    tp = model.tps[-1]
    if isinstance(model.groups[group], Rows):
        return [(tp, tp)]
    return [(tp, other) for other in (tp, tp // 2, 2 * tp) if other]


def templates_of(model: Model, group: str, pair: tuple[int, int]) -> list[Template]:
    """What the first source rank writes to the target's rank 0, NHD and HND; fragments of any size.

    Who writes what does not depend on the order.
    """
    tp, target_tp = pair
    sources = {rank: rank_layout(model, tp, rank) for rank in range(tp)}
    first, *_ = assign(rank_layout(model, target_tp, 0), group, sources, roster=Roster(tp=tp))
    templates = []
    for order in ORDERS:
        ends = rank_layout(model, tp, first.rank, order), rank_layout(model, target_tp, 0, order)
        templates.append(
            make_template(ends[0], group, ends[1], group, parts=first.parts, fragment_bytes_min=0)
        )
    return templates


def count(template: Template, blocks: int) -> Count:
    """Plan that many blocks in neighbouring slots."""
    slots = np.arange(blocks)
    (flow,) = plan(template, slots, slots)
    return Count(
        blocks * template.fragments_per_block,
        len(flow.copies),
        flow.copies.bytes,
        template.mean_fragment_bytes,
    )


def token_table() -> str:
    """A row per group that has tokens, and TP pair: both orders, of `TOKENS` tokens."""
    columns = [f"{order} {what}" for order in ORDERS for what in ("apart", "merged", "mean bytes")]
    rows = [*_head("model", "group", "TP", "MiB", *columns)]
    for model, group, pair in _cases(states=False):
        blocks = TOKENS // model.tokens(group)
        counts = [count(template, blocks) for template in templates_of(model, group, pair)]
        tp = "any" if isinstance(model.groups[group], Rows) else f"{pair[0]} to {pair[1]}"
        cells = [
            cell
            for one in counts
            for cell in (f"{one.descriptors:,}", f"{one.merged:,}", one.verdict)
        ]
        rows.append(_row(model.name, group, tp, f"{counts[0].bytes / 2**20:.2f}", *cells))
    return "\n".join(rows)


def state_table() -> str:
    """A row per group of states and TP pair: of one state, whose order is always the same."""
    rows = [*_head("model", "TP", "MiB", "descriptors", "mean bytes")]
    for model, group, pair in _cases(states=True):
        one = count(templates_of(model, group, pair)[0], 1)
        tp, size = f"{pair[0]} to {pair[1]}", f"{one.bytes / 2**20:.2f}"
        rows.append(_row(model.name, tp, size, str(one.descriptors), one.verdict))
    return "\n".join(rows)


def _cases(*, states: bool) -> Iterator[tuple[Model, str, tuple[int, int]]]:
    for model in MODELS:
        for group, cache in model.groups.items():
            if (cache.kind == "state") == states:
                for pair in tp_pairs(model, group):
                    yield model, group, pair


def _head(*names: str) -> tuple[str, str]:
    return _row(*names), _row(*("---" for _ in names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(token_table(), state_table(), sep="\n\n")
