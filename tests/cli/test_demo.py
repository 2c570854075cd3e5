"""`kvferry demo` as its users run it: the command, two processes, real NIXL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_COMMAND = (sys.executable, "-m", "kvferry.cli.main")
_LIMIT_S = 50.0


def kvferry(*arguments: str, tls: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments],
        env=environment(tls),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def environment(tls: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return environ | ({"UCX_TLS": tls} if tls else {})


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stdout; nothing may go wrong beside it."""
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_it_verifies_and_says_so_as_json() -> None:
    done = kvferry("demo", "--json", "--requests", "64")
    run = told(done)
    assert (done.returncode, run["verified"], run["reasons"]) == (0, True, [])
    assert run["requests"] == 64
    assert run["bytes"] >= 512 * 2**20
    assert 8 <= run["in_flight"] <= 16
    assert run["model"] == "Llama-3.1-8B"
    assert run["transport"] == "nixl"
    assert "cma" in run["lane"]
    assert run["gb_per_s"] == pytest.approx(run["bytes"] / run["seconds"] / 1e9, rel=0.01)
    times = run["transfer_ms"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    for side in ("prefill", "decode"):
        assert set(run[side]["loop_lag_ms"]) == {"p50", "p99", "max"}
        assert 0 < run[side]["cpu_moving_s"] < run[side]["cpu_s"]
        assert run[side]["peak_memory_bytes"] < 900 * 2**20
    assert done.stderr == ""


def test_too_little_is_not_verified_and_says_why() -> None:
    done = kvferry("demo", "--requests", "9", "--scale", "0.05", "--in-flight", "7")
    assert done.returncode == 1, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "NOT verified" in lines
    assert "9 requests are too few, verifying takes 64" in lines
    assert "7 in flight at once are too few, verifying takes 8" in lines
    assert any("MiB are too few, verifying takes 512 MiB" in line for line in lines)
    for word in ("backend", "lane", "throughput", "transfer time", "loop lag of decode"):
        assert word in done.stdout


@pytest.mark.slow
def test_it_verifies_over_tcp() -> None:
    run = told(kvferry("demo", "--json", "--requests", "64", tls="tcp"))
    assert (run["verified"], run["reasons"]) == (True, [])
    assert "tcp" in run["lane"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-235B-A22B"])
def test_it_verifies_other_models(model: str) -> None:
    run = told(kvferry("demo", "--json", "--requests", "64", "--model", model, "--seed", "11"))
    assert (run["verified"], run["reasons"]) == (True, [])


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["wrong-anchor", "flip-byte", "extra-byte"])
def test_a_planted_fault_is_found(plant: str) -> None:
    done = kvferry("demo", "--json", "--requests", "64", "--plant", plant)
    run = told(done)
    assert (done.returncode, run["verified"]) == (1, False)
    (found,) = run["differences"]
    assert (len(run["reasons"]), run["requests"]) == (1, 64)  # nothing else is wrong
    assert found["needed"] is (plant != "extra-byte")
    assert found["elements"] == 1 or plant == "wrong-anchor"


# ---------------------------------------------------------------- the user's mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt-2"), "no model 'gpt-2'; there are Llama-3.1-8B, Llama-3.1-70B"),
        (("--scale", "2"), "--scale is 2.0, must be over 0 and at most 1"),
        (("--requests", "0"), "--requests is 0, must be at least 1"),
        (("--plant", "weeds"), "--plant is 'weeds', must be one of"),
        (("--scale", "1", "--in-flight", "4000", "--requests", "4000"), "choose a smaller --scale"),
    ],
)
def test_a_mistake_ends_with_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    done = kvferry("demo", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert words in done.stderr


def test_a_transport_that_does_not_open_ends_with_a_sentence() -> None:
    done = kvferry("demo", "--json", tls="bogus")
    assert (done.returncode, told(done)["verified"]) == (1, False)
    assert "UCX_TLS" in done.stderr


def test_help_and_version() -> None:
    assert kvferry("--version").stdout.startswith("kvferry 0.")
    shown = kvferry("demo", "--help").stdout
    for option in ("--model", "--scale", "--requests", "--seed", "--json"):
        assert option in shown
    assert "plant" not in shown


# ---------------------------------------------------------------- how it ends early


def _as_from_a_terminal() -> None:
    """A test run in the background may ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A demo in a process group of its own."""

    def __init__(self, requests: int = 400) -> None:
        self.process = subprocess.Popen(
            [*_COMMAND, "demo", "--json", "--requests", str(requests)],
            env=environment(""),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def alive(self) -> list[int]:
        """The processes of the group that are not dead."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(fields[2]) == self.process.pid and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
        return found

    def children(self) -> list[int]:
        return [pid for pid in self.alive() if pid != self.process.pid]

    def wait_for(self, moment: str) -> None:
        """Until both processes exist, or until both have filled their pools."""
        wanted = 0 if moment == "starting" else 400 * 2**20
        self.until(lambda: sum(resident(pid) > wanted for pid in self.children()) == 2)

    def until(self, true: Any) -> None:
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


@pytest.mark.parametrize("moment", ["starting", "running"])
@pytest.mark.parametrize("whom", ["group", "parent"])
def test_ctrl_c_ends_everything(whom: str, moment: str) -> None:
    with Run() as run:
        run.wait_for(moment)
        send = os.killpg if whom == "group" else os.kill
        send(run.process.pid, signal.SIGINT)
        out, err = run.process.communicate(timeout=20)
        assert run.alive() == []
        assert (run.process.returncode, out, err) == (130, "", "kvferry: interrupted\n")


@pytest.mark.slow
def test_the_children_leave_ctrl_c_to_the_parent() -> None:
    """A terminal sends it to all of them; a child that obeyed would end with a traceback."""
    with Run(requests=64) as run:
        for moment in ("starting", "running"):
            run.wait_for(moment)
            for child in run.children():
                os.kill(child, signal.SIGINT)
        out, err = run.process.communicate(timeout=_LIMIT_S)
        assert (run.process.returncode, json.loads(out)["verified"], err) == (0, True, "")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "running"])
def test_the_children_end_with_a_killed_parent(moment: str) -> None:
    with Run() as run:
        run.wait_for(moment)
        run.process.kill()
        run.until(lambda: run.alive() == [])


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_child_that_dies_is_told(which: int) -> None:
    with Run() as run:
        run.wait_for("running")
        os.kill(sorted(run.children())[which], signal.SIGKILL)
        out, err = run.process.communicate(timeout=20)
        assert run.alive() == []
        assert run.process.returncode == 1
        assert json.loads(out)["verified"] is False
        name = ("prefill", "decode")[which]
        assert err.startswith(f"kvferry: the {name} process ended by signal SIGKILL while it was")
        assert "Traceback" not in err
