"""NIXL itself: its environment, the import of exactly one of its wheels, one configured agent.

Speaks to NIXL's bindings, not to its Python `nixl_agent`: that one hardcodes a progress thread
that burns a core, and its handles keep the C++ agent alive and are freed on whichever thread
collects garbage. Rules: the environment is prepared before the first import and only where the
user said nothing, and nothing here runs at import time.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")
_SAFE_MODULES: Final = "^cuda,ib"


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what NIXL and UCX read when they load; never overrides the user. Modifies `environ`.

    On a host without GPU and without RDMA device, UCX's cuda and ib modules crash the interpreter
    while it exits (a fault in the bundled libnl-route: exit code 139 whatever the program
    returned), so they are not loaded there. NIXL's own words go to stderr, also for what is
    answered by an event (a peer that died); NIXL_LOG_LEVEL=ERROR brings them back.
    """
    if not _has_gpu() and not _has_rdma():
        environ.setdefault("UCX_MODULES", _SAFE_MODULES)
    environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def bindings() -> Any:
    """NIXL's bindings. Raises ImportError that says what to install.

    Two of its wheels in one process can't be loaded (they register the same C++ types), so one
    that is loaded already is used.
    """
    for package in _PACKAGES:
        if (loaded := sys.modules.get(f"{package}._bindings")) is not None:
            return loaded
    prepare_environment()
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            continue
        return sys.modules[f"{package}._bindings"]
    raise ImportError("no NIXL is installed: pip install 'nixl>=1.5.1'")


def version() -> str:
    """NIXL's version, "unknown" when no wheel says it."""
    for package in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def cma_allowed(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether UCX may move bytes by the poster's own CPU, straight into a process of this host.

    That is cma, and with an explicit list the shared-memory lanes, which are alike in this.
    Source: UCX_TLS is a list of transports and aliases, "^" in front excludes them (UCX docs).
    """
    chosen = environ.get("UCX_TLS", "all")
    names = {name.strip() for name in chosen.removeprefix("^").split(",")}
    if chosen.startswith("^"):
        return not names & {"cma", "sm", "shm"}
    return bool(names & {"all", "cma", "sm", "shm", "posix", "sysv", "xpmem", "knem"})


def create_agent(name: str, progress_delay_us: int) -> tuple[Any, int]:
    """A NIXL agent with its UCX backend: (agent, backend handle). Takes 15 to 500 ms.

    One UCX worker (`num_threads` 0): with several, a write is no fence for those before it. The
    progress thread is on, since a target without one stalls its peers; its delay of 0 would burn
    a core. Raises NIXL's exceptions.
    """
    nixl = bindings()
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.pthrDelay = progress_delay_us
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    agent = nixl.nixlAgent(name, config)
    backend = agent.createBackend("UCX", {})
    return agent, backend


def _has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/nvidiactl"))


def _has_rdma() -> bool:
    return bool(glob.glob("/sys/class/infiniband/*"))
