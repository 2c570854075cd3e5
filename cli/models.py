"""Cache geometries of a few public models with plain full attention.

Figures only. Two rules: every figure is of the whole model on one rank, in bf16, as its published
configuration says; scaling changes layers and tokens and nothing else.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..engine.errors import UsageError

ELEMENT_BYTES: Final = 2  # bf16
KINDS: Final = ("K", "V")


class Geometry(msgspec.Struct, frozen=True):
    """The cache of one model: per layer, K and V of `kv_heads * head_dim` elements per token."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int = 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * len(KINDS) * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.token_bytes * self.tokens_per_block

    def scaled(self, scale: float) -> Geometry:
        """The same cache with fewer layers, at least one."""
        return msgspec.structs.replace(self, layers=max(1, round(self.layers * scale)))

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_block)


# Source: num_hidden_layers, num_key_value_heads and head_dim of each model's config.json.
MODELS: Final = {
    "Llama-3.1-8B": Geometry(layers=32, kv_heads=8, head_dim=128),
    "Llama-3.1-70B": Geometry(layers=80, kv_heads=8, head_dim=128),
    "Llama-3.1-405B": Geometry(layers=126, kv_heads=8, head_dim=128),
    "Qwen3-32B": Geometry(layers=64, kv_heads=8, head_dim=128),
    "Qwen3-235B-A22B": Geometry(layers=94, kv_heads=4, head_dim=128),
}


def find_model(name: str) -> str:
    """The model's name as it is written here; case does not matter. Raises UsageError."""
    for known in MODELS:
        if known.casefold() == name.casefold():
            return known
    raise UsageError(f"no model {name!r}; there are {', '.join(MODELS)}")
