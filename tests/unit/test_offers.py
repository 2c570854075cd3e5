"""Waiting offers and tombstones: bounded, in step, and forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.engine import offers, wire
from kvferry.engine.keys import Key
from kvferry.engine.limits import TOMBSTONE_S
from kvferry.engine.offers import Tombstones, WaitingOffer, WaitingOffers
from kvferry.engine.source_sessions import Target
from kvferry.engine.spans import Span

S = 1_000_000_000


def target(name: str) -> Target:
    return cast("Target", SimpleNamespace(peer=name))


def waiting(key: Key, owner: Target, blocks: int = 1) -> WaitingOffer:
    offer = wire.Offer(key, 0, 0, [], 1, 1, 1)
    return WaitingOffer(offer, {"g": Span.from_slots(range(blocks))}, owner, 5 * S)


def test_offers_are_found_by_request_key_and_target() -> None:
    table = WaitingOffers(10)
    a, b = target("a"), target("b")
    one, two, three = (
        waiting(Key("r", 1), a),
        waiting(Key("r", 2), b),
        waiting(Key("s"), a),
    )
    for item in (one, two, three):
        table.add(item)
        table.check_integrity()
    assert table.of_request("r") == [one, two]
    assert table.of_target(a) == [one, three]
    assert table.get(Key("r", 2)) is two
    assert table.get(Key("r", 3)) is None
    assert list(table.all()) == [one, three, two]
    for item in (one, two, three):
        table.drop(item)
        table.check_integrity()
    assert list(table.all()) == []
    assert table.of_request("r") == []


def test_the_bounds_are_of_one_target() -> None:
    table = WaitingOffers(2)
    a, b = target("a"), target("b")
    items = [waiting(Key(f"r{i}"), a) for i in range(2)]
    for item in items:
        assert not table.full_for(a)
        table.add(item)
    assert table.full_for(a)
    assert not table.full_for(b)
    table.drop(items[0])
    assert not table.full_for(a)


def test_the_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "OFFERS_WAITING_BYTES_MAX", 3000)
    table, a = WaitingOffers(100), target("a")
    large = waiting(Key("large"), a, 1000)
    assert large.size >= 8000
    assert not table.full_for(a), "one that is larger than the bound is let in alone"
    table.add(large)
    assert table.full_for(a)
    table.drop(large)
    assert not table.full_for(a)


def test_a_tombstone_covers_older_attempts_of_its_branch() -> None:
    graves = Tombstones()
    graves.bury(Key("r", 3, 1), "done", 0)
    assert graves.find(Key("r", 3, 1)) is not None
    assert graves.find(Key("r", 0, 1)) is not None
    assert graves.find(Key("r", 4, 1)) is None
    assert graves.find(Key("r", 3, 0)) is None
    graves.bury(Key("r", 1, 1), "late", 0)
    assert graves.find(Key("r", 3, 1)) is not None, "an older attempt does not dig up a newer one"


def test_a_cancel_before_the_send_is_heard_once() -> None:
    graves = Tombstones()
    assert graves.hear("r") is None
    graves.bury(Key("r", 1), "done", 0)
    assert graves.hear("r") is None
    graves.bury(Key("r", 2, 5), "left", 0, unheard=True)
    heard = graves.hear("r")
    assert heard is not None
    assert heard.reason == "left"
    assert graves.hear("r") is None
    assert graves.find(Key("r", 2, 5)) is not None


def test_tombstones_are_forgotten_in_time() -> None:
    graves = Tombstones()
    graves.bury(Key("a"), "x", 0, unheard=True)
    graves.bury(Key("b"), "x", 10 * S)
    graves.bury(Key("a", 1), "x", 20 * S)
    graves.expire(int(TOMBSTONE_S * S) + 9 * S)
    assert graves.find(Key("b")) is not None
    graves.expire(int(TOMBSTONE_S * S) + 10 * S)
    assert graves.find(Key("b")) is None
    assert graves.find(Key("a")) is not None, "buried again: it counts from then"
    graves.expire(int(TOMBSTONE_S * S) + 20 * S)
    assert graves.find(Key("a")) is None
    assert graves.hear("a") is None


def test_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "TOMBSTONES_MAX", 3)
    graves = Tombstones()
    for number in range(10):
        graves.bury(Key(f"r{number}"), "x", number, unheard=True)
    kept = [number for number in range(10) if graves.find(Key(f"r{number}"))]
    assert kept == [7, 8, 9]
    assert graves.hear("r0") is None
    assert graves.hear("r9") is not None
    assert len(graves._unheard) == 2
