"""Shows a demo run: live progress and a table for people, one JSON object for programs.

Two rules: a figure says what it was measured over; JSON goes to stdout alone, progress to stderr.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .outcome import percentiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from .outcome import Outcome, Side

_REASONS_SHOWN_MAX: Final = 8


class Bar:
    """Implements `demo.Watcher` as a line that is drawn over and over."""

    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=requests)

    def phase(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text)

    def done(self, requests: int) -> None:
        """Advance."""
        self._progress.advance(self._task, requests)


@contextmanager
def live_progress(requests: int) -> Iterator[Bar]:
    """A progress line on stderr, as long as that is a terminal; it is gone afterwards."""
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bar(progress, requests)


def as_json(outcome: Outcome) -> str:
    """The run as one JSON object. Its key `verified` is the answer, `reasons` why not."""
    settings, workload = outcome.settings, outcome.workload
    told: dict[str, Any] = {
        "verified": outcome.verified,
        "reasons": outcome.reasons,
        "differences": outcome.differences,
        "transport": outcome.transport,
        "lane": outcome.lane,
        "model": settings.model,
        "scale": settings.scale,
        "seed": settings.seed,
        "geometry": workload.geometry,
        "requests": outcome.requests,
        "bytes": outcome.bytes,
        "in_flight": outcome.in_flight,
        "seconds": round(outcome.seconds, 4),
        "gb_per_s": round(outcome.gb_per_s, 3),
        "transfer_ms": percentiles(outcome.latencies_ms, 50, 90, 99),
        "prefill": _side(outcome.prefill),
        "decode": _side(outcome.decode),
    }
    return msgspec.json.format(msgspec.json.encode(told), indent=2).decode()


def _side(side: Side) -> dict[str, Any]:
    return {
        "loop_lag_ms": percentiles(side.lags_ms, 50, 99),
        "cpu_moving_s": round(side.cpu_moving_s, 3),
        "cpu_s": round(side.cpu_s, 3),
        "peak_memory_bytes": side.peak_bytes,
    }


def as_text(outcome: Outcome) -> RenderableType:
    """The run as two tables."""
    return Group(_facts(outcome), Text(), _times(outcome))


def _facts(outcome: Outcome) -> Table:
    settings, workload = outcome.settings, outcome.workload
    geometry = workload.geometry
    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    table.add_row("backend", outcome.transport)
    table.add_row("lane", outcome.lane)
    table.add_row(
        "cache",
        f"{settings.model} at scale {settings.scale:g}: {geometry.layers} layers, "
        f"{geometry.kv_heads} KV heads, head dim {geometry.head_dim}, bf16, blocks of "
        f"{geometry.tokens_per_block} tokens",
    )
    table.add_row(
        "requests",
        f"{outcome.requests} of {min(workload.tokens)} to {max(workload.tokens)} tokens, "
        f"{outcome.in_flight} in flight at once, seed {settings.seed}",
    )
    table.add_row("bytes", f"{outcome.bytes:,} ({outcome.bytes / 2**20:,.0f} MiB)")
    table.add_row(
        "throughput",
        f"{outcome.gb_per_s:.2f} GB/s over {outcome.seconds:.2f} s of moving; computing and "
        "comparing are not counted",
    )
    for name, side in (("prefill", outcome.prefill), ("decode", outcome.decode)):
        table.add_row(
            name,
            f"{side.cpu_moving_s:.2f} CPU seconds while moving, {side.cpu_s:.2f} from start to "
            f"end; {side.peak_bytes / 2**20:,.0f} MiB of memory at most",
        )
    return table


def _times(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("while moving, in ms", style="bold cyan", no_wrap=True)
    for name in ("p50", "p90", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, values in (
        ("transfer time, receive to done", outcome.latencies_ms),
        ("loop lag of prefill, 1 ms ticker", outcome.prefill.lags_ms),
        ("loop lag of decode, 1 ms ticker", outcome.decode.lags_ms),
    ):
        found = percentiles(values, 50, 90, 99)
        table.add_row(title, *(f"{found[name]:.2f}" for name in ("p50", "p90", "p99", "max")))
    return table


def verdict(outcome: Outcome) -> list[Text]:
    """Verified or not, and the first reasons why not: lines, not to be wrapped."""
    if outcome.verified:
        return [
            Text.assemble(
                ("verified", "bold green"),
                ": every needed byte is in place, and no other byte of the decode pool changed",
            )
        ]
    reasons = outcome.reasons
    lines = [Text("NOT verified", style="bold red")]
    lines += [Text(f"  {reason}") for reason in reasons[:_REASONS_SHOWN_MAX]]
    if len(reasons) > _REASONS_SHOWN_MAX:
        lines.append(Text(f"  and {len(reasons) - _REASONS_SHOWN_MAX} more"))
    return lines


def failure_as_json(text: str) -> str:
    """A run that gave no figures, as one JSON object."""
    told = {"verified": False, "reasons": [text]}
    return msgspec.json.format(msgspec.json.encode(told), indent=2).decode()
