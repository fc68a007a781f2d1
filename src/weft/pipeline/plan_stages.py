"""Choose where a model is split into stages, and which schedule runs them."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    STAGE_AXIS,
    ConfigError,
    Layout,
    LayoutError,
    NothingToDivide,
    PipelineRequest,
    Schedule,
    Staging,
    UnsupportedModel,
    gather_json,
    nearest,
)
from weft.nn import model_arguments, named_inputs, weighed_loss, with_loss

from . import schedules
from .balance import partition
from .capture.graph import ForwardGraph
from .capture.split_points import SplitPoint, split_points
from .capture.tracer import trace_forward
from .split_model import ReadsValue, split_stages

SPLIT_MEASURES = ("parameters", "flops", "time")
PROFILES = 5  # forwards that are timed
TRIES = 32  # cuts beside the one of the best balance, where that is refused


def make_stages(
    model: nn.Module,
    layout: Layout,
    microbatches: int,
    pipeline: PipelineRequest,
    blocks: Sequence[str],
    inputs: Sequence[str] | None,
    sample: Mapping[str, Tensor] | None,
    counted: Sequence[str] = (),
    units: Collection[tuple[str, ...]] = (),
    loss: Callable | None = None,
) -> tuple[Staging, Schedule]:
    """The stages of `model` over `pp`, and the schedule that runs them.

    If stages balance measured "time", all ranks of the process group call it, and rank 0's times
    count.

    Args:
        model: The whole model.
        layout: The axes; `pp` says how many ranks the pipeline has.
        microbatches: Microbatches of one step.
        pipeline: How the model is cut, and which schedule runs the stages.
        blocks: The model's repeated blocks, which are preferred as cuts.
        inputs: The entries that the model is called with; None for those that its forward names.
        sample: A batch, along which the forward is traced.
        counted: Modules that count their own dropout masks, as blocks do.
        units: Modules that a cut is to leave whole, each alone or with others that run one after
            another.
        loss: (output, batch) -> (sum, weight), of the sample too; None: not known.

    Raises:
        Refusal: The model, the schedule or the cut does not work with the layout.
    """
    if sample is None:
        raise ConfigError(
            "sample",
            None,
            "weft cuts a pipeline along a forward of the model, which needs a sample",
            "give a batch of two samples",
        )
    where = pipeline.cut
    made = choose_schedule(layout, microbatches, pipeline.schedule, pipeline.options or {})
    names = inputs if inputs is not None else named_inputs(model)
    try:
        recorded = trace_forward(
            model,
            model_arguments(names, dict(sample)),
            PROFILES if where == "time" else 0,
            partial(_total, loss, dict(sample)) if loss is not None else None,
        )
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:
        size = next(iter(sample.values())).shape[0]
        raise UnsupportedModel(
            "sample",
            f"{size} samples",
            f"the model does not run on it: {str(problem).splitlines()[0]}",
            "give a batch that it runs on, of at least two samples if it has batch norm",
        ) from problem
    if microbatches > 1:
        _check_checkpoints(recorded)
    if made.versions and any(event.name == with_loss.__name__ for event in recorded.events):
        raise ConfigError(
            "pipeline.schedule",
            made.name,
            "an expert gate adds a balancing loss, and each stage would need the number of"
            " tokens that count in a microbatch",
            "balance by a bias instead, or use a synchronous schedule such as 1f1b",
        )
    check_split_points(where, made.stages, f"{made.name} over {layout}")
    staging = _split(recorded, made, where, blocks, units, counted)
    return staging, made


def _split(
    recorded: ForwardGraph,
    made: Schedule,
    where: str | Sequence[str],
    blocks: Sequence[str],
    units: Collection[tuple[str, ...]],
    counted: Sequence[str],
) -> Staging:
    """The stages. A cut that weft chose, and that is refused at the call of its module, is tried
    before the functions that lead to that call, and then elsewhere. Where nothing works, the first
    refusal is raised."""
    early: dict[str, UnsupportedModel] = {}  # -> the refusal at the call
    given_up = set[str]()
    while True:
        try:
            points = _points(recorded, made, where, blocks, units, given_up)
        except UnsupportedModel as problem:
            raise next(iter(early.values()), problem) from None
        if where == "time" and dist.is_initialized():  # every rank has measured times of its own
            points = tuple(gather_json(points)[0])
        whole = unsplit_blocks([*blocks, *counted], points)
        try:
            return split_stages(recorded, points, whole, early)
        except UnsupportedModel as problem:
            at = str(problem.value)
            chosen = isinstance(where, str) and at in points
            if not chosen or isinstance(problem, ReadsValue) or len(given_up) == TRIES:
                raise next(iter(early.values()), problem) from None
            if at in early:
                given_up.add(at)
            else:
                early[at] = problem


def _total(loss: Callable, batch: dict[str, Tensor], output: Any) -> Tensor:
    return weighed_loss(loss, output, batch)[0]


def _check_checkpoints(recorded: ForwardGraph) -> None:
    """Refuse a model that runs again in backward what changes its buffers: after the forward of its
    microbatch alone, and in a pipeline after those of others."""
    again = [e for e in recorded.events if e.within in ("checkpoint", "CheckpointFunction")]
    changed = next((n for e in again for n in e.buffers if n in recorded.changed), None)
    if changed is not None:
        raise UnsupportedModel(
            "model",
            changed,
            "is changed inside torch.utils.checkpoint, so backward changes it again, and a"
            " pipeline runs backward in another order",
            'leave the checkpoint out and set train.recompute = "full"',
        )


def unsplit_blocks(blocks: Sequence[str], points: Sequence[str]) -> list[str]:
    """The blocks that no split point divides."""
    return [block for block in blocks if not any(point.startswith(block + ".") for point in points)]


def schedule_of(layout: Layout) -> str | None:
    """The schedule that a layout names, or None. Raises LayoutError."""
    found = layout.options_of(STAGE_AXIS)
    if len(found) > 1:
        raise ConfigError(
            "layout", str(layout), f"{' and '.join(found)} at once", "choose one schedule"
        )
    if found and found[0] not in schedules.builtin_schedules():
        problem = f"axis pp has no option {found[0]!r}"
        raise LayoutError(
            "layout", str(layout), problem, nearest(found[0], schedules.builtin_schedules())
        )
    return found[0] if found else None


def choose_schedule(
    layout: Layout,
    microbatches: int,
    schedule: str | Schedule | Callable[..., Schedule],
    options: Mapping[str, Any],
) -> Schedule:
    """The schedule over `pp`.

    Args:
        layout: The layout. An option of its `pp` axis overrides `schedule`.
        microbatches: Microbatches of one step.
        schedule: A name, a Schedule, or a function (ranks, microbatches, **options) -> Schedule.
        options: Arguments of the schedule.

    Raises:
        ConfigError: There is no such schedule or option, or the schedule cannot run.
    """
    ranks, schedule = layout.stage_ranks, schedule_of(layout) or schedule
    if isinstance(schedule, str):
        return schedules.make_schedule(schedule, ranks, microbatches, **options)
    if isinstance(schedule, Schedule) and options:
        option, value = next(iter(options.items()))
        raise ConfigError(
            f"pipeline.{option}",
            value,
            f"the schedule {schedule.name} is a Schedule object, which takes no options",
            "leave it out",
        )
    made = (
        schedule
        if isinstance(schedule, Schedule)
        else _call(schedule, ranks, microbatches, options)
    )
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        problem = f"was made for {made.ranks} ranks and {made.microbatches} microbatches"
        raise ConfigError(
            "pipeline.schedule",
            made.name,
            problem,
            f"make it for {ranks} ranks and {microbatches} microbatches",
        )
    schedules.require_valid(made)
    return made


def _call(
    build: Callable[..., Schedule], ranks: int, microbatches: int, options: Mapping[str, Any]
) -> Schedule:
    """Make a schedule by the user's function, and name the function in errors."""
    name = f"{build.__module__}:{build.__name__}" if inspect.isfunction(build) else str(build)
    schedules.check_options(name, build, options)
    try:
        made = build(ranks, microbatches, **options)
    except ConfigError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"raises {type(error).__name__}: {error} (line {last.lineno} of {last.filename})"
        raise ConfigError(
            "pipeline.schedule", name, problem, f"correct it for {ranks} ranks"
        ) from error
    if not isinstance(made, Schedule):
        problem = f"returns {type(made).__name__}"
        raise ConfigError(
            "pipeline.schedule", name, problem, "return a weft.core.schedule.Schedule"
        )
    return made


def check_split_points(where: str | Sequence[str], stages: int, who: str) -> None:
    """Raise ConfigError unless `where` is a way to split a model into this many stages. `who` names
    the schedule in the error."""
    if not isinstance(where, str):
        if len(where) != stages - 1:
            fix = "name the first module of each stage but the first"
            raise ConfigError("pipeline.cut", list(where), f"{who} has {stages} stages", fix)
    elif where not in SPLIT_MEASURES:
        choices, hint = ", ".join(SPLIT_MEASURES), nearest(where, SPLIT_MEASURES)
        fix = f"choose one of {choices}, or name modules; {hint}"
        raise ConfigError("pipeline.cut", where, "not a way to cut stages", fix)


def _has_work_before(recorded: ForwardGraph, atoms: Sequence[SplitPoint]) -> bool:
    """Whether the forward computes something of its inputs with weights before the first of these
    modules is called."""
    if not atoms:
        return False
    first = next(i for i in recorded.calls() if recorded.events[i].name == atoms[0].module)
    before = (event for event in recorded.events[:first] if not event.call)
    return any(event.weights and event.reads for event in before)


def _points(
    recorded: ForwardGraph,
    made: Schedule,
    where: str | Sequence[str],
    blocks: Sequence[str],
    units: Collection[tuple[str, ...]],
    given_up: Collection[str],
) -> tuple[str, ...]:
    if not isinstance(where, str):
        return tuple(where)
    for whole in ((blocks, units), ((), units), ((), ())):  # where it has to, it cuts blocks too
        atoms = split_points(recorded, *whole)
        if len(atoms) - sum(atom.module in given_up for atom in atoms[1:]) >= made.stages:
            break
    if len(atoms) == made.stages - 1 and _has_work_before(recorded, atoms) and not given_up:
        return tuple(atom.module for atom in atoms)  # what is called several times comes first
    if len(atoms) - sum(atom.module in given_up for atom in atoms[1:]) < made.stages:
        several = f"{len(atoms)} modules" if len(atoms) > 1 else "one module"
        problem = f"has {made.stages} stages, and the model has only {several} at which"
        problem += " a stage can begin"
        if len(atoms) > 1:
            fix = "use fewer stages, or name modules that are called once in [pipeline] cut"
            raise UnsupportedModel("pipeline.schedule", made.name, problem, fix)
        raise NothingToDivide("pipeline.schedule", made.name, problem, "{others}")
    costs = [float(getattr(atom, where)) for atom in atoms]
    starts = partition(
        costs,
        made.stages,
        crossing=[math.inf if atom.module in given_up else 0.0 for atom in atoms],
        placement=made.placement if made.stages > made.ranks else None,
    )
    return tuple(atoms[i].module for i in starts[1:])
