"""Whole instances against an oracle that walks every element: who writes what, from where.

Goal: for every target rank, the legs of all source ranks together write each needed byte exactly
once, from the same coordinate, and nothing else; and carrying a cache over and back is the
identity. Method: `instances` draws two sides of one model (tensor and pipeline parallelism,
fewer heads than ranks, replicas, context parallelism, sections, any axis order and block size).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.engine.align import Stream
from kvferry.engine.plan import Copies, Cut, plan
from kvferry.engine.template import make_template
from kvferry.engine.topology import assign
from tests.property.instances import (
    BYTES_MAX,
    NOTHING,
    Instance,
    Int64Array,
    Model,
    instances,
    models,
)

SOURCE, TARGET = 1_000_000, 9_000_000


@dataclass
class Case:
    model: Model
    source: Instance
    target: Instance


@st.composite
def cases(draw: st.DrawFn, *, both_ways: bool = False) -> Case:
    model = draw(models(optional=not both_ways))
    tp_max = 4 if both_ways else 8  # every rank to every rank, twice
    target = draw(instances(model, TARGET, is_source=False, tp_max=tp_max))
    alike = target.tokens_per_block if draw(st.booleans()) else 0
    source = draw(instances(model, SOURCE, is_source=not both_ways, block=alike, tp_max=tp_max))
    assume(all(rank.held.address.size <= BYTES_MAX for rank in target.ranks))
    return Case(model, source, target)


def copies_of(
    source: Instance, target: Instance, number: int, tokens: int
) -> list[tuple[int, Copies]]:
    """What every leg writes into one target rank: (source rank, copies)."""
    sink = target.ranks[number]
    layouts = {at: rank.layout for at, rank in enumerate(source.ranks)}
    found = []
    for leg in assign(sink.layout, "g", layouts, roster=source.roster, target_rank=number):
        rank = source.ranks[leg.rank]
        template = make_template(
            rank.layout, "g", sink.layout, "g", parts=leg.parts, fragment_bytes_min=0
        )
        need = sink.span.stride(*leg.stride)
        stream = Stream(need, template.target_tokens, template.source_tokens, tokens)
        pairs, _ = stream.add(rank.span)
        for flow in plan(template, pairs.source_slots, pairs.target_slots, pairs.shift):
            found += [(leg.rank, write) for write in Cut(flow.copies, 7, 50)]
    return found


def carry(source: Instance, target: Instance, number: int, tokens: int) -> Int64Array:
    """Execute every leg into one target rank; return how often each of its bytes was written."""
    sink = target.ranks[number]
    written = np.zeros(sink.size, dtype=np.int64)
    for leg, copies in copies_of(source, target, number, tokens):
        rank = source.ranks[leg]
        columns = (copies.source - rank.base, copies.target - sink.base, copies.lengths)
        for at, to, length in zip(*(column.tolist() for column in columns), strict=True):
            assert 0 <= at < at + length <= rank.size
            assert 0 <= to < to + length <= sink.size
            sink.memory[to : to + length] = rank.memory[at : at + length]
            written[to : to + length] += 1
    return written


@given(cases(), st.data())
def test_all_legs_together_write_each_needed_byte_once(case: Case, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(case.target.ranks) - 1), label="target rank")
    for rank in case.source.ranks:
        rank.compute()
    sink = case.target.ranks[number]
    written = carry(case.source, case.target, number, case.model.tokens)
    held = np.concatenate([rank.held.tag for rank in case.source.ranks])
    has_source = np.isin(sink.held.tag, held)
    counts = (sink.held.token < case.model.tokens) | (case.model.state)
    assert (has_source | sink.held.optional | ~counts).all(), "the drawn source lacks something"
    where = sink.held.address - sink.base
    assert (written[where] <= has_source).all()
    assert (written[where] == 1)[has_source & counts].all()
    assert (sink.memory[where] == sink.held.tag)[written[where] == 1].all()
    outside = np.ones(sink.size, dtype=np.bool_)
    outside[where] = False
    assert not written[outside].any()


@given(cases(both_ways=True))
def test_there_and_back_is_the_identity(case: Case) -> None:
    for rank in case.source.ranks:
        rank.compute()
    for number in range(len(case.target.ranks)):
        carry(case.source, case.target, number, case.model.tokens)
    for rank in case.source.ranks:
        rank.memory[:] = NOTHING
    for number in range(len(case.source.ranks)):
        carry(case.target, case.source, number, case.model.tokens)
    for rank in case.source.ranks:
        counts = rank.held.token < case.model.tokens
        where = (rank.held.address - rank.base)[counts]
        np.testing.assert_array_equal(rank.memory[where], rank.held.tag[counts])
