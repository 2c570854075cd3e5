"""The core is pure: it awaits nothing, asks no clock and draws no lot.

What is not named as shell is core, so a new module is pure until somebody says otherwise here.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

import pytest

from .modules import ROOT, Module, module, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHELL: Final = (
    "connections",
    "control",
    "driver",
    "handles",
    "host",
    "service",
    "tasks",
    "thread",
    "thread_loop",
)
SHELL: Final = {f"engine/{name}.py" for name in _SHELL}
CLOCKED: Final = {"engine/host.py"}  # the only one that knows the time, and chance
CONTRACT: Final = {"engine/ports.py"}  # declares what shells await, awaits nothing itself

CHANCE: Final = {"datetime", "random", "secrets", "time", "uuid"}
CONCURRENCY: Final = {
    "anyio",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
}
_AWAITS: Final = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def core() -> list[Module]:
    """The modules that must be pure: the engine's core and the I/O worker."""
    exempt = SHELL | CONTRACT
    engine = [each for each in modules("engine") if each.path not in exempt]
    worker = [each for each in modules("transports") if each.path == "transports/worker.py"]
    assert worker, "transports/worker.py is the I/O worker"
    return engine + worker


def awaits(module: Module) -> Iterator[str]:
    """Everything that waits, or is made to."""
    for node in ast.walk(module.tree):
        if isinstance(node, _AWAITS):
            yield f"line {node.lineno} awaits"
        elif isinstance(node, ast.AsyncFunctionDef) and module.path not in CONTRACT:
            yield f"line {node.lineno} defines async {node.name}"


def chance(module: Module) -> Iterator[str]:
    """Clocks and randomness: they make a run differ from its repetition."""
    for line, name in module.imports():
        if name.split(".")[0] in CHANCE or name.startswith("numpy.random"):
            yield f"line {line} imports {name}"
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "random"
            and isinstance(node.value, ast.Name)
            and node.value.id in ("np", "numpy")
        ):
            yield f"line {node.lineno} uses numpy.random"


def concurrency(module: Module) -> Iterator[str]:
    """Loops, threads, processes and the system."""
    for line, name in module.imports():
        if name.split(".")[0] in CONCURRENCY:
            yield f"line {line} imports {name}"


def test_the_core_awaits_nothing() -> None:
    found = [f"{each.path}: {what}" for each in core() for what in awaits(each)]
    found += [f"{p.path}: {w}" for p in modules("engine") if p.path in CONTRACT for w in awaits(p)]
    assert found == []


def test_only_the_host_knows_time_and_chance() -> None:
    others = [each for each in modules("engine") if each.path not in CLOCKED] + core()
    assert [f"{each.path}: {what}" for each in others for what in chance(each)] == []


def test_the_core_knows_no_loop_and_no_system() -> None:
    assert [f"{each.path}: {what}" for each in core() for what in concurrency(each)] == []


@pytest.mark.parametrize("path", sorted(SHELL | CLOCKED | CONTRACT))
def test_exemptions_are_needed(path: str) -> None:
    assert (ROOT / path).is_file()
    each = next(each for each in modules("engine") if each.path == path)
    assert [*awaits(each), *chance(each), *concurrency(each)]


@pytest.mark.parametrize(
    "text",
    [
        "async def f():\n    pass",
        "async def f(x):\n    await x",
        "async def f(x):\n    async with x:\n        pass",
        "async def f(x):\n    return [y async for y in x]",
    ],
)
def test_a_waiting_is_seen(text: str) -> None:
    assert list(awaits(module("engine/a.py", text)))


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from time import monotonic_ns",
        "import random",
        "import secrets",
        "from numpy.random import default_rng",
        "import numpy as np\nr = np.random.default_rng()",
        "def f():\n    from datetime import datetime",
    ],
)
def test_chance_is_seen(text: str) -> None:
    assert list(chance(module("engine/a.py", text)))


@pytest.mark.parametrize("text", ["import asyncio", "from threading import Lock", "import anyio"])
def test_concurrency_is_seen(text: str) -> None:
    assert list(concurrency(module("engine/a.py", text)))
