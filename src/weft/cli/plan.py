"""`weft plan`: find the fastest layouts on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.core import kept_imports

from .options import (
    AsJson,
    Era,
    Measured,
    NoCode,
    NoKeptRuns,
    RunFile,
    Settings,
    exit_codes,
    load,
    say,
)
from .picture_file import write_file


def plan(
    path: RunFile,
    cluster: Annotated[
        str,
        typer.Option(
            help=(
                "Hardware and number of devices: h100x64, a hardware file, or local for this"
                " machine."
            )
        ),
    ],
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Search only layouts of this pattern, as in tp8.* or fsdp*+zero2.tp8. A complete"
                " layout is estimated as it is; give several to compare them part by part."
            )
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 10,
    as_json: AsJson = False,
    memory: Annotated[
        float | None,
        typer.Option("--max-memory", metavar="GIB", help="Memory of each device that may be used."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT", help="Print every part of this layout's estimate with its formula."
        ),
    ] = None,
    era: Era = None,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive",
            help="Search unusual layouts too, such as tensor parallelism over several nodes.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write a run file with the best layout, or as .svg a picture of the memory of the"
                " layouts shown."
            ),
        ),
    ] = None,
    measured: Measured = None,
    no_kept_runs: NoKeptRuns = False,
    settings: Settings = None,
    no_code: NoCode = False,
) -> None:
    """Find the fastest layouts of RUN.toml that fit on a cluster, and say why others are slower or
    do not fit."""
    with exit_codes():
        run = load(path, settings, no_code=no_code)

        with kept_imports():
            from weft.planner import (
                explain_json,
                explain_row,
                memory_svg,
                plan_for_cluster,
                write_run_file,
            )

        report, laid = plan_for_cluster(
            run,
            cluster,
            layout or (),
            era,
            memory,
            exhaustive,
            explain,
            top,
            measured or (),
            not no_kept_runs,
        )
        row = report.explained
        pictured = out is not None and out.suffix == ".svg"
        if out is not None and pictured:
            shown = [row] if row is not None else report.shown(top)
            write_file(out, memory_svg(shown, report.question.memory_bytes))
        elif out is not None:
            write_run_file(laid, out)
        if as_json:
            found = report.json(top)
            if row is not None:
                found |= {"explained": report.figures_of(row) | {"parts": explain_json(row)}}
            typer.echo(json.dumps(found))
        elif row is not None:
            say(explain_row(row))
        else:
            typer.echo(report.text(top))
            fits = report.best.fits
            if out is not None:
                next_step = f"; now weft train {out}" if fits else ", which does not fit"
                next_step = "" if pictured else next_step
                say(f"\nwritten: {out}{next_step}")
            elif fits:
                name = f"{path.stem}-{report.question.cluster.hardware.name}.toml"
                say(
                    f"\nto train this plan: the same command with --out {name}, then weft train"
                    f" {name}"
                )
