"""The switch that turns skips into failures. About 2 s: runs pytest on tests made for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

CONFTEST: Final = Path(__file__).with_name("conftest.py")
SKIPS: Final = {
    "test_call.py": "import pytest\ndef test(): pytest.skip('call')",
    "test_mark.py": "import pytest\n@pytest.mark.skipif(True, reason='mark')\ndef test(): ...",
    "test_fixture.py": (
        "import pytest\n@pytest.fixture\ndef f(): pytest.skip('fixture')\ndef test(f): ..."
    ),
    "test_file.py": "import pytest\npytest.skip('file', allow_module_level=True)",
}
OTHERS: Final = {
    "test_passes.py": "def test(): pass",
    "test_fails_as_expected.py": (
        "import pytest\n@pytest.mark.xfail(strict=True)\ndef test(): assert False"
    ),
}


def run_pytest(folder: Path, switch: str) -> str:
    """What pytest says of these tests, under this project's conftest and nothing else of it."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    for name, text in (SKIPS | OTHERS).items():
        (folder / name).write_text(text)
    options = ["-p", "no:cacheprovider", "-rA", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."],
        cwd=folder,
        env={**os.environ, "KVFERRY_NO_SKIPS": switch, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == (1 if switch == "1" else 0), done.stdout + done.stderr
    return done.stdout


def test_a_skip_fails_with_its_reason(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, "1")
    for reason in ("call", "mark", "fixture", "file"):
        assert f"allows no skip: Skipped: {reason}" in said
    assert "1 failed, 1 passed, 1 xfailed, 3 errors" in said


@pytest.mark.parametrize("switch", ["", "0"])
def test_without_the_switch_a_skip_is_a_skip(switch: str, tmp_path: Path) -> None:
    assert "1 passed, 4 skipped, 1 xfailed" in run_pytest(tmp_path, switch)
