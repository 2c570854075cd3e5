"""The paged cache, call by call: tables, windows, prefixes, and who keeps a slot from being free.

Whole engines that move its blocks are in `test_paged_engines`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvferry.adapters.paged import Counts, OutOfBlocks, PagedCache
from kvferry.engine.errors import UsageError
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.spans import Span
from tests.unit.paged import make_group, make_layout

FULL = make_group("full")
WINDOW = make_group("window", "window", 4, 6)
SINKS = make_group("sinks", "window", 4, 6)
CHUNK = make_group("chunk", "chunk", 4, 8)
TIGHT = make_group("window", "window", 4, 1)
VLLM = make_group("window", "window", 32, 64)
STATE = make_group("state", "state", 1)


def make_cache(*groups, slots=16, reserved=(), **options) -> PagedCache:
    return PagedCache(make_layout(groups or (FULL,), slots, reserved), **options)


def filled_cache(tokens: int, *groups, **options) -> PagedCache:
    """With request "r" of `tokens` computed tokens."""
    cache = make_cache(*groups, **options)
    cache.start("r", tokens)
    cache.append("r", tokens)
    return cache


def ordinals(span: Span) -> list[int]:
    return span.ordinals().tolist()


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def back(need: dict[str, Span]) -> dict[str, np.ndarray]:
    """What the engine hands to `on_released`."""
    return {group: span.slots() for group, span in need.items()}


# ---------------------------------------------------------------- tables


def test_blocks_come_in_ascending_slots_and_only_when_a_token_needs_them():
    cache = make_cache()
    cache.start("r", 9)
    assert cache.table("r", "full") == Span()
    for tokens, blocks in ((3, 1), (1, 1), (1, 2), (0, 2), (4, 3)):
        cache.append("r", tokens)
        assert cache.table("r", "full") == Span.from_slots(range(blocks))
    assert cache.tokens("r") == 9
    cache.check()


def test_scratch_is_not_counted_and_becomes_the_next_tokens():
    cache = make_cache()
    cache.start("r", 4)
    cache.append("r", 4, lookahead=5)
    assert (cache.tokens("r"), len(cache.table("r", "full"))) == (4, 3)
    cache.append("r", 6)
    assert (cache.tokens("r"), len(cache.table("r", "full"))) == (10, 3)


def test_a_state_has_one_slot_however_many_tokens():
    cache = make_cache(FULL, STATE)
    cache.start("r", 9)
    assert ordinals(cache.table("r", "state")) == []
    for _ in range(9):
        cache.append("r", 1)
        assert ordinals(cache.table("r", "state")) == [0]
    assert cache.counts("state") == Counts(free=15, tabled=1, pinned=0, leased=0)


def test_reserved_slots_are_never_lent():
    cache = filled_cache(56, reserved=(0, 5))
    assert cache.table("r", "full").slots().tolist() == [1, 2, 3, 4, *range(6, 16)]
    assert cache.counts("full") == Counts(free=0, tabled=14, pinned=0, leased=0)
    cache.check()


def test_a_seed_scatters_the_slots_always_alike():
    tables = [filled_cache(40, seed=seed).table("r", "full") for seed in (7, 7, 8)]
    assert tables[0] == tables[1] != tables[2]
    assert len(tables[0].runs[0].slots) == 10
    assert np.count_nonzero(np.diff(tables[0].slots()) == 1) < 5


def test_the_slots_freed_last_are_lent_next():
    cache = filled_cache(8)
    cache.start("s", 4)
    cache.append("s", 4)
    cache.free("r")
    cache.start("t", 12)
    cache.append("t", 12)
    assert cache.table("t", "full").slots().tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("group", "sinks", "steps", "resident"),
    [
        pytest.param(WINDOW, 0, [22], [0, 1, 2, 3, 4, 5], id="a chunk is computed whole first"),
        pytest.param(WINDOW, 0, [22, 1], [4, 5], id="the token at 22 attends from 17 on"),
        pytest.param(WINDOW, 0, [8, 1], [0, 1, 2], id="the token at 8 attends from 3 on"),
        pytest.param(WINDOW, 0, [8, 1, 1], [1, 2], id="the token at 9 attends from 4 on"),
        pytest.param(WINDOW, 0, [1] * 22, [4, 5], id="token by token"),
        pytest.param(WINDOW, 4, [22, 1], [0, 4, 5], id="a sink stays"),
        pytest.param(WINDOW, 5, [22, 1], [0, 1, 4, 5], id="the block of a sink stays whole"),
        pytest.param(WINDOW, 5, [1] * 23, [0, 1, 4, 5], id="sinks, token by token"),
        pytest.param(WINDOW, 99, [22, 1], [0, 1, 2, 3, 4, 5], id="sinks longer than the prompt"),
        pytest.param(TIGHT, 0, [8, 1], [2], id="a window of one token"),
        pytest.param(VLLM, 0, [311, 1], [7, 8, 9], id="vLLM 0.32: ids 9, 1, 2 behind 7 nulls"),
        pytest.param(CHUNK, 0, [8, 7], [2, 3], id="behind 7 the chunk 0..7 is over"),
        pytest.param(CHUNK, 0, [7, 1], [0, 1], id="7 is in the chunk 0..7"),
        pytest.param(CHUNK, 0, [20, 1], [4, 5], id="the chunk 16..23"),
        pytest.param(FULL, 0, [20, 1], [0, 1, 2, 3, 4, 5], id="full"),
    ],
)
def test_blocks_leave_the_window_before_the_next_tokens_are_computed(group, sinks, steps, resident):
    cache = make_cache(group, sinks={"window": sinks} if sinks else None)
    cache.start("r", sum(steps))
    for tokens in steps:
        cache.append("r", tokens)
        cache.check()
    assert ordinals(cache.table("r", group.name)) == resident
    assert cache.counts(group.name).tabled == len(resident)


def test_groups_of_one_pool_never_share_a_slot():
    groups = FULL, make_group("side", pool="full"), make_group("apart")
    cache = filled_cache(16, *groups)
    used = [cache.table("r", group.name).slots().tolist() for group in groups]
    assert used == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert cache.counts("full") == cache.counts("side") == Counts(8, 8, 0, 0)
    cache.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["last", "first"])
def test_groups_share_by_way_of_a_third_one_as_many_slots_as_all_pools_have(order):
    """One group has its keys in one pool and its values in another; each holds a group besides."""
    keys, values = make_group("keys"), make_group("values")
    key, value = keys.tensors[0], values.tensors[0]
    both = Group("both", "full", 4, (msgspec.structs.replace(key, role="k"), value))
    pools = [Pool("keys", 1 << 32, 4096, 16, reserved=(0,)), Pool("values", 2 << 32, 4096, 9)]
    groups = [(keys, values, both)[index] for index in order]
    cache = PagedCache(Layout(tuple(pools), tuple(groups)).check())
    assert {cache.counts(group).free for group in ("keys", "values", "both")} == {8}
    cache.start("r", 8)
    cache.append("r", 8)
    used = [cache.table("r", group).slots() for group in ("keys", "values", "both")]
    assert sorted(np.concatenate(used).tolist()) == [1, 2, 3, 4, 5, 6]
    cache.check()


def test_too_few_blocks_are_none_at_all():
    """The other group's three are there, and are not taken either."""
    cache = filled_cache(12, FULL, make_group("side", pool="full"), slots=10)
    with pytest.raises(OutOfBlocks, match="'side': 3 blocks are wanted") as raised:
        cache.append("r", 12)
    assert (raised.value.group, raised.value.wanted, raised.value.free) == ("side", 3, 1)
    with pytest.raises(OutOfBlocks):
        cache.need("s", 12)
    assert (cache.tokens("r"), cache.counts("full").free) == (12, 4)
    cache.append("r", 8)
    cache.start("s", 1)
    cache.check()


# ---------------------------------------------------------------- prefixes


def test_a_prefix_is_reused_in_whole_blocks_and_outlives_its_request():
    cache = filled_cache(10)
    assert cache.commit("r", "p") == 8
    table = cache.table("r", "full")
    cache.free("r")
    assert cache.counts("full") == Counts(free=14, tabled=2, pinned=0, leased=0)
    assert cache.start("s", 10, prefix="p") == cache.tokens("s") == cache.cached_tokens("s") == 8
    assert cache.table("s", "full") == table.restrict(0, 2)
    cache.append("s", 2)
    cache.check()
    assert cache.table("s", "full").slots().tolist()[:2] == table.slots().tolist()[:2]
    cache.forget("p")
    assert cache.counts("full").tabled == 3
    cache.check()
    cache.free("s")
    assert cache.all_free


@pytest.mark.parametrize(
    ("groups", "committed", "prompt", "started", "received"),
    [
        pytest.param([FULL], 8, 20, 8, 8, id="whole blocks"),
        pytest.param([FULL], 11, 20, 8, 8, id="rounded down"),
        pytest.param([FULL], 3, 20, 0, 0, id="less than a block"),
        pytest.param([FULL], 8, 8, 4, 8, id="one token is left to compute, none to receive"),
        pytest.param([FULL], 20, 9, 8, 8, id="a shorter prompt"),
        pytest.param([FULL, make_group("six", tokens=6)], 20, 30, 12, 12, id="blocks of 4 and 6"),
        pytest.param([FULL, WINDOW], 8, 20, 8, 8, id="its window is there"),
        pytest.param([FULL, WINDOW], 20, 14, 0, 0, id="a shorter one's window is not"),
        pytest.param([FULL, STATE], 8, 20, 0, 8, id="a state is computed from the start"),
        pytest.param([FULL, STATE], 8, 8, 0, 4, id="a state has to come"),
    ],
)
def test_how_much_of_a_prefix_is_reused(groups, committed, prompt, started, received):
    cache = filled_cache(committed, *groups)
    cache.commit("r", "p")
    assert cache.start("s", prompt, prefix="p") == started
    cache.append("s", 0)
    cache.need("t", prompt, prefix="p")
    assert cache.cached_tokens("t") == received
    assert cache.start("u", prompt) == cache.start("v", prompt, prefix="unknown") == 0
    cache.check()


def test_a_prefix_whose_window_has_passed_is_not_kept():
    cache = make_cache(FULL, WINDOW)
    cache.start("r", 16)
    cache.append("r", 15)
    cache.append("r", 1)
    assert cache.commit("r", "p") == 16
    assert ordinals(cache.table("r", "window")) == [2, 3]
    cache.append("r", 3)
    cache.append("r", 1)
    assert ordinals(cache.table("r", "window")) == [3, 4]
    assert cache.commit("r", "q") == 20
    for _ in range(3):
        cache.append("r", 1)
    assert ordinals(cache.table("r", "window")) == [4, 5]
    assert cache.commit("r", "too late") == 0
    with pytest.raises(UsageError, match="too late"):
        cache.forget("too late")
    cache.check()


def test_a_prefix_in_host_memory_is_not_kept():
    cache = filled_cache(8)
    cache.offload("r", "full", 0, 1)
    assert cache.commit("r", "p") == 0


# ---------------------------------------------------------------- host memory


def test_offloaded_blocks_have_no_slot_until_they_are_back():
    cache = filled_cache(20)
    facts = cache.facts("r", 20)
    cache.offload("r", "full", 1, 3)
    assert ordinals(cache.table("r", "full")) == [0, 3, 4]
    assert cache.counts("full").free == 13
    with pytest.raises(UsageError, match=r"ordinals 1\.\.2 are in host memory.*`onboard`"):
        facts.extract("full", 0, 5)
    with pytest.raises(UsageError, match="host memory"):
        cache.append("r", 1)
    assert ordinals(facts.extract("full", 3, 5)) == [3, 4]
    back_again = cache.onboard("r", "full")
    assert ordinals(back_again) == [1, 2]
    assert facts.extract("full", 0, 5) == cache.table("r", "full")
    assert cache.onboard("r", "full") == Span()
    cache.append("r", 1)
    cache.check()


def test_offloading_keeps_what_others_hold():
    cache = filled_cache(8)
    cache.commit("r", "p")
    cache.start("s", 9, prefix="p")
    shared = cache.table("s", "full")
    facts = cache.facts("s", 8)
    facts.extract("full", 0, 1)
    cache.offload("r", "full", 0, 2)
    cache.offload("s", "full", 0, 2)
    cache.forget("p")
    assert cache.counts("full") == Counts(free=15, tabled=0, pinned=1, leased=0)
    facts.released({"full": shared.slots()[:1]}, "settled")
    assert cache.all_free
    cache.check()


def test_a_block_that_left_its_window_needs_not_come_back():
    cache = filled_cache(22, WINDOW)
    cache.offload("r", "window", 0, 4)
    cache.append("r", 1)
    assert cache.onboard("r", "window") == Span()


# ---------------------------------------------------------------- the source's end


def test_what_is_extracted_has_its_ordinals_and_holes():
    groups = FULL, WINDOW, CHUNK, STATE
    cache = filled_cache(22, *groups, sinks={"window": 3}, seed=1)
    cache.append("r", 1, lookahead=9)
    facts = cache.facts("r", 23)
    extents = {"full": (0, 6), "window": (0, 6), "chunk": (0, 6), "state": (0, 1)}
    spans = {group: facts.extract(group, *extent) for group, extent in extents.items()}
    assert {group: ordinals(span) for group, span in spans.items()} == {
        "full": [0, 1, 2, 3, 4, 5],
        "window": [0, 4, 5],
        "chunk": [4, 5],
        "state": [0],
    }
    for group, span in spans.items():
        assert span == cache.table("r", group).restrict(0, 6)
    assert ordinals(facts.extract("window", 3, 5)) == [4]
    assert facts.extract("window", 1, 4) == Span()
    assert {group: cache.counts(group).pinned for group in extents} == {
        "full": 6,
        "window": 3,
        "chunk": 2,
        "state": 1,
    }
    cache.check()


@pytest.mark.parametrize(
    ("computed", "promised", "stop", "ready"),
    [
        pytest.param(7, 20, 1, True, id="whole blocks"),
        pytest.param(7, 20, 2, False, id="a block that is not whole yet"),
        pytest.param(7, 7, 2, True, id="the last one, when the promise is reached"),
        pytest.param(9, 7, 2, True, id="the last one, when it is passed"),
        pytest.param(12, 7, 3, False, id="a block beyond the promise"),
        pytest.param(7, 7, 3, False, id="scratch"),
    ],
)
def test_only_computed_and_promised_blocks_are_given(computed, promised, stop, ready):
    cache = make_cache()
    cache.start("r", promised)
    cache.append("r", computed, lookahead=8)
    facts = cache.facts("r", promised)
    if ready:
        assert ordinals(facts.extract("full", 0, stop)) == list(range(stop))
    else:
        with pytest.raises(UsageError, match=f"ordinal {stop - 1} is asked for"):
            facts.extract("full", 0, stop)
        assert cache.counts("full").pinned == 0


def test_a_state_is_given_at_the_promised_token_only():
    cache = make_cache(FULL, STATE)
    cache.start("r", 8)
    facts = cache.facts("r", 8)
    cache.append("r", 7)
    assert facts.extract("state", 0, 1) == facts.extract("state", 0, 7) == Span()
    cache.append("r", 1)
    assert facts.extract("state", 7, 8) == Span()
    assert facts.extract("state", 0, 1) == cache.table("r", "state")
    cache.append("r", 1)
    with pytest.raises(UsageError, match="its state is at token 9, the send promises 8"):
        facts.extract("state", 0, 1)


def test_what_is_out_is_held_once_however_often_it_is_extracted():
    cache = filled_cache(8)
    facts = cache.facts("r", 8)
    first = facts.extract("full", 0, 1)
    assert facts.extract("full", 0, 2).restrict(0, 1) == first
    cache.free("r")
    facts.released({"full": slots(0, 1)}, "settled")
    assert cache.all_free


def test_two_sends_hold_a_block_each():
    cache = filled_cache(4)
    one, two = cache.facts("r", 4), cache.facts("r", 4)
    one.extract("full", 0, 1)
    two.extract("full", 0, 1)
    cache.free("r")
    assert cache.counts("full").pinned == 1
    one.released({"full": slots(0)}, "settled")
    with pytest.raises(UsageError, match="slot 0 was released before"):
        one.released({"full": slots(0)}, "settled")
    assert cache.counts("full").pinned == 1
    two.released({"full": slots(0)}, "settled")
    assert cache.all_free


def test_a_pinned_block_outlives_its_request_and_its_window():
    cache = filled_cache(12, WINDOW, slots=4)
    facts = cache.facts("r", 12)
    facts.extract("window", 0, 3)
    cache.append("r", 1)
    assert ordinals(cache.table("r", "window")) == [1, 2, 3]
    assert cache.counts("window") == Counts(free=0, tabled=1, pinned=3, leased=0)
    cache.free("r")
    cache.start("s", 8)
    with pytest.raises(OutOfBlocks):
        cache.append("s", 8)
    facts.released({"window": slots(0)}, "settled")
    cache.append("s", 8)
    assert 0 in cache.table("s", "window").slots()
    facts.released({"window": slots(1, 2)}, "drained")
    cache.free("s")
    assert cache.all_free
    cache.check()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"full": slots(0, 2)}, id="never extracted"),
        pytest.param({"full": slots(0, 0)}, id="twice at once"),
        pytest.param({"full": slots(0, -1)}, id="negative"),
        pytest.param({"full": slots(0), "side": slots(0)}, id="another group's"),
        pytest.param({"full": slots(0), "none": slots(0)}, id="no such group"),
    ],
)
def test_a_wrong_release_of_the_source_changes_nothing(given):
    cache = filled_cache(12, FULL, make_group("side"))
    facts = cache.facts("r", 12)
    facts.extract("full", 0, 2)
    with pytest.raises(UsageError, match="slot"):
        facts.released(given, "settled")
    facts.released({"full": slots(0, 1)}, "settled")
    cache.free("r")
    assert cache.all_free


# ---------------------------------------------------------------- the target's end


@pytest.mark.parametrize(
    ("groups", "tokens", "cached", "wanted"),
    [
        pytest.param([FULL], 22, 0, {"full": [0, 1, 2, 3, 4, 5]}, id="all"),
        pytest.param([FULL], 22, 8, {"full": [2, 3, 4, 5]}, id="without the prefix"),
        pytest.param([FULL], 8, 8, {"full": []}, id="nothing is explicit"),
        pytest.param(
            [FULL, WINDOW], 22, 8, {"full": [2, 3, 4, 5], "window": [4, 5]}, id="a window"
        ),
        pytest.param([FULL, WINDOW], 14, 12, {"full": [3], "window": [3]}, id="a window's rest"),
        pytest.param([CHUNK, STATE], 22, 0, {"chunk": [4, 5], "state": [0]}, id="chunk and state"),
        pytest.param([FULL, STATE], 22, 20, {"full": [5], "state": [0]}, id="a state always"),
        pytest.param([SINKS], 22, 0, {"sinks": [0, 4, 5]}, id="sinks and a window"),
        pytest.param([SINKS], 22, 4, {"sinks": [4, 5]}, id="reused sinks"),
        pytest.param([SINKS], 8, 0, {"sinks": [0, 1]}, id="sinks within the window"),
    ],
)
def test_a_need_has_its_ordinals_and_its_slots_are_leased(groups, tokens, cached, wanted):
    sinks = {"sinks": 3} if SINKS in groups else None
    cache = filled_cache(max(1, cached), *groups, sinks=sinks, seed=3, slots=32)
    assert cache.commit("r", "p") == cached
    need = cache.need("s", tokens, prefix="p")
    assert {group: ordinals(span) for group, span in need.items()} == wanted
    for group, span in need.items():
        assert cache.counts(group).leased == len(span)
        assert span.subtract(cache.table("s", group)) == Span()
    cache.check()
    cache.on_released(back(need), "drained")
    cache.filled("s", tokens)
    cache.append("s", 1)
    cache.check()


def test_a_window_reaches_into_the_reused_prefix():
    cache = filled_cache(12, FULL, WINDOW)
    cache.commit("r", "p")
    need = cache.need("s", 14, prefix="p")
    assert ordinals(need["window"]) == [3]
    assert ordinals(cache.table("s", "window")) == [1, 2, 3]


@pytest.mark.parametrize("order", ["released first", "filled first"])
def test_after_success_the_blocks_are_the_requests(order):
    cache = make_cache()
    need = cache.need("r", 10)
    calls = [lambda: cache.on_released(back(need), "drained"), lambda: cache.filled("r", 10)]
    for call in calls if order == "released first" else calls[::-1]:
        call()
        cache.check()
    assert cache.counts("full") == Counts(free=13, tabled=3, pinned=0, leased=0)
    cache.append("r", 2)
    assert cache.table("r", "full") == need["full"]
    assert cache.facts("r", 12).extract("full", 0, 3) == need["full"]


@pytest.mark.parametrize("order", ["released first", "freed first"])
def test_after_a_failure_the_blocks_are_free_when_both_have_spoken(order):
    cache = make_cache(slots=4)
    need = cache.need("r", 16)
    calls = [lambda: cache.on_released(back(need), "drained"), lambda: cache.free("r")]
    first, second = calls if order == "released first" else calls[::-1]
    first()
    assert cache.counts("full").free == 0
    with pytest.raises(OutOfBlocks):
        cache.need("s", 4)
    second()
    assert cache.all_free
    cache.check()


def test_a_next_attempt_gets_other_slots_while_the_first_is_still_leased():
    cache = make_cache(slots=4)
    first = cache.need("r", 8)
    cache.free("r")
    second = cache.need("r", 8)
    assert not set(first["full"].slots()) & set(second["full"].slots())
    cache.on_released(back(first), "drained")
    assert cache.counts("full") == Counts(free=2, tabled=0, pinned=0, leased=2)
    cache.check()


def test_blocks_can_be_read_again_and_freed_while_still_leased():
    """A host that goes on before the release came: nothing of it is lent meanwhile."""
    cache = make_cache(slots=2)
    need = cache.need("r", 8)
    cache.filled("r", 8)
    facts = cache.facts("r", 8)
    span = facts.extract("full", 0, 2)
    cache.free("r")
    assert cache.counts("full") == Counts(free=0, tabled=0, pinned=0, leased=2)
    facts.released({"full": span.slots()}, "settled")
    assert cache.counts("full") == Counts(free=0, tabled=0, pinned=0, leased=2)
    cache.on_released(back(need), "drained")
    assert cache.all_free


def test_a_shorter_transfer_leaves_the_blocks_behind_it():
    cache = make_cache(FULL, STATE)
    need = cache.need("r", 20)
    cache.filled("r", 9)
    assert ordinals(cache.table("r", "full")) == [0, 1, 2]
    assert (cache.tokens("r"), cache.counts("full").tabled) == (9, 0)
    cache.on_released(back(need), "drained")
    assert cache.counts("full") == Counts(free=13, tabled=3, pinned=0, leased=0)
    cache.check()


def test_a_shorter_transfer_whose_window_reaches_further_back_is_refused():
    cache = make_cache(FULL, WINDOW)
    cache.need("r", 22)
    with pytest.raises(UsageError, match=r"'window': 18 tokens need ordinals 3, which 22 did not"):
        cache.filled("r", 18)
    assert cache.tokens("r") == 22
    cache.filled("r", 21)
    cache.check()


def test_what_the_engine_never_took_is_withdrawn():
    cache = filled_cache(8)
    cache.commit("r", "p")
    cache.need("s", 16, prefix="p")
    cache.withdraw("s")
    assert cache.counts("full") == Counts(free=14, tabled=2, pinned=0, leased=0)
    cache.check()


def test_what_the_engine_took_can_not_be_withdrawn_after_it_came_back():
    cache = make_cache()
    need = cache.need("r", 8)
    cache.on_released({"full": need["full"].slots()[:1]}, "drained")
    with pytest.raises(UsageError, match="slot 0 was released before"):
        cache.withdraw("r")
    assert cache.counts("full").leased == 1


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"full": slots(0, 9)}, id="never leased"),
        pytest.param({"full": slots(0, 2)}, id="another's table"),
        pytest.param({"full": slots(0, 0)}, id="twice at once"),
        pytest.param({"full": slots(0, 16)}, id="outside the pool"),
        pytest.param({"full": slots(0), "side": slots(9)}, id="another group's"),
        pytest.param({"full": slots(0), "none": slots(0)}, id="no such group"),
    ],
)
def test_a_wrong_release_of_the_target_changes_nothing(given):
    cache = make_cache(FULL, make_group("side"))
    need = cache.need("r", 8)
    cache.start("s", 8)
    cache.append("s", 8)
    with pytest.raises(UsageError, match=r"slot|group"):
        cache.on_released(given, "drained")
    assert cache.counts("full").leased == cache.counts("side").leased == 2
    cache.on_released(back(need), "drained")
    with pytest.raises(UsageError, match="was released before, or never leased"):
        cache.on_released(back(need), "drained")


# ---------------------------------------------------------------- misuse


def waiting_cache() -> PagedCache:
    """With "r" that waits for 8 tokens, and "s" that has computed 8."""
    cache = make_cache(FULL, WINDOW)
    cache.start("s", 8)
    cache.append("s", 8)
    cache.need("r", 8)
    return cache


MISUSES = {
    "append unknown": (lambda c: c.append("x", 1), "no request 'x'"),
    "append backwards": (lambda c: c.append("s", -1), "tokens is -1"),
    "append scratch backwards": (lambda c: c.append("s", 1, lookahead=-1), "lookahead is -1"),
    "append while waiting": (lambda c: c.append("r", 1), "'r' waits for its blocks"),
    "facts while waiting": (lambda c: c.facts("r", 8), "'r' waits for its blocks"),
    "facts of unknown": (lambda c: c.facts("x", 8), "no request 'x'"),
    "commit while waiting": (lambda c: c.commit("r", "p"), "'r' waits for its blocks"),
    "offload while waiting": (lambda c: c.offload("r", "full", 0, 1), "'r' waits"),
    "onboard while waiting": (lambda c: c.onboard("r", "full"), "'r' waits"),
    "start twice": (lambda c: c.start("s", 8), "'s' is in the cache already"),
    "need twice": (lambda c: c.need("r", 8), "'r' is in the cache already"),
    "need nothing": (lambda c: c.need("t", 0), "tokens is 0"),
    "filled without need": (lambda c: c.filled("s", 8), "'s' waits for no transfer"),
    "filled too far": (lambda c: c.filled("r", 9), "9 tokens are filled, of 8 asked for"),
    "filled with nothing": (lambda c: c.filled("r", 0), "0 tokens are filled, of 8 asked for"),
    "withdraw without need": (lambda c: c.withdraw("s"), "'s' waits for no transfer"),
    "free unknown": (lambda c: c.free("x"), "no request 'x'"),
    "forget unknown": (lambda c: c.forget("p"), "no prefix 'p'"),
    "offload beyond": (lambda c: c.offload("s", "full", 1, 3), r"ordinals 1\.\.2 .* 2 blocks"),
    "group unknown": (lambda c: c.table("s", "x"), "no group 'x'"),
    "counts unknown": (lambda c: c.counts("x"), "no group 'x'"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_and_changes_nothing(name):
    cache = waiting_cache()
    before = [(cache.counts(group), cache.table("s", group)) for group in ("full", "window")]
    misuse, text = MISUSES[name]
    with pytest.raises(UsageError, match=text):
        misuse(cache)
    assert before == [(cache.counts(g), cache.table("s", g)) for g in ("full", "window")]
    cache.check()


def test_a_prefix_is_committed_once():
    cache = filled_cache(8)
    cache.commit("r", "p")
    with pytest.raises(UsageError, match="'p' is kept already"):
        cache.commit("r", "p")


@pytest.mark.parametrize("name", ["full", "none"])
def test_sinks_are_for_windows(name):
    with pytest.raises(UsageError, match=name):
        make_cache(FULL, WINDOW, sinks={name: 4})


def test_facts_end_with_their_request():
    cache = filled_cache(8)
    facts = cache.facts("r", 8)
    cache.free("r")
    cache.start("r", 8)  # another one of that name
    cache.append("r", 8)
    with pytest.raises(UsageError, match="'r' was freed"):
        facts.extract("full", 0, 2)


# ---------------------------------------------------------------- the check itself


PLANTS = {
    "freed under a table": lambda space: space._put(slots(0)),
    "a table too many": lambda space: space.hold("table", slots(5)),
    "a table too few": lambda space: space.drop("table", slots(1)),
    "free twice": lambda space: space._put(slots(9)),
    "leased twice": lambda space: [space.hold("receive", slots(0)) for _ in range(2)],
    "lost": lambda space: setattr(space, "free", space.free - 1),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen(name):
    cache = filled_cache(8)
    cache.check()
    PLANTS[name](cache._slots._spaces["full"])
    with pytest.raises(AssertionError):
        cache.check()
