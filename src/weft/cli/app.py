"""The command `weft`: registers every subcommand.

What can be refused is refused in this process, before any other starts.

Exit codes: 0 done; 1 a process died, or verification failed; 2 refused; 75 stopped by SIGTERM after
saving a checkpoint; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import (
    calibrate,
    checkpoint,
    doctor,
    draw,
    examples,
    launch,
    plan,
    report,
    simulate,
    train,
    verify,
)
from .commands import Command, CommandGroup, localized
from .options import exit_codes

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def main() -> None:
    """The entry point of the command `weft`."""
    try:
        with exit_codes():
            command = localized(app, sys.argv[1:])
    except typer.Exit as refused:
        sys.exit(refused.exit_code)
    command(prog_name="weft")


def _print_version(wanted: bool) -> None:
    if wanted:
        from weft.core import __version__

        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    lang: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Language of help, errors and tables: en or zh. Default: that of the locale.",
        ),
    ] = None,
) -> None:
    """Train any PyTorch model on many devices, and verify that the numbers are right."""


for verb in (
    train.train,
    verify.verify,
    plan.plan,
    doctor.doctor,
    calibrate.calibrate,
    draw.draw,
    simulate.simulate,
    report.report,
):
    app.command(cls=Command)(verb)
app.add_typer(checkpoint.commands, name="checkpoint")
app.add_typer(launch.commands, name="launch")
app.add_typer(examples.commands, name="examples")
