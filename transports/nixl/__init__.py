"""NIXL as a transport: one agent per worker thread, writes over UCX.

Rules: importing this module does not import NIXL (the first agent does), and every NIXL call is
made in the worker's thread.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ...engine.errors import UsageError
from ...engine.ports import WriteBounds
from ..transport import WorkerTransport
from . import agent, sockets
from .backend import NixlBackend

if TYPE_CHECKING:
    from ..transport import RunnerFactory

__all__ = ["nixl"]

_MIB = 1024 * 1024
# cma copies inside the post, so a write's size is how long the worker is away from its other
# writes, and the most that a stopped peer can still put down when it goes on.
BOUNDS_CMA = WriteBounds(descriptors_max=512, bytes_max=2 * _MIB)
BOUNDS_NETWORK = WriteBounds(descriptors_max=512, bytes_max=8 * _MIB)


def nixl(
    *,
    agents: int = 1,
    progress_delay_us: int = 1000,
    runner_factory: RunnerFactory | None = None,
) -> WorkerTransport:
    """A NIXL transport over UCX; UCX_TLS and its other variables choose the lane.

    agents: NIXL agents, a thread each; every one registers all regions.
    progress_delay_us: how long NIXL's progress thread sleeps between polls, at least 1; 0 would
    burn a core per agent.
    Whether a peer is on the same host is not known when a plan is cut, so bounds are those of
    cma unless UCX_TLS forbids it. Raises UsageError.
    """
    if progress_delay_us < 1:
        raise UsageError(f"progress_delay_us is {progress_delay_us}, must be at least 1")
    agent.prepare_environment()
    return WorkerTransport(
        "nixl",
        BOUNDS_CMA if agent.cma_allowed() else BOUNDS_NETWORK,
        partial(NixlBackend, progress_delay_us=progress_delay_us),
        agents=agents,
        describe=_describe,
        runner_factory=runner_factory,
        emptied=sockets.emptied,
    )


def _describe() -> str:
    cma = "same-host cma, else network"
    lane = cma if agent.cma_allowed() else f"UCX_TLS={os.environ['UCX_TLS']}"
    return f"nixl {agent.version()}, UCX, {lane}"
