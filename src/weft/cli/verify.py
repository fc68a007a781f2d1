"""`weft verify`: compare layouts with one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core import METRICS, RUN_FILE, ConfigError, kept_imports

from .options import AsJson, NoCode, RunFile, Settings, exit_codes, load, say

if TYPE_CHECKING:
    from weft.core import Refusal, RunConfig


def verify(
    path: RunFile,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="A layout to verify; may be repeated. Default: the run file's layout."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps to compare. Default: 3; below fp64 1."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="fp64; or a training precision, equal within a few roundings: bf16, fp16, or"
            " float8 (emulated)."
        ),
    ] = "fp64",
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help=(
                "Also train 20 steps as weft train does, and resume: learning rates, clipping,"
                " validation, checkpoints."
            ),
        ),
    ] = False,
    as_json: AsJson = False,
    world: Annotated[
        int | None, typer.Option(min=1, help="Verify every layout of this many ranks.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help=(
                "A run folder, in which verify.json keeps the table for weft report. Default: that"
                " of RUN.toml, if the run has begun."
            ),
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    no_code: NoCode = False,
) -> None:
    """Verify that loss, gradients and weights equal those of one device, and that the collectives
    are the predicted ones."""
    with exit_codes():
        if deep and precision != "fp64":
            problem = f"compares in float64, and --precision is {precision}"
            raise ConfigError("--deep", deep, problem, "leave one of them out")
        # checked as it is verified: what else is set may need that
        computed = {"bf16": "bf16", "float8": "bf16", "fp16": "fp16"}.get(precision)
        low = {} if computed is None else {"precision.compute": f'"{computed}"'}
        run = load(path, settings, further=low, no_code=no_code)

        with kept_imports():
            from weft.verification import (
                coverage,
                coverage_text,
                every_layout,
                on_cpus,
                result_table,
                verified_precision,
                verified_sync,
                verify_deep,
                verify_layouts,
                write_verified,
            )

        layouts, count = list(layout or []), steps or (3 if precision == "fp64" else 1)
        tried = [] if world is None else every_layout(world)
        named = layouts or ([] if tried else [str(run.layout.axes)])
        layouts = [*named, *(axes for axes in tried if axes not in named)]
        for key in ("async_tp", "offload_activations"):
            if getattr(run.train, key):
                say(f"weft: train.{key} needs GPUs: verified without", err=True)
        written, run = run, on_cpus(run)
        refused = _refused_layouts(run, layouts, deep)
        for axes in [axes for axes in refused if axes not in named]:
            say(f"weft: left out {axes}: {refused.pop(axes)}", err=True)
            layouts.remove(axes)
        float8 = run.precision.float8
        verified = verified_precision(run.precision, precision)
        if verified.float8 != float8:
            say(
                f"weft: [precision] float8 = {float8!r} is left out: verified in {precision}."
                " --precision float8 verifies it, by emulation",
                err=True,
            )
        exact, changed = verified_sync(run.sync, precision), ""
        if run.sync != exact:
            changed = (
                f"[sync] {run.sync.name}, {run.sync.codec} changes numbers by design:"
                f" verified with {exact.name}, {exact.codec}"
            )
            say(f"weft: {changed}", err=True)
        report = verify_layouts(
            run,
            layouts,
            count,
            lambda result: None if as_json else say(f"{result_table(result, count)}\n"),
            precision,
            refused,
        )
        training = []
        if deep:
            planned = [result.layout for result in report.results if result.refused is None]
            training = verify_deep(
                run, planned, lambda found: None if as_json else say(f"{found.text()}\n")
            )
        verified_layouts = [each.layout for each in report.results if each.refused is None]
        covered = coverage(written, count, verified, changed, training, verified_layouts)
        report = replace(report, training=tuple(training), covered=tuple(covered))
        if not as_json:
            typer.echo(f"{coverage_text(covered)}\n")
        folder = _run_folder(path, written, output)
        if folder is not None:
            write_verified(
                folder, report, written.model_dump(mode="json", exclude_none=True), precision
            )
        typer.echo(report.json() if as_json else "\n\n".join(report.told()))
        if not report.passed:
            raise typer.Exit(1)


def _run_folder(path: Path, run: RunConfig, output: str | None) -> Path | None:
    """Where the table is kept: --output; the folder of a run, whose own run file it is; or the run
    file's output, if that is there already."""
    if output is not None:
        return Path(output)
    folders = (path.parent if path.name == RUN_FILE else Path(run.output), Path(run.output))
    return next((each for each in folders if (each / METRICS).is_file()), None)


def _refused_layouts(run: RunConfig, layouts: Sequence[str], deep: bool) -> dict[str, Refusal]:
    """The layouts that cannot be verified, and why. Raises Refusal if that is every one, and has
    printed the reasons of the others then."""
    from weft.core import Refusal
    from weft.train import check_run
    from weft.verification import check_deep

    refused: dict[str, Refusal] = {}
    try:
        plans = check_run(run, layouts, refused.__setitem__ if len(layouts) > 1 else None)
        if deep:
            planned = [axes for axes in layouts if axes not in refused]
            for axes, laid in zip(planned, plans, strict=True):
                try:
                    check_deep(axes, laid)
                except Refusal as reason:
                    refused[axes] = reason
            if all(axes in refused for axes in layouts):
                raise refused[layouts[-1]]
    except Refusal as last:
        for axes, why in refused.items():
            if why is not last:
                say(f"weft: {axes} is refused: {why}", err=True)
        raise
    return refused
