"""What the commands share: common options, reading the run file, errors and exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core import (
    LINES,
    NO_CODE,
    ConfigError,
    Refusal,
    WeftError,
    printable,
    translate,
)
from weft.launch import launched_rank, note_error

if TYPE_CHECKING:  # pydantic and torch are imported when a command runs: --help is to be fast
    from weft.core import RunConfig

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the run file, as in train.steps=20."
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", help="Axes and sizes, as in dp2.tp2. Default: the run file's layout."),
]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="The run folder. Default: the run file's output.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
NoCode = Annotated[
    bool,
    typer.Option(
        "--no-code",
        envvar=NO_CODE,
        help="Refuse a run file that names code from outside weft, before importing that code.",
    ),
]
Era = Annotated[
    str | None,
    typer.Option(help="The software whose speed is assumed: an era of the hardware file."),
]

Measured = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help=(
            "Steps measured on such devices: metrics.jsonl of a run, or a CSV file with the columns"
            " layout and step_s. Repeat it for several."
        ),
        show_default=False,
    ),
]
NoKeptRuns = Annotated[
    bool,
    typer.Option("--no-kept-runs", help="Leave out what weft train has measured on this machine."),
]


def say(text: str, err: bool = False) -> None:
    """Print what a person reads, in their language."""
    typer.echo(translate(text), err=err)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Print an error that weft raises on purpose as one message, and exit with its code."""
    try:
        yield
    except WeftError as error:
        joined = launched_rank()
        # all ranks refuse with the same words: one prints them
        if joined is None or joined[0] == 0 or not isinstance(error, Refusal):
            typer.echo(f"weft: {printable(translate(str(error)), LINES)}", err=True)
        note_error(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        say("weft: interrupted", err=True)
        raise typer.Exit(130) from None


def rule_out_code() -> None:
    """From now on this process, and those that it starts, refuse code that a run file names."""
    # nor may a file of the current directory stand in for a module that Python imports
    os.environ.update({NO_CODE: "1", "PYTHONSAFEPATH": "1"})


def load(
    path: Path,
    settings: list[str] | None = None,
    layout: str | None = None,
    output: str | None = None,
    further: Mapping[str, str] | None = None,
    no_code: bool = False,
) -> RunConfig:
    """Read the run file, with the keys that the command line overrides: `settings`, and after them
    those of other options; epochs are counted in steps. `further`: key -> TOML value; `no_code`:
    for this process and those that it starts. Raises Refusal."""
    from weft.core import load_run

    if no_code:
        rule_out_code()
    overrides = key_values(settings, "train.steps=20") | dict(further or {})
    for key, text in (("layout.axes", layout), ("output", output)):
        if text is not None:
            overrides[key] = json.dumps(text)  # a string, even if it reads like a number
    run = load_run(path, overrides)
    if run.train.epochs is None:
        return run
    from weft.train import count_steps

    return count_steps(run)


def repeated_options(
    settings: list[str] | None, layout: str | None, output: str | None
) -> list[str]:
    """The words with which another command loads the same run."""
    options = [
        ("--layout", layout),
        *(("--set", text) for text in settings or []),
        ("--output", output),
    ]
    return [word for option, text in options if text is not None for word in (option, text)]


def key_values(settings: list[str] | None, example: str) -> dict[str, str]:
    """Key -> value of each KEY=VALUE that --set was given. Raises ConfigError."""
    pairs = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError("--set", setting, "has no =", f"write --set {example}")
        pairs[key.strip()] = value.strip()
    return pairs
