"""Posed: a run in the terms of an estimate. What `plan`, `simulate` and a run's own prediction ask of a run file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial

from torch import nn

from .. import build, schedule, stages
from ..config import Pipeline, Run
from ..cost.choices import Choices
from ..cost.practice import Practice
from ..cost.trace import trace
from ..cost.work import Work
from ..data import Dataset
from ..layout import Layout
from ..syncs import Sync
from .practice_of import practice
from .rules import STAGES


@dataclass(frozen=True)
class Posed:
    """The arguments of `estimate` that follow from a run; `choices` holds the run's own alone."""

    work: Work
    choices: Choices
    practice: Practice
    sync: Sync


def posed(run: Run, axes: str | None = None, device: str = "cpu", work: Work | None = None) -> Posed:
    """A run as its file has it, on its own layout or on these axes. `device`: the kind of device whose kernels it
    would run, as a sheet has it. `work`: its model's, where that is known. Raises Refusal."""
    there = run if axes is None else build.with_layout(run, axes)
    work = work or traced(run, build.skeleton(run), build.dataset(run), device)
    return Posed(work, choice(there), practice(run), build.synchronizer(run))


def traced(run: Run, bare: nn.Module, held: Dataset, device: str) -> Work:
    """The work of a run's model for one of its samples. Raises Refusal."""
    return trace(
        bare, build.first(run, held), build.loss(run), precision=run.precision.compute, device=device,
        roles=run.roles or None, inputs=build.inputs(run, bare), name=run.model.build or str(run.model.hf),
    )  # fmt: skip


def choice(run: Run) -> Choices:
    """The layout of a run, with its microbatches, recomputation and schedule. Raises Refusal."""
    layout = Layout.parse(run.layout.axes)
    name, chunks = _schedule(run, layout)
    if layout.live("pp"):
        stages.hold_cut(run.pipeline.cut, layout.size("pp") * chunks, f"{name} over {layout}")
    return Choices.of(
        [plain(run.layout.axes)], batch=run.train.batch, accumulate=run.train.accumulate, recompute=run.train.recompute,
        schedule=name, chunks=chunks,
    )  # fmt: skip


def plain(axes: str) -> Layout:
    """A layout as estimates have it: less what has one rank, and as `up` what `cp+ulysses` is."""
    layout = Layout.parse(axes)
    layout = layout.without(*(axis for axis, size in layout.sizes if size == 1))
    if "ulysses" in layout.option("cp"):
        layout = Layout.parse(str(layout).replace("cp", "up").replace("+ulysses", ""))
    return layout


def _schedule(run: Run, layout: Layout) -> tuple[str, int]:
    """Its name, and stages of a rank."""
    if not layout.live("pp"):
        return "1f1b", 1
    name = stages.named(layout) or run.pipeline.schedule
    if name not in schedule.folder():
        arguments = run.pipeline.arguments
        own = build.resolve(name, run.folder, "pipeline.schedule") if ":" in name else name
        made = stages.choose(layout, run.train.accumulate, own, arguments)
        if not isinstance(own, str):
            schedule.register(partial(own, **arguments), name)
        return name, made.stages // made.ranks
    given = inspect.signature(schedule.folder()[name]).parameters
    if "chunks" in given:
        return name, int(run.pipeline.arguments.get("chunks", given["chunks"].default))
    return name, STAGES.get(name, 1)


def with_choice(run: Run, axes: str, accumulate: int, recompute: str | int, name: str, options: dict[str, int]) -> Run:
    """The run so laid; `name`: the schedule's, if it has several stages."""
    train = run.train.model_copy(update={"accumulate": accumulate, "recompute": recompute})
    pipeline = run.pipeline
    if name:
        count = Layout.parse(axes).size("pp") * options.get("chunks", STAGES.get(name, 1))
        same = isinstance(pipeline.cut, str) or len(pipeline.cut) == count - 1  # modules are named for so many stages
        cut = pipeline.cut if same else "flops"
        arguments = (pipeline.arguments if name == pipeline.schedule else {}) | options
        pipeline = Pipeline(schedule=name, cut=cut, dynamic_shapes=pipeline.dynamic_shapes, **arguments)
    return build.with_layout(run.model_copy(update={"train": train, "pipeline": pipeline}), axes)
