"""The demo's idea of right bytes: the pattern against a scalar restatement, and the pools."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cli import pattern
from kvferry.cli.models import MODELS, Geometry, find_model
from kvferry.cli.pools import CachePool, FreeSlots
from kvferry.cli.workload import Settings, default_scale, make_workload
from kvferry.engine.errors import UsageError

SMALL = Geometry(layers=3, kv_heads=2, head_dim=8, tokens_per_block=4)


def scalar(seed: int, request: int, layer: int, kind: int, head: int, token: int, dim: int) -> int:
    """The pattern in Python integers, one element at a time."""

    def mix(number: int) -> int:
        number ^= number >> 30
        number = number * 0xBF58476D1CE4E5B9 % 2**64
        number ^= number >> 27
        number = number * 0x94D049BB133111EB % 2**64
        return number ^ number >> 31

    origin = mix((seed * 0x9E3779B97F4A7C15 + request * 0xC2B2AE3D27D4EB4F) % 2**64)
    word = mix(
        (
            origin
            + layer * 0x165667B19E3779F9
            + kind * 0xD6E8FEB86659FD93
            + token * 0xA0761D6478BD642F
            + head * 0xE7037ED1A0B428DB
            + dim // 4 * 0x8EBC6AF09C88C6E3
        )
        % 2**64
    )
    return word >> 16 * (dim % 4) & 0xFFFF


def test_the_pattern_is_a_function_of_the_coordinates_alone() -> None:
    tokens = np.array([0, 5, 70_000])
    for seed, request, layer in [(0, 0, 0), (7, 3, 2), (2**40, pattern.NOBODY, 125)]:
        values = pattern.words(seed, request, layer, tokens, kv_heads=2, head_dim=8)
        seen = values.view(np.uint16)
        assert seen.shape == (2, 3, 2, 8)
        for kind, token, head, dim in np.ndindex(seen.shape):
            where = seed, request, layer, kind, head, int(tokens[token]), dim
            assert seen[kind, token, head, dim] == scalar(*where), where


def test_neighbours_differ_along_every_axis() -> None:
    values = pattern.words(1, 1, 1, np.arange(64), kv_heads=4, head_dim=128).view(np.uint16)
    others = pattern.words(1, 2, 1, np.arange(64), kv_heads=4, head_dim=128).view(np.uint16)
    for axis in range(4):
        step = np.diff(values.astype(np.int64), axis=axis)
        assert (step != 0).mean() > 0.999
    assert (values != others).mean() > 0.999


def filled(request: int = 5) -> tuple[CachePool, np.ndarray]:
    pool = CachePool(SMALL, slots=10, seed=3, model="m")
    slots = pool.free.take(4)
    pool.own(request, slots)
    pool.write(request, slots, np.arange(4))
    return pool, slots


def test_a_pool_that_holds_what_it_must_has_no_difference() -> None:
    pool, _ = filled()
    assert [d for d in pool.check(5, 6) if d] == []


def test_a_flipped_byte_is_found_and_named() -> None:
    pool, slots = filled()
    pool.flip_byte(int(slots[2]))
    (found,) = [d for d in pool.check(5, 6) if d]
    where = found.request, found.slot, found.layer, found.kind, found.head, found.token, found.dim
    assert where == (5, slots[2], 1, "V", 1, 2 * 4 + 2, 4)
    assert found.expected == scalar(3, 5, 1, 1, 1, 10, 4)
    assert (found.expected ^ found.got, found.elements, found.needed) == (0xFF, 1, True)


@pytest.mark.parametrize("held", [False, True])
def test_a_byte_that_nobody_needs_is_found_and_named(held: bool) -> None:
    pool, slots = filled()
    slot = int(slots[0]) if held else pool.free.first()
    pool.flip_byte(slot)
    (found,) = [d for d in pool.check(6, 9) if d]  # request 5 was of an earlier round
    assert (found.slot, found.needed) == (slot, False)
    assert ("last used for request 5" if held else "never used") in str(found)


def test_blocks_in_the_wrong_order_are_found() -> None:
    pool, slots = filled()
    pool.write(5, np.roll(slots, -1), np.arange(4))
    (found,) = [d for d in pool.check(5, 6) if d]
    assert found.elements > 0.9 * 4 * SMALL.block_bytes / 2


def test_free_slots_are_fragmented_and_come_back_once() -> None:
    free = FreeSlots(64, np.random.default_rng(1))
    first, second = free.take(20), free.take(20)
    assert len(np.union1d(first, second)) == 40
    assert (np.diff(first) != 1).mean() > 0.5
    free.give_back(first)
    assert free.taken == 20
    with pytest.raises(UsageError, match=f"slot {first[0]} was given back"):
        free.give_back(first[:1])


@pytest.mark.parametrize("model", MODELS)
def test_the_default_scale_is_enough_to_verify_64_requests(model: str) -> None:
    for seed in range(20):
        settings = Settings(model, default_scale(model), requests=64, seed=seed, in_flight=16)
        workload = make_workload(settings)
        total = sum(workload.blocks(i) for i in range(64)) * workload.geometry.block_bytes
        assert total >= 512 * 2**20, seed
        assert 2 * workload.pool_bytes < 900 * 2**20, seed
        assert [i for both in workload.rounds for i in range(*both)] == list(range(64))


def test_scale_reduces_layers_and_tokens_only() -> None:
    settings = Settings("Llama-3.1-8B", 1.0, requests=9, seed=4, in_flight=8)
    whole = make_workload(settings)
    half = make_workload(Settings("Llama-3.1-8B", 0.5, requests=9, seed=4, in_flight=8))
    assert whole.geometry == MODELS["Llama-3.1-8B"]
    assert half.geometry == Geometry(layers=16, kv_heads=8, head_dim=128)
    assert half.tokens == [round(tokens / 2) for tokens in whole.tokens]
    assert make_workload(settings) == whole


def test_models_are_found_whatever_their_case() -> None:
    assert find_model("llama-3.1-8b") == "Llama-3.1-8B"
    with pytest.raises(UsageError, match=r"no model 'gpt-2'; there are Llama-3\.1-8B, "):
        find_model("gpt-2")
