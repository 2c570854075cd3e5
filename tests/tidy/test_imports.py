"""Dependency direction: adapters -> engine <- transports; cli sees all; nobody is bare."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

from .modules import FOLDERS, PARTS, module, modules, offences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .modules import Module

SEEN_BY: Final = {
    "engine": {"engine"},
    "adapters": {"adapters", "engine"},
    "transports": {"transports", "engine"},
    "cli": {"cli", "adapters", "transports", "engine", ""},  # "" is the package's root
}
ENGINE_LIBRARIES: Final = {"anyio", "msgspec", "numpy"}


def wrong_direction(module: Module) -> Iterator[str]:
    """Imports of what this part must not know."""
    seen = SEEN_BY[module.part]
    for line, name in module.imports():
        first, _, rest = name.partition(".")
        if name.startswith("..") or (first == "kvferry" and rest.split(".")[0] not in seen):
            yield f"line {line} imports {name}, {module.part} sees {sorted(seen)}"


def foreign_library(module: Module) -> Iterator[str]:
    """Libraries that the engine must not need."""
    allowed = {*sys.stdlib_module_names, *ENGINE_LIBRARIES, "kvferry"} - {"importlib"}
    for line, name in module.imports():
        if name.split(".")[0] not in allowed:
            yield f"line {line} imports {name}, the engine has {sorted(ENGINE_LIBRARIES)}"


def bare_name(module: Module) -> Iterator[str]:
    """`import engine`: works in the checkout and nowhere else."""
    for line, name in module.imports():
        if name.split(".")[0] in PARTS:
            yield f"line {line} imports {name}, without kvferry in front"


def test_parts_see_only_what_they_may() -> None:
    assert offences(wrong_direction, *PARTS) == []


def test_the_engine_needs_three_libraries() -> None:
    assert offences(foreign_library, "engine") == []


def test_no_part_is_imported_by_its_bare_name() -> None:
    assert offences(bare_name, *FOLDERS) == []


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_looked_at(part: str) -> None:
    assert any(list(each.imports()) for each in modules(part))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine/a.py", "from ..transports import memory"),
        ("engine/a.py", "from .. import transports"),
        ("engine/a.py", "from kvferry.cli import main"),
        ("engine/a.py", "import kvferry"),
        ("engine/a.py", "if TYPE_CHECKING:\n    from ..adapters.torch_layout import x"),
        ("adapters/a.py", "from ..transports.worker import Worker"),
        ("adapters/a.py", "import kvferry.transports"),
        ("transports/nixl/a.py", "from ...adapters import torch_layout"),
        ("transports/a.py", "def f():\n    from ..cli import demo"),
        ("transports/a.py", "from ...engine import spans"),
        ("cli/a.py", "from ..tests import conftest"),
    ],
)
def test_a_wrong_direction_is_seen(path: str, text: str) -> None:
    assert list(wrong_direction(module(path, text)))


@pytest.mark.parametrize("text", ["import torch", "from nixl._api import nixl_agent"])
def test_a_foreign_library_is_seen(text: str) -> None:
    assert list(foreign_library(module("engine/a.py", text)))


@pytest.mark.parametrize("text", ["import engine", "from transports.worker import Worker"])
def test_a_bare_name_is_seen(text: str) -> None:
    assert list(bare_name(module("tests/unit/test_a.py", text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine/a.py", "from .spans import Span\nfrom . import wire"),
        ("transports/nixl/a.py", "from ...engine.ports import Post\nfrom ..worker import Worker"),
        ("cli/a.py", "from ..transports.nixl import nixl\nimport kvferry"),
    ],
)
def test_a_right_direction_is_left_alone(path: str, text: str) -> None:
    assert not list(wrong_direction(module(path, text)))
