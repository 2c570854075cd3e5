"""Transfers between two real processes over real NIXL: right bytes, nothing else, both orders."""

from __future__ import annotations

import pytest

from tests.e2e.node import TOKENS_PER_BLOCK
from tests.e2e.pair import Pair, fragmented

BLOCK_BYTES = 2**19


@pytest.mark.parametrize("first", ["receive", "send"])
def test_fragmented_blocks_arrive_in_either_order(pair: Pair, first: str) -> None:
    source, target = fragmented(1, 24), fragmented(2, 24)
    if first == "receive":
        pair.receive("r", target)
        pair.send("r", source)
    else:
        pair.send("r", source)
        pair.receive("r", target)
    sent, received = pair.outcomes("r")
    tokens, size = 24 * TOKENS_PER_BLOCK, 24 * BLOCK_BYTES
    assert sent == {"end": "done", "tokens": tokens, "bytes": size}
    assert received == {"end": "done", "tokens": tokens, "bytes": size, "aux": b"first tokens"}
    pair.moved((source, target))
    pair.slots_back("prefill", "r", source, "settled")
    pair.slots_back("decode", "r", target, "drained")


def test_pushes_stream_while_prefill_goes_on(pair: Pair) -> None:
    source, target = fragmented(3, 20), fragmented(4, 20)
    pair.send("r", source, push=False)
    pair.prefill.push("r", [(0, source[:4])])  # before its target comes
    pair.receive("r", target)
    pair.prefill.push(
        "r",
        [
            (12, source[12:]),
        ],
    )
    pair.prefill.push("r", [(4, source[4:7]), (9, source[9:12])])
    pair.prefill.push("r", [(7, source[7:9])])
    pair.prefill.finish("r", b"")
    sent, received = pair.outcomes("r")
    assert (sent["end"], received["end"], received["aux"]) == ("done", "done", b"")
    pair.moved((source, target))


def test_pushed_blocks_are_written_before_the_end_is_known(pair: Pair) -> None:
    source, target = fragmented(5, 4), fragmented(6, 4)
    pair.receive("r", target)
    pair.send("r", source, push=False)
    pair.prefill.push("r", [(2, source[2:])])
    elements = BLOCK_BYTES // 2
    while pair.decode.changed(0xABCD, target[2:]) < 2 * elements * 0.99:
        pass  # bounded by the test's time limit
    assert pair.decode.changed(0xABCD, target[:2]) == 0
    pair.prefill.push("r", [(0, source[:2])])
    pair.prefill.finish("r")
    assert [outcome["end"] for outcome in pair.outcomes("r")] == ["done", "done"]
    pair.moved((source, target))


def test_only_what_is_needed_is_written(pair: Pair) -> None:
    """The target holds ordinals 0 to 4 and 9 already, and wants fewer tokens than there are."""
    source, target = fragmented(7, 16), fragmented(8, 7)
    runs = [(5, target[:4]), (10, target[4:])]
    pair.decode.receive("r", runs, 13 * TOKENS_PER_BLOCK, pair.peer)
    pair.send("r", source)
    sent, received = pair.outcomes("r")
    assert (received["end"], received["tokens"]) == ("done", 13 * TOKENS_PER_BLOCK)
    assert sent["bytes"] == received["bytes"] == 7 * BLOCK_BYTES
    pair.moved((source[5:9], target[:4]), (source[10:13], target[4:]))
    pair.slots_back("prefill", "r", source, "settled", "never-exposed")


def test_many_at_once_keep_apart(pair: Pair) -> None:
    source, target = fragmented(9, 60), fragmented(10, 60)
    parts = [slice(start, start + 3) for start in range(0, 60, 3)]
    for number, part in enumerate(parts):
        pair.receive(f"r{number}", target[part])
    for number, part in reversed(list(enumerate(parts))):
        pair.send(f"r{number}", source[part])
    for number in range(len(parts)):
        assert [o["end"] for o in pair.outcomes(f"r{number}")] == ["done", "done"]
    pair.moved((source, target))


def test_slots_are_used_again(pair: Pair) -> None:
    target = fragmented(11, 8)
    for turn in range(4):
        source = fragmented(20 + turn, 8)
        pair.receive(f"r{turn}", target)
        pair.send(f"r{turn}", source)
        assert pair.decode.outcome(f"r{turn}")["end"] == "done"
        pair.slots_back("decode", f"r{turn}", target, "drained")
        pair.moved((source, target))


def test_aux_of_64_kib_arrives(pair: Pair) -> None:
    aux = bytes(range(256)) * 256
    pair.receive("r", [1])
    pair.send("r", [2], push=False)
    pair.prefill.push("r", [(0, [2])])
    pair.prefill.finish("r", aux)
    assert pair.decode.outcome("r")["aux"] == aux
    assert pair.prefill.outcome("r")["end"] == "done"
