"""`weft examples`: the run files that come with weft."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError

from .commands import Command, CommandGroup
from .options import exit_codes, say

EXAMPLES = Path(__file__).parents[1] / "examples"

commands = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Run files to begin with.")


@commands.callback()
def examples() -> None:
    """Run files to begin with."""


@commands.command(cls=Command)
def copy(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")
    ] = Path("examples"),
) -> None:
    """Copy weft's examples to a directory of your own."""
    with exit_codes():
        fix = "name a directory that does not exist: weft examples copy DIR"
        if folder.exists():
            raise ConfigError("DIR", str(folder), "is there already", fix)
        try:
            shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        except OSError as error:
            raise ConfigError("DIR", str(folder), f"cannot be written ({error})", fix) from None
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            typer.echo(file)
        say(f"begin: weft train {folder / 'quickstart.toml'}")
