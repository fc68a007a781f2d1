"""`weft checkpoint`: show checkpoints, and convert weights to and from Hugging Face."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError, nearest

from .commands import Command, CommandGroup
from .options import (
    AsJson,
    NoCode,
    Output,
    Settings,
    exit_codes,
    load,
    repeated_options,
    rule_out_code,
    say,
)

commands = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Show checkpoints; convert weights to and from Hugging Face.",
)

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run folder.", show_default=False)
]
AtStep = Annotated[
    str | None,
    typer.Option(
        metavar="N|best",
        help="The step; best: that of the lowest validation loss (checkpoint.keep_best). Default:"
        " the latest one.",
    ),
]


@commands.command(cls=Command)
def show(
    folder: RunFolder,
    step: AtStep = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a run's checkpoints hold."""
    with exit_codes():
        from weft.checkpoint import describe_checkpoint, listing_text

        found = describe_checkpoint(folder, _number(folder, step))
        typer.echo(json.dumps(found)) if as_json else say(listing_text(found, tensors))


@commands.command(cls=Command)
def export(
    folder: RunFolder,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="A directory that does not exist yet.")
    ],
    step: AtStep = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: the checkpoint's.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="The whole model, with the adapter merged into it.")
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving averages of the weights (train.ema).")
    ] = False,
    no_code: NoCode = False,
) -> None:
    """Write a run's weights as a directory that transformers' from_pretrained loads; for a run with
    an adapter, write the adapter as peft loads it."""
    with exit_codes():
        if no_code:
            rule_out_code()
        from weft.train import DTYPES, export_weights

        if dtype is not None and dtype not in DTYPES:
            raise ConfigError("--dtype", dtype, "is not a dtype", nearest(dtype, DTYPES))
        found = export_weights(folder, to, _number(folder, step), dtype, merge=merge, averaged=ema)
        say(
            f"step {found.step}: {found.tensors} tensors, {found.nbytes:,} B, in {found.files}"
            f" files -> {to}"
        )


def _number(folder: Path, step: str | None) -> int | None:
    """The number that `--step` gives."""
    if step is None:
        return None
    if step.isdecimal():
        return int(step)
    if step != "best":
        raise ConfigError("--step", step, "is not a step", "write a number, or best")
    from weft.train import best_step

    return best_step(folder)


@commands.command("import", cls=Command)
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A directory that save_pretrained wrote.", show_default=False
        ),
    ],
    run_file: Annotated[
        Path,
        typer.Option(
            "--run",
            metavar="RUN.toml",
            help="The run file of the run that starts from these weights.",
        ),
    ],
    settings: Settings = None,
    output: Output = None,
    no_code: NoCode = False,
) -> None:
    """Write a transformers directory's weights as step 0 of a run, from which weft train RUN.toml
    --resume starts."""
    with exit_codes():
        from weft.train import import_weights

        run = load(run_file, settings, output=output, no_code=no_code)
        found = import_weights(source, run)
        begin = ["weft", "train", str(run_file), *repeated_options(settings, None, output)]
        say(
            f"{found.tensors} tensors, {found.nbytes:,} B -> {run.output}; begin:"
            f" {shlex.join(begin)} --resume"
        )
