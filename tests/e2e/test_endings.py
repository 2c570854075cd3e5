"""Transfers that do not end well, over real NIXL: both sides hear why, and slots stay safe."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.pair import POISON, SLOTS, Pair, fragmented

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.process import Process

SETTLE_S = 0.3  # a write that comes late would come within it


class InFlight:
    """A transfer to which something happens while its bytes move, repeated until it did.

    `after(action)` enters both sides and has the action done by `process` as soon as bytes move.
    An attempt in which everything had arrived before shows nothing, so there is another.
    """

    TRIES = 5

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.request = ""
        self.source = fragmented(1, 60)
        self.target = fragmented(2, 60)

    def attempts(self, process: Process, method: str, *arguments: str) -> Iterator[str]:
        """Yield the request of each try, after the action; stop after one that was in time."""
        for number in range(self.TRIES):
            request = f"r{number}"
            self.pair.decode.fill(POISON)
            self.pair.receive(request, self.target)
            self.pair.send(request, self.source, push=False)
            named = () if method == "close" else (request,)
            process.when_moving(method, *named, *arguments)
            self.pair.prefill.push(request, [(0, self.source[:-1])])
            process.triggered()
            yield request
            if self.landed < 0.9:
                return
        pytest.fail(f"in {self.TRIES} tries all bytes were there before the {method}")

    landed = 1.0

    def settle(self, request: str) -> None:
        """Every slot comes back with evidence, and nothing lands after it."""
        pair, source = self.pair, self.source[:-1]
        pair.slots_back("decode", request, self.target, "drained")
        size = pair.decode.pool().shape[1]
        self.landed = pair.decode.changed(POISON, self.target) / (len(source) * size)
        pair.decode.fill(POISON)
        time.sleep(SETTLE_S)
        assert pair.decode.changed(POISON, list(range(SLOTS))) == 0
        pair.slots_back("prefill", request, source, "settled", "never-exposed")


def test_the_target_cancels_in_flight(pair: Pair) -> None:
    flight = InFlight(pair)
    for request in flight.attempts(pair.decode, "cancel", "client left"):
        sent, received = pair.outcomes(request)
        assert (received["end"], received["by"]) == ("Cancelled", "caller")
        assert (sent["end"], sent["by"], sent["peer"]) == ("Cancelled", "peer", "decode")
        assert "client left" in sent["text"]
        assert "client left" in received["text"]
        flight.settle(request)


def test_the_source_cancels_in_flight(pair: Pair) -> None:
    flight = InFlight(pair)
    for request in flight.attempts(pair.prefill, "cancel", "preempted"):
        sent, received = pair.outcomes(request)
        assert (sent["end"], sent["by"]) == ("Cancelled", "caller")
        assert (received["end"], received["by"]) == ("Cancelled", "peer")
        assert received["peer"] == "prefill"
        assert "preempted" in received["text"]
        flight.settle(request)


def test_leaving_a_send_unfinished_cancels_it(pair: Pair) -> None:
    flight = InFlight(pair)
    for request in flight.attempts(pair.prefill, "leave"):
        assert [outcome["end"] for outcome in pair.outcomes(request)] == ["Cancelled"] * 2
        flight.settle(request)


@pytest.mark.parametrize("closing", ["prefill", "decode"])
def test_closing_with_transfers_running_ends_them_on_both_sides(pair: Pair, closing: str) -> None:
    flight = InFlight(pair)
    process = pair.prefill if closing == "prefill" else pair.decode
    for request in flight.attempts(process, "close"):
        sent, received = pair.outcomes(request)
        own, other = (sent, received) if closing == "prefill" else (received, sent)
        assert (own["end"], own["by"]) == ("Cancelled", "caller")
        assert (other["end"], other["by"], other["peer"]) == ("Cancelled", "peer", closing)
        flight.settle(request)
        pair.forget(closing)
        pair.close()
        pair.open()


def test_a_cancelled_request_succeeds_at_the_next_attempt(pair: Pair) -> None:
    source, target = fragmented(7, 30), fragmented(8, 30)
    pair.receive("r", target)
    pair.send("r", source, push=False)
    pair.prefill.push("r", [(0, source[:20])])
    while not pair.decode.changed(POISON, target[:20]):
        pass  # bounded by the test's time limit
    pair.decode.cancel("r", "changed its mind")
    assert [outcome["end"] for outcome in pair.outcomes("r")] == ["Cancelled", "Cancelled"]
    pair.slots_back("decode", "r", target, "drained")
    pair.slots_back("prefill", "r", source[:20], "settled", "never-exposed")
    pair.decode.fill(POISON)
    pair.receive("r", target, attempt=1)
    pair.send("r", source)
    assert [outcome["end"] for outcome in pair.outcomes("r")] == ["done", "done"]
    pair.moved((source, target))


def test_what_was_lent_to_a_killed_source_comes_back(pair: Pair) -> None:
    """It dies while its writes are on their way; nothing lands once its end is known."""
    source, target = fragmented(1, 60), fragmented(2, 60)
    pair.receive("r", target)
    pair.send("r", source, push=False)
    pair.prefill.when_moving("die")
    pair.prefill.push("r", [(0, source)])
    pair.prefill.process.wait(10)
    pair.forget("prefill")
    received = pair.decode.outcome("r")
    assert (received["end"], received["by"], received["retry_safe"]) == ("PeerLost", "peer", True)
    pair.slots_back("decode", "r", target, "source-ended")
    landed = pair.decode.changed(POISON, target)
    pair.decode.fill(POISON)
    time.sleep(3 * SETTLE_S)
    assert pair.decode.changed(POISON, list(range(SLOTS))) == 0, f"{landed} elements before"


@pytest.mark.parametrize("first", ["receive", "send"])
def test_too_few_blocks_are_named_on_both_sides(pair: Pair, first: str) -> None:
    target, source = fragmented(9, 6), fragmented(10, 6)

    def send() -> None:
        pair.send("r", source, push=False)
        pair.prefill.push("r", [(0, source[:3]), (4, source[4:])])
        pair.prefill.finish("r")

    if first == "send":  # pushed in one piece: refused before its first byte
        send()
        pair.receive("r", target)
    else:
        pair.receive("r", target)
        send()
    sent, received = pair.outcomes("r")
    for outcome in (sent, received):
        assert outcome["code"] == "coverage"
        assert "'full'" in outcome["text"]
        assert "3" in outcome["text"].partition("full")[2]
    assert (sent["by"], received["by"]) == ("caller", "peer")
    pair.slots_back("decode", "r", target, "drained")
    if first == "send":
        assert sent["end"] == received["end"] == "Refused"
        assert pair.decode.changed(POISON, list(range(SLOTS))) == 0


def test_too_few_tokens_are_named_on_both_sides(pair: Pair) -> None:
    pair.send("r", [1, 2], tokens=20)
    pair.receive("r", [3, 4], min_tokens=30)
    sent, received = pair.outcomes("r")
    for outcome in (sent, received):
        assert (outcome["end"], outcome["code"]) == ("Refused", "coverage")
        assert "20 tokens are sent, at least 30 are needed" in outcome["text"]
    assert pair.decode.changed(POISON, list(range(SLOTS))) == 0


def test_another_name_than_the_peers_is_refused(pair: Pair) -> None:
    pair.receive("r", [3, 4], peer=("prefill-7", pair.peer[1]))
    received = pair.decode.outcome("r")
    assert (received["end"], received["retry_safe"]) == ("Refused", False)
    assert "'prefill-7'" in received["text"]
    assert "'prefill'" in received["text"]
    pair.slots_back("decode", "r", [3, 4], "never-exposed")


def test_a_peer_that_does_not_listen_is_lost(pair: Pair) -> None:
    with socket.socket() as bound:  # bound, and nobody listens
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        pair.receive("r", [3, 4], peer=("prefill", address))
        received = pair.decode.outcome("r")
    assert (received["end"], received["retry_safe"]) == ("PeerLost", True)
    assert address in received["text"]
    pair.slots_back("decode", "r", [3, 4], "never-exposed")
