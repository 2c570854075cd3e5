"""Every vector of TensorRT-LLM on spans and trims is tested, or docs say why it is not."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.unit import test_vectors_spans as spans
from tests.unit import test_vectors_topology as topology
from tests.unit import test_vectors_trims as trims

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS: Final = Path(__file__).parents[2] / "docs" / "vectors.md"
RANGES: Final = {
    "A": range(1, 19),
    "B": range(21, 25),
    "D": range(1, 19),
    "E": range(1, 14),
    "F": range(1, 20),
    "G": range(1, 17),
    "P": range(1, 7),
    "W": range(1, 17),
}
ALL: Final = {f"{section}{number}" for section, numbers in RANGES.items() for number in numbers}


def ids_tested() -> Iterator[str]:
    """Ids of the tables' rows, a remark after a space left out, and of tests named by one."""
    for module in (spans, trims):
        tables = [each for each in vars(module).values() if isinstance(each, dict)]
        keys = [key for key in chain(*tables) if isinstance(key, str)]
        yield from (match[1] for key in keys if (match := re.fullmatch(r"([A-Z]\d+)( .*)?", key)))
        names = [re.match(r"test_([a-z]\d+)_", name) for name in vars(module)]
        yield from (match[1].upper() for match in names if match)


def documented() -> set[str]:
    """Ids of the rows of the docs' tables."""
    return set(re.findall(r"^\| ([A-Z]\d+) \|", DOCS.read_text(), re.MULTILINE))


def test_every_vector_is_tested_or_explained() -> None:
    """Topology's file sees to its own completeness."""
    assert set(ids_tested()) | documented() == ALL | topology.LIFTED.keys()


def test_what_is_not_here_is_explained() -> None:
    assert ALL - set(ids_tested()) == {"A18", "E2"}
