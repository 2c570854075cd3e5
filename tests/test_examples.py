"""The programs under examples/ do what they say. About 5 s: two processes load NIXL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[1] / "examples"


def test_two_processes_have_the_same_caches() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "two_processes.py")]
    with subprocess.Popen(
        [*command, "prefill", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as prefill:
        try:
            assert prefill.stdout is not None
            address = prefill.stdout.readline().removeprefix("listening on ").strip()
            decode = subprocess.run(
                [*command, "decode", address],
                stdout=subprocess.PIPE,
                text=True,
                timeout=40,
                check=False,
            )
            sent, _ = prefill.communicate(timeout=10)
        finally:
            prefill.kill()
    assert (decode.returncode, prefill.returncode) == (0, 0)
    got = sorted(decode.stdout.splitlines())
    assert len(set(got)) == 8
    assert sorted(sent.splitlines()) == got
