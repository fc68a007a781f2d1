"""`weft simulate`: simulate a step of a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core import kept_imports

from .options import (
    Era,
    LayoutOption,
    Measured,
    NoCode,
    NoKeptRuns,
    RunFile,
    Settings,
    exit_codes,
    load,
    say,
)


def simulate(
    path: RunFile,
    layout: LayoutOption = None,
    cluster: Annotated[
        str,
        typer.Option(
            help=(
                "Hardware and number of devices, as in h100x1024. Default: local, this machine as"
                " weft calibrate measured it."
            ),
            show_default=False,
        ),
    ] = "local",
    era: Era = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DEVICE=]FACTOR",
            help="A device that is this many times slower; without DEVICE=, any one of them.",
        ),
    ] = None,
    slow_link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=FACTOR", help="A link of this axis whose bandwidth is divided by FACTOR."
        ),
    ] = None,
    jitter: Annotated[
        float,
        typer.Option(
            help="Standard deviation of a device's step time, as a fraction of that time."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    mtbf: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Mean time between failures of one device."),
    ] = None,
    node_mtbf: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Mean time between failures of one node."),
    ] = None,
    checkpoint: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time for which a checkpoint stops training."),
    ] = None,
    storage: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Bandwidth at which all ranks together write a checkpoint in the background.",
        ),
    ] = None,
    restart: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Time from a failure until training continues. Default: 300."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="weak|strong",
            help="Simulate more replicas: weak lets the batch grow with them, strong keeps it.",
        ),
    ] = None,
    to: Annotated[
        int | None, typer.Option(help="The number of devices up to which --scale goes.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write .svg, .html, .json (Perfetto) or .csv."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    measured: Measured = None,
    no_kept_runs: NoKeptRuns = False,
    settings: Settings = None,
    no_code: NoCode = False,
) -> None:
    """Simulate a step of RUN.toml on a cluster with slow devices, failures, replicas that wait for
    each other or do not, or more devices."""
    with exit_codes():
        run = load(path, settings, layout, no_code=no_code)

        with kept_imports():
            from weft.planner import (
                SimulateRequest,
                make_scenario,
                parse_scale_mode,
                parse_slow,
                parse_slow_link,
                print_report,
                report_json,
                require_unique,
                simulate_scenario,
                write_report,
            )

        request = SimulateRequest(
            slow=require_unique(map(parse_slow, slow or []), "--slow"),
            links=require_unique(map(parse_slow_link, slow_link or []), "--slow-link"),
            jitter=jitter,
            seed=seed,
            mtbf_h=mtbf,
            node_mtbf_h=node_mtbf,
            checkpoint_s=checkpoint,
            storage_gbps=storage,
            restart_s=restart,
            every=run.checkpoint.every,
            scale=parse_scale_mode(scale),
            to=to,
        )
        scenario, belief, notes = make_scenario(run, cluster, era, measured or (), not no_kept_runs)
        for note in notes:
            say(f"note: {note}", err=True)
        found = simulate_scenario(scenario, request, belief)
        if out is not None:
            write_report(out, found)
        if as_json:
            typer.echo(report_json(found))
        elif out is None:
            print_report(found)
