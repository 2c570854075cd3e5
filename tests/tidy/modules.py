"""The project's Python files, parsed. Nothing of the project is imported or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = ("engine", "adapters", "transports", "cli")  # of the package
FOLDERS: Final = (*PARTS, "examples", "tests")


@dataclass(frozen=True)
class Module:
    """One file: where it is, relative to the root, and what it says."""

    path: str
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The top-level folder: "engine", "tests", ..."""
        return self.path.split("/")[0]

    @property
    def package(self) -> list[str]:
        """The package that its relative imports start from: ["kvferry", "transports", "nixl"]."""
        return ["kvferry", *self.path.split("/")[:-1]]

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, absolute name) of everything imported, type-checking imports included.

        `from a import b` gives "a.b", since b may be a module. A relative import that leaves the
        package gives a name that begins with "..".
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                up = node.level - 1
                base = self.package[: len(self.package) - up] if node.level else []
                if node.level and not base:
                    base = [".."]
                parents = [*base, *(node.module.split(".") if node.module else [])]
                yield from ((node.lineno, ".".join([*parents, a.name])) for a in node.names)


def module(path: str, text: str) -> Module:
    """A module from its text: a file's, or one made up by a test."""
    return Module(path, text, ast.parse(text, filename=path))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Every module under the folders, in order of their paths."""
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in found)


def offences(check: Callable[[Module], Iterator[str]], *folders: str) -> list[str]:
    """Everything that `check` finds, as "path: what"."""
    return [f"{each.path}: {what}" for each in modules(*folders) for what in check(each)]
