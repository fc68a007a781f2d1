"""`weft report`: a run, a plan or a simulation as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from weft.core import ConfigError

from .options import exit_codes, say


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_DIR [RUN_DIR]",
            help="A run folder, as weft train wrote it; two are shown side by side.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Show what weft plan --json or weft simulate --json printed; - is stdin.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="The file to write. Default: report.html in the run folder, or beside FILE.json.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML file about a run, two runs, a plan or a simulation. It needs no network."""
    with exit_codes():
        from weft.report import plan_page, read_figures, read_run, run_page, write_html

        named = folders or []
        if plan is not None:
            if named:
                problem = "cannot stand beside --plan"
                raise ConfigError("RUN_DIR", str(named[0]), problem, "leave one of them out")
            page, beside = plan_page(read_figures(plan)), Path(f"{plan.stem}.html")
            where = out or (beside if str(plan) == "-" else plan.with_suffix(".html"))
        elif len(named) in (1, 2):
            page = run_page([read_run(folder) for folder in named])
            where = out or named[0] / REPORT
        else:
            problem = "names no run folder" if not named else "are more than two run folders"
            fix = "write weft report RUN_DIR, weft report A B, or weft report --plan FILE.json"
            raise ConfigError("RUN_DIR", " ".join(map(str, named)), problem, fix)
        size = write_html(where, page)
        say(f"{where}: {decimal(size)}; open it in a browser")


REPORT = "report.html"
