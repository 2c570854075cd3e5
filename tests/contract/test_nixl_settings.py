"""What the NIXL transport decides from its surroundings, before NIXL is loaded."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from kvferry.engine.errors import UsageError
from kvferry.engine.ports import Close, Event, Stopped
from kvferry.transports.memory import Fabric, memory
from kvferry.transports.nixl import BOUNDS_CMA, BOUNDS_NETWORK, agent, nixl


@pytest.mark.parametrize(
    ("tls", "allowed"),
    [
        (None, True),
        ("all", True),
        ("tcp", False),
        ("rc,tcp", False),
        ("tcp,cma", True),
        ("sm, tcp", True),
        ("^cma", False),
        ("^sm", False),
        ("^cuda", True),
    ],
)
def test_bounds_are_small_wherever_cma_may_move_the_bytes(
    monkeypatch: pytest.MonkeyPatch, tls: str | None, allowed: bool
) -> None:
    if tls is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", tls)
    assert agent.cma_allowed() is allowed
    assert nixl().bounds == (BOUNDS_CMA if allowed else BOUNDS_NETWORK)
    assert ("cma" in nixl().describe().split("UCX, ")[1]) is allowed or tls == "^cma"


def test_the_environment_is_set_only_where_the_user_said_nothing() -> None:
    said = {"UCX_MODULES": "^gdr", "NIXL_LOG_LEVEL": "INFO"}
    agent.prepare_environment(said)
    assert said == {"UCX_MODULES": "^gdr", "NIXL_LOG_LEVEL": "INFO"}


@pytest.mark.parametrize("device", ["none", "gpu", "rdma"])
def test_modules_that_crash_are_kept_out_only_on_hosts_without_their_devices(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(agent, "_has_gpu", lambda: device == "gpu")
    monkeypatch.setattr(agent, "_has_rdma", lambda: device == "rdma")
    environ: dict[str, str] = {}
    agent.prepare_environment(environ)
    assert environ.get("UCX_MODULES") == ("^cuda,ib" if device == "none" else None)


def test_importing_the_transport_does_not_import_nixl() -> None:
    code = (
        "import sys, kvferry.transports.nixl as n; n.nixl();"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0


def test_values_out_of_bounds_are_refused() -> None:
    with pytest.raises(UsageError, match="progress_delay_us is 0"):
        nixl(progress_delay_us=0)
    with pytest.raises(UsageError, match="agents is 0"):
        nixl(agents=0)


def test_a_loop_that_closed_is_tolerated_and_ends_the_thread() -> None:
    events: list[Event] = []
    transport = memory(Fabric())

    async def start() -> None:
        transport.start("life", [], lambda _agent, batch: events.extend(batch))

    asyncio.run(start())
    transport.submit(0, [Close(0)])
    _, runner = transport._workers[0]
    runner._thread.join(50)  # type: ignore[attr-defined]
    assert not runner.alive  # type: ignore[attr-defined]
    assert Stopped() not in events
