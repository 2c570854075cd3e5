"""The doctor's checks of this host: interpreter, kernel permissions, limits, devices.

Two rules: a check looks and changes nothing, and its defaults are this machine. What NIXL and UCX
say is in `lanes`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import runpy
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["ok", "warning", "problem"]

FILES_MIN: Final = 1024  # open files; an engine holds some 25, and a few more per peer
SHM_FREE_BYTES_MIN: Final = 16 * 1024 * 1024  # one agent's shared segments took 4.1 MiB
CLOCK_RATE_OFF_MAX: Final = 0.01  # what permits assume, see the README's guarantees
CLOCK_STEP_S_MAX: Final = 0.001
_CAP_IPC_LOCK: Final = 1 << 14  # Source: linux/capability.h
_PR_SET_PTRACER: Final = 0x59616D61  # Source: linux/prctl.h
_PEEK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. remedy: one line that can be acted on; empty where all is well."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def unreadable(check: str, error: OSError, remedy: str) -> Finding:
    """A file of the kernel's could not be read, so nothing is known."""
    return Finding(check, "warning", f"not known: {error.strerror} ({error.filename})", remedy)


# ---------------------------------------------------------------- software


def kvferry() -> Finding:
    """Its version, and where it was imported from."""
    where = Path(__file__).parents[1]
    return Finding("kvferry", "ok", f"{importlib.metadata.version('kvferry')}, in {where}")


def python() -> Finding:
    """The interpreter."""
    words = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding("Python", "ok", f"{words}, {sys.executable}")


def numpy() -> Finding:
    """Its version."""
    return Finding("numpy", "ok", importlib.metadata.version("numpy"))


def torch(find: Callable[[str], object] = importlib.util.find_spec) -> Finding:
    """Version and kind of build, from its version file: importing it would take seconds."""
    spec = find("torch")
    origin = getattr(spec, "origin", None)
    if origin is None:
        return Finding(
            "torch", "ok", "not installed: no engine needs it, only the demo and the self-test do"
        )
    told = runpy.run_path(str(Path(origin).with_name("version.py")))
    build = f"CUDA {told['cuda']}" if told.get("cuda") else "CPU"
    if told.get("hip"):
        build = f"ROCm {told['hip']}"
    return Finding("torch", "ok", f"{told['__version__']}, a {build} build; no engine needs it")


# ---------------------------------------------------------------- what the kernel allows


def same_host_copies(
    scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope"),
    peek: Callable[[], str] | None = None,
) -> Finding:
    """Whether one of our processes may read another, as UCX's cma does, and what Yama says."""
    check = "same-host copies"
    refused = (peek or peek_by_another_process)()
    try:
        yama = f"ptrace_scope is {scope.read_text().strip()}"
    except FileNotFoundError:
        known = scope.parent.parent.exists()
        yama = "no Yama in this kernel" if known else "ptrace_scope is not known"
    except OSError as error:
        yama = f"ptrace_scope can't be read ({error.strerror})"
    if not refused:
        return Finding(check, "ok", f"one process may read another's memory (cma); {yama}")
    return Finding(
        check,
        "warning",
        f"one process may not read another's memory ({refused}; {yama}): cma can't be used, "
        "transfers on one host go through sockets",
        "run both as one user; in a container add --cap-add=SYS_PTRACE; on a host set "
        "kernel.yama.ptrace_scope to 0 or 1 (sysctl)",
    )


_PEEK: Final = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
pid, address, size = map(int, sys.stdin.readline().split())
buffer = ctypes.create_string_buffer(size)
mine, theirs = Piece(ctypes.addressof(buffer), size), Piece(address, size)
call = ctypes.CDLL(None, use_errno=True).process_vm_readv
arguments = ctypes.byref(mine), 1, ctypes.byref(theirs), 1
read = call(pid, *arguments, ctypes.c_ulong(0))
print(os.strerror(ctypes.get_errno()) if read < 0 else buffer.raw[:read].hex(), end="")
"""


def peek_by_another_process() -> str:
    """Let a child read this process's memory; return why it could not, or nothing.

    That way round, since Yama lets any process read its descendants. UCX allows every process
    (PR_SET_PTRACER) where Yama wants that; here only the child is allowed.
    """
    secret = os.urandom(16)
    buffer = ctypes.create_string_buffer(secret, len(secret))
    prctl = ctypes.CDLL(None).prctl
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", _PEEK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        prctl(_PR_SET_PTRACER, ctypes.c_ulong(child.pid), 0, 0, 0)
        where = f"{os.getpid()} {ctypes.addressof(buffer)} {len(secret)}\n"
        try:
            read, errors = child.communicate(where, timeout=_PEEK_S)
        finally:
            child.kill()
            prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    if read == secret.hex():
        return ""
    return read or errors.strip().rpartition("\n")[2] or "the reading process died"


def ended_sources(
    namespaces: Path = Path("/proc/self/ns"),
    tables: Path = Path("/proc/net/tcp"),
    open_pidfd: Callable[[int], int] | None = None,
) -> Finding:
    """What evidence `source-ended` needs: pidfds, known namespaces, the table of sockets."""
    check = "ended sources"
    loss = "slots lent to a source that is killed stay quarantined"
    try:
        os.close((open_pidfd or os.pidfd_open)(os.getpid()))
    except (OSError, AttributeError) as error:
        return Finding(
            check,
            "warning",
            f"no pidfd can be opened ({error}): {loss}",
            "use Linux 5.3 or later and a seccomp profile that allows pidfd_open",
        )
    try:
        names = [os.readlink(namespaces / name) for name in ("pid", "net")]
        tables.read_text()
    except OSError as error:
        return unreadable(check, error, f"mount /proc for this user; until then {loss}")
    return Finding(
        check,
        "ok",
        f"pidfds work; seen are sources of this host that are in {names[0]} and {names[1]} too",
    )


# ---------------------------------------------------------------- limits


def locked_memory(
    limits: tuple[int, int] | None = None,
    devices: Path = Path("/sys/class/infiniband"),
    status: Path = Path("/proc/self/status"),
) -> Finding:
    """RLIMIT_MEMLOCK: registering a pool with an RDMA device locks all of it."""
    check = "locked memory"
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = f"limit {_bytes(soft)} (at most {_bytes(hard)})"
    if soft == resource.RLIM_INFINITY or _may_lock(status):
        why = "no limit" if soft == resource.RLIM_INFINITY else f"{words}, CAP_IPC_LOCK lifts it"
        return Finding(check, "ok", why)
    if not _rdma_devices(devices):
        return Finding(check, "ok", f"{words}; it matters only with RDMA devices, here are none")
    return Finding(
        check,
        "warning",
        f"{words}: pools that are larger can't be registered with an RDMA device",
        "ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity in a unit",
    )


def open_files(
    limits: tuple[int, int] | None = None, held: Path = Path("/proc/self/fd")
) -> Finding:
    """RLIMIT_NOFILE: each peer takes sockets."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = soft == resource.RLIM_INFINITY
    words = "no limit" if endless else f"limit {soft:,} (at most {_count(hard)})"
    try:
        words += f", {len(os.listdir(held))} open now"
    except OSError:
        words += ", how many are open is not known"
    if endless or soft >= FILES_MIN:
        return Finding("open files", "ok", words)
    return Finding(
        "open files",
        "warning",
        f"{words}: engines with many peers will fail to connect",
        f"ulimit -n {FILES_MIN} or more before the process starts; LimitNOFILE in a unit",
    )


def shared_memory(where: Path = Path("/dev/shm")) -> Finding:
    """/dev/shm, in which UCX keeps its posix shared-memory segments."""
    check = "shared memory"
    remedy = "mount a tmpfs there; for a container --shm-size=1g or --ipc=host"
    try:
        size = os.statvfs(where)
    except OSError as error:
        return unreadable(check, error, remedy)
    free = size.f_bavail * size.f_frsize
    words = f"{where} has {_bytes(free)} free of {_bytes(size.f_blocks * size.f_frsize)}"
    if free >= SHM_FREE_BYTES_MIN:
        return Finding(check, "ok", words)
    return Finding(check, "warning", f"{words}: too little for the segments of UCX", remedy)


def control_port(address: str = "127.0.0.1") -> Finding:
    """Listen, connect and accept on loopback, as engines do for their control connections."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(5)
            where = server.getsockname()
            with socket.create_connection(where, 5), server.accept()[0]:
                return Finding("control port", "ok", f"{address}:{where[1]} listens and accepts")
    except OSError as error:
        return Finding(
            "control port",
            "problem",
            f"{address} can't be listened on and connected to: {error}",
            "bring loopback up (ip link set lo up), and allow it in firewall and sandbox",
        )


def clock(
    source: Path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    rates: Callable[[], tuple[int, int]] | None = None,
    step_s: float | None = None,
) -> Finding:
    """The monotonic clock: its source, its step, its rate against the hardware's own."""
    adjusted, raw = (rates or _clock_rates)()
    off = abs(adjusted / raw - 1)
    step_s = time.get_clock_info("monotonic").resolution if step_s is None else step_s
    try:
        name = source.read_text().strip()
    except OSError:
        name = "of unknown source"
    words = f"{name}, steps of {step_s * 1e9:g} ns, adjusted by {off:.4%}"
    if off < CLOCK_RATE_OFF_MAX and step_s <= CLOCK_STEP_S_MAX:
        return Finding("clock", "ok", words)
    return Finding(
        "clock",
        "warning",
        f"{words}: permits assume clocks that run within {CLOCK_RATE_OFF_MAX:.0%} of each other",
        "choose another clock source (tsc or kvm-clock), and let chrony slew slowly",
    )


# ---------------------------------------------------------------- devices


def rdma(
    devices: Path = Path("/sys/class/infiniband"), nodes: Path = Path("/dev/infiniband")
) -> Finding:
    """RDMA devices with their ports, and whether this process may open them."""
    check = "RDMA devices"
    names = _rdma_devices(devices)
    if not names:
        return Finding(check, "ok", "none: between hosts bytes go over tcp")
    ports = {
        f"{name} port {port.name}": _port(port)
        for name in names
        for port in sorted((devices / name / "ports").iterdir())
    }
    words = ", ".join(f"{port} {state}" for port, state in ports.items())
    if not [node for node in _names(nodes) if node.startswith("uverbs")]:
        return Finding(
            check,
            "warning",
            f"{words}; but no {nodes}/uverbs* is here, so no process can open them",
            "start the container with --device=/dev/infiniband, or load ib_uverbs",
        )
    if not any(state.startswith("ACTIVE") for state in ports.values()):
        remedy = "bring a port up: cable, switch, and a subnet manager for InfiniBand"
        return Finding(check, "warning", f"{words}; no port is active", remedy)
    return Finding(check, "ok", words)


def gpus(driver: Path = Path("/proc/driver/nvidia/gpus"), nodes: Path = Path("/dev")) -> Finding:
    """GPUs, for information: host memory is carried without."""
    models = []
    for name in _names(driver):
        lines = (driver / name / "information").read_text().splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    usable = [n for n in _names(nodes) if n.startswith("nvidia") and n[6:].isdigit()]
    if not models and not usable:
        return Finding("GPUs", "ok", "none: caches in host memory need none")
    kinds = [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]
    words = ", ".join(kinds) or "of unknown model"
    return Finding("GPUs", "ok", f"{words}; {len(usable)} can be opened here")


# ---------------------------------------------------------------- the kernel's words


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing if there is none. Raises OSError if it can't be read."""
    return sorted(os.listdir(folder)) if folder.exists() else []


def _rdma_devices(devices: Path) -> list[str]:
    """By name. Raises OSError where /sys is not mounted, so that nothing is known."""
    devices.parent.stat()
    return _names(devices)


def _port(port: Path) -> str:
    """As "ACTIVE (InfiniBand)"; the kernel writes the state as "4: ACTIVE"."""
    state = (port / "state").read_text().rpartition(":")[2].strip()
    return f"{state} ({(port / 'link_layer').read_text().strip()})"


def _may_lock(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    effective = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(effective and int(effective[0], 16) & _CAP_IPC_LOCK)


def _clock_rates() -> tuple[int, int]:
    """How far the adjusted and the raw clock went, in ns, over some milliseconds."""
    clocks = time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW
    before = [time.clock_gettime_ns(one) for one in clocks]
    time.sleep(0.02)
    adjusted, raw = (time.clock_gettime_ns(one) for one in clocks)
    return adjusted - before[0], raw - before[1]


def _count(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _bytes(size: int) -> str:
    if size == resource.RLIM_INFINITY:
        return "no limit"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}".replace(".0 ", " ")
    return f"{size} bytes"
