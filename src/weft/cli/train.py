"""`weft train`: train the model of a run file."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from weft.core import STOPPED, ConfigError, kept_imports
from weft.launch import Rendezvous, launched_rank, parse_nodes

from .options import (
    LayoutOption,
    NoCode,
    Output,
    RunFile,
    Settings,
    exit_codes,
    load,
    repeated_options,
)


def train(
    path: RunFile,
    layout: LayoutOption = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of processes; with --nodes, of each host. Default: as many as the layout"
                " has ranks."
            ),
        ),
    ] = None,
    settings: Settings = None,
    no_code: NoCode = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run folder's latest checkpoint.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume", help="Continue from the latest checkpoint; start anew without one."
        ),
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="N|MIN:MAX",
            help="Number of hosts. Start the same command on each of them.",
        ),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(
            "--rdzv",
            metavar="HOST:PORT",
            help="Where the hosts meet: a port of one of them, or a shared file:///path.",
        ),
    ] = None,
    output: Output = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Draw the measured timeline of each stage under the predicted one."
        ),
    ] = False,
) -> None:
    """Train the model of RUN.toml, with one process for each rank of its layout."""
    with exit_codes():
        run = load(path, settings, layout, output, no_code=no_code)
        if (nodes is None) != (rdzv is None):
            given, value = ("--nodes", nodes) if rdzv is None else ("--rdzv", rdzv)
            lacks = (
                "does not say where they meet" if rdzv is None else "does not say how many hosts"
            )
            raise ConfigError(given, value, lacks, "write --nodes 4 --rdzv HOST:PORT")
        if resume and auto_resume:
            raise ConfigError(
                "--auto-resume", True, "cannot stand beside --resume", "give one of them"
            )
        if trace and run.workers:
            raise ConfigError(
                "--trace",
                trace,
                "shows the stages of a layout, and a run with [workers] has no layout",
                "leave it out",
            )
        if trace and run.train.profile is not None:
            problem = "--trace and train.profile both record the stages"
            raise ConfigError("--trace", trace, problem, "leave it out, or train.profile")
        if nodes is not None:
            # set before torch is imported: each lost connection prints a page of C++ stacks else
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with kept_imports():
            from . import train_run

        if nodes is None and nproc not in (None, run.world):
            raise train_run.world_size_error(run, "--nproc", nproc)
        if nodes is not None and rdzv is not None:
            hosts, meeting = parse_nodes(nodes), Rendezvous.parse(rdzv)
            arguments = [str(path), *repeated_options(settings, layout, output)]
            arguments += ["--trace"] if trace else []
            stopped = train_run.train_as_host(
                run, hosts, nproc, meeting, None if auto_resume else resume, arguments
            )
        else:
            resume |= auto_resume and train_run.saved_step(run) is not None
            start = train_run.train_here if launched_rank() is None else train_run.train_as_rank
            stopped = start(run, resume, trace)
        if stopped:
            raise typer.Exit(STOPPED)
