"""Makes a search query from a run file. What `plan`, `simulate` and a run's own prediction ask
of a run file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from weft.core import DEFAULT_SCHEDULE, Layout, PipelineConfig, RunConfig, Sync
from weft.nn import block_lists, callable_blocks
from weft.parallel import axis_table, recomputed_modules
from weft.pipeline import check_split_points, choose_schedule, schedule_of, schedules
from weft.train import (
    Dataset,
    build_dataset,
    build_loss,
    build_skeleton,
    build_sync,
    model_inputs,
    on_own_layout,
    resolve_callable,
    sample_batch,
    with_layout,
)

from ..cost.hardware import Cluster
from ..cost.layout_batch import LayoutBatch
from ..cost.model_work import ModelWork
from ..cost.precision_policy import PrecisionPolicy
from ..cost.profile import profile_model
from .constraints import STAGES
from .run_precision import run_precision


@dataclass(frozen=True)
class RunQuery:
    """The arguments of `estimate` that follow from a run; `choices` holds the run's own alone."""

    work: ModelWork
    choices: LayoutBatch
    practice: PrecisionPolicy
    sync: Sync


def query_from_run(
    run: RunConfig, axes: str | None = None, device: str = "cpu", work: ModelWork | None = None
) -> RunQuery:
    """A run as its file has it, on its own layout or on these axes. `device`: the kind of device
    whose kernels it would run, as a sheet has it. `work`: its model's, where that is known. Raises
    Refusal."""
    there = run if axes is None else with_layout(run, axes)
    named = isinstance(run.train.recompute, tuple)
    bare = build_skeleton(run) if work is None or named else nn.Module()
    work = work or work_of_run(run, bare, build_dataset(run), device)
    return RunQuery(work, layout_of_run(there, bare), run_precision(run), build_sync(run))


def work_of_run(run: RunConfig, bare: nn.Module, held: Dataset, device: str) -> ModelWork:
    """The work of a run's model for one of its samples. Raises Refusal."""
    return profile_model(
        bare,
        sample_batch(run, held),
        build_loss(run),
        precision=run.precision.compute,
        device=device,
        roles=run.roles or None,
        inputs=model_inputs(run, bare),
        parts=run.layout.parts,
        fsdp_units=run.layout.fsdp_units,
        name=run.model.build or str(run.model.hf),
    )


def layout_of_run(run: RunConfig, model: nn.Module) -> LayoutBatch:
    """The layout of a run, with its microbatches, recomputation and schedule. `model`: its own,
    which is asked where modules that run again are named. Raises Refusal."""
    layout, recompute = run.layout.axes, run.train.recompute
    again = _named_share(model, recompute) if isinstance(recompute, tuple) else recompute
    name, chunks = _schedule(run, layout)
    if layout.stage_ranks > 1:
        check_split_points(run.pipeline.cut, layout.stage_ranks * chunks, f"{name} over {layout}")
    return LayoutBatch.of(
        [plain_layout(layout)],
        batch=run.train.batch,
        accumulate=run.train.accumulate,
        recompute=again,
        schedule=name,
        chunks=chunks,
    )


def _named_share(model: nn.Module, patterns: Sequence[str]) -> float:
    """Of the repeated blocks the share that these globs name. Other modules that they name, such as
    a stem, count as if they were kept. Raises ConfigError."""
    lists = block_lists(model)
    blocks = callable_blocks(model, (name for each in lists for name in each))
    again = recomputed_modules(model, patterns, blocks)
    return len({*again} & {*blocks}) / max(1, len(blocks))


def plain_layout(layout: Layout) -> Layout:
    """A layout as estimates have it: less what has one rank, and an option that another axis does
    alone as that axis (`cp2+ulysses` as `ulysses2`)."""
    layout = layout.without(*(axis for axis, size in layout.sizes if size == 1))
    same = {
        axis: axis_table().traits[axis].written_as[option]
        for axis, option in layout.options
        if option in axis_table().traits[axis].written_as
    }
    return Layout(
        tuple((same.get(axis, axis), size) for axis, size in layout.sizes),
        tuple(
            (same.get(axis, axis), option)
            for axis, option in layout.options
            if option not in axis_table().traits[axis].written_as
        ),
    )


def _schedule(run: RunConfig, layout: Layout) -> tuple[str, int]:
    """Its name, and stages of a rank."""
    if layout.stage_ranks == 1:
        return DEFAULT_SCHEDULE, 1
    name = schedule_of(layout) or run.pipeline.schedule
    if name not in schedules.builtin_schedules():
        arguments = run.pipeline.arguments
        own = resolve_callable(name, run.folder, "pipeline.schedule") if ":" in name else name
        made = choose_schedule(layout, run.train.accumulate, own, arguments)
        if not isinstance(own, str):
            schedules.register(partial(own, **arguments), name)
        return name, made.stages // made.ranks
    given = inspect.signature(schedules.builtin_schedules()[name]).parameters
    if "chunks" in given:
        return name, int(run.pipeline.arguments.get("chunks", given["chunks"].default))
    return name, STAGES.get(name, 1)


def run_with_layout(
    run: RunConfig,
    axes: str,
    accumulate: int,
    recompute: str | int | tuple[str, ...],
    name: str,
    options: dict[str, int],
) -> RunConfig:
    """The run so laid; `name`: the schedule's, if it has several stages."""
    train = run.train.model_copy(update={"accumulate": accumulate, "recompute": recompute})
    pipeline = run.pipeline
    if name:
        count = Layout.parse(axes).stage_ranks * options.get("chunks", STAGES.get(name, 1))
        same = (
            isinstance(pipeline.cut, str) or len(pipeline.cut) == count - 1
        )  # modules are named for so many stages
        cut = pipeline.cut if same else "flops"
        arguments = (pipeline.arguments if name == pipeline.schedule else {}) | options
        pipeline = PipelineConfig(
            schedule=name, cut=cut, dynamic_shapes=pipeline.dynamic_shapes, **arguments
        )
    return on_own_layout(run.model_copy(update={"train": train, "pipeline": pipeline}), axes)


def era_of(cluster: Cluster, name: str | None, run: RunConfig | None = None) -> str:
    """The era of this name; without one "compiled" if the run compiles its blocks, else "eager", as
    far as the hardware sheet has them. Raises ConfigError."""
    eras = cluster.hardware.eras
    compiled = run is not None and run.train.compile == "blocks"
    wanted = ("compiled", "eager") if compiled else ("eager",)
    found = name or next((era for era in wanted if era in eras), next(iter(eras)))
    cluster.hardware.era(found)
    return found
