"""`weft doctor`: check this machine, or several and the network between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError
from weft.launch import Rendezvous, parse_nodes

from .options import AsJson, LayoutOption, NoCode, Settings, exit_codes, load


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="A run file to check too.", show_default=False),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Check this many hosts together; start the command on each of them."
        ),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the hosts meet: a port of one of them."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder to check. Default: the run file's output."),
    ] = None,
    as_json: AsJson = False,
    layout: LayoutOption = None,
    settings: Settings = None,
    no_code: NoCode = False,
) -> None:
    """Check this machine, or several machines and the network between them, and say what will
    work."""
    with exit_codes():
        if (nodes is None) != (rdzv is None):
            raise ConfigError(
                "--nodes", nodes, "goes with --rdzv", "give both: --nodes 3 --rdzv host0:29400"
            )

        for option, given in (("--layout", layout), ("--set", settings)):
            if path is None and given:
                raise ConfigError(option, given, "goes with a run file", "name a RUN.toml")

        from weft.core import __version__
        from weft.launch import DoctorRequest, RunChecks, report_doctor

        from .doctor_run_check import check_run_file, checkpoint_size

        checks = RunChecks(check_run_file, checkpoint_size)
        read = None if path is None else partial(load, path, settings, layout, no_code=no_code)
        request = DoctorRequest(__version__, read, folder, run_checks=checks)
        if nodes is not None and rdzv is not None:
            request = replace(request, hosts=parse_nodes(nodes), meeting=Rendezvous.parse(rdzv))
        if not report_doctor(request, as_json):
            raise typer.Exit(1)
