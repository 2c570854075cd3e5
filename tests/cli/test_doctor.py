"""`kvferry doctor`: its checks of NIXL and UCX, its self-test, its exit code, and real runs."""

from __future__ import annotations

import json
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvferry.cli import checks, doctor, lanes, selftest
from kvferry.cli.checks import Finding
from kvferry.cli.doctor import Check, Line
from kvferry.cli.messages import Checked, Closed, Difference, Moved
from kvferry.cli.probe import Probed, ending, ucx_words
from kvferry.cli.selftest import Side, Tested, judge
from kvferry.cli.workload import Settings, make_workload

from .test_checks import told_by, tree
from .test_demo import kvferry, told

MIB = 2**20


# ---------------------------------------------------------------- NIXL, UCX and lanes

LANES = ["self/memory", "tcp/eth0", "tcp/lo", "sysv/memory", "posix/memory", "cma/memory"]
GOOD = Probed(
    package="nixl_cu13",
    installed={"nixl": "1.5.1", "nixl-cu13": "1.5.1"},
    plugins=["POSIX", "UCX"],
    ucx_version="1.23.0",
    ucx_library="/somewhere/libucp.so",
    lanes=LANES,
    lanes_unset=LANES,
)


def probed(**changed: Any) -> Probed:
    return msgspec.structs.replace(GOOD, **changed)


@pytest.mark.parametrize(
    ("seen", "status", "words", "remedy"),
    [
        (GOOD, "ok", "1.5.1, imported as nixl_cu13", ""),
        (
            probed(installed={"nixl": "1.5.1", "nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1"}),
            "ok",
            "nixl-cu12 is installed too, a process can load only one",
            "",
        ),
        (
            probed(installed={"nixl-cu12": "1.5.0", "nixl-cu13": "1.5.1"}),
            "warning",
            "versions differ: nixl-cu12 1.5.0, nixl-cu13 1.5.1",
            "one version",
        ),
        (
            Probed("ImportError: no NIXL is installed"),
            "problem",
            "no NIXL is installed; installed: none",
            "pip install 'nixl>=",
        ),
        (
            Probed("it ended by signal SIGILL", installed={"nixl": "1.5.1"}),
            "problem",
            "SIGILL; installed: nixl 1.5.1",
            "--force-reinstall 'nixl>=",
        ),
    ],
    ids=["one", "two", "two-versions", "none", "broken"],
)
def test_nixl(seen: Probed, status: str, words: str, remedy: str) -> None:
    told_by(lanes.nixl(seen), status, words, remedy)


@pytest.mark.parametrize(
    ("seen", "environ", "status", "words", "remedy"),
    [
        (GOOD, {}, "ok", "UCX opens; other plugins: POSIX", ""),
        (probed(plugins=["POSIX"]), {}, "problem", "UCX is missing", "NIXL_PLUGIN_DIR"),
        (
            probed(backend_trouble="E", said=["transport 'x' is not available"]),
            {"UCX_TLS": "x"},
            "problem",
            "UCX can't be opened: E; transport 'x' is not available",
            "unset UCX_TLS, or",
        ),
        (probed(backend_trouble="E"), {}, "problem", "can't be opened: E", "UCX_LOG_LEVEL"),
    ],
    ids=["good", "missing", "setting", "no-setting"],
)
def test_backends(
    seen: Probed, environ: dict[str, str], status: str, words: str, remedy: str
) -> None:
    told_by(lanes.backends(seen, environ), status, words, remedy)


@pytest.mark.parametrize(
    ("taken", "possible", "environ", "status", "words", "remedy"),
    [
        (LANES, LANES, {}, "ok", "cma copies straight into the other process; sysv, posix", ""),
        (["tcp/lo"], LANES, {}, "warning", "no copying lane (no shared", "UCX_TLS include cma"),
        (["posix/memory"], [], {"UCX_MODULES": "^cma"}, "warning", "(posix)", "unset UCX_MODULES"),
        (["tcp/lo"], ["tcp/lo"], {}, "warning", "no copying lane", "same-host copies"),
    ],
    ids=["cma", "excluded", "module", "not-permitted"],
)
def test_lanes_of_one_host(
    taken: list[str],
    possible: list[str],
    environ: dict[str, str],
    status: str,
    words: str,
    remedy: str,
) -> None:
    seen = probed(lanes=taken, lanes_unset=possible)
    told_by(lanes.same_host(seen, environ), status, words, remedy)


@pytest.mark.parametrize(
    ("taken", "status", "words", "remedy"),
    [
        (LANES, "ok", "tcp on eth0, lo", ""),
        (
            ["tcp/eth0", "rc_mlx5/mlx5_0:1", "ud_verbs/mlx5_0:1", "cma/memory"],
            "ok",
            "tcp on eth0; RDMA: rc_mlx5/mlx5_0:1, ud_verbs/mlx5_0:1",
            "",
        ),
        (["tcp/lo", "cma/memory"], "warning", "tcp on lo only", "UCX_NET_DEVICES"),
        (["cma/memory"], "warning", "no lane", "UCX_TLS include tcp"),
    ],
    ids=["tcp", "rdma", "loopback", "none"],
)
def test_lanes_of_the_network(taken: list[str], status: str, words: str, remedy: str) -> None:
    told_by(lanes.network(probed(lanes=taken)), status, words, remedy)


@pytest.mark.parametrize(
    ("seen", "environ", "status", "words"),
    [
        (GOOD, {"HOME": "/x"}, "ok", "none"),
        (probed(modules_preset="^cuda,ib"), {}, "ok", "UCX_MODULES=^cuda,ib by kvferry"),
        (GOOD, {"UCX_MODULES": "^ib"}, "ok", "of UCX's modules ib are not loaded"),
        (GOOD, {"UCX_MODULES": "cma"}, "ok", "of UCX's modules cma alone are loaded"),
        (
            probed(lanes=["tcp/lo"]),
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
            "warning",
            "UCX_NET_DEVICES=lo; UCX_TLS=tcp; this excludes self/memory, tcp/eth0, sysv/memory",
        ),
    ],
    ids=["none", "preset", "without", "only", "excluding"],
)
def test_settings(seen: Probed, environ: dict[str, str], status: str, words: str) -> None:
    remedy = "unset UCX_TLS and UCX_NET_DEVICES" if status == "warning" else ""
    told_by(lanes.settings(seen, environ), status, words, remedy)


@pytest.mark.parametrize(
    ("tested", "working", "status", "words", "remedy"),
    [
        (
            Tested(lane="nixl 1, UCX, fast", requests=8, bytes=5 * MIB, gb_per_s=1.234),
            "",
            "ok",
            "verified: 5 MiB in 8 requests at 1.23 GB/s (fast)",
            "",
        ),
        (Tested("it broke", said=["no route"]), "", "problem", "it broke: no route", "unset UCX_T"),
        (Tested("it broke"), "tcp", "problem", "it broke", "UCX_TLS=tcp works here"),
        (Tested("no torch", tried=False), "", "warning", "not run: no torch", "install torch"),
    ],
    ids=["verified", "failed", "other-works", "not-run"],
)
def test_self_test(tested: Tested, working: str, status: str, words: str, remedy: str) -> None:
    found = lanes.self_test(selftest.DEFAULT, tested, working, {"UCX_TLS": "all"})
    told_by(found, status, words, remedy)


def test_a_busy_host_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.os, "cpu_count", lambda: 4)
    for load, busy in ((4.0, False), (4.1, True)):
        monkeypatch.setattr(lanes.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert ("is busy" in lanes.self_test("tcp", Tested()).found) == busy


# ---------------------------------------------------------------- what the self-test makes of it

SETTINGS = Settings("Llama-3.1-8B", 0.1, requests=3, seed=0, in_flight=2)
WORKLOAD = make_workload(SETTINGS)
NEEDED = sum(map(WORKLOAD.blocks, range(3))) * WORKLOAD.geometry.block_bytes
FIRST = WORKLOAD.blocks(0) * WORKLOAD.geometry.block_bytes
WRONG = Difference(0, 0, 0, "K", 0, 0, 0, 1, 2, 1, needed=True)


def side(*, bytes_: int = NEEDED, **changed: Any) -> Side:
    """What a side reports of a warm-up and a measured round of 2 s."""
    rounds = [
        Moved([], 0.0, [], 1.0, [1.0], FIRST, 1),
        Moved([], 0.0, [], 2.0, [1.0, 1.0], bytes_ - FIRST, 2),
    ]
    report = Side(lane="a", moved=rounds, checked=[Checked(), Checked()], closed=Closed(0, 0, []))
    return msgspec.structs.replace(report, **changed)


def test_speed_is_that_of_the_measured_round() -> None:
    tested = judge(SETTINGS, WORKLOAD, side(), side())
    assert (tested.trouble, tested.requests, tested.bytes) == ("", 2, NEEDED - FIRST)
    assert tested.gb_per_s == pytest.approx((NEEDED - FIRST) / 2e9)


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (side(trouble="decode: x"), "decode: x"),
        (side(closed=None), "a process ended early"),
        (side(bytes_=NEEDED - 1), f"{NEEDED - 1} bytes were moved, {NEEDED} are needed"),
        (side(checked=[Checked([WRONG]), Checked()]), "expected 0x0001, got 0x0002"),
        (side(closed=Closed(0, 0, ["slots are missing"])), "slots are missing"),
    ],
    ids=["trouble", "early", "bytes", "difference", "slots"],
)
def test_what_is_wrong_is_trouble(decode: Side, words: str) -> None:
    assert words in judge(SETTINGS, WORKLOAD, side(), decode).trouble


def test_ucx_is_quoted_once_without_time_and_source() -> None:
    line = "[1.5] [vm:7:0]     a.c:1  UCX  WARN  no   x\n[1.6] [vm:8:0] a.c:1 UCX  ERROR gone\n"
    assert ucx_words("noise\n" + line * 2) == ["no x", "gone"]


def test_an_end_is_said_in_words() -> None:
    assert (ending(3), ending(-11)) == ("with exit code 3", "by signal SIGSEGV")


# ---------------------------------------------------------------- exit code and printing


def line(status: checks.Status, *, decides: bool = False) -> Line:
    remedy = "" if status == "ok" else "do something"
    check = Check("section", "name", lambda: Finding("name", status, "", remedy), decides=decides)
    return doctor._look(check)


@pytest.mark.parametrize(
    ("found", "works"),
    [
        ([line("ok", decides=True), line("warning"), line("warning", decides=True)], True),
        ([line("problem")], True),
        ([line("ok"), line("problem", decides=True)], False),
    ],
    ids=["warnings", "undecisive", "decisive"],
)
def test_only_decisive_problems_decide(found: list[Line], works: bool) -> None:
    assert doctor.works(found) is works
    assert json.loads(doctor.as_json(found))["works"] is works
    console = Console(file=StringIO())
    text = " ".join(str(part) for part in doctor.as_text(found, console))
    assert ("No transfer can work" in text) is not works


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RuntimeError("oh"), "problem", "the check itself failed: RuntimeError: oh"),
        (PermissionError(13, "Permission denied", "/proc/x"), "warning", "denied: '/proc/x'"),
    ],
    ids=["bug", "unreadable"],
)
def test_a_check_that_raises_is_a_finding(error: Exception, status: str, words: str) -> None:
    def look() -> Finding:
        raise error

    found = doctor._look(Check("section", "name", look, decides=True)).finding
    told_by(found, status, words)
    assert found.check == "name"


def test_this_host_can_be_looked_at() -> None:
    for check, finding in map(doctor._look, doctor._host_checks()):
        assert finding.check == check.name
        assert "the check itself failed" not in finding.found


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✗"), ("ascii", "x")])
def test_marks_and_remedies_are_printed(encoding: str, mark: str) -> None:
    out = TextIOWrapper(BytesIO(), encoding=encoding)
    console = Console(file=out, width=80)
    for part in doctor.as_text([line("problem", decides=True)], console):
        console.print(part)
    out.seek(0)
    rows = [row.strip() for row in out.read().splitlines()]
    assert [rows[0], rows[1], rows[2]] == ["section", f"{mark} name", "Remedy: do something"]


# ---------------------------------------------------------------- the command


def findings(done: Any) -> dict[str, dict[str, str]]:
    """By check; every one has the shape that is promised."""
    found = told(done)["checks"]
    for one in found:
        assert list(one) == ["check", "status", "found", "remedy"]
        assert one["status"] in ("ok", "warning", "problem")
    assert len({one["check"] for one in found}) == len(found)
    return {one["check"]: one for one in found}


def test_it_finds_that_transfers_work() -> None:
    done = kvferry("doctor", "--json")
    found = findings(done)
    assert (done.returncode, told(done)["works"], done.stderr) == (0, True, ""), found
    for lane in ("default", "tcp"):
        assert "verified: " in found[f"self-test, {lane}"]["found"]
    assert "tcp on" in found["UCX on the network"]["found"]
    assert found["NIXL backends"]["found"].startswith("UCX opens")


def test_without_a_usable_lane_it_says_so() -> None:
    done = kvferry("doctor", "--no-self-test", tls="bogus")
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "NIXL backends UCX can't be opened" in words
    assert "transport 'bogus' is not available" in words
    assert "Remedy: unset UCX_TLS" in words
    assert "No transfer can work here" in words
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_nixl_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        text = f"raise ModuleNotFoundError('none', name={name!r})"
        tree(tmp_path, {f"{name}/__init__.py": text})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = kvferry("doctor", "--json")
    found = findings(done)
    assert (done.returncode, told(done)["works"]) == (1, False)
    assert found["NIXL"]["status"] == "problem"
    assert "no NIXL is installed" in found["NIXL"]["found"]
    assert found["NIXL"]["remedy"].startswith("pip install ")
    assert not any(check.startswith("self-test") for check in found)
