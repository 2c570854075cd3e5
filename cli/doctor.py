"""`kvferry doctor`: what to look at when a transfer does not work.

Runs the checks of `checks` and `lanes` in an order in which causes come before effects, and prints
them. Two rules: a check that fails itself is a finding and never a traceback; only what decides
whether a transfer can work decides the exit code.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from . import checks, lanes
from .checks import Finding
from .probe import probe
from .selftest import DEFAULT, run_selftest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console, RenderableType

    from .checks import Status

_STYLES: Final[Mapping[Status, str]] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_MARKS: Final[Mapping[Status, str]] = {"ok": "✓", "warning": "!", "problem": "✗"}
_MARKS_ASCII: Final[Mapping[Status, str]] = {"ok": "+", "warning": "!", "problem": "x"}


class Check(NamedTuple):
    """One check. decides: whether a problem that it finds means that no transfer can work."""

    section: str
    name: str
    look: Callable[[], Finding]
    decides: bool = False


class Line(NamedTuple):
    """A check and what it found."""

    check: Check
    finding: Finding


def examine(
    self_test: bool, tell: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> list[Line]:
    """Run every check. tell: is given what is done meanwhile, where it takes seconds."""
    lines = [_look(check) for check in _host_checks()]
    tell("asking NIXL and UCX")
    lines += [_look(check) for check in _nixl_checks()]
    if self_test and works(lines):
        tell("moving bytes between two processes")
        lines += [_look(check) for check in _self_tests(environ)]
    return lines


def works(lines: Sequence[Line]) -> bool:
    """Whether nothing was found that keeps transfers from working."""
    return not any(line.check.decides and line.finding.status == "problem" for line in lines)


def _host_checks() -> Iterator[Check]:
    for name, look in (
        ("kvferry", checks.kvferry),
        ("Python", checks.python),
        ("numpy", checks.numpy),
        ("torch", checks.torch),
    ):
        yield Check("software", name, look)
    for name, look in (
        ("same-host copies", checks.same_host_copies),
        ("ended sources", checks.ended_sources),
        ("shared memory", checks.shared_memory),
        ("locked memory", checks.locked_memory),
        ("open files", checks.open_files),
        ("clock", checks.clock),
        ("RDMA devices", checks.rdma),
        ("GPUs", checks.gpus),
    ):
        yield Check("this host", name, look)
    yield Check("this host", "control port", checks.control_port, decides=True)


def _nixl_checks() -> Iterator[Check]:
    probed = probe()
    yield Check("NIXL and UCX", "NIXL", partial(lanes.nixl, probed), decides=True)
    if probed.trouble:
        return  # nothing was loaded that could be asked
    yield Check("NIXL and UCX", "NIXL backends", partial(lanes.backends, probed), decides=True)
    if not probed.ucx_version:
        return
    for name, look in (
        ("UCX", lanes.ucx),
        ("UCX settings", lanes.settings),
        ("UCX on one host", lanes.same_host),
        ("UCX on the network", lanes.network),
    ):
        yield Check("NIXL and UCX", name, partial(look, probed))


def _self_tests(environ: Mapping[str, str]) -> Iterator[Check]:
    """On the lane that UCX chooses, and on tcp, where that is another choice."""
    wanted = [DEFAULT] if environ.get("UCX_TLS") == "tcp" else [DEFAULT, "tcp"]
    results = dict(zip(wanted, run_selftest(wanted), strict=True))
    working = next((lane for lane in wanted[1:] if not results[lane].trouble), "")
    for lane, tested in results.items():
        look = partial(lanes.self_test, lane, tested, working)
        yield Check("self-test", f"self-test, {lane or 'default'}", look, decides=True)


def _look(check: Check) -> Line:
    try:
        return Line(check, check.look())
    except OSError as error:
        return Line(
            check,
            Finding(
                check.name,
                "warning",
                f"not known: {error}",
                "run it as the engine's user, where /proc and /sys are mounted",
            ),
        )
    except Exception as error:  # noqa: BLE001  a finding, and never a traceback
        return Line(
            check,
            Finding(
                check.name,
                "problem",
                f"the check itself failed: {type(error).__name__}: {error}",
                "report it with this output; it says nothing about transfers",
            ),
        )


# ---------------------------------------------------------------- for the user


def as_json(lines: Sequence[Line]) -> str:
    """One object: `works` is the answer, `checks` are the findings in their order."""
    told = {"works": works(lines), "checks": [line.finding for line in lines]}
    return msgspec.json.format(msgspec.json.encode(told), indent=2).decode()


def as_text(lines: Sequence[Line], console: Console) -> Iterator[RenderableType]:
    """A table per section, then the answer."""
    marks = _MARKS_ASCII if console.options.ascii_only else _MARKS
    width = max(len(line.check.name) for line in lines)
    for section in dict.fromkeys(line.check.section for line in lines):
        yield Text(section, style="bold")
        table = Table.grid(padding=(0, 1), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column()
        for check, finding in lines:
            if check.section == section:
                style = _STYLES[finding.status]
                name = Text(finding.check, style="cyan")
                table.add_row(Text(marks[finding.status], style=style), name, _words(finding))
        yield table
        yield Text()
    yield from _answer(lines)


def _words(finding: Finding) -> Text:
    words = Text(finding.found)
    if finding.remedy:
        words.append(f"\nRemedy: {finding.remedy}", style=_STYLES[finding.status])
    return words


def _answer(lines: Sequence[Line]) -> Iterator[Text]:
    if not works(lines):
        yield Text("No transfer can work here until the problems above are solved.", "bold red")
    elif any(line.check.section == "self-test" and line.finding.status == "ok" for line in lines):
        yield Text.assemble(("Transfers work here", "bold green"), ": bytes moved and were right.")
    else:
        yield Text("Nothing found that keeps transfers from working; no byte was moved.")
