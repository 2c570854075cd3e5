"""The caches of public models as data, and layouts of single ranks from it.

Figures are of bf16 caches unless a group says otherwise. `rank_layout` lays a rank's cache out as
vLLM does: one pool per layer, K and V of a block side by side in its slot. Layers are numbered
from 0 in each group; only equality between the two sides counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.tensors import Tensor, dense_tensor
from kvferry.engine.topology import shard_heads

if TYPE_CHECKING:
    from kvferry.engine.layout import GroupKind
    from kvferry.engine.tensors import AxisName

    Ranges = dict[AxisName, tuple[int, int]]

Order = Literal["NHD", "HND"]  # of a block's token, head and dim axes

PROMPTS: Final = (1024, 8192, 32768, 131072)  # tokens, of `Model.request_bytes`


@dataclass(frozen=True)
class Heads:
    """Keys and values per head, which the ranks share out; window: see `Group`."""

    layers: int
    heads: int
    dim: int
    window: int = 0
    kind: GroupKind = "full"

    def tensors(self, layer: int, pool: str, share: Share) -> tuple[Tensor, ...]:
        axes = {"NHD": "kind token head dim", "HND": "kind head token dim"}[share.order]
        ranges: Ranges = {
            "layer": (layer, layer + 1),
            "kind": (0, 2),
            "head": shard_heads(self.heads, share.tp, share.rank),
            "token": (0, share.tokens),
            "dim": (0, self.dim),
        }
        return (dense_tensor("kv", pool, axes, ranges, item_bits=16, dtype="bf16"),)


@dataclass(frozen=True)
class Rows:
    """A row per token that every rank holds whole; parts: (role, elements, bytes of each).

    The rows of each part lie together in a block, as those of an indexer and their scales do.
    """

    layers: int
    kind: GroupKind
    parts: tuple[tuple[str, int, int], ...]
    window: int = 0

    def tensors(self, layer: int, pool: str, share: Share) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for role, elements, item_bytes in self.parts:
            ranges: Ranges = {
                "layer": (layer, layer + 1),
                "token": (0, share.tokens),
                "dim": (0, elements),
            }
            offset = found[-1].stop if found else 0
            bits, dtype = 8 * item_bytes, f"{item_bytes} bytes"
            found.append(
                dense_tensor(
                    role, pool, "token dim", ranges, item_bits=bits, dtype=dtype, offset=offset
                )
            )
        return tuple(found)


@dataclass(frozen=True)
class State:
    """A recurrent state: what a convolution remembers, and behind it heads of `head_elements`.

    sections: (channels, units) of the convolution; the ranks share out the units of each section
    on its own. taps: positions that it remembers.
    """

    layers: int
    heads: int
    head_elements: int
    item_bytes: int = 2
    sections: tuple[tuple[int, int], ...] = ()
    taps: int = 3
    window: int = 0
    kind: GroupKind = "state"

    def tensors(self, layer: int, pool: str, share: Share) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        begin = offset = 0
        for channels, units in self.sections:
            unit = channels // units
            start, stop = shard_heads(units, share.tp, share.rank)
            taps: Ranges = {
                "layer": (layer, layer + 1),
                "dim": (begin + start * unit, begin + stop * unit),
                "kind": (0, self.taps),
            }
            found.append(
                dense_tensor(
                    "conv", pool, "dim kind", taps, item_bits=16, dtype="bf16", offset=offset
                )
            )
            begin, offset = begin + channels, found[-1].stop
        heads: Ranges = {
            "layer": (layer, layer + 1),
            "head": shard_heads(self.heads, share.tp, share.rank),
            "dim": (0, self.head_elements),
        }
        bits = 8 * self.item_bytes
        dtype = f"{self.item_bytes} bytes"
        return *found, dense_tensor(
            "ssm", pool, "head dim", heads, item_bits=bits, dtype=dtype, offset=offset
        )


@dataclass(frozen=True)
class Share:
    """Which share of a model a rank holds, and in what blocks and order."""

    tp: int
    rank: int
    tokens: int
    order: Order


@dataclass(frozen=True, eq=False)
class Model:
    """A model's layer groups by name, and how it is usually run.

    tps: usual tensor-parallel sizes. tokens_per_block: of all groups but states.
    request_bytes: what decode needs of a prompt of each length of `PROMPTS`, over all ranks,
    replicas counted once, windows trimmed.
    """

    name: str
    groups: dict[str, Heads | Rows | State]
    tps: tuple[int, ...]
    request_bytes: tuple[int, int, int, int]
    tokens_per_block: int = 16

    def tokens(self, group: str) -> int:
        """Tokens of one block of a group; a state is one point."""
        return 1 if self.groups[group].kind == "state" else self.tokens_per_block


@cache
def rank_layout(
    model: Model, tp: int, rank: int, order: Order = "NHD", *, base: int = 2**40, slots: int = 64
) -> Layout:
    """What rank `rank` of `tp` holds of a model, checked; the pools follow each other from `base`.

    With fewer heads than ranks, neighbouring ranks hold the same head.
    """
    pools: list[Pool] = []
    groups: list[Group] = []
    for name, held in model.groups.items():
        tokens = model.tokens(name)
        tensors: list[Tensor] = []
        for layer in range(held.layers):
            pool = f"{name}/{layer}"
            tensors += held.tensors(layer, pool, Share(tp, rank, tokens, order))
            begin = pools[-1].stop if pools else base
            pools.append(Pool(pool, begin, tensors[-1].stop, slots))
        groups.append(Group(name, held.kind, tokens, tuple(tensors), held.window))
    return Layout(tuple(pools), tuple(groups), model.name).check()


def _full(layers: int, heads: int = 8, dim: int = 128) -> dict[str, Heads | Rows | State]:
    return {"full": Heads(layers, heads, dim)}


_LATENT: Final = ("latent", 576, 2)  # 512 of the latent and 64 of the rotary key
_INDEXER: Final = (("indexer_k", 128, 1), ("indexer_scale", 1, 4))

MODELS: Final = (
    Model("Llama-3.1-8B", _full(32), (1, 2), (134217728, 1073741824, 4294967296, 17179869184)),
    Model("Llama-3.1-70B", _full(80), (2, 4, 8), (335544320, 2684354560, 10737418240, 42949672960)),
    Model("Llama-3.1-405B", _full(126), (8, 16), (528482304, 4227858432, 16911433728, 67645734912)),
    Model("Qwen3-32B", _full(64), (1, 2, 4), (268435456, 2147483648, 8589934592, 34359738368)),
    Model(
        "Qwen3-235B-A22B",
        _full(94, heads=4),
        (4, 8),
        (197132288, 1577058304, 6308233216, 25232932864),
    ),
    Model(
        "Qwen3-Next-80B-A3B",
        {
            **_full(12, heads=2, dim=256),
            "state": State(36, 32, 128 * 128, sections=((2048, 16), (2048, 16), (4096, 32))),
        },
        (2, 4),
        (64684032, 240844800, 844824576, 3260743680),
    ),
    Model(
        "DeepSeek-V3 / R1",
        {"latent": Rows(61, "latent", (_LATENT,))},
        (8, 16),
        (71958528, 575668224, 2302672896, 9210691584),
        tokens_per_block=64,
    ),
    Model(
        "DeepSeek-V3.2",
        {
            "latent": Rows(61, "latent", (_LATENT,)),
            "indexer": Rows(61, "indexer", _INDEXER),
        },
        (8, 16),
        (80203776, 641630208, 2566520832, 10266083328),
        tokens_per_block=64,
    ),
    Model(
        "Gemma-3-27B",
        {**_full(10, heads=16), "window": Heads(52, 16, 128, 1024, "window")},
        (1, 2, 4),
        (520093696, 1107296256, 3120562176, 11173625856),
    ),
    Model(
        "gpt-oss-120b",
        {**_full(18, dim=64), "window": Heads(18, 8, 64, 128, "window")},
        (1, 2, 4, 8),
        (42467328, 306708480, 1212678144, 4836556800),
    ),
    Model(
        "Mistral-7B-v0.1",
        {"window": Heads(32, 8, 128, 4096, "window")},
        (1,),
        (134217728, 536870912, 536870912, 536870912),
    ),
    Model(
        "Mistral-Small-24B-2501",
        _full(40),
        (1, 2),
        (167772160, 1342177280, 5368709120, 21474836480),
    ),
    Model(
        "Llama-4-Scout-17B-16E",
        {**_full(12), "chunk": Heads(36, 8, 128, 8192, "chunk")},
        (4, 8),
        (201326592, 1610612736, 2818572288, 7650410496),
    ),
    Model(
        "Kimi-K2",
        {"latent": Rows(61, "latent", (_LATENT,))},
        (8, 16),
        (71958528, 575668224, 2302672896, 9210691584),
        tokens_per_block=64,
    ),
    Model("MiniMax-M2.5", _full(62), (4, 8), (260046848, 2080374784, 8321499136, 33285996544)),
    Model(
        "MiniMax-Text-01 / M1",
        {**_full(10), "state": State(70, 64, 128 * 128, 4)},
        (8,),
        (335544320, 629145600, 1635778560, 5662310400),
    ),
    Model(
        "Nemotron-H-56B",
        {
            **_full(10),
            "state": State(54, 256, 64 * 256, sections=((16384, 256), (2048, 8), (2048, 8))),
        },
        (4, 8),
        (501563392, 795164672, 1801797632, 5828329472),
    ),
    Model(
        "Nemotron-3-Nano-30B-A3B",
        {
            **_full(6, heads=2),
            "state": State(23, 64, 64 * 128, 4, sections=((4096, 64), (1024, 8), (1024, 8))),
        },
        (1, 2),
        (55373824, 99414016, 250408960, 854388736),
    ),
    Model("GLM-4.5", _full(92), (8,), (385875968, 3087007744, 12348030976, 49392123904)),
    Model("GLM-4.5-Air", _full(46), (4, 8), (192937984, 1543503872, 6174015488, 24696061952)),
)
