"""What `weft draw --plan` does: plans a run, and shows or writes what each rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from weft.parallel import PlanRows, plan_rows, plan_svg, plan_text
from weft.pipeline import print_for_terminal
from weft.train import check_run

from .picture_file import require_svg, write_file

if TYPE_CHECKING:
    from weft.core import RunConfig


def make_rows(run: RunConfig) -> PlanRows:
    """Plan the run without starting a process. Raises Refusal."""
    return plan_rows(check_run(run)[0])


def write_plan(path: Path, rows: PlanRows) -> None:
    """Raises ConfigError."""
    require_svg(path)
    write_file(path, plan_svg(rows))


def print_plan(rows: PlanRows) -> None:
    """Print the rows: in colours where the terminal has them."""
    print_for_terminal(lambda *, colour, **_: plan_text(rows, colour=colour))


def plan_figures(rows: PlanRows) -> str:
    """A JSON object: all rows."""
    return json.dumps(rows.figures(), indent=2)
