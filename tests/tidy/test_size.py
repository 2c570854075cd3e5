"""Files that can be read at one sitting, functions that fit a screen, and a word on what they own.

Lines are counted as they stand, docstrings and comments included.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from .modules import PARTS, module, offences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .modules import Module

FILE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70


def long_file(module: Module) -> Iterator[str]:
    """Too long for one responsibility."""
    lines = len(module.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{lines} lines, at most {FILE_LINES_MAX}"


def long_function(module: Module) -> Iterator[str]:
    """Too long for one screen."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def unexplained(module: Module) -> Iterator[str]:
    """No docstring that says what the module owns."""
    if not (ast.get_docstring(module.tree) or "").strip():
        yield "no module docstring"


def test_files_are_short() -> None:
    assert offences(long_file, *PARTS) == []


def test_functions_fit_a_screen() -> None:
    assert offences(long_function, *PARTS) == []


def test_modules_say_what_they_own() -> None:
    assert offences(unexplained, *PARTS, ".src/kvferry") == []


def test_a_long_file_is_seen() -> None:
    assert not list(long_file(module("engine/a.py", "a = 1\n" * FILE_LINES_MAX)))
    assert list(long_file(module("engine/a.py", "a = 1\n" * (FILE_LINES_MAX + 1))))


def test_a_long_function_is_seen() -> None:
    text = "class A:\n    async def f(self):\n" + "        a = 1\n" * FUNCTION_LINES_MAX
    assert list(long_function(module("engine/a.py", text)))
    assert not list(long_function(module("engine/a.py", text.removesuffix("        a = 1\n"))))


def test_a_missing_docstring_is_seen() -> None:
    assert list(unexplained(module("engine/a.py", "import ast\n")))
