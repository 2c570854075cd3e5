"""A program that used NIXL ends with the exit code that it chose, closed properly or not.

About 15 s: each case loads NIXL in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from .ends import End, maker

ENDINGS = ("closed", "abandoned", "abandoned in mid-write", "loop closed in mid-write")
EXIT_CODE = 3


async def _use(ending: str, kept: list[End]) -> None:
    make = maker("nixl")
    near, far = End(make), End(make)
    kept += [near, far]
    await near.connect(await far.metadata())
    size = 8 * 1024 * 1024
    first = near.post([0], [0], [4096], to=far.base)
    near.submit(first)
    assert await near.settled(first) == ["done"]
    if ending == "closed":
        await near.close()
        await far.close()
    elif ending != "abandoned":
        near.submit(*(near.post([0], [size], [size], to=far.base) for _ in range(8)))


def _program(ending: str) -> None:
    """Runs in the child: use NIXL, end as told, and say so with the exit code."""
    kept: list[End] = []
    if ending == "loop closed in mid-write":
        asyncio.run(_use(ending, kept))
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_use(ending, kept))
    sys.exit(EXIT_CODE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("tls", ["", "tcp"])
def test_the_exit_code_is_the_programs_own(tls: str, ending: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    if tls:
        environ["UCX_TLS"] = tls
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.test_exit", ending],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


if __name__ == "__main__":
    _program(sys.argv[1])
