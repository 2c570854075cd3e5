"""Sides of unequal geometry over real NIXL: other block size, axis order and share of the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.e2e.node import SHAPE, TOKENS_PER_BLOCK
from tests.e2e.pair import POISON, Pair, fragmented

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Lane

LAYERS, KINDS, _, HEADS, DIMS = SHAPE
TOKENS = 6 * TOKENS_PER_BLOCK + 5
# As tokens of (layer, kind, token, head, dim), the axes of the prefill side.
LAYER_MAJOR, TOKEN_MAJOR = "block layer kind token head dim", "block token kind layer head dim"
ORDERS = {LAYER_MAJOR: (0, 1, 2, 3, 4, 5), TOKEN_MAJOR: (0, 3, 2, 1, 4, 5)}


@pytest.fixture
def pair(lane: Lane) -> Iterator[Pair]:
    """Not opened yet: the test says how the decoder stores its cache."""
    pair = Pair(*lane.processes())
    yield pair
    pair.close()


def tokens_of(pool: np.ndarray, slots: list[int], tokens: int) -> np.ndarray:
    """Blocks [n, layer, kind, token, head, dim] as [layer, kind, token of the request, ...]."""
    blocks = np.moveaxis(pool[slots], 0, 2)
    return blocks.reshape(LAYERS, KINDS, -1, *blocks.shape[4:])[:, :, :tokens]


@pytest.mark.parametrize(
    ("axes", "block", "heads"),
    [
        (LAYER_MAJOR, 8, (0, 8)),
        (LAYER_MAJOR, 16, (2, 4)),
        (LAYER_MAJOR, 32, (4, 8)),
        (TOKEN_MAJOR, 24, (4, 8)),
        (TOKEN_MAJOR, 32, (0, 8)),
    ],
    ids=["small blocks", "some heads", "large blocks", "neither divides", "token-major"],
)
def test_every_token_lands_where_the_decoder_stores_it(
    pair: Pair, axes: str, block: int, heads: tuple[int, int]
) -> None:
    extents = {"layer": LAYERS, "kind": KINDS, "token": block, "head": heads[1] - heads[0]}
    extents["dim"] = DIMS
    shape = tuple(extents[name] for name in axes.split()[1:])
    options: dict[str, Any] = {"shape": shape, "axes": axes, "heads": heads}
    pair.open(**options)
    source = fragmented(1, -(-TOKENS // TOKENS_PER_BLOCK) + 1)  # one block more than is needed
    target = fragmented(2, -(-TOKENS // block))
    pair.receive("r", target, tokens=TOKENS)
    pair.send("r", source, tokens=TOKENS, push=False)
    pair.prefill.push("r", [(3, source[3:])])  # the tail first: blocks wait until complete
    pair.prefill.push("r", [(0, source[:3])])
    pair.prefill.finish("r")
    sent, received = pair.outcomes("r")
    assert (sent["end"], received["end"]) == ("done", "done")
    assert sent["bytes"] == received["bytes"]
    pair.slots_back("prefill", "r", source, "settled", "never-exposed")
    pair.slots_back("decode", "r", target, "drained")

    written = pair.decode.pool().reshape(-1, *shape).transpose(ORDERS[axes])
    whole = pair.prefill.pool().reshape(-1, *SHAPE)
    expected = tokens_of(whole, source, TOKENS)[..., slice(*heads), :]
    np.testing.assert_array_equal(tokens_of(written, target, TOKENS), expected)
    others = np.setdiff1d(np.arange(len(written)), target)
    assert (written[others] == POISON).all()
