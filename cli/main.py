"""The command line of kvferry.

Two rules: a mistake of the user ends with a sentence and never with a traceback; the exit code
says the truth (0 shown, 1 not shown, 2 asked wrongly, 130 interrupted).
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Annotated, Final

import typer
from rich.console import Console

from ..engine.errors import UsageError
from .models import MODELS, find_model
from .workload import PLANTS, Settings, default_scale

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_UNVERIFIED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvferry {version('kvferry')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Carries KV caches from prefill to decode over NIXL."""
    del show_version  # its callback has answered


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(metavar="NAME", help=f"Whose cache: {', '.join(MODELS)}.")
    ] = "Llama-3.1-8B",
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="0..1",
            help="Reduce layers and tokens by this. By default as far as memory and time want it.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="How many requests to carry.")] = 96,
    in_flight: Annotated[int, typer.Option(help="How many of them at once, at most.")] = 16,
    seed: Annotated[int, typer.Option(help="Chooses requests, slots and bytes.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; the answer is `verified`.")
    ] = False,
    plant: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Carry requests between two processes on this machine, and verify every byte.

    A prefill process streams the caches of a seeded list of requests to a decode process over
    NIXL. Decode knows what every byte must be and compares them all: the needed ones, and the
    rest of its pool, which must not have changed. UCX_TLS chooses the lane (UCX_TLS=tcp).
    """
    # Not before it is needed: `kvferry --help` shall answer at once.
    from . import report
    from .demo import run_demo
    from .processes import DemoError

    try:
        found = find_model(model)
        if plant not in PLANTS:
            raise UsageError(f"--plant is {plant!r}, must be one of {', '.join(PLANTS[1:])}")
        settings = Settings(
            found,
            default_scale(found) if scale is None else scale,
            requests,
            seed,
            in_flight,
            plant,
        )
        with report.live_progress(requests) as watcher:
            outcome = asyncio.run(run_demo(settings, watcher))
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except UsageError as error:
        _complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    except DemoError as error:
        if as_json:
            print(report.failure_as_json(str(error)))
        _complain(str(error))
        raise typer.Exit(EXIT_UNVERIFIED) from None
    if as_json:
        print(report.as_json(outcome))
    else:
        console = Console()
        console.print(report.as_text(outcome))
        console.print(*report.verdict(outcome), sep="\n", soft_wrap=True)
    if not outcome.verified:
        raise typer.Exit(EXIT_UNVERIFIED)


@app.command()
def doctor(
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Move bytes between two processes.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; the answer is `works`.")
    ] = False,
) -> None:
    """Look for what keeps transfers from working on this machine, and say what to do about it.

    Run it as the user, in the container and with the UCX variables of your engine. The exit code
    is 1 if no transfer can work; warnings are limits that you may live with.
    """
    from . import doctor as doctor_

    console, progress = Console(highlight=False), Console(stderr=True)
    try:
        with progress.status("looking at this host") as status:
            lines = doctor_.examine(self_test, status.update)
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print(doctor_.as_json(lines))
    else:
        for part in doctor_.as_text(lines, console):
            console.print(part)
    if not doctor_.works(lines):
        raise typer.Exit(EXIT_UNVERIFIED)


def _complain(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"kvferry: {text}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
