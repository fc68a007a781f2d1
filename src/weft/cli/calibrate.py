"""`weft calibrate`: measure this machine, or fit an era to measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError

from .options import AsJson, exit_codes


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Write the hardware file there. Default: where --cluster local reads it.",
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--fit",
            metavar="RUNS.csv",
            help="Instead of measuring, fit an era's constants to measured runs.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --fit: the hardware of the runs, as in h100x64."),
    ] = None,
    era: Annotated[
        str | None, typer.Option(help="With --fit: the era to fit. Default: that of weft itself.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, for `weft plan --cluster local` and for the estimate that `weft train`
    prints."""
    with exit_codes():
        if (runs is None) != (cluster is None) or (runs is None and era is not None):
            given, value = ("--fit", runs) if runs is not None else ("--cluster", cluster or era)
            raise ConfigError(
                given,
                str(value),
                "--fit goes with --cluster",
                "write --fit RUNS.csv --cluster h100x64",
            )

        from weft.planner import report_calibrate, report_fit

        if runs is not None and cluster is not None:
            report_fit(runs, cluster, era, out, as_json)
        else:
            report_calibrate(out, as_json)
