"""kvferry: carries the KV cache of a request from the node that prefilled it to the decoder.

Everything public is here. Transports are resolved on first use, so that importing kvferry
imports neither NIXL nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .engine.config import Config
from .engine.effects import Received, Sent
from .engine.errors import (
    Busy,
    Cancelled,
    Failed,
    KvferryError,
    PeerLost,
    Refused,
    TimedOut,
    UsageError,
)
from .engine.handles import Receive, Send
from .engine.hosted import Ended, Quarantined, Released
from .engine.keys import Key, Peer
from .engine.layout import Group, Layout, Pool
from .engine.service import Engine, Stats
from .engine.spans import Run, Span
from .engine.tensors import Axis, Tensor, dense_tensor
from .engine.thread import EngineThread
from .engine.topology import shard_heads, shard_layers

if TYPE_CHECKING:
    from .transports.memory import memory as memory
    from .transports.nixl import nixl as nixl

__all__ = [
    "Axis",
    "Busy",
    "Cancelled",
    "Config",
    "Ended",
    "Engine",
    "EngineThread",
    "Failed",
    "Group",
    "Key",
    "KvferryError",
    "Layout",
    "Peer",
    "PeerLost",
    "Pool",
    "Quarantined",
    "Receive",
    "Received",
    "Refused",
    "Released",
    "Run",
    "Send",
    "Sent",
    "Span",
    "Stats",
    "Tensor",
    "TimedOut",
    "UsageError",
    "dense_tensor",
    "memory",
    "nixl",
    "shard_heads",
    "shard_layers",
]

_LAZY = {"memory": ".transports.memory", "nixl": ".transports.nixl"}


def __getattr__(name: str) -> Any:
    """Resolve a transport by its name (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
