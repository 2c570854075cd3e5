"""Project files name no machine: no path of somebody's home, no package registry."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from .modules import FOLDERS, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Written in pieces, or this file would be found too.
MACHINE: Final = re.compile(
    r"""(?<![\w.])/(?:work|home|root|opt|Users|mnt|srv)/[\w.]"""
    r"""|pypi\.[a-z]|python""" + r"""hosted|index-""" + r"""url|find-""" + r"""links"""
)
SUFFIXES: Final = {".py", ".md", ".toml", ".txt", ".cfg", ".ini", ".json", ".yml", ".yaml", ".sh"}
GENERATED: Final = re.compile(r"(^|/)(__pycache__|build|dist|[^/]*\.egg-info)(/|$)")


def project_files() -> Iterator[Path]:
    """Text files of the project, the generated ones left out."""
    folders = [ROOT / name for name in (*FOLDERS, ".src", ".ci", "docs")]
    found = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    for path in found:
        text = path.suffix in SUFFIXES or path.parent.name == ".ci"
        if text and path.is_file() and not GENERATED.search(path.relative_to(ROOT).as_posix()):
            yield path


def machine_names(text: str) -> list[str]:
    """What in `text` belongs to one machine."""
    return [match.group() for match in MACHINE.finditer(text)]


def test_no_file_names_a_machine() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in project_files()
        if (names := machine_names(path.read_text()))
    }
    assert found == {}


def test_the_files_are_looked_at() -> None:
    seen = {path.relative_to(ROOT).as_posix() for path in project_files()}
    assert {"README.md", "pyproject.toml", "constraints.txt", ".ci/run"} <= seen
    assert {"engine/spans.py", ".src/kvferry/__init__.py", "tests/conftest.py"} <= seen


@pytest.mark.parametrize(
    "text",
    ["cd /{}/me/kvferry", 'open("/{}/main/x")', "see /{}/.cache"],
)
@pytest.mark.parametrize("folder", ["home", "work", "root"])
def test_a_machine_path_is_seen(text: str, folder: str) -> None:
    assert machine_names(text.format(folder))


@pytest.mark.parametrize("text", ["pip install --extra-{}-url x", "https://{}.org/simple"])
def test_a_registry_is_seen(text: str) -> None:
    assert machine_names(text.format("index" if "extra" in text else "pypi"))


@pytest.mark.parametrize("text", ["/proc/self/stat", "a/home/b", "/dev/nvidia0", "/sys/class"])
def test_what_every_machine_has_is_left_alone(text: str) -> None:
    assert not machine_names(text)
