"""The handshake, message by message, and both counts of a permit."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.engine import wire
from kvferry.engine.keys import Key
from kvferry.engine.limits import PERMIT_TTL_MIN_S
from kvferry.engine.ports import ProcessIdentity
from kvferry.engine.session import (
    Introduction,
    Role,
    SessionMachine,
    SessionRefused,
    SourcePermit,
    TargetPermit,
)
from kvferry.engine.transitions import Session
from tests.unit.pair import make_layout

S = 1_000_000_000
TTL = 10 * S
PROCESS = ProcessIdentity("boot", "pids", "net", 1, 2)


def machine(role: Role, expected: str | None = None, *, model: str = "m") -> SessionMachine:
    name = "prefill" if role == "source" else "decode"
    layout = make_layout(1 << 32, model=model)
    geometry = wire.Geometry(layout, 1, "memory", PROCESS, b"metadata of " + name.encode())
    return SessionMachine(role, Introduction(name, "ab" * 16, geometry), b"n", expected)


def handshake(target: SessionMachine, source: SessionMachine) -> list[tuple[str, wire.Message]]:
    """Carry messages until nobody speaks; (who, message) in order."""
    told: list[tuple[str, wire.Message]] = []
    queue = [("target", message) for message in target.start()]
    assert source.start() == []
    while queue:
        who, message = queue.pop(0)
        told.append((who, message))
        receiver, name = (source, "source") if who == "target" else (target, "target")
        decoded = wire.decode(wire.encode(message))
        assert decoded is not None
        queue += [(name, answer) for answer in receiver.receive(decoded)]
    return told


def test_the_target_speaks_first_at_every_step() -> None:
    target, source = machine("target", "prefill"), machine("source")
    told = handshake(target, source)
    assert [(who, type(message).__name__) for who, message in told] == [
        ("target", "Hello"),
        ("source", "Hello"),
        ("target", "Prove"),
        ("source", "Prove"),
        ("target", "Geometry"),
        ("source", "Geometry"),
    ]
    assert target.live
    assert source.live
    assert target.peer == "prefill/" + "ab" * 16
    assert source.peer == "decode/" + "ab" * 16
    assert source.peer_geometry is not None
    assert source.peer_geometry.metadata == b"metadata of decode"
    assert target.version == source.version == 1


MESSAGES: list[wire.AnyMessage] = [
    wire.Hello("decode", "cd" * 16, 1, 1, b"", "target"),
    wire.Prove(),
    wire.Geometry(make_layout(2 << 32), 1, "memory", PROCESS),
    wire.Goodbye(),
    wire.Renew(1),
    wire.Granted(1, 1),
    wire.Cancel(Key("r"), ""),
    wire.Unsettled([]),
]
TURNS = {
    Session.OPENING: "Hello",
    Session.PROVING: "Prove",
    Session.GREETING: "Geometry",
    Session.LIVE: "Goodbye",
    Session.CLOSING: "Goodbye",
    Session.ENDED: "",
}


def source_in(state: Session) -> SessionMachine:
    source = machine("source")
    for message in MESSAGES[: min(list(TURNS).index(state), 4)]:
        source.receive(message)
    if state is Session.ENDED:
        source.end()
    assert source.state is state
    return source


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("state", list(TURNS))
def test_every_message_in_every_state(state: Session, message: wire.AnyMessage) -> None:
    source = source_in(state)
    if type(message).__name__ == TURNS[state]:
        source.receive(message)
        assert source.state is not state or state is Session.CLOSING
        return
    with pytest.raises(SessionRefused) as refused:
        source.receive(message)
    assert refused.value.code == "order"
    assert source.state is state
    assert refused.value.refusal is not None


@pytest.mark.parametrize("state", list(TURNS))
def test_a_refusal_and_an_end_in_every_state(state: Session) -> None:
    source = source_in(state)
    with pytest.raises(SessionRefused) as refused:
        source.receive(wire.Refuse("model", "no"))
    assert refused.value.refusal is None, "a refusal is not answered by one"
    source.end()
    source.end()
    assert source.state is Session.ENDED
    assert not source.live


@pytest.mark.parametrize("state", [Session.OPENING, Session.PROVING])
def test_nothing_is_told_before_the_proof(state: Session) -> None:
    source = source_in(state)
    for message in MESSAGES:
        if type(message).__name__ != TURNS[state]:
            with pytest.raises(SessionRefused) as refused:
                source.receive(message)
            assert "metadata" not in refused.value.text
    answers = source.receive(MESSAGES[list(TURNS).index(state)])
    assert not any(isinstance(answer, wire.Geometry) for answer in answers)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version_min": 2, "version_max": 3}, "version"),
        ({"version_min": -5, "version_max": 0}, "version"),
        ({"version_min": 1, "version_max": -(2**60)}, "version"),
        ({"role": "source"}, "role"),
        ({"name": ""}, "name"),
        ({"name": "é" * 65}, "name"),
        ({"incarnation": ""}, "incarnation"),
        ({"incarnation": "AB" * 16}, "incarnation"),
        ({"incarnation": "ab" * 16 + "\n"}, "incarnation"),
    ],
)
def test_an_ill_hello(changes: dict[str, object], code: str) -> None:
    source = machine("source")
    hello = msgspec.structs.replace(MESSAGES[0], **changes)
    with pytest.raises(SessionRefused) as refused:
        source.receive(hello)
    assert refused.value.code == code
    assert source.state is Session.OPENING


def test_the_highest_common_version() -> None:
    source = machine("source")
    source.receive(msgspec.structs.replace(MESSAGES[0], version_min=0, version_max=99))
    assert source.version == 1


def test_a_name_that_was_not_expected() -> None:
    target = machine("target", "other")
    with pytest.raises(SessionRefused, match="'prefill', not 'other'") as refused:
        target.receive(wire.Hello("prefill", "ab" * 16, 1, 1, b"", "source"))
    assert refused.value.code == "name"


def test_a_proof_that_nobody_asked_for() -> None:
    source = source_in(Session.PROVING)
    with pytest.raises(SessionRefused) as refused:
        source.receive(wire.Prove("hmac", b"x"))
    assert refused.value.code == "auth"


@pytest.mark.parametrize(
    ("changes", "code"), [({"transport": "nixl"}, "transport"), ({"layout": None}, "model")]
)
def test_a_geometry_that_does_not_fit(changes: dict[str, object], code: str) -> None:
    source = source_in(Session.GREETING)
    if "layout" in changes:
        changes = {"layout": make_layout(2 << 32, model="other")}
    with pytest.raises(SessionRefused, match=r"at decode, '\w+' at prefill") as refused:
        source.receive(msgspec.structs.replace(MESSAGES[2], **changes))
    assert refused.value.code == code
    assert source.state is Session.GREETING


# ---------------------------------------------------------------- permits


def test_the_source_counts_from_asking_and_the_target_from_answering() -> None:
    source, target = SourcePermit(TTL), TargetPermit(TTL, 0)
    assert source.posts_until == 0
    renew = source.renew(1 * S)
    granted = target.receive(renew, 3 * S)
    source.receive(granted, 6 * S)
    assert source.posts_until == 1 * S + int(TTL * 0.99)
    assert target.runs_out_at == 13 * S
    assert source.posts_until < target.runs_out_at
    assert source.renew_at() == 1 * S + TTL // 3


def test_answers_out_of_order_unknown_and_twice() -> None:
    permit = SourcePermit(TTL)
    first, second = permit.renew(1 * S), permit.renew(4 * S)
    permit.receive(wire.Granted(second.number, 10_000), 5 * S)
    until = permit.posts_until
    for number in (first.number, second.number, 77, -1, 2**60):
        permit.receive(wire.Granted(number, 10_000), 6 * S)
    assert permit.posts_until == until
    assert permit.renew_at() == 4 * S + TTL // 3


@pytest.mark.parametrize("ttl_ms", [-(2**62), -1, 0])
def test_a_grant_of_nothing_gives_nothing(ttl_ms: int) -> None:
    permit = SourcePermit(TTL)
    permit.receive(wire.Granted(permit.renew(S).number, ttl_ms), S)
    assert permit.posts_until <= S
    assert permit.renew_at() >= S + int(PERMIT_TTL_MIN_S * S) // 3


def test_a_grant_is_never_longer_than_what_was_asked_for() -> None:
    permit = SourcePermit(TTL)
    permit.receive(wire.Granted(permit.renew(S).number, 2**62), S)
    assert permit.posts_until == S + int(TTL * 0.99)


def test_a_shorter_grant_is_renewed_sooner() -> None:
    permit = SourcePermit(TTL)
    permit.receive(wire.Granted(permit.renew(S).number, 3_000), S)
    assert permit.posts_until == S + int(3 * S * 0.99)
    assert permit.renew_at() == 2 * S


def test_silence_is_counted_from_the_oldest_question_without_an_answer() -> None:
    permit = SourcePermit(TTL)
    assert permit.silent_since() is None
    first = permit.renew(1 * S)
    permit.renew(4 * S)
    assert permit.silent_since() == 1 * S
    permit.receive(wire.Granted(first.number, 10_000), 5 * S)
    permit.renew(7 * S)
    permit.renew(9 * S)
    assert permit.silent_since() == 7 * S


def test_questions_are_not_kept_for_ever() -> None:
    permit = SourcePermit(TTL)
    for second in range(1, 1000):
        permit.receive(wire.Granted(permit.renew(second * S).number, 10_000), second * S)
    assert len(permit._sent) <= 2


def test_an_offer_gives_the_source_time_to_ask() -> None:
    permit = TargetPermit(TTL, 0)
    assert permit.runs_out_at == TTL
    permit.expect(50 * S)
    assert permit.runs_out_at == 60 * S
    permit.receive(wire.Renew(1), 55 * S)
    assert permit.runs_out_at == 65 * S
    permit.expect(10 * S)
    assert permit.runs_out_at == 65 * S, "an older offer takes nothing away"
