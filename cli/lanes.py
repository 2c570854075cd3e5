"""The doctor's checks of NIXL, UCX and the lanes between two processes.

Pure: from what `probe` and `selftest` found to lines for the user. Two rules: a figure is one that
was found on this machine, and a remedy names the setting to change.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING, Final

from .checks import Finding
from .probe import CHOOSING
from .selftest import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .probe import Probed
    from .selftest import Tested

# Source: names of transports in UCX's documentation and in what a context prints.
_COPIES: Final = ("cma", "xpmem", "knem")
_SHARED: Final = ("sysv", "posix")
_RDMA: Final = ("rc", "ud", "dc", "gga", "srd")  # with "_verbs", "_mlx5" and the like behind


def nixl(probed: Probed) -> Finding:
    """Which NIXL is imported, and what else is installed."""
    installed = ", ".join(f"{name} {version}" for name, version in probed.installed.items())
    if probed.trouble:
        (wanted,) = _requirements("nixl")
        return Finding(
            "NIXL",
            "problem",
            f"can't be imported: {probed.trouble}; installed: {installed or 'none'}",
            f"pip install --force-reinstall '{wanted}'; python -m kvferry.cli.probe tries it alone"
            if probed.installed
            else f"pip install '{wanted}'",
        )
    variants = [name for name in probed.installed if name != "nixl"]
    loaded = probed.package.replace("_", "-")
    words = f"{probed.installed.get(loaded, 'unknown version')}, imported as {probed.package}"
    others = [name for name in variants if name != loaded]
    if others:
        words += f"; {' and '.join(others)} is installed too, a process can load only one"
    if len(set(probed.installed.values())) > 1:
        remedy = "install one version of them all, or uninstall those that are not used"
        return Finding("NIXL", "warning", f"{words}; versions differ: {installed}", remedy)
    return Finding("NIXL", "ok", words)


def backends(probed: Probed, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether NIXL has UCX, and can open it."""
    others = [name for name in probed.plugins if name != "UCX"]
    more = f"; other plugins: {', '.join(others)}" if others else ""
    if "UCX" not in probed.plugins:
        return Finding(
            "NIXL backends",
            "problem",
            f"UCX is missing{more}{_cause(probed.backend_trouble)}",
            "reinstall NIXL from its wheel, or let NIXL_PLUGIN_DIR name the folder of its plugins",
        )
    if probed.backend_trouble:
        return Finding(
            "NIXL backends",
            "problem",
            f"UCX can't be opened{_cause(probed.backend_trouble, *probed.said)}",
            _settings_remedy(environ) or "NIXL_LOG_LEVEL=DEBUG UCX_LOG_LEVEL=debug show why",
        )
    return Finding("NIXL backends", "ok", f"UCX opens{more}")


def ucx(probed: Probed) -> Finding:
    """Its version and where it lies: NIXL's wheel brings its own."""
    return Finding("UCX", "ok", f"{probed.ucx_version}, {os.path.basename(probed.ucx_library)}")


def same_host(probed: Probed, environ: Mapping[str, str] = os.environ) -> Finding:
    """UCX's lanes between two processes of one host."""
    names = _transports(probed.lanes)
    copies, shared = _in(names, _COPIES), _in(names, _SHARED)
    if copies:
        words = f"{', '.join(copies)} copies straight into the other process"
        if shared:
            words += f"; {', '.join(shared)} ready too"
        return Finding("UCX on one host", "ok", words)
    excluded = _in(_transports(probed.lanes_unset), _COPIES)
    remedy = "see `same-host copies` above; UCX_LOG_LEVEL=info shows why UCX leaves cma out"
    if excluded:
        remedy = f"let UCX_TLS include {excluded[0]}"
    elif "UCX_MODULES" in environ:
        remedy = "unset UCX_MODULES, or let it include cma"
    words = f"no copying lane ({', '.join(shared) or 'no shared memory either'}): "
    return Finding("UCX on one host", "warning", f"{words}bytes go through sockets", remedy)


def network(probed: Probed) -> Finding:
    """UCX's lanes between hosts; also what NIXL needs on one host, for its control messages."""
    rdma = [lane for lane in probed.lanes if lane.partition("_")[0].partition("/")[0] in _RDMA]
    tcp = [lane.partition("/")[2] for lane in probed.lanes if lane.startswith("tcp/")]
    words = [f"tcp on {', '.join(tcp)}"] if tcp else []
    words += [f"RDMA: {', '.join(rdma)}"] if rdma else []
    if not words:
        return Finding(
            "UCX on the network",
            "warning",
            "no lane: other hosts can't be reached, and NIXL can't be opened on this one",
            "let UCX_TLS include tcp, and UCX_NET_DEVICES a device that exists (ip link)",
        )
    if not rdma and set(tcp) == {"lo"}:
        remedy = "let UCX_NET_DEVICES name the device that leads to the other hosts (ip link)"
        return Finding(
            "UCX on the network", "warning", "tcp on lo only: no other host can be reached", remedy
        )
    return Finding("UCX on the network", "ok", "; ".join(words))


def settings(probed: Probed, environ: Mapping[str, str] = os.environ) -> Finding:
    """The UCX settings that are in force, and what they exclude."""
    mine = {name: value for name, value in environ.items() if name.startswith("UCX_")}
    words = [f"{name}={value}" for name, value in sorted(mine.items())]
    if modules := mine.get("UCX_MODULES"):
        listed = ", ".join(modules.removeprefix("^").split(","))
        only = "are not loaded" if modules.startswith("^") else "alone are loaded"
        words.append(f"of UCX's modules {listed} {only}")
    preset = []
    if probed.modules_preset:
        preset.append(
            f"UCX_MODULES={probed.modules_preset} by kvferry: here is no GPU and no RDMA device, "
            "and without either those modules crash a process at its end"
        )
    excluded = [lane for lane in probed.lanes_unset if lane not in probed.lanes]
    if not excluded:
        return Finding("UCX settings", "ok", "; ".join(words + preset) or "none")
    words.append(f"this excludes {', '.join(excluded)}")
    named = " and ".join(name for name in CHOOSING if name in mine)
    remedy = f"unset {named}, if that is not what you want"
    return Finding("UCX settings", "warning", "; ".join(words + preset), remedy)


def self_test(
    lane: str,
    tested: Tested,
    working: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Finding:
    """One lane of the self-test. lane: DEFAULT or a value of UCX_TLS; working: one that works."""
    check = f"self-test, {lane or 'default'}"
    if not tested.tried:
        remedy = "free memory, or install torch: the self-test uses the demo's tensors"
        return Finding(check, "warning", f"not run: {tested.trouble}", remedy)
    if tested.trouble:
        remedy = "UCX_LOG_LEVEL=info NIXL_LOG_LEVEL=INFO kvferry demo shows more"
        if lane == DEFAULT:
            remedy = _settings_remedy(environ) or remedy
        if working:
            remedy = f"UCX_TLS={working} works here, take it meanwhile; {remedy}"
        return Finding(
            check, "problem", f"failed: {tested.trouble}{_cause('', *tested.said)}", remedy
        )
    words = f"verified: {tested.bytes / 2**20:.0f} MiB in {tested.requests} requests at "
    words += f"{tested.gb_per_s:.2f} GB/s ({tested.lane.rpartition('UCX, ')[2]})"
    return Finding(check, "ok", words + _busy(os.getloadavg()[0], os.cpu_count() or 1))


def _settings_remedy(environ: Mapping[str, str]) -> str:
    """Settings of UCX are the first suspects, where there are any."""
    mine = [name for name in (*CHOOSING, "UCX_MODULES") if name in environ]
    if not mine:
        return ""
    return f"unset {' and '.join(mine)}, or let UCX_TLS include tcp or an RDMA transport"


def _busy(load: float, cores: int) -> str:
    if load <= cores:
        return ""
    return f"; this host is busy, load {load:.1f} on {cores} cores, so an idle one is faster"


def _cause(*words: str) -> str:
    told = "; ".join(word for word in words if word)
    return f": {told}" if told else ""


def _transports(lanes: Iterable[str]) -> list[str]:
    return [lane.partition("/")[0] for lane in lanes]


def _in(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    found = set(names)
    return [name for name in wanted if name in found]


def _requirements(package: str) -> list[str]:
    """What kvferry itself requires of a package, as pip takes it."""
    wanted = importlib.metadata.requires("kvferry") or []
    return [line for line in wanted if line.rstrip(".0123456789<>=!~, ") == package]
