"""Names, where an axis finds nothing to divide in a model, the other layouts that take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.core import (
    BLOCKS,
    Layout,
    NeedsData,
    NothingToDivide,
    PipelineRequest,
    Plan,
    Refusal,
    UnsupportedModel,
)

from .axes import DATA_AXES, EXPERT_AXES, STATE_AXES
from .changed_weights import changed_weights
from .plan_request import PlanRequest

_OF_SAMPLES = tuple(axis for axis in DATA_AXES if axis not in EXPERT_AXES)


def name_others(
    problem: NothingToDivide, request: PlanRequest, plan: Callable[[PlanRequest], Plan]
) -> UnsupportedModel:
    """The refusal, which says to use those of the layouts that `plan` takes the model on; where
    there are none, what the first says to change."""
    refused = [(axis, _refusal(axis, request, plan)) for axis in problem.others or _OF_SAMPLES]
    taken = [axis for axis, why in refused if why is None]
    if taken:
        *most, last = taken
        return problem.naming("use " + " or ".join(filter(None, (", ".join(most), last))))
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
        return None
    changed = changed_weights(asked) if axis in STATE_AXES else ()
    if changed:
        return UnsupportedModel(
            "layout",
            str(asked.layout),
            f"{changed[0]} is changed by the model's forward",
            "change it outside of the forward",
        )
    return None
