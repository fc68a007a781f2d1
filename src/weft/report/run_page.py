"""A page of one run, or of two side by side: its sections in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .read_run import RunRecord
from .sections.curves import loss, pace
from .sections.experts import experts
from .sections.faults import faults
from .sections.layout import layout
from .sections.memory import memory
from .sections.outcome import outcome
from .sections.proof import proof
from .sections.settings import settings
from .sections.stages import stages
from .sections.traffic import traffic

SECTIONS = (
    outcome,
    loss,
    pace,
    memory,
    layout,
    stages,
    traffic,
    experts,
    faults,
    proof,
    settings,
)


def run_page(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The page as data (`blocks.py`); sections without anything to show are left out."""
    names = [run.name for run in runs]
    found = [made for make in SECTIONS if (made := make(runs)) is not None]
    return {"title": " | ".join(names), "kind": "run", "runs": names, "sections": found}
