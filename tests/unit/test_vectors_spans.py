"""TensorRT-LLM's vectors on pairing blocks and beam tails: the same pairs from plain spans.

Its lists get their place from one anchor (A, E), from an index with -1 for holes (G), or from the
order that beams were packed in (B); here all of them are spans, paired by ordinal. docs/vectors.md
says where the numbers come from, and names those where kvferry differs on purpose.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvferry.engine import wire
from kvferry.engine.errors import UsageError
from kvferry.engine.keys import Key
from kvferry.engine.spans import Span, shortfall
from kvferry.engine.trims import (
    check_beams,
    chunk_blocks,
    local_blocks,
    needed,
    pair_tails,
    split_tails,
    to_global,
    to_local,
)

NONE: list[int] = []


def at(first: int, slots: object) -> Span:
    return Span.from_slots(slots, first)


def table(*slots: int) -> Span:
    return Span.from_table(slots)


# {id: (what the source has, what the target needs, source slots and target slots that pair)}
PAIRS = {
    "A1": (at(0, [10, 11, 12]), at(0, [20, 21, 22]), [10, 11, 12], [20, 21, 22]),
    "A2": (at(0, range(10, 15)), at(128 // 64, [20, 21, 22]), [12, 13, 14], [20, 21, 22]),
    "A3": (at(64 // 64, [10, 11, 12]), at(0, range(20, 24)), [10, 11, 12], [21, 22, 23]),
    "A4": (at(64 // 64, [10, 11, 12]), at(128 // 64, [20, 21]), [11, 12], [20, 21]),
    "A5": (at(0, [10, 11, 12]), at(192 // 64, [20, 21, 22]), NONE, NONE),
    "A6": (at(0, range(10, 14)), at(128 // 64, [20, 21, 22]), [12, 13], [20, 21]),
    "A7": (at(4, range(4, 8)), at(0, [10, 11, 12]), NONE, NONE),
    "A8": (at(0, range(16)), at(0, range(100, 132)), [*range(16)], [*range(100, 116)]),
    "A9": (at(16, range(16, 32)), at(0, range(100, 132)), [*range(16, 32)], [*range(116, 132)]),
    "A10": (at(0, range(4)), at(4, range(104, 108)), NONE, NONE),
    "A11": (at(4, range(4, 8)), at(4, range(104, 108)), [4, 5, 6, 7], [104, 105, 106, 107]),
    "A12": (at(1224, [10]), at(1223, [20, 21]), [10], [21]),
    "A13": (at(1223, [10, 11]), at(1223, [20, 21]), [10, 11], [20, 21]),
    "A14": (at(0, [10, 11, 12]), at(2, [20]), [12], [20]),
    "A15": (at(2, [10, 11]), at(1, [20, 21, 22]), [10, 11], [21, 22]),
    "A16": (at(0, [10, 11]), at(2, [22, 23]), NONE, NONE),
    "A17": (at(0, []), at(0, [20, 21]), NONE, NONE),
    "E1 group 0": (at(4, range(4, 8)), at(4, range(104, 108)), [4, 5, 6, 7], [*range(104, 108)]),
    "E1 group 1": (at(5, [10, 11, 12]), at(5, [200, 201, 202]), [10, 11, 12], [200, 201, 202]),
    "E3": (at(2, range(2, 8)), at(2, range(102, 108)), [*range(2, 8)], [*range(102, 108)]),
    "E10": (at(1224, [10]), at(1223, [20, 21]), [10], [21]),
    "G1": (table(10, 11, 12), table(20, 21, 22), [10, 11, 12], [20, 21, 22]),
    "G2": (table(10, 11, 12, 13), table(-1, -1, 22, 23), [12, 13], [22, 23]),
    "G3": (table(-1, 11, 12, -1), table(20, 21, 22, 23), [11, 12], [21, 22]),
    "G4": (table(10, -1, 12, 13), table(-1, 21, 22, -1), [12], [22]),
    "G5": (table(10, 11, -1, -1), table(-1, -1, 22, 23), NONE, NONE),
    "G6": (table(10, 11, 12, 13), table(20, 21, 22, 23).restrict(2, 4), [12, 13], [22, 23]),
    "G7": (table(10, 11, 12, 13), table(20, 21), [10, 11], [20, 21]),
    "G8": (table(100, 101), table(-1, 201), [101], [201]),
    "G9": (table(-1, -1, 12, 13), table(-1, 21, 22, 23), [12, 13], [22, 23]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_blocks_pair_by_ordinal(name: str) -> None:
    have, need, sources, targets = PAIRS[name]
    ordinals, theirs, ours = need.intersect(have)
    assert ours.tolist() == sources
    assert theirs.tolist() == targets
    assert set(ordinals.tolist()) == {*have.ordinals().tolist()} & {*need.ordinals().tolist()}


def test_e4_chunks_give_the_pairs_of_the_whole() -> None:
    need = {"a": at(4, range(104, 108)), "b": at(5, [200, 201, 202])}
    whole = {"a": at(0, range(8)), "b": at(5, [10, 11, 12])}
    chunks = [{"a": at(0, range(4)), "b": Span()}, {"a": at(4, range(4, 8)), "b": whole["b"]}]
    for group in need:
        parts = [need[group].intersect(chunk[group]) for chunk in chunks]
        for index, all_at_once in enumerate(need[group].intersect(whole[group])):
            assert np.concatenate([part[index] for part in parts]).tolist() == all_at_once.tolist()


# {id: (blocks of beam 0, source list, target list, pairs)}, four beams
TAILS = {
    "E7": (8, [*range(8), 70, 71, 72], [*range(100, 108), 170, 171, 172], 11),
    "E8": (8, [*range(8), 70, 71], [*range(100, 108), 170, 171], 10),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_pair_in_their_order(name: str) -> None:
    length, source, target, count = TAILS[name]
    assert packed_pairs(length, source, target) == list(zip(source, target, strict=True))
    assert len(source) == count


def test_e9_tails_that_one_side_lacks_are_refused() -> None:
    with pytest.raises(UsageError, match="source lists 3 beam tails, the target 0"):
        packed_pairs(8, [*range(8), 70, 71, 72], [*range(100, 108)])


def packed_pairs(length: int, source: list[int], target: list[int]) -> list[tuple[int, int]]:
    """What an adapter does with two packed lists of a whole prompt, of four beams."""
    have, our_tails = split_tails(source, length, 4)
    need, their_tails = split_tails(target, length, 4)
    ordinals, theirs, ours = at(0, need).intersect(at(0, have))
    our_tails, their_tails = pair_tails(our_tails, their_tails, ordinals, length)
    sources = np.concatenate((ours, our_tails)).tolist()
    return list(zip(sources, np.concatenate((theirs, their_tails)).tolist(), strict=True))


# {id: (packed list, blocks of beam 0, beams, beam 0's blocks, tails)}
SPLITS = {
    "B21": ([10, 11, 12, 13], 1, 4, [10], [11, 12, 13]),
    "B22": ([*range(10, 16)], 3, 4, [10, 11, 12], [13, 14, 15]),
    "B22 two tails": ([10, 11, 12, 14, 15], 3, 4, [10, 11, 12], [14, 15]),
    "B23": ([12, 13, 14, 15], 3 - 2, 4, [12], [13, 14, 15]),
    "B24": ([10, 11], 3, 4, [10, 11], NONE),
    "B24 one beam": ([10, 11, 12], 1, 1, [10, 11, 12], NONE),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_packed_list_is_split_by_the_length_of_beam_0(name: str) -> None:
    packed, length, beams, chain, tails = SPLITS[name]
    assert [part.tolist() for part in split_tails(packed, length, beams)] == [chain, tails]


def test_g16_beams_of_which_blocks_were_evicted_are_refused() -> None:
    with pytest.raises(UsageError, match="4 beams can't be moved with 1 evicted blocks"):
        check_beams(4, evicted_blocks=1)


# ---------------------------------------------------------------- context parallelism

# {id: (blocks of the prompt, ranks, what each holds)}
PARTITIONS = {
    "P1": (4, 2, [[0, 2], [1, 3]]),
    "P2": (5, 2, [[0, 2, 4], [1, 3]]),
    "P3": (3, 4, [[0], [1], [2], []]),
    "P4": (8, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_blocks_are_dealt_out_in_turn(name: str) -> None:
    blocks, size, parts = PARTITIONS[name]
    prompt = at(0, range(blocks))
    for rank, ordinals in enumerate(parts):
        assert prompt.stride(rank, size).ordinals().tolist() == ordinals
        assert local_blocks(blocks, rank, size) == len(ordinals)
        local = at(0, range(len(ordinals)))
        assert to_global(local, rank, size).ordinals().tolist() == ordinals


# 64 tokens in blocks of 8 on two ranks: rank 0 holds 0, 2, 4, 6. To drop as many of its blocks as
# are cached of the prompt is wrong: {id: (cached tokens, local blocks cached, still needed)}
CACHED = {"P5": (16, 1, [2, 4, 6]), "P6": (32, 2, [4, 6])}


@pytest.mark.parametrize("name", CACHED)
def test_a_cached_prefix_is_counted_per_rank(name: str) -> None:
    cached_tokens, cached, ordinals = CACHED[name]
    held = to_global(at(0, range(4)), 0, 2)
    need = held.select(needed("full", 64, 8, cached_tokens=cached_tokens))
    assert need.ordinals().tolist() == ordinals
    assert local_blocks(cached_tokens // 8, 0, 2) == cached
    assert to_local(need, 0, 2) == at(0, range(4)).restrict(cached, 4)


@pytest.mark.parametrize(
    ("dropped", "lacking"), [(2, "ordinals 2: 8 tokens"), (4, "ordinals 4, 6: 16 tokens")]
)
def test_a_prefix_counted_as_the_prompts_shows_as_a_shortfall(dropped: int, lacking: str) -> None:
    need = to_global(at(0, range(4)), 0, 2).select(needed("full", 64, 8, cached_tokens=8 * dropped))
    trimmed = to_global(at(0, range(4)).restrict(dropped, 4), 0, 2)
    assert str(shortfall(need, 8, trimmed, 8, 64)) == lacking


def test_e5_a_target_on_two_ranks_may_have_any_anchor() -> None:
    have = at(4, range(4, 8))
    for rank, ordinals in ((0, [4, 6]), (1, [5, 7])):
        need = to_global(at(2, [104, 105]), rank, 2)
        paired, targets, sources = need.intersect(have)
        assert paired.tolist() == sources.tolist() == ordinals
        assert targets.tolist() == [104, 105]


def test_e6_chunks_go_to_a_target_on_two_ranks() -> None:
    have, need = at(0, range(8)), to_global(at(0, range(100, 104)), 1, 2)
    chunks = [
        have.restrict(*chunk_blocks(start, stop, 8, first=start == 0, last=stop == 64))
        for start, stop in ((0, 24), (24, 64))
    ]
    assert [need.intersect(chunk)[0].tolist() for chunk in chunks] == [[1], [3, 5, 7]]


# ---------------------------------------------------------------- on the wire


def offer(needs: object) -> bytes:
    fields = {"tokens": 64, "min_tokens": 64, "match_ms": 1, "stall_ms": 1, "total_ms": 1}
    return msgspec.msgpack.encode({"t": "offer", "key": Key("r"), **fields, "needs": needs})


def test_e11_anchors_survive_the_wire() -> None:
    spans = {"a": at(6, [1, 2, 3]), "b": Span()}
    needs = [wire.Need(group, *span.to_wire()) for group, span in spans.items()]
    read = wire.decode(wire.encode(wire.Offer(Key("r"), 64, 64, needs, 1, 1, 1)))
    assert isinstance(read, wire.Offer)
    assert {
        need.group: Span.from_wire(need.firsts, need.counts, need.slots) for need in read.needs
    } == spans


def test_e12_slots_without_ordinals_are_no_offer() -> None:
    assert isinstance(wire.decode(offer([["a", b"", b"", b""]])), wire.Offer)
    for needs in ([["a", b"\1\0\0\0"]], [["a", [[0, b"\1\0\0\0"]]]]):
        with pytest.raises(wire.WireError, match="offer"):
            wire.decode(offer(needs))


def test_e13_every_run_has_its_anchor() -> None:
    with pytest.raises(ValueError, match="1 firsts and 2 counts"):
        Span.from_wire(b"\0\0\0\0", b"\1\0\0\0\1\0\0\0", b"\1\0\0\0\2\0\0\0")
