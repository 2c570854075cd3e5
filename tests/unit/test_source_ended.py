"""The end of a source's process, as evidence: whom it frees, whom not, and who is watched."""

from __future__ import annotations

import pytest

from kvferry.engine.keys import Key
from tests.unit.pair import Pair
from tests.unit.test_router import KEY, moving, offered, others_work, settle_all

ENDED = {"source-ended"}


def die(pair: Pair) -> str:
    """The source's process ends, and whatever it had posted has landed; its incarnation."""
    incarnation = pair.prefill.context.incarnation
    pair.prefill.worker.posted.clear()
    pair.prefill.worker.queued.clear()
    pair.prefill.handles = {}
    return incarnation


def test_a_session_has_its_source_watched() -> None:
    pair = Pair()
    offered(pair)
    assert pair.decode.watched == {pair.prefill.context.incarnation: pair.prefill.context.process}
    assert not pair.prefill.watched, "nobody's slots are lent by a source"


@pytest.mark.parametrize("noticed", [True, False], ids=["session lost", "session alive"])
def test_what_was_lent_to_an_ended_process_comes_back(noticed: bool) -> None:
    pair = Pair()
    rx, _ = moving(pair)
    if noticed:
        pair.lose()
        assert not rx.released
    pair.decode.process_ended(die(pair))
    assert rx.evidence == ENDED
    assert (rx.fenced, rx.code) == (1, "session-lost")
    pair.decode.router.check_integrity()


def test_a_failed_write_of_an_ended_process_lands_no_more() -> None:
    """Its word was no evidence; its end, with nothing left in the kernel, is."""
    pair = Pair()
    rx, _ = moving(pair)
    settle_all(pair, "failed")
    assert not rx.released
    incarnation = die(pair)
    pair.prefill.worker.residue.clear()
    pair.decode.process_ended(incarnation)
    assert rx.evidence == ENDED


def test_the_end_of_an_older_life_frees_only_what_it_had() -> None:
    pair = Pair()
    old, _ = moving(pair)
    pair.lose()
    incarnation = die(pair)
    pair.prefill.start()
    pair.wait(3)
    new = offered(pair, Key("r", 2), (30,))
    assert len(pair.decode.watched) == 2
    pair.decode.process_ended(incarnation)
    assert old.evidence == ENDED
    assert not new.released
    assert pair.decode.watched.keys() == {pair.prefill.context.incarnation}
    others_work(pair)


def test_an_end_that_frees_nothing_only_ends_the_session() -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.evidence == {"drained"}
    pair.decode.process_ended(die(pair))
    assert rx.fenced == 1
    pair.decode.router.process_ended("never heard of", pair.now)
    assert not pair.decode.watched


def test_nobody_is_watched_for_longer_than_needed() -> None:
    """While a session lives, or slots are out; the second is over once they are back."""
    pair = Pair()
    rx, _ = moving(pair)
    pair.lose()
    assert len(pair.decode.watched) == 1
    pair.wait(1)
    settle_all(pair)
    assert rx.evidence == {"drained"}
    assert len(pair.decode.watched) == 1, "the session lives"
    pair.lose()
    assert not pair.decode.watched
    assert KEY not in pair.decode.router.target._transfers
