"""Names the other layouts that take a model, where an axis finds nothing to divide in it, or its
ranks would change its state each to other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.core import (
    BLOCKS,
    STAGE_AXIS,
    Layout,
    NeedsData,
    NothingToDivide,
    PipelineRequest,
    Plan,
    Refusal,
    UnsupportedModel,
    either,
)

from .axes import DATA_AXES, EXPERT_AXES, FEATURE_AXES, STATE_AXES, TOKEN_AXES
from .forward_record import record_forward
from .plan_request import PlanRequest

_OF_ONE_STATE = (*FEATURE_AXES, STAGE_AXIS)  # whose ranks have the same samples
_OF_SAMPLES = tuple(axis for axis in DATA_AXES if axis not in EXPERT_AXES)


def plan_or_name_others(request: PlanRequest, plan: Callable[[PlanRequest], Plan]) -> Plan:
    """What `plan` makes of the request, with the axes that keep what the model's forward changes.
    Raises Refusal, which says which other layouts `plan` takes the model on."""
    try:
        made = plan(request)
    except NothingToDivide as problem:
        raise name_others(problem, request, plan) from None
    record = record_forward(request) if made.layout.active_axes(*TOKEN_AXES) else None
    if record is not None and record.changes_state():
        taken = (axis for axis in _OF_ONE_STATE if _refusal(axis, request, plan) is None)
        return replace(made, of_one_state=tuple(taken))
    return made


def name_others(
    problem: NothingToDivide, request: PlanRequest, plan: Callable[[PlanRequest], Plan]
) -> UnsupportedModel:
    """The refusal, which says to use those of the layouts that `plan` takes the model on; where
    there are none, what the first says to change."""
    refused = [(axis, _refusal(axis, request, plan)) for axis in problem.others or _OF_SAMPLES]
    taken = [axis for axis, why in refused if why is None]
    if taken:
        return problem.naming(f"use {either(taken)}")
    fixes: Iterator[str] = (why.fix for _, why in refused if why is not None)
    return problem.naming(next(fixes))


def _refusal(
    axis: str, request: PlanRequest, plan: Callable[[PlanRequest], Plan]
) -> UnsupportedModel | None:
    """Why as many ranks of this axis alone do not take the model; None: they do."""
    asked = replace(
        request,
        layout=Layout(((axis, request.layout.world),)),
        roles=None,
        parts={},
        fsdp_units=BLOCKS,
        pipeline=PipelineRequest(),
    )
    try:
        plan(asked)
    except NeedsData:  # it says nothing of the model with weights
        return None
    except UnsupportedModel as why:
        return why
    except Refusal:  # of a size, or a setting beside the model
        pass
    record = record_forward(asked) if axis in STATE_AXES else None
    changed = record.changed_weights() if record is not None else ()
    if changed:
        return UnsupportedModel(
            "layout",
            str(asked.layout),
            f"{changed[0]} is changed by the model's forward",
            "change it outside of the forward",
        )
    return None
