"""Two routers joined in memory: the protocol of a transfer, message by message. About 2 s."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvferry.engine import wire
from kvferry.engine.errors import Busy, Failed, UsageError
from kvferry.engine.keys import Key, Peer
from kvferry.engine.limits import OFFERS_WAITING_BYTES_MAX
from kvferry.engine.ports import Settled
from kvferry.engine.source_sessions import PERMIT_LINGER_S
from kvferry.engine.spans import Span
from tests.unit.pair import MS, SLOTS, Handle, Pair, S, make_layout, tags

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.pair import End

KEY = Key("r", 1)
DRAINED = {"drained"}
NEVER = {"never-exposed"}


def offered(pair: Pair, key: Key = KEY, slots: tuple[int, ...] = (5, 6, 9, 2)) -> Handle:
    """A receive whose offer has reached the source."""
    rx = pair.decode.receive(key, pair.prefill, slots)
    pair.roundtrip()
    return rx


def moving(pair: Pair, *, posted: bool = True) -> tuple[Handle, Handle]:
    """A matched transfer of four blocks in at least two writes, handed over or posted."""
    pair.prefill.worker.prompt = False
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.roundtrip()
    if posted:
        for write in list(pair.prefill.worker.queued):
            pair.prefill.worker.post(write, pair.now)
        pair.prefill.work()
        assert len(pair.prefill.worker.posted) >= 2
    return rx, tx


def settle_all(pair: Pair, result: str = "done") -> None:
    worker = pair.prefill.worker
    for write in [*worker.posted, *worker.doubtful]:
        worker.settle(write, result)
    pair.prefill.work()
    pair.roundtrip()


# ---------------------------------------------------------------- the good way


def test_offer_first() -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2])
    pair.prefill.push(tx, [7, 8], first=2)
    pair.prefill.finish(tx, b"aux")
    pair.roundtrip()
    (received, _), (sent, _) = rx.ended[0], tx.ended[0]
    assert received is not None
    assert sent is not None
    assert (received.tokens, received.bytes_moved, received.aux) == (16, 4096, b"aux")
    assert (sent.tokens, sent.bytes_moved, sent.key) == (16, 4096, KEY)
    assert rx.evidence == DRAINED
    assert tx.evidence == {"settled"}
    assert tags(pair.prefill.sent, KEY) == ["moving", "done"]
    pair.check_over()


def test_send_first_and_sealed_before_the_offer() -> None:
    pair = Pair()
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.finish(tx)
    rx = offered(pair)
    assert rx.done
    assert tx.done
    pair.check_over()


def test_finish_after_the_last_write_has_settled() -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.roundtrip()
    assert not tx.ended
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    pair.check_over()


def test_blocks_that_nobody_needs_come_back_at_once() -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6], first=1)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.push(tx, [1, 2], group="side")
    assert not tx.released, "before the match nobody knows what is needed"
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    free = {place for place, evidence in tx.released if evidence == "never-exposed"}
    assert free == {("full", 1), ("full", 4), ("side", 1), ("side", 2)}
    pair.check_over()


def test_nothing_needed_is_done_at_once() -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [], tokens=0)
    tx = pair.prefill.send("r", 0)
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    assert tx.done


def test_the_target_accepts_fewer_tokens() -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6, 9, 2], tokens=16, min_tokens=6)
    tx = pair.prefill.send("r", 7)
    pair.prefill.push(tx, [1, 2])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    received, _ = rx.ended[0]
    assert received is not None
    assert (received.tokens, received.bytes_moved) == (7, 2048)
    pair.check_over()


def test_a_thousand_transfers_over_one_session() -> None:
    pair = Pair()
    handles = []
    for number in range(200):
        rx = pair.decode.receive(Key(f"r{number}"), pair.prefill, [number % SLOTS])
        handles += [rx, pair.prefill.send(f"r{number}", 4)]
        pair.prefill.push(handles[-1], [number % SLOTS])
        pair.prefill.finish(handles[-1])
        pair.roundtrip()
    assert all(handle.done for handle in handles)
    assert len(pair.cables) == 1
    pair.check_over()


# ---------------------------------------------------------------- coverage


def test_a_shortfall_is_told_to_both_sides() -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.code == tx.code == "coverage"
    assert "ordinal 3" in str(rx.error)
    assert "'full'" in str(rx.error)
    pair.check_over()


def test_one_piece_that_is_too_short_is_refused_before_its_first_byte() -> None:
    pair = Pair()
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3])
    pair.prefill.finish(tx)
    rx = offered(pair)
    assert rx.code == tx.code == "coverage"
    assert "post" not in {type(command).__name__.lower() for command in pair.prefill.worker.log}
    pair.check_over()


def test_fewer_tokens_than_accepted() -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 12)
    pair.roundtrip()
    assert rx.code == tx.code == "coverage"
    assert "12 tokens" in str(rx.error)
    pair.check_over()


# ---------------------------------------------------------------- cancelling


STAGES = ["begun", "offered", "matched", "handed", "posted", "sealed"]


@pytest.mark.parametrize(
    ("stage", "side"),
    # A send that is cancelled before any offer came answers nobody: see `Tombstones`.
    [*((s, "target") for s in STAGES), *((s, "source") for s in STAGES[1:])],
)
def test_cancel_at_each_stage(stage: str, side: str) -> None:
    pair = Pair()
    pair.prefill.worker.prompt = False
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6, 9, 2])
    tx: Handle | None = None
    if stage != "begun":
        pair.roundtrip()
    if stage not in ("begun", "offered"):
        tx = pair.prefill.send("r", 16)
    if tx is not None and stage != "matched":
        pair.prefill.push(tx, [1, 2, 3, 4])
        pair.roundtrip()
    if stage in ("posted", "sealed"):
        for write in list(pair.prefill.worker.queued):
            pair.prefill.worker.post(write, pair.now)
        pair.prefill.work()
    if tx is not None and stage == "sealed":
        pair.prefill.finish(tx)
    if side == "source" and tx is None:
        tx = pair.prefill.send("r", 16)
    end, handle = (pair.decode, rx) if side == "target" else (pair.prefill, tx)
    assert handle is not None
    end.cancel(handle, "enough")
    assert handle.code == "cancelled", "the caller is answered at once"
    end.cancel(handle, "again")
    pair.roundtrip()
    pair.prefill.work()
    pair.roundtrip()
    if stage in ("posted", "sealed"):
        assert not rx.released
        settle_all(pair)
    assert rx.fenced == 1
    assert rx.code == "cancelled"
    assert rx.evidence == (NEVER if (stage, side) == ("begun", "target") else DRAINED)
    if tx is not None:
        assert tx.code == "cancelled"
        assert tx.fenced == 1
    answers = [t for t in tags(pair.prefill.sent, KEY) if t in ("done", "drained")]
    failures = [m for m in pair.prefill.sent if isinstance(m, wire.Failed) and m.drained]
    assert len(answers) + len(failures) == (0 if (stage, side) == ("begun", "target") else 1)


def test_a_cancel_that_crosses_done_gets_no_second_answer() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.prefill.finish(tx)
    for write in list(pair.prefill.worker.posted):
        pair.prefill.worker.settle(write)
    pair.prefill.work()
    assert tx.done
    pair.decode.cancel(rx)
    pair.roundtrip()
    assert rx.code == "cancelled"
    assert rx.evidence == DRAINED
    assert tags(pair.prefill.sent, KEY) == ["moving", "done"]
    pair.check_over()


def test_a_cancel_before_its_send_is_remembered() -> None:
    pair = Pair()
    rx = offered(pair)
    pair.decode.cancel(rx, "client left")
    pair.roundtrip()
    assert rx.evidence == DRAINED
    tx = pair.prefill.send("r", 16)
    assert tx.code == "cancelled"
    assert "client left" in str(tx.error)
    again = pair.prefill.send("r", 16)
    assert not again.ended, "a cancel ends one send, not every later one"


def test_a_cancel_before_its_send_is_remembered_for_every_branch() -> None:
    pair = Pair()
    rx = offered(pair, Key("r", 1, branch=7))
    pair.decode.cancel(rx)
    pair.roundtrip()
    assert pair.prefill.send("r", 16).code == "cancelled"


def test_what_waits_for_the_session_is_given_back_without_being_offered() -> None:
    pair = Pair()
    pair.dialling = False
    rx = pair.decode.receive(KEY, pair.prefill, [5])
    pair.decode.cancel(rx)
    assert rx.evidence == NEVER
    assert rx.fenced == 1
    pair.dialling = True
    pair.roundtrip()
    assert "offer" not in tags(pair.decode.sent)


def test_an_offer_that_has_not_left_is_dropped_by_its_gate() -> None:
    pair = Pair()
    offered(pair, Key("warm"))
    rx = pair.decode.receive(KEY, pair.prefill, [7])
    assert tags(pair.decode.sent, KEY) == ["offer"], "queued, but not carried"
    pair.decode.cancel(rx)
    assert rx.evidence == NEVER
    pair.roundtrip()
    assert not tags(pair.prefill.heard, KEY), "neither the offer nor a cancel has left"


# ---------------------------------------------------------------- refusals, attempts, tombstones


def test_refusal_of_a_group_that_the_source_does_not_have() -> None:
    pair = Pair(target_layout=make_layout(2 << 32, groups=("full", "side")))
    lean = pair.add("lean", layout=make_layout(3 << 32, groups=("full",)))
    rx = pair.decode.receive(KEY, lean, [3], group="side")
    pair.roundtrip()
    assert type(rx.error).__name__ == "Refused"
    assert rx.fenced == 1
    assert not rx.error.retry_safe


def test_another_model_is_refused_with_the_field_and_both_values() -> None:
    pair = Pair()
    other = pair.add("other", layout=make_layout(3 << 32, model="llama"))
    rx = pair.decode.receive(KEY, other, [3])
    pair.roundtrip()
    assert rx.code == "refused-model"
    assert "'llama'" in str(rx.error)
    assert "'m'" in str(rx.error)
    assert rx.evidence == NEVER
    assert not pair.cables


def test_a_newer_attempt_ends_the_waiting_older_one() -> None:
    pair = Pair()
    older = offered(pair)
    newer = offered(pair, Key("r", 2), (11, 12, 13, 14))
    assert older.code == "superseded"
    assert older.evidence == DRAINED
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert newer.done
    pair.check_over()


def test_a_newer_attempt_ends_the_moving_older_one() -> None:
    pair = Pair()
    older, tx = moving(pair)
    newer = offered(pair, Key("r", 2), (11, 12, 13, 14))
    assert older.code == tx.code == "cancelled"
    assert not older.released, "its writes are posted"
    assert not newer.ended
    settle_all(pair)
    assert older.evidence == DRAINED
    again = pair.prefill.send("r", 16)
    pair.prefill.worker.prompt = True
    pair.prefill.push(again, [1, 2, 3, 4])
    pair.prefill.finish(again)
    pair.roundtrip()
    assert newer.done
    pair.check_over()


def test_an_older_attempt_is_refused() -> None:
    pair = Pair()
    offered(pair, Key("r", 2))
    older = offered(pair, Key("r", 1), (11,))
    assert older.code == "superseded"
    assert older.evidence == DRAINED


def test_another_branch_is_neither_superseded_nor_served_by_the_same_send() -> None:
    pair = Pair()
    one = offered(pair, Key("r", 1, 0), (1,))
    two = offered(pair, Key("r", 2, 1), (2,))
    assert not one.ended
    assert not two.ended
    tx = pair.prefill.send("r", 4)
    pair.prefill.push(tx, [1])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert two.done, "the highest attempt is served"
    assert not one.ended


def test_a_late_offer_of_an_ended_key_is_refused_with_the_reason() -> None:
    pair = Pair()
    rx = offered(pair)
    pair.decode.cancel(rx, "client left")
    pair.roundtrip()
    late = offered(pair)
    assert late.code == "ended"
    assert "client left" in str(late.error)
    assert late.evidence == DRAINED
    newer = offered(pair, Key("r", 2))
    assert not newer.ended


def test_tombstones_are_forgotten_after_their_time() -> None:
    pair = Pair()
    rx = offered(pair)
    pair.decode.cancel(rx)
    pair.roundtrip()
    keeper = pair.decode.receive(Key("keep"), pair.prefill, [60], deadlines_s=(999, 999, 999))
    pair.wait(310)
    assert not keeper.ended
    assert not offered(pair).ended


# ---------------------------------------------------------------- ill and duplicate messages (I11)


def others_work(pair: Pair) -> None:
    """Proof that nothing else was hurt: the same session serves another transfer."""
    session = pair.cables[0]
    pair.prefill.worker.prompt = True
    key = Key(f"other{pair.now}")
    rx = pair.decode.receive(key, pair.prefill, [50, 51])
    tx = pair.prefill.send(key.request, 8)
    pair.prefill.push(tx, [50, 51])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    assert pair.cables[0] is session


ZERO, ONE, TWO = b"\0\0\0\0", b"\1\0\0\0", b"\2\0\0\0"


def offer(key: Key = KEY, **changes: object) -> wire.Offer:
    fields: dict[str, object] = {
        "tokens": 4,
        "min_tokens": 4,
        "needs": [wire.Need("full", ZERO, ONE, b"\3\0\0\0")],
        "match_ms": 60_000,
        "stall_ms": 60_000,
        "total_ms": 60_000,
    }
    return wire.Offer(key, **{**fields, **changes})  # type: ignore[arg-type]


ILL_OFFERS = {
    "initiator": offer(Key("ill"), initiator="target"),
    "unknown group": offer(Key("ill"), needs=[wire.Need("nope", ZERO, ONE, b"\3\0\0\0")]),
    "group twice": offer(Key("ill"), needs=2 * [wire.Need("full", b"", b"", b"")]),
    "slot beyond": offer(Key("ill"), needs=[wire.Need("full", ZERO, ONE, b"\xff\0\0\0")]),
    "slot negative": offer(Key("ill"), needs=[wire.Need("full", ZERO, ONE, b"\xff\xff\xff\xff")]),
    "slot twice": offer(Key("ill"), needs=[wire.Need("full", ZERO, TWO, b"\3\0\0\0\3\0\0\0")]),
    "runs overlap": offer(
        Key("ill"), needs=[wire.Need("full", ZERO + ZERO, ONE + ONE, b"\3\0\0\0\4\0\0\0")]
    ),
    "ordinal negative": offer(Key("ill"), needs=[wire.Need("full", b"\xff" * 4, ONE, ONE)]),
    "ragged slots": offer(Key("ill"), needs=[wire.Need("full", ZERO, ONE, b"\3\0\0")]),
    "slots missing": offer(Key("ill"), needs=[wire.Need("full", ZERO, ONE, b"")]),
    "tokens negative": offer(Key("ill"), tokens=-1, min_tokens=-2),
    "min over tokens": offer(Key("ill"), tokens=1, min_tokens=2),
}


@pytest.mark.parametrize("name", list(ILL_OFFERS))
def test_an_ill_offer_is_refused_and_nothing_else(name: str) -> None:
    pair = Pair()
    offered(pair)
    pair.prefill.hear(ILL_OFFERS[name])
    answer = pair.prefill.sent[-1]
    assert isinstance(answer, wire.Failed)
    assert (answer.key, answer.outcome, answer.drained) == (Key("ill"), "refused", True)
    pair.roundtrip()
    others_work(pair)


ILL_KEYS = [Key(""), Key("x" * 129), Key("r", -1), Key("r", 2**32), Key("r", 1, 2**16)]


@pytest.mark.parametrize("key", [*ILL_KEYS, Key("x" * 300_000)], ids=lambda key: str(key)[:20])
def test_an_ill_key_is_ignored(key: Key) -> None:
    pair = Pair()
    offered(pair)
    for message in (offer(key), wire.Cancel(key, "x"), wire.Unsettled([key, KEY])):
        pair.prefill.hear(message)
    pair.roundtrip()
    assert pair.prefill.router.source.messages_ignored >= 3
    others_work(pair)


def test_ill_durations_of_an_offer_end_at_most_its_own_key() -> None:
    pair = Pair()
    offered(pair)
    pair.prefill.hear(offer(Key("a"), match_ms=-5))
    pair.prefill.hear(offer(Key("b"), match_ms=2**63, stall_ms=2**63, total_ms=2**63))
    pair.prefill.hear(offer(Key("c"), stall_ms=-1, total_ms=-1, priority=-(2**62)))
    pair.wait(1)
    others_work(pair)


def test_a_duplicate_of_a_waiting_offer_changes_nothing() -> None:
    pair = Pair()
    rx = offered(pair)
    pair.prefill.hear(offer(KEY, tokens=16, min_tokens=16))
    pair.roundtrip()
    assert not rx.ended, "an answer would end the waiting offer at its target, but not here"
    others_work(pair)


def test_a_duplicate_of_a_moving_offer_is_not_called_drained() -> None:
    pair = Pair()
    rx, _ = moving(pair)
    pair.prefill.hear(offer(KEY, tokens=16, min_tokens=16))
    pair.roundtrip()
    assert not rx.released, "its writes are posted"
    settle_all(pair)


def test_a_duplicate_of_a_draining_offer_is_not_called_drained() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.prefill.cancel(tx)
    pair.roundtrip()
    pair.prefill.hear(offer(KEY, tokens=16, min_tokens=16))
    pair.roundtrip()
    assert not rx.released, "its writes are posted"
    settle_all(pair)
    assert rx.evidence == DRAINED


def test_the_same_key_from_another_target_is_refused_and_hurts_nobody() -> None:
    pair = Pair()
    thief = pair.add("thief")
    rx, tx = moving(pair)
    stolen = thief.receive(KEY, pair.prefill, [5])
    pair.roundtrip()
    assert stolen.code == "duplicate"
    assert not rx.ended
    assert not tx.ended
    pair.prefill.finish(tx)
    settle_all(pair)
    assert rx.done


def test_a_cancel_from_another_target_hurts_nobody() -> None:
    pair = Pair()
    thief = pair.add("thief")
    thief.receive(Key("t"), pair.prefill, [5])
    rx = offered(pair)
    cable = pair.cables[0]
    pair.prefill.hear(wire.Cancel(KEY, "ha"), cable)
    tx = pair.prefill.send("r", 16)
    assert not tx.ended
    pair.prefill.hear(wire.Cancel(KEY, "ha"), cable)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    pair.prefill.hear(wire.Cancel(KEY, "ha"), cable)


def messages_to_a_target(key: Key) -> list[wire.AnyMessage]:
    return [
        wire.Moving(key, 16),
        wire.Moving(key, -1),
        wire.Done(key, 16, 4096),
        wire.Failed(key, "no such outcome", "c", "t", retry_safe=True, drained=True),
        wire.Failed(key, "failed", "c", "t", retry_safe=True, drained=False),
        wire.Drained(key),
    ]


@pytest.mark.parametrize("index", range(6))
def test_messages_of_an_unknown_key_are_counted(index: int) -> None:
    pair = Pair()
    rx = offered(pair)
    before = pair.decode.router.target.messages_ignored
    pair.decode.hear(messages_to_a_target(Key("who", 9))[index])
    assert pair.decode.router.target.messages_ignored == before + 1
    assert not rx.ended
    others_work(pair)


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("second", range(6))
def test_any_two_messages_of_one_key_end_at_most_it(first: int, second: int) -> None:
    pair = Pair()
    rx = offered(pair)
    for index in (first, second):
        pair.decode.hear(messages_to_a_target(KEY)[index])
    assert len(rx.ended) <= 1
    assert rx.fenced <= 1
    pair.roundtrip()
    if rx.ended and not rx.fenced:
        pair.roundtrip()
        assert rx.evidence <= DRAINED
    others_work(pair)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (wire.Done(KEY, 16, 4095), "4095 bytes"),
        (wire.Done(KEY, 15, 4096), "15 tokens"),
        (wire.Moving(KEY, 16), "wants to move 16"),
        (wire.Drained(KEY), "without an outcome"),
    ],
    ids=["bytes", "tokens", "moving twice", "drained"],
)
def test_a_source_that_breaks_the_protocol_fails_its_transfer(
    message: wire.AnyMessage, text: str
) -> None:
    pair = Pair()
    rx = offered(pair)
    pair.decode.hear(wire.Moving(KEY, 16))
    pair.decode.hear(message)
    assert rx.code == "protocol"
    assert text in str(rx.error)
    pair.roundtrip()
    assert rx.fenced == 1
    others_work(pair)


HANDSHAKE = [
    wire.Hello("x", "0" * 32, 1, 1, b"", "source"),
    wire.Prove(),
    wire.Renew(1),
    wire.Granted(99, 10**9),
    wire.Granted(1, -5),
    wire.Moving(KEY, 1),
    wire.Offer(Key("z"), 0, 0, [], 1, 1, 1),
    wire.Cancel(Key("z"), "r"),
    wire.Unsettled([Key("z")]),
    wire.Drained(Key("z")),
    wire.Goodbye("bye"),
    wire.Goodbye("bye"),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_messages_out_of_place_in_a_live_session_do_no_harm(side: str) -> None:
    pair = Pair()
    offered(pair)
    end: End = getattr(pair, side)
    for message in HANDSHAKE:
        end.hear(message)
    pair.roundtrip()
    others_work(pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    "message", [*HANDSHAKE[1:], wire.Refuse("x", "y")], ids=lambda m: type(m).__name__
)
def test_a_message_before_its_turn_ends_the_connection(side: str, message: wire.AnyMessage) -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5])
    pair.connect()
    getattr(pair, side).hear(message)
    pair.deliver()
    assert not pair.cables
    assert rx.fenced == 1
    assert rx.evidence == NEVER


def test_an_ill_layout_is_refused_when_it_is_told() -> None:
    layout = make_layout(2 << 32)
    import msgspec

    tensor = msgspec.structs.replace(layout.groups[0].tensors[0], pool="nowhere")
    group = msgspec.structs.replace(layout.groups[0], tensors=(tensor,))
    ill = msgspec.structs.replace(layout, groups=(group,))
    for side in ("target", "source"):
        pair = Pair()
        liar = pair.add("liar")
        liar.context.layout = ill
        if side == "target":
            rx = liar.receive(KEY, pair.prefill, [5])
        else:
            rx = pair.decode.receive(KEY, liar, [5])
        pair.roundtrip()
        assert rx.code == "refused-layout", side
        assert not pair.cables


@pytest.mark.parametrize(
    ("name", "incarnation"),
    [("decode", "f" * 31), ("decode", "x/" + "f" * 30), ("", "f" * 32), ("n" * 129, "f" * 32)],
)
def test_an_ill_introduction_is_refused(name: str, incarnation: str) -> None:
    pair = Pair()
    pair.decode.receive(KEY, pair.prefill, [5])
    pair.connect()
    pair.prefill.hear(wire.Hello(name, incarnation, 1, 1, b"", "target"))
    assert tags(pair.prefill.sent) == ["refuse"]


def test_an_ill_introduction_of_any_size_can_be_refused() -> None:
    pair = Pair()
    pair.decode.receive(KEY, pair.prefill, [5])
    pair.connect()
    pair.decode.hear(wire.Hello("\0" * 200_000, "f" * 32, 1, 1, b"", "source"))
    assert tags(pair.decode.sent)[-1] == "refuse"


# ---------------------------------------------------------------- writes


def test_expired_writes_are_queued_again_and_the_transfer_goes_on() -> None:
    pair = Pair()
    rx, tx = moving(pair, posted=False)
    worker = pair.prefill.worker
    handed = set(worker.queued)
    for write in list(worker.queued):
        worker.post(write, 2**62)
    pair.prefill.work()
    pair.prefill.work()
    assert worker.queued, "handed over again, under new numbers"
    assert not handed & set(worker.queued)
    worker.prompt = True
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    assert tx.done
    pair.check_over()


def test_an_expired_write_of_a_cancelled_transfer_is_dropped() -> None:
    pair = Pair()
    rx, tx = moving(pair, posted=False)
    pair.prefill.cancel(tx)
    for write in list(pair.prefill.worker.queued):
        pair.prefill.worker.post(write, 2**62)
    pair.prefill.work()
    pair.roundtrip()
    assert tx.fenced == 1
    assert rx.evidence == DRAINED
    pair.check_over()


def test_a_failed_write_fails_both_sides_after_its_siblings_have_settled() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    first, *rest = pair.prefill.worker.posted
    pair.prefill.worker.settle(first, "failed")
    pair.prefill.work()
    pair.roundtrip()
    assert rx.code == tx.code == "write"
    assert rx.error is not None
    assert rx.error.retry_safe
    assert not rx.released
    assert rest
    settle_all(pair)
    assert tx.evidence == {"settled"}
    assert not rx.released, "what this host had received of it may still land"
    assert any("stay quarantined" in report.text for report in pair.decode.reports)
    assert tags(pair.prefill.sent, KEY) == ["moving", "failed", "drained"]
    pair.check_over()


@pytest.mark.parametrize("told", [True, False])
def test_a_failed_write_is_remembered_past_its_session(told: bool) -> None:
    pair = Pair()
    rx, tx = moving(pair)
    if not told:
        pair.lose()
    pair.prefill.worker.settle(next(iter(pair.prefill.worker.posted)), "failed")
    pair.prefill.work()
    settle_all(pair)
    if pair.cables:
        pair.lose()
    pair.roundtrip()
    assert tx.fenced == 1
    assert not rx.released
    pair.wait(300)
    assert not rx.released, "no time and no later word is evidence"
    assert pair.decode.router.target.slots_quarantined == 4
    pair.check_over()
    again = pair.decode.receive(Key("again"), pair.prefill, [40])
    pair.roundtrip()
    pair.decode.cancel(again)
    pair.roundtrip()
    assert again.evidence <= {"drained", "never-exposed"}, "others are not touched by it"
    assert again.fenced == 1


def test_a_refused_write_was_never_posted_and_leaves_nothing() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.prefill.worker.events.append(Settled(pair.prefill.worker.posted.popitem()[0], "refused"))
    pair.prefill.work()
    settle_all(pair)
    assert rx.code == tx.code == "write"
    assert rx.evidence == DRAINED
    pair.check_over()


def test_a_write_in_doubt_holds_the_slots_of_both_sides_until_it_settles() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    worker = pair.prefill.worker
    doubtful = next(iter(worker.posted))
    worker.doubt(doubtful)
    pair.prefill.work()
    for write in list(worker.posted):
        worker.settle(write)
    pair.prefill.work()
    pair.roundtrip()
    assert rx.code == tx.code == "write"
    assert not rx.released
    assert not tx.fenced
    assert any("quarantined" in report.text for report in pair.prefill.reports)
    pair.wait(120)
    assert not rx.released, "no timer frees a slot"
    settle_all(pair)
    assert rx.evidence == DRAINED
    pair.check_over()


@pytest.mark.parametrize("result", ["done", "failed"])
def test_a_doubt_after_a_cancel(result: str) -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.decode.cancel(rx)
    pair.roundtrip()
    for write in list(pair.prefill.worker.posted):
        pair.prefill.worker.doubt(write)
    pair.prefill.work()
    assert not tx.fenced
    settle_all(pair, result)
    assert rx.evidence == (DRAINED if result == "done" else set())
    assert tx.fenced == 1
    assert tags(pair.prefill.sent, KEY) == ["moving", "drained"]
    pair.check_over()


def test_events_of_unknown_writes_are_ignored() -> None:
    from kvferry.engine.ports import InDoubt, Opened, Posted, Revoked, Settled

    pair = Pair()
    offered(pair)
    pair.worker_events(
        pair.prefill,
        [Opened(b""), Posted(999), Settled(999, "done"), InDoubt(999, "x"), Revoked("p", True)],
    )
    pair.prefill.act()
    others_work(pair)


def test_a_planning_bug_ends_its_transfer_and_gives_every_block_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)

    def explode(*_: object) -> None:
        raise ArithmeticError("boom")

    with monkeypatch.context() as patch:
        patch.setattr("kvferry.engine.pipeline.Cut", explode)
        pair.prefill.push(tx, [1, 2, 3, 4])
    pair.roundtrip()
    assert "boom" in str(tx.error)
    assert rx.evidence == DRAINED
    others_work(pair)
    assert tx.fenced == 1


# ---------------------------------------------------------------- the transport's own end


def test_when_the_transport_stops_what_was_never_posted_is_free() -> None:
    pair = Pair()
    rx, tx = moving(pair, posted=False)
    worker = pair.prefill.worker
    posted, *queued = list(worker.queued)
    worker.post(posted, pair.now)
    worker.stop("device lost")
    worker.step(pair.now)
    events, worker.events = worker.events, []
    late = pair.prefill.send("late", 4)
    pair.worker_events(pair.prefill, events)
    pair.prefill.act()
    pair.roundtrip()
    assert queued
    assert rx.ended
    assert tx.ended
    assert not rx.released, "one write was posted and never settled"
    assert late.fenced == 1
    assert pair.prefill.router.source.mover.writes_open == 1


def test_writes_that_cross_the_transports_end_are_free() -> None:
    pair = Pair()
    rx, tx = moving(pair, posted=False)
    worker = pair.prefill.worker
    worker.queued.clear()  # they crossed `Stopped`: never posted, and never answered
    worker.stop("device lost")
    pair.prefill.work()
    pair.roundtrip()
    assert tx.fenced == 1
    assert rx.evidence == DRAINED
    pair.check_over()


# ---------------------------------------------------------------- sessions


def test_a_lost_session_fails_both_sides_and_the_next_one_brings_the_evidence() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.lose()
    assert rx.code == tx.code == "session-lost"
    assert rx.error is not None
    assert rx.error.retry_safe
    assert not rx.released
    assert any("quarantined" in report.text for report in pair.decode.reports)
    assert pair.decode.router.target.slots_quarantined == 4
    pair.wait(1)
    assert tags(pair.decode.sent)[-3:].count("unsettled") == 1
    assert not rx.released, "its writes are still posted"
    settle_all(pair)
    assert rx.evidence == DRAINED
    assert tags(pair.prefill.sent, KEY) == ["moving", "drained"]
    pair.check_over()


def test_evidence_that_came_while_there_was_no_session_is_asked_for() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.lose()
    settle_all(pair)
    assert tx.fenced == 1
    assert not rx.released
    pair.wait(1)
    assert rx.evidence == DRAINED
    pair.check_over()


def test_a_second_loss_does_not_lose_the_question() -> None:
    pair = Pair()
    rx, _ = moving(pair)
    for _ in range(3):
        pair.lose()
        pair.wait(3)
        assert not rx.released
    settle_all(pair)
    assert rx.evidence == DRAINED
    assert tags(pair.prefill.sent, KEY).count("drained") == 1
    pair.check_over()


def test_the_word_of_another_incarnation_is_no_evidence() -> None:
    pair = Pair()
    rx, _ = moving(pair)
    pair.lose()
    pair.prefill.start()
    pair.prefill.handles = {}
    pair.wait(3)
    pair.decode.hear(wire.Drained(KEY))
    pair.decode.hear(wire.Done(KEY, 16, 4096))
    assert not rx.released
    assert pair.decode.router.target.slots_quarantined == 4
    newer = offered(pair, Key("r", 2), (30,))
    assert not newer.ended


def test_a_source_that_changes_its_layout_between_sessions_harms_nothing() -> None:
    pair = Pair()
    rx, _ = moving(pair)
    pair.lose()
    pair.prefill.context.layout = make_layout(1 << 32, groups=("side",))
    pair.wait(1)
    pair.prefill.worker.posted.clear()
    pair.decode.hear(wire.Done(KEY, 16, 4096))
    assert rx.code == "session-lost"
    assert rx.fenced == 1, "its word is evidence all the same"


def test_redials_grow_apart_and_go_on() -> None:
    pair = Pair()
    moving(pair)
    pair.dialling = False
    pair.lose()
    times = []
    for _ in range(8):
        pair.wait(2.5)
        while pair.dials:
            times.append(pair.now)
            pair.refuse_dial(*pair.dials.popleft())
    assert len(times) == 8
    pair.dialling = True
    settle_all(pair)
    pair.wait(3)
    pair.check_over()


def test_an_unreachable_source_fails_every_receive_and_is_forgotten() -> None:
    pair = Pair()
    pair.dialling = False
    handles = [pair.decode.receive(Key(f"r{i}"), pair.prefill, [i]) for i in range(3)]
    assert len(pair.dials) == 1
    pair.refuse_dial(*pair.dials.popleft())
    assert {handle.code for handle in handles} == {"unreachable"}
    assert {handle.fenced for handle in handles} == {1}
    assert not pair.decode.router.target.links.all()
    assert pair.decode.router.target.links.find(pair.prefill.peer) is None


def test_a_newer_session_of_a_target_replaces_the_older_one() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    old = pair.cables[0]
    # The target lost its connection, the source did not notice yet.
    del pair.decode.cables[old.numbers[pair.decode]]
    pair.decode.router.lost(old.numbers[pair.decode], "reset", pair.now)
    pair.decode.act()
    pair.decode.cables[old.numbers[pair.decode]] = old
    assert rx.code == "session-lost"
    assert not tx.ended
    pair.wait(1)
    assert tx.code == "session-lost"
    assert not rx.released
    stray = offer(Key("stray"))
    before = len(pair.prefill.sent)
    pair.prefill.hear(stray, old)
    assert len(pair.prefill.sent) == before, "what comes on the older connection is void"
    settle_all(pair)
    assert rx.evidence == DRAINED
    pair.check_over()


def test_a_new_incarnation_of_a_target_does_not_inherit() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    pair.decode.start()
    pair.decode.handles = {}
    pair.lose()
    new = pair.decode.receive(Key("new"), pair.prefill, [20])
    pair.roundtrip()
    assert tx.code == "session-lost"
    assert not new.ended
    settle_all(pair)
    assert tx.fenced == 1
    kinds = [type(command).__name__ for command in pair.prefill.worker.log]
    assert kinds.count("Connect") == 2
    assert kinds.count("Disconnect") == 1, "the old one is forgotten when nothing moves any more"
    assert not rx.released, "and nobody told the old one's slots, which are gone with it"


def test_a_target_that_never_comes_back_is_forgotten() -> None:
    pair = Pair()
    for number in range(5):
        visitor = pair.add(f"visitor{number}")
        rx = visitor.receive(Key(f"v{number}"), pair.prefill, [1])
        pair.roundtrip()
        visitor.cancel(rx)
        pair.roundtrip()
        pair.lose()
    pair.wait(PERMIT_LINGER_S + 1)
    disconnected = [c for c in pair.prefill.worker.log if type(c).__name__ == "Disconnect"]
    assert len(disconnected) == 5
    assert not pair.prefill.worker.peers


def test_metadata_that_can_not_be_used_refuses_the_session() -> None:
    pair = Pair()
    pair.prefill.worker.connects = False
    rx = pair.decode.receive(KEY, pair.prefill, [5])
    pair.roundtrip()
    assert rx.code in ("session-lost", "refused-metadata")
    assert "ill metadata" in str(rx.error)
    pair.prefill.worker.connects = True
    pair.wait(3)
    others = offered(pair, Key("again"))
    assert not others.ended


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_handshake_that_takes_too_long_ends(side: str) -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5])
    pair.connect()
    end: End = getattr(pair, side)
    (number,) = end.cables
    end.router.handshake_expired(number, pair.now)
    end.act()
    pair.deliver()
    assert not pair.cables
    assert rx.code == "session-lost"
    for other in pair.ends:
        other.router.handshake_expired(number, pair.now)
        assert not other.context.effects


def test_a_live_session_outlives_the_handshakes_time() -> None:
    pair = Pair()
    offered(pair)
    for end in pair.ends:
        for number in end.cables:
            end.router.handshake_expired(number, pair.now)
    others_work(pair)


def test_events_of_connections_and_links_that_are_gone_are_void() -> None:
    pair = Pair()
    offered(pair)
    router = pair.decode.router
    router.received(77, wire.Drained(KEY), pair.now)
    router.lost(77, "x", pair.now)
    router.dial_failed(77, "x", pair.now)
    assert not pair.decode.context.effects
    router.dialled(77, 99, pair.now)
    effect = router.next_effect()
    assert not router.has_effects
    assert type(effect).__name__ == "HangUp"


# ---------------------------------------------------------------- permits


def test_the_source_stops_before_the_target_gives_up() -> None:
    pair = Pair(permit_ttl_s=10.0)
    rx, tx = moving(pair)
    settle_all(pair)  # every write is done, but the transfer goes on
    start = pair.now
    permit_end = next(iter(pair.prefill.router.source.sessions.live_targets())).permit
    assert permit_end is not None
    posts_until = permit_end.posts_until
    (link,) = pair.decode.router.target.links.all()
    assert link.permit is not None
    assert posts_until < link.permit.runs_out_at
    pair.wait((posts_until - start) / S, quiet=True)
    pair.prefill.worker.log.clear()
    pair.prefill.push(tx, [5, 6], first=4)
    assert not pair.prefill.worker.commands, "the permit is over: nothing is handed over"
    assert not rx.ended
    pair.wait(1, quiet=True)
    assert rx.code == "permit"
    pair.roundtrip()
    assert tx.code == "session-lost"


def test_a_permit_that_ran_out_between_two_timers_stops_the_next_write() -> None:
    pair = Pair()
    _, tx = moving(pair)
    settle_all(pair)
    (target,) = pair.prefill.router.source.sessions.live_targets()
    assert target.permit is not None
    pair.now = target.permit.posts_until - 1
    pair.prefill.push(tx, [5], first=4)
    assert not pair.prefill.worker.commands, "ordinal 4 is not needed"
    rx = pair.decode.receive(Key("more"), pair.prefill, [20, 21])
    more = pair.prefill.send("more", 8)
    pair.prefill.worker.commands.clear()
    cable = pair.cables[0]
    while tags(pair.prefill.heard)[-1] != "offer":
        assert pair.carry(cable, pair.decode)
    pair.prefill.push(more, [1])
    assert len(pair.prefill.worker.commands) == 1
    pair.now += 1
    pair.prefill.push(more, [2], first=1)
    assert len(pair.prefill.worker.commands) == 1
    assert not rx.ended


def test_writes_are_handed_over_only_after_the_first_permit() -> None:
    pair = Pair()
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6, 9, 2])
    pair.connect()
    cable = pair.cables[0]
    seen: list[str] = []
    while pair.carry(cable, pair.decode) or pair.carry(cable, pair.prefill):
        pair.prefill.work()
        posts = [c for c in pair.prefill.worker.log if type(c).__name__ == "Post"]
        if posts and not seen:
            seen = tags(pair.prefill.heard)
    assert seen[-1] == "granted"
    assert not rx.ended


def test_the_not_after_of_a_write_is_the_permits_end() -> None:
    pair = Pair()
    moving(pair, posted=False)
    (target,) = pair.prefill.router.source.sessions.live_targets()
    assert target.permit is not None
    posts = pair.prefill.worker.queued.values()
    assert {post.not_after for post in posts} == {target.permit.posts_until}


def test_a_transfer_of_minutes_keeps_its_permit() -> None:
    pair = Pair()
    deadlines = (300.0, 300.0, 300.0)
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6], deadlines_s=deadlines)
    tx = pair.prefill.send("r", 8, deadlines_s=deadlines)
    pair.wait(100)
    pair.prefill.push(tx, [1])
    pair.wait(100)
    pair.prefill.push(tx, [2], first=1)
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    pair.check_over()


@pytest.mark.parametrize("ttls", [(10.0, 1.0), (1.0, 10.0)])
def test_sides_with_different_permit_times_keep_their_session(ttls: tuple[float, float]) -> None:
    pair = Pair()
    source = pair.add("source", permit_ttl_s=ttls[0])
    target = pair.add("target", permit_ttl_s=ttls[1])
    rx = target.receive(KEY, source, [5, 6])
    tx = source.send("r", 8)
    pair.roundtrip()
    source.push(tx, [1])
    pair.wait(30)
    assert not rx.ended, rx.error
    source.push(tx, [2], first=1)
    source.finish(tx)
    pair.roundtrip()
    assert rx.done


def test_a_permit_of_nothing_is_not_asked_for_without_end() -> None:
    pair = Pair()
    offered(pair)
    for number in range(50):
        pair.prefill.hear(wire.Granted(number, 0))
    before = len(pair.prefill.sent)
    pair.wait(1, quiet=True)
    assert len(pair.prefill.sent) - before < 100


def test_an_idle_permit_lapses_silently_and_comes_back_with_the_next_offer() -> None:
    pair = Pair()
    rx = offered(pair)
    pair.decode.cancel(rx)
    pair.roundtrip()
    pair.wait(PERMIT_LINGER_S + 1)
    before = len(pair.prefill.sent)
    pair.wait(500)
    assert tags(pair.prefill.sent[before:]) == [], "nobody asks for what nobody needs"
    assert len(pair.cables) == 1
    assert pair.decode.router.wake_at is None
    others_work(pair)
    pair.wait(20)
    assert len(pair.cables) == 1


def test_a_silent_source_loses_its_session_even_if_the_offer_left_late() -> None:
    pair = Pair()
    warm = offered(pair, Key("warm"), (40,))
    pair.decode.cancel(warm)
    pair.roundtrip()
    rx = pair.decode.receive(KEY, pair.prefill, [7], deadlines_s=(50.0, 50.0, 50.0))
    cable = pair.cables[0]
    pair.decode.receive(Key("t"), pair.prefill, [8], deadlines_s=(1.0, 1.0, 1.0))
    pair.wait(2, quiet=True)  # a timer that has nothing to do with it fires in between
    while cable.outboxes[pair.decode].take(1):  # now they leave, and nobody answers
        pass
    pair.decode.cancel(rx)
    pair.wait(20, quiet=True)
    assert cable.cut or pair.decode in cable.finishing, "its silence was never noticed"
    assert pair.decode.router.target.slots_quarantined > 0


def test_a_silent_target_loses_its_session() -> None:
    pair = Pair()
    _, tx = moving(pair)
    pair.decode.router.tick = lambda now: None  # type: ignore[method-assign]  # it hangs
    pair.decode.context.wake_at = None
    pair.wait(25, quiet=True)
    assert tx.code == "session-lost"
    assert "silent" in str(tx.error)


# ---------------------------------------------------------------- deadlines


def test_match_deadline_of_a_target() -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5], deadlines_s=(2.0, 9.0, 9.0))
    pair.roundtrip()
    pair.wait(1.99)
    assert not rx.ended
    pair.wait(0.02)
    assert rx.code == "match"
    assert rx.evidence == DRAINED
    pair.check_over()


def test_match_deadline_of_a_source() -> None:
    pair = Pair()
    tx = pair.prefill.send("r", 16, deadlines_s=(2.0, 9.0, 9.0))
    pair.prefill.push(tx, [1, 2])
    pair.wait(2.01)
    assert tx.code == "match"
    assert tx.evidence == NEVER
    pair.check_over()


def test_stall_deadline_counts_from_the_last_progress() -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6, 9, 2], deadlines_s=(9.0, 2.0, 99.0))
    tx = pair.prefill.send("r", 16)
    pair.roundtrip()
    for ordinal in range(3):
        pair.wait(1.9)
        pair.prefill.push(tx, [ordinal + 1], first=ordinal)
        pair.roundtrip()
    assert not tx.ended
    pair.wait(2.1)
    assert rx.code == tx.code == "stall"
    assert rx.evidence == DRAINED
    pair.check_over()


@pytest.mark.parametrize("stage", ["waiting", "moving"])
def test_total_deadline(stage: str) -> None:
    pair = Pair()
    rx = pair.decode.receive(KEY, pair.prefill, [5, 6], deadlines_s=(3.0, 9.0, 3.0))
    tx = pair.prefill.send("r", 8)
    if stage == "waiting":
        pair.prefill.cancel(tx)
    pair.roundtrip()
    pair.wait(3.1)
    assert rx.code in ("total", "match", "cancelled")
    assert rx.fenced == 1
    if stage == "moving":
        assert rx.code == "total"
    pair.check_over()


def test_an_offer_waits_for_its_send_until_the_targets_own_deadline() -> None:
    pair = Pair()
    offered(pair)
    pair.prefill.hear(offer(Key("short"), match_ms=500))
    pair.wait(0.6, quiet=True)
    (answer,) = [m for m in pair.prefill.sent if isinstance(m, wire.Failed)]
    assert (answer.key, answer.code, answer.drained) == (Key("short"), "match", True)
    assert answer.retry_safe


def test_no_timer_is_left_when_everything_is_over() -> None:
    pair = Pair()
    others: list[Callable[[], object]] = [lambda: offered(pair)]
    rx = others[0]()
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2, 3, 4])
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert isinstance(rx, Handle)
    assert rx.done
    pair.wait(PERMIT_LINGER_S + 30)
    assert pair.decode.router.wake_at is None
    assert pair.prefill.router.wake_at is None


# ---------------------------------------------------------------- bounds


def test_bounds_of_receives_and_sends() -> None:
    pair = Pair(receives_max=2, sends_max=2)
    for number in range(2):
        pair.decode.receive(Key(f"r{number}"), pair.prefill, [number])
        pair.prefill.send(f"s{number}", 4)
    with pytest.raises(Busy) as busy:
        pair.decode.receive(Key("r9"), pair.prefill, [9])
    assert busy.value.retry_after_s > 0
    with pytest.raises(Busy):
        pair.prefill.send("s9", 4)
    pair.roundtrip()
    pair.prefill.router.check_integrity()
    first = pair.prefill.handles[min(pair.prefill.handles)]
    pair.prefill.cancel(first)
    pair.prefill.send("s9", 4)


def test_draining_transfers_count_against_the_bound() -> None:
    pair = Pair(receives_max=1, sends_max=1)
    rx, tx = moving(pair)
    pair.decode.cancel(rx)
    pair.roundtrip()
    with pytest.raises(Busy):
        pair.decode.receive(Key("more"), pair.prefill, [40])
    with pytest.raises(Busy):
        pair.prefill.send("more", 4)
    settle_all(pair)
    assert tx.fenced
    pair.decode.receive(Key("more"), pair.prefill, [40])
    pair.prefill.send("more", 4)


def test_too_many_waiting_offers_of_one_target_are_busy() -> None:
    pair = Pair(offers_waiting_max=2)
    kept = [offered(pair, Key(f"r{i}"), (i,)) for i in range(2)]
    third = offered(pair, Key("r2"), (9,))
    assert third.code == "busy"
    assert third.error is not None
    assert third.error.retry_safe
    assert third.evidence == DRAINED
    other = pair.add("other").receive(Key("o"), pair.prefill, [1])
    pair.roundtrip()
    assert not other.ended, "the bound is of one target"
    pair.decode.cancel(kept[0])
    pair.roundtrip()
    assert not offered(pair, Key("r3"), (9,)).ended


def test_a_waiting_offer_keeps_its_slots_once() -> None:
    pair = Pair()
    offered(pair)
    (waiting,) = pair.prefill.router.source._offers.of_request("r")
    assert not waiting.offer.needs, "the spans are kept, the message's bytes are not"
    assert waiting.size < OFFERS_WAITING_BYTES_MAX


def test_a_key_in_use_and_a_request_being_sent() -> None:
    pair = Pair()
    rx = offered(pair)
    with pytest.raises(UsageError, match="already in use"):
        pair.decode.receive(KEY, pair.prefill, [30])
    tx = pair.prefill.send("r", 16)
    with pytest.raises(UsageError, match="already being sent"):
        pair.prefill.send("r", 16)
    assert not rx.ended
    assert not tx.ended


def test_a_push_that_is_refused_changes_nothing() -> None:
    from kvferry.engine.spans import Span

    pair = Pair()
    rx = offered(pair)
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1, 2])
    for chunk in (
        {"side": Span.from_slots([5]), "full": Span.from_slots([9], 1)},  # ordinal 1 again
        {"side": Span.from_slots([5]), "full": Span.from_slots([1], 2)},  # slot 1 again
    ):
        with pytest.raises(UsageError):
            pair.prefill.do(lambda router, now, c=chunk: router.source.push(tx.number, c, now))
        backwards = dict(reversed(chunk.items()))
        with pytest.raises(UsageError):
            pair.prefill.do(lambda router, now, c=backwards: router.source.push(tx.number, c, now))
    pair.prefill.push(tx, [5], group="side")
    pair.prefill.push(tx, [3, 4], first=2)
    pair.prefill.finish(tx)
    pair.roundtrip()
    assert rx.done
    pair.check_over()


def test_finish_and_push_after_the_end_are_harmless() -> None:
    pair = Pair()
    tx = pair.prefill.send("r", 16)
    pair.prefill.push(tx, [1])
    pair.prefill.cancel(tx)
    assert not pair.prefill.push(tx, [2], first=1)
    pair.prefill.finish(tx)
    assert tx.owned == {("full", 1)}
    assert tx.fenced == 1


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_closing_ends_everything_and_says_goodbye(side: str) -> None:
    pair = Pair()
    rx, tx = moving(pair)
    waiting = offered(pair, Key("w"), (40,))
    end: End = getattr(pair, side)
    end.do(lambda router, now: router.close(now))
    end.do(lambda router, now: router.close(now))
    pair.roundtrip()
    assert rx.ended
    assert tx.ended
    assert waiting.ended
    assert "goodbye" in tags(end.sent)
    settle_all(pair)
    pair.check_over()
    late = pair.decode.receive(Key("late"), pair.prefill, [41])
    pair.roundtrip()
    if side == "prefill":
        assert late.code == "closing"
        assert late.evidence == DRAINED


def test_a_broken_transport_fails_both_roles_as_what_it_is() -> None:
    pair = Pair()
    rx, tx = moving(pair)
    waiting = pair.prefill.send("w", 4)
    pair.prefill.worker.stop("the device is gone")
    pair.prefill.work()
    pair.roundtrip()
    assert rx.ended
    for handle, code in ((tx, "write"), (waiting, "transport-stopped")):
        assert handle.error is not None
        assert (handle.code, handle.error.by) == (code, "transport")
        assert "the device is gone" in str(handle.error)
    with pytest.raises(Failed, match="the device is gone"):
        pair.prefill.router.check_usable()


def test_one_engine_has_one_address_while_something_runs() -> None:
    pair = Pair()
    rx = offered(pair)
    moved = Peer(pair.prefill.name, "elsewhere:1")
    span = {"full": Span.from_slots([40])}
    deadlines = pair.decode.router.deadlines(None, None, None)
    target = pair.decode.router.target
    with pytest.raises(UsageError, match="one address per peer"):
        target.receive(Key("b"), moved, span, 4, 4, deadlines, 0, pair.now)
    pair.decode.cancel(rx)
    pair.roundtrip()
    assert target.receive(Key("b"), moved, span, 4, 4, deadlines, 0, pair.now)
    pair.decode.act()
    assert [dial.peer for _, dial in pair.dials] == [moved]
    target.check_integrity()


def test_a_source_that_comes_back_elsewhere_still_answers_for_what_is_out() -> None:
    pair = Pair()
    rx, _ = moving(pair)
    pair.dialling = False
    pair.lose()
    assert pair.decode.router.target.slots_quarantined == 4
    pair.dials.clear()
    pair.prefill.peer = Peer(pair.prefill.name, "elsewhere:1")
    pair.decode.receive(Key("next", 1), pair.prefill, [41])
    assert [dial.peer for _, dial in pair.dials] == [pair.prefill.peer]
    pair.dialling = True
    pair.roundtrip()
    settle_all(pair)
    assert rx.evidence == DRAINED
    pair.decode.router.target.check_integrity()


def test_an_offer_waits_no_longer_than_the_source_lets_anything_last() -> None:
    pair = Pair(total_s=2.0, match_s=1.0)
    rx = pair.decode.receive(KEY, pair.prefill, [5], deadlines_s=(500.0, None, 500.0))
    pair.roundtrip()
    pair.wait(2.5)
    assert rx.code == "match"


def test_an_offer_may_have_a_run_per_block() -> None:
    pair = Pair()
    offered(pair)
    need = Span.from_runs((4 * i, [i]) for i in range(24))
    pair.prefill.hear(offer(Key("strided"), tokens=400, needs=[wire.Need("full", *need.to_wire())]))
    waiting = pair.prefill.router.source._offers.get(Key("strided"))
    assert waiting is not None
    assert waiting.need == {"full": need}
    assert waiting.size == 256 + 24 * (8 + 16), "runs are counted too"


def test_time_moves_in_milliseconds_on_the_wire() -> None:
    pair = Pair()
    offered(pair)
    (message,) = [m for m in pair.prefill.heard if isinstance(m, wire.Offer)]
    (receive,) = [t for _, t in pair.decode.router.target._transfers.values()]
    assert message.match_ms * MS == receive.deadlines.match
