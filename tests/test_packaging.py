"""What a user installs: the wheel has all of the package, its types, and nothing else.

About 5 s: builds a wheel from a copy of the tree, without an index.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[1]
PARTS: Final = ("engine", "adapters", "transports", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PARTS, ".src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / "tree" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=folder / "tree",
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_has_every_module_and_nothing_else(wheel: set[str]) -> None:
    sources = {
        f"kvferry/{path.relative_to(ROOT).as_posix()}"
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
    }
    assert len(sources) > len(PARTS)
    installed = {name for name in wheel if ".dist-info/" not in name}
    assert installed == sources | {"kvferry/__init__.py", "kvferry/py.typed"}


def test_the_wheel_has_the_licence(wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_every_folder_of_modules_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")}
    assert set(declared["packages"]) == {"kvferry"} | {
        ".".join(("kvferry", *folder.relative_to(ROOT).parts)) for folder in folders
    }


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="kvferry")
    assert callable(command.load())


def test_the_pins_are_within_the_bounds() -> None:
    """Every dependency has its pin in constraints.txt, and the pin fits the declared bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = [Requirement(text) for texts in declared for text in texts]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    unfit = [str(each) for each in needed if not each.specifier.contains(pins[each.name])]
    assert unfit == []
