"""The doctor's checks of the host, each with made-up machines."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.cli import checks
from kvferry.cli.checks import Finding

ENDLESS = resource.RLIM_INFINITY
MIB = 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    """A folder as /proc and /sys have them."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def told_by(finding: Finding, status: str, words: str, remedy: str = "") -> None:
    """A finding says this; it has a remedy exactly if something is to be done."""
    assert (finding.status, words in finding.found) == (status, True), finding
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status != "ok")
    assert "\n" not in finding.found + finding.remedy


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("__version__ = '9.1+cpu'\ncuda = None\nhip = None", "9.1+cpu, a CPU build"),
        ("__version__ = '9.1+cu129'\ncuda = '12.9'", "9.1+cu129, a CUDA 12.9 build"),
        ("__version__ = '9.1'\ncuda = None\nhip = '6.4'", "9.1, a ROCm 6.4 build"),
    ],
    ids=["cpu", "cuda", "rocm"],
)
def test_torch_is_told_by_its_build(tmp_path: Path, version: str, words: str) -> None:
    tree(tmp_path, {"version.py": version})
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    told_by(checks.torch(lambda _: spec), "ok", words)


def test_torch_is_not_needed() -> None:
    told_by(checks.torch(lambda _: None), "ok", "not installed: no engine needs it")


@pytest.mark.parametrize(
    ("refused", "scope", "status", "words"),
    [
        ("", "0\n", "ok", "ptrace_scope is 0"),
        ("", None, "ok", "no Yama in this kernel"),
        ("Operation not permitted", "2\n", "warning", "not permitted; ptrace_scope is 2"),
    ],
    ids=["allowed", "no-yama", "refused"],
)
def test_same_host_copies(
    tmp_path: Path, refused: str, scope: str | None, status: str, words: str
) -> None:
    if scope is not None:
        tree(tmp_path, {"scope": scope})
    found = checks.same_host_copies(tmp_path / "scope", lambda: refused)
    told_by(found, status, words, "SYS_PTRACE" if refused else "")


def test_a_file_that_can_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "scope").mkdir()  # reading it fails, for root too
    found = checks.same_host_copies(tmp_path / "scope", str)
    told_by(found, "ok", "ptrace_scope can't be read (Is a directory)")


def test_another_process_reads_this_one() -> None:
    assert checks.peek_by_another_process() == ""


def test_a_peek_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PEEK", checks._PEEK.replace("call(pid,", "call(2**31 - 1,"))
    assert checks.peek_by_another_process() == os.strerror(errno.ESRCH)


def test_ended_sources(tmp_path: Path) -> None:
    tree(tmp_path, {"tcp": ""})
    for name in ("pid", "net"):
        (tmp_path / name).symlink_to(f"{name}:[7]")
    good = tmp_path, tmp_path / "tcp"
    told_by(checks.ended_sources(*good), "ok", "in pid:[7] and net:[7] too")
    told_by(checks.ended_sources(tmp_path / "none", good[1]), "warning", "not known", "/proc")
    told_by(checks.ended_sources(good[0], tmp_path / "none"), "warning", "not known", "/proc")

    def refuse(_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    told_by(checks.ended_sources(*good, refuse), "warning", "not implemented", "pidfd_open")


@pytest.mark.parametrize(
    ("limits", "device", "capabilities", "status", "words"),
    [
        ((ENDLESS, ENDLESS), True, "0", "ok", "no limit"),
        ((8 * MIB, ENDLESS), False, "0", "ok", "limit 8 MiB (at most no limit)"),
        ((8 * MIB, 8 * MIB), True, "4000", "ok", "CAP_IPC_LOCK lifts it"),
        ((65536, 8 * MIB), True, "3fff", "warning", "limit 64 KiB (at most 8 MiB)"),
    ],
    ids=["endless", "no-device", "capable", "too-low"],
)
def test_locked_memory(
    tmp_path: Path,
    limits: tuple[int, int],
    device: bool,
    capabilities: str,
    status: str,
    words: str,
) -> None:
    tree(tmp_path, {"status": f"Name:\tx\nCapEff:\t{capabilities}\n"})
    if device:
        tree(tmp_path, {"infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"})
    found = checks.locked_memory(limits, tmp_path / "infiniband", tmp_path / "status")
    told_by(found, status, words, "memlock" if status == "warning" else "")


@pytest.mark.parametrize(
    ("limits", "status", "words"),
    [
        ((256, 4096), "warning", "limit 256 (at most 4,096), 2 open now"),
        ((checks.FILES_MIN, ENDLESS), "ok", "limit 1,024 (at most no limit), 2 open now"),
        ((ENDLESS, ENDLESS), "ok", "no limit, 2 open now"),
    ],
    ids=["low", "enough", "endless"],
)
def test_open_files(tmp_path: Path, limits: tuple[int, int], status: str, words: str) -> None:
    held = tree(tmp_path, {"0": "", "1": ""})
    told_by(checks.open_files(limits, held), status, words, "ulimit -n" * (status != "ok"))


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told_by(checks.shared_memory(tmp_path / "none"), "warning", "not known: No such", "tmpfs")
    size = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)
    monkeypatch.setattr(checks.os, "statvfs", lambda _: size)
    told_by(checks.shared_memory(Path("/x")), "ok", "/x has 64 MiB free of 64 MiB")
    size.f_bavail = 256
    told_by(checks.shared_memory(Path("/x")), "warning", "1 MiB free of 64 MiB", "--shm-size")


def test_control_port() -> None:
    told_by(checks.control_port(), "ok", "listens and accepts")
    told_by(checks.control_port("192.0.2.1"), "problem", "192.0.2.1 can't be", "loopback")


@pytest.mark.parametrize(
    ("rates", "step_s", "status", "words"),
    [
        ((1_000_100, 1_000_000), 1e-9, "ok", "tsc, steps of 1 ns, adjusted by 0.0100%"),
        ((985_000, 1_000_000), 1e-9, "warning", "adjusted by 1.5000%: permits assume"),
        ((1_000_000, 1_000_000), 0.004, "warning", "steps of 4e+06 ns"),
    ],
    ids=["good", "fast", "coarse"],
)
def test_clock(
    tmp_path: Path, rates: tuple[int, int], step_s: float, status: str, words: str
) -> None:
    source = tree(tmp_path, {"source": "tsc\n"}) / "source"
    found = checks.clock(source, lambda: rates, step_s)
    told_by(found, status, words, "clock source" if status == "warning" else "")


def test_a_clock_of_unknown_source_is_no_trouble(tmp_path: Path) -> None:
    told_by(checks.clock(tmp_path / "none", lambda: (1, 1)), "ok", "of unknown source")


@pytest.mark.parametrize(
    ("state", "node", "status", "words"),
    [
        ("4: ACTIVE", "uverbs0", "ok", "mlx5_0 port 1 ACTIVE (Ethernet)"),
        ("1: DOWN", "uverbs0", "warning", "mlx5_0 port 1 DOWN (Ethernet); no port is active"),
        ("4: ACTIVE", "rdma_cm", "warning", "no process can open them"),
    ],
    ids=["active", "down", "no-node"],
)
def test_rdma(tmp_path: Path, state: str, node: str, status: str, words: str) -> None:
    port = "sys/mlx5_0/ports/1"
    files = {f"{port}/state": f"{state}\n", f"{port}/link_layer": "Ethernet\n", f"dev/{node}": ""}
    tree(tmp_path, files)
    told_by(checks.rdma(tmp_path / "sys", tmp_path / "dev"), status, words)


def test_no_rdma_is_no_trouble(tmp_path: Path) -> None:
    told_by(checks.rdma(tmp_path / "none"), "ok", "none: between hosts bytes go over tcp")


def test_without_sys_nothing_is_known_of_rdma(tmp_path: Path) -> None:
    devices = tmp_path / "none" / "infiniband"
    with pytest.raises(FileNotFoundError):
        checks.rdma(devices)
    with pytest.raises(FileNotFoundError):
        checks.locked_memory((1, 1), devices, status=tmp_path / "status")


def test_gpus_are_information(tmp_path: Path) -> None:
    told_by(checks.gpus(tmp_path / "none", tmp_path), "ok", "none")
    files = {f"gpus/{n}/information": "IRQ: 9\nModel: \t NVIDIA H200\n" for n in "ab"}
    tree(tmp_path, files | {"dev/nvidia0": "", "dev/nvidiactl": ""})
    found = checks.gpus(tmp_path / "gpus", tmp_path / "dev")
    told_by(found, "ok", "2 x NVIDIA H200; 1 can be opened here")
