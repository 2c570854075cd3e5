"""Streams of unequal block sizes, in the cases that took a thought."""

from __future__ import annotations

from kvferry.engine.align import Stream
from kvferry.engine.spans import Span


def test_a_block_beside_a_complete_need_does_not_wait() -> None:
    """Blocks of 4 and 6 tokens repeat after 12. Only tokens 0..5 are needed: block 2 is not."""
    stream = Stream(Span.from_slots([50]), 6, 4, tokens=12)
    pairs, unneeded = stream.add(Span.from_slots([10, 11]))
    assert (pairs.source_slots.tolist(), unneeded.tolist()) == ([10, 11], [])
    pairs, unneeded = stream.add(Span.from_slots([12], first=2))
    assert (pairs.source_slots.tolist(), unneeded.tolist()) == ([], [12])
    assert stream.drop().tolist() == []


def test_a_block_beyond_the_count_is_not_needed() -> None:
    """5 tokens in blocks of 2 are three blocks; the target's one block of 8 goes on to token 7."""
    stream = Stream(Span.from_slots([50]), 8, 2, tokens=5)
    pairs, unneeded = stream.add(Span.from_slots([10, 11, 12, 13]))
    assert pairs.source_slots.tolist() == [10, 11, 12]
    assert pairs.shift is not None
    assert pairs.shift.target_token.tolist() == [0, 2, 4]
    assert unneeded.tolist() == [13]


def test_a_block_leaves_with_its_whole_period() -> None:
    """Target block 0 is complete after one source block, which target block 1 needs too."""
    stream = Stream(Span.from_slots([50, 51, 52]), 4, 6, tokens=12)
    assert stream.add(Span.from_slots([10]))[0].ordinals.tolist() == []
    pairs, _ = stream.add(Span.from_slots([11], first=1))
    assert pairs.ordinals.tolist() == [0, 1, 1, 2]
    assert pairs.source_slots.tolist() == [10, 10, 11, 11]
