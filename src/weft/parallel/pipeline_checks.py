"""What a pipeline's stages require of a layout, a schedule and the steps of other axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.core import (
    COPY,
    ActionCosts,
    ConfigError,
    Layout,
    LayoutError,
    Schedule,
    Stage,
    Staging,
    Step,
    UnsupportedModel,
    is_inside,
    stage_runs_module,
)
from weft.nn import Roles
from weft.pipeline import simulate

from .axes import FEATURE_AXES, STATE_AXES
from .plan_request import PlanRequest


def modules_of_one_stage(
    request: PlanRequest, roles: Roles, steps: Sequence[Step], blocks: tuple[str, ...]
) -> dict[tuple[str, ...], str]:
    """Module, or several that run one after another, that must lie in one stage -> the feature that
    needs it.

    Args:
        request: what is planned.
        roles: what was found in its model.
        steps: of all axes.
        blocks: the repeated modules.
    """
    layout, recompute = request.layout, request.recompute
    again = recompute if isinstance(recompute, tuple) else ()
    if recompute == "full":
        again = blocks
    if isinstance(recompute, int):
        again = blocks[::recompute]
    gathered = [(s.module, *s.gather.beside) for s in steps if s.gather is not None and s.module]
    units: dict[tuple[str, ...], str] = {}
    units |= {(name,): "sharding" for unit in gathered for name in unit}
    units |= {(name,): "recompute" for name in again}
    if layout.active_axes(*FEATURE_AXES):
        entries = {(chain.entry,) for chain in roles.chains if chain.entry}
        units |= dict.fromkeys(entries, "tensor parallelism")
        units |= {chain.linears: "tensor parallelism" for chain in roles.chains}
    if layout.has_option("sequence"):
        units |= {(name,): "sequence parallelism" for name in blocks}
    return units


def check_stages(
    layout: Layout,
    staging: Staging,
    staged: Schedule,
    units: Mapping[tuple[str, ...], str],
    precision: str,
) -> None:
    """Check the stages against the schedule, the precision and the units of other features.

    Args:
        layout: The axes.
        staging: The stages.
        staged: The schedule.
        units: Module, or several that run one after another, that must lie in one stage -> the
            feature that needs it.
        precision: The dtype of computation.

    Raises:
        Refusal: A stage cuts a unit, or the schedule does not work with the rest.
    """
    single = {unit[0]: feature for unit, feature in units.items() if len(unit) == 1}
    for one in staging.stages:
        inside = next((u for u in single if one.first.startswith(u + ".")), None)
        if inside is not None:
            feature = single[inside]
            raise UnsupportedModel(
                "pipeline.cut",
                one.first,
                f"cuts {inside} in two, which must stay one unit of {feature}",
                f"cut before {inside} or before what follows it",
            )
    keeping = next((u for u in single if u in staging.around), None)
    if keeping is not None:
        feature = single[keeping]
        raise UnsupportedModel(
            "pipeline.cut",
            staging.stages[1].first,
            f"{keeping} keeps a tensor that other modules read, so every stage would run its"
            f" code, and it must stay one unit of {feature}",
            f"return the tensor from {keeping}",
        )
    for unit, feature in units.items():
        of_unit = [
            stage for stage in staging.stages if any(_runs(stage, module) for module in unit)
        ]
        if len(unit) > 1 and len(of_unit) > 1:
            first, *_, last = unit
            raise UnsupportedModel(
                "pipeline.cut",
                of_unit[-1].first,
                f"comes between {first} and {last}, which must stay one unit of {feature}",
                f"cut before {first} or after {last}",
            )
    if not staged.versions:
        return
    if precision == "fp16":
        raise ConfigError(
            "precision.compute",
            precision,
            f"{staged.name} updates each stage by itself, and all stages share one loss scale",
            "use bf16 or fp32, or a synchronous schedule such as 1f1b",
        )
    if layout.active_axes(*STATE_AXES):
        raise LayoutError(
            "layout",
            str(layout),
            f"{staged.name} keeps several versions of the weights, and fsdp stores one",
            "use dp beside it, or a synchronous schedule such as 1f1b",
        )
    seen: set[str] = set()
    for one in staging.stages:
        both = seen & set(one.weights)
        if both:
            raise UnsupportedModel(
                "layout",
                str(layout),
                f"{min(both)} is used by two stages, which {staged.name} updates at"
                " different times",
                "untie it, or use a synchronous schedule such as 1f1b",
            )
        seen |= set(one.weights)


def check_called_modules(layout: Layout, staging: Staging, steps: Sequence[Step]) -> None:
    """Check that a stage which uses a cut or sharded parameter calls a module that handles it; a
    plain function would not. Raises UnsupportedModel."""
    knowing: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        for param in step.params:
            if param.stored != COPY:
                knowing.setdefault((param.name, param.axis), []).append(step)
    for (name, axis), those in knowing.items():
        for one in staging.stages:
            if name in one.weights and not any(
                stage_runs_module(step.module, one.modules) for step in those
            ):
                raise UnsupportedModel(
                    "layout",
                    str(layout),
                    f"stage {one.index} uses {name} without calling {those[0].module}, so it"
                    f" would read a shard over {axis} as the whole weight",
                    f"call {those[0].module}, or a module that is tied to it, where it is used",
                )


def bubble_note(staged: Schedule) -> str:
    """A line that says for how long the ranks of the pipeline wait."""
    timeline = simulate(staged, ActionCosts().shared(staged.placement))
    count = "1 microbatch" if staged.microbatches == 1 else f"{staged.microbatches} microbatches"
    text = f"{staged.name}, {count}: ranks wait {timeline.bubble_fraction:.0%} of a step"
    more = "" if timeline.bubble_fraction < 0.25 else "; a larger train.accumulate makes it less"
    return f"{text} if all stages take the same time{more}"


def _runs(stage: Stage, module: str) -> bool:
    return any(is_inside(module, called) for called in stage.modules)
