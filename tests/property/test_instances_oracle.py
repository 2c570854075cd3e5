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
from kvferry.engine.plan import Copies, cut, plan
from kvferry.engine.template import make_template
from kvferry.engine.topology import assign
from tests.property.instances import (
    ELEMENTS_MAX,
    Instance,
    Model,
    Rank,
    elements,
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
    model = draw(models())
    source = draw(instances(model, SOURCE, is_source=not both_ways))
    target = draw(instances(model, TARGET, is_source=False))
    unequal = source.tokens_per_block != target.tokens_per_block
    assume(source.roster.cp == 1 or not unequal)  # refused: a block has one owner
    assume(len(elements(target.ranks[0].layout, target.ranks[0].span)) <= ELEMENTS_MAX)
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
            found += [(leg.rank, write) for write in cut(flow.copies, 7, 50)]
    return found


def listed(copies: Copies) -> list[tuple[int, int, int]]:
    columns = (copies.source, copies.target, copies.lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected(case: Case, sink: Rank) -> tuple[dict[int, set[int]], set[int]]:
    """({target byte: the source bytes that it may come from}, target bytes that may stay)."""
    held: dict = {}
    for rank in case.source.ranks:
        for place, (address, _, _) in elements(rank.layout, rank.span).items():
            held.setdefault(place, set()).add(address)
    must: dict[int, set[int]] = {}
    may: set[int] = set()
    for place, (address, size, optional) in elements(sink.layout, sink.span).items():
        if place not in held:
            assert optional or place[4] >= case.model.tokens
            continue
        for byte in range(size):
            if place[4] >= case.model.tokens:  # behind the count: may be copied, is not judged
                may.add(address + byte)
            must[address + byte] = {at + byte for at in held[place]}
    return must, may


@given(cases(), st.data())
def test_all_legs_together_write_each_needed_byte_once(case: Case, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(case.target.ranks) - 1), label="target rank")
    must, may = expected(case, case.target.ranks[number])
    moved: dict[int, int] = {}
    for leg, copies in copies_of(case.source, case.target, number, case.model.tokens):
        rank = case.source.ranks[leg]
        for source, target, length in listed(copies):
            assert rank.base <= source < source + length <= rank.base + rank.size
            for byte in range(length):
                assert target + byte not in moved, f"byte {target + byte} is written twice"
                moved[target + byte] = source + byte
    assert moved.keys() <= must.keys()
    assert must.keys() - moved.keys() <= may
    wrong = {to: at for to, at in moved.items() if at not in must[to]}
    assert not wrong


def carry(source: Instance, target: Instance, tokens: int) -> None:
    """Execute every leg on the ranks' memory."""
    for number, sink in enumerate(target.ranks):
        for leg, copies in copies_of(source, target, number, tokens):
            rank = source.ranks[leg]
            for at, to, length in listed(copies):
                piece = rank.memory[at - rank.base : at - rank.base + length]
                sink.memory[to - sink.base : to - sink.base + length] = piece


@given(cases(both_ways=True), st.integers(0, 2**32 - 1))
def test_there_and_back_is_the_identity(case: Case, seed: int) -> None:
    assume(not any(role.optional for role in case.model.roles))
    rng = np.random.default_rng(seed)
    truth: dict = {}
    judged = []
    for rank in case.source.ranks:
        for place, (address, size, _) in elements(rank.layout, rank.span).items():
            value = truth.setdefault(place, rng.integers(0, 256, size, dtype=np.uint8))
            where = slice(address - rank.base, address - rank.base + size)
            rank.memory[where] = value
            if place[4] < case.model.tokens:
                judged.append((rank, where, value))
    carry(case.source, case.target, case.model.tokens)
    for rank in case.source.ranks:
        rank.memory[:] = 0
    carry(case.target, case.source, case.model.tokens)
    for rank, where, value in judged:
        np.testing.assert_array_equal(rank.memory[where], value)
