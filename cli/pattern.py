"""The value of every cached element of the demo, from its coordinates alone.

Pure. Two rules: a value depends on (seed, request, layer, kind, head, token, dim) and on nothing
else, so two processes agree on it without telling each other; no span, plan or block table is
known here.

Four neighbouring dims share one 64-bit word: the word's number is mixed as SplitMix64 does, which
spreads every bit of every coordinate over the whole word. Source: G. Steele, D. Lea, C. Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .models import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]
    Words = NDArray[np.uint64]

NOBODY: Final = -1  # the "request" whose values fill slots that no request ever held
ELEMENTS_PER_WORD: Final = 4

# One odd 64-bit constant per coordinate; a word's number is the sum of coordinate * constant.
_SEED: Final = 0x9E3779B97F4A7C15
_REQUEST: Final = 0xC2B2AE3D27D4EB4F
_LAYER: Final = 0x165667B19E3779F9
_KIND: Final = 0xD6E8FEB86659FD93
_TOKEN: Final = 0xA0761D6478BD642F
_HEAD: Final = 0xE7037ED1A0B428DB
_WORD: Final = 0x8EBC6AF09C88C6E3
_MASK: Final = 2**64 - 1


def words(
    seed: int, request: int, layer: int, tokens: Int64Array, kv_heads: int, head_dim: int
) -> Words:
    """The values of some tokens in one layer, K and V.

    Shapes: tokens int64[n]; returns uint64[2, n, kv_heads, head_dim / 4]; seen as uint16, its
    last axis is `dim`.
    """
    origin = _mix(np.array([(seed * _SEED + request * _REQUEST) & _MASK], dtype=np.uint64))
    origin += np.uint64(layer * _LAYER & _MASK)
    return _mix(
        origin
        + _steps(np.arange(len(KINDS)), _KIND)[:, None, None, None]
        + _steps(tokens, _TOKEN)[:, None, None]
        + _steps(np.arange(kv_heads), _HEAD)[:, None]
        + _steps(np.arange(head_dim // ELEMENTS_PER_WORD), _WORD)
    )


def _steps(coordinates: Any, constant: int) -> Words:
    steps: Words = np.asarray(coordinates).astype(np.uint64) * np.uint64(constant)
    return steps


def _mix(numbers: Words) -> Words:
    """SplitMix64's finalizer. Modifies `numbers` and returns it."""
    shifted = numbers >> np.uint64(30)
    numbers ^= shifted
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(numbers, np.uint64(27), out=shifted)
    numbers ^= shifted
    numbers *= np.uint64(0x94D049BB133111EB)
    np.right_shift(numbers, np.uint64(31), out=shifted)
    numbers ^= shifted
    return numbers
