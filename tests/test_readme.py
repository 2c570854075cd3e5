"""What the README shows works as it is printed. About 5 s: the example loads NIXL."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
README: Final = (ROOT / "README.md").read_text()
COMMANDS: Final = (
    "pip install -c constraints.txt . && kvferry demo",
    "pip install -c constraints.txt '.[test]' && pytest",
)


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_embed_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *released, last = done.stdout.splitlines()
    assert last == "48 b'the first token'"
    assert sorted(line.rsplit(maxsplit=1)[-1] for line in released) == [
        "drained",
        "settled",
        "settled",
    ]


def test_there_are_two_set_up_commands() -> None:
    told = "".join(blocks("sh")).splitlines()
    assert [line for line in told if "&& kvferry" in line or "&& pytest" in line] == list(COMMANDS)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https://)([^)#]+)\)", README)
    assert targets
    assert [name for name in targets if not (ROOT / name).exists()] == []


def test_every_top_level_folder_is_explained() -> None:
    folders = {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))} | {".src/kvferry"}
    assert {name for name in folders if f"| `{name}/` |" not in README} == set()
