"""`weft train --trace`: a run's measured timeline under the predicted one."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch.distributed as dist
from rich.text import Text

from weft.core import (
    STAGE_AXIS,
    TRACE,
    Action,
    ActionCosts,
    Schedule,
    gather_json,
    replace_file,
)
from weft.engine import Engine, Span
from weft.pipeline import Timeline, perfetto, simulate, svg, text

FIRST, STEPS = 2, 5  # the first step that is recorded (step 1 warms up), and how many are
PICTURE, COSTS = "trace.svg", "costs.json"


class TraceRecorder:
    """Records the actions of some steps. All ranks use it; the pipeline of the first data rank is
    drawn.

    The prediction is the simulated schedule with the median time of each kind of action on each
    stage, over the recorded steps: what is left between it and the measured step is waiting and
    communication.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps: list[list[Span]] = []

    def before(self, step: int) -> None:
        """A step begins: the `step`-th that this run takes."""
        if FIRST <= step < FIRST + STEPS:
            if dist.is_initialized():
                dist.barrier()  # one zero for the clocks of all hosts
            self._zero = time.perf_counter()
            self._engine.trace = []

    def after(self) -> None:
        """A step has ended."""
        if self._engine.trace is not None:
            shifted = [
                s._replace(start=s.start - self._zero, stop=s.stop - self._zero)
                for s in self._engine.trace
            ]
            self._steps.append(shifted)
            self._engine.trace = None

    def finish(self, folder: Path, width: int, colour: bool) -> Text | None:
        """Write the pictures to the run folder; on rank 0 the drawing for a terminal of `width`
        columns."""
        engine = self._engine
        everyone = [
            [[Span(Action(*action), *rest) for action, *rest in step] for step in steps]
            for steps in gather_json(self._steps)
        ]
        if engine.mesh.rank != 0 or not self._steps:
            return None
        ranks = [everyone[rank] for rank in engine.plan.layout.group_ranks(0, STAGE_AXIS)]
        schedule = engine.plan.schedule
        recorded = [*zip(*ranks, strict=True)]  # step -> rank -> spans
        measured = Timeline.of(
            [
                [(s.action if s.kind == "compute" else s.kind, s.start, s.stop) for s in spans]
                for spans in recorded[-1]
            ]
        )
        costs = _costs(schedule, ranks)
        pair = [("predicted", simulate(schedule, costs)), ("measured", measured)]
        replace_file(folder / COSTS, costs.json())
        replace_file(folder / PICTURE, svg(pair))
        replace_file(folder / TRACE, perfetto(pair))
        return text(pair, width=width, colour=colour)


def _costs(schedule: Schedule, ranks: list[list[list[Span]]]) -> ActionCosts:
    """The median seconds of each kind of action on each stage. A backward that was never apart
    counts half to its input and half to its weights: the matrix products are equally large."""
    split = {a[1:] for actions in schedule.order for a in actions if a.kind == "W"}
    times: dict[tuple[str, int], list[float]] = {}
    for steps in ranks:
        for span in (s for spans in steps for s in spans if s.kind == "compute"):
            kind, stage, microbatch = span.action
            whole = kind == "B" and (stage, microbatch) not in split
            times.setdefault(("whole" if whole else kind, stage), []).append(span.stop - span.start)

    def median(kind: str, stage: int) -> float:
        return statistics.median(times.get((kind, stage), [0.0]))

    stages = range(schedule.stages)
    return ActionCosts(
        forward_s=[median("F", s) for s in stages],
        backward_s=[
            median("B", s) if ("B", s) in times else median("whole", s) / 2 for s in stages
        ],
        weight_s=[median("W", s) if ("B", s) in times else median("whole", s) / 2 for s in stages],
        update_s=[median("U", s) for s in stages],
    )
