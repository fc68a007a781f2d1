"""How large the values are that cross stages: from a forward on one device, of one rank's
microbatch."""

from __future__ import annotations

from math import prod

from torch import Tensor

from weft.core import Plan
from weft.nn import model_arguments, named_inputs
from weft.parallel import (
    FEATURE_AXES,
)
from weft.pipeline import split_stages, trace_forward

from .case import Case


def stage_value_bytes(case: Case, plan: Plan, batch: dict[str, Tensor]) -> dict[int, int]:
    """Value -> bytes of one microbatch on one rank. A part: what leaves a block that `tp` cuts
    along the sequence, and what was looked up per head ([..., heads, queries, keys])."""
    if plan.staging is None:
        return {}
    model = case.model()
    taken = max(2, plan.microbatch)  # batch norm asks for two
    micro = {key: value[:taken] for key, value in batch.items()}
    with case.mode():
        recorded = trace_forward(model, model_arguments(case.inputs or named_inputs(model), micro))
    points = [stage.first for stage in plan.staging.stages[1:]]
    values = split_stages(recorded, points, early=plan.staging.early).values
    parts = [
        _parts(plan, v.name.rpartition(" of ")[2], tuple(v.shape), taken) * plan.sequence_size
        for v in values
    ]
    rows = [
        plan.microbatch / taken if v.shape[:1] and v.shape[0] % taken == 0 else 1 for v in values
    ]
    return {
        i: round(prod(v.shape) * share) * plan.dtypes.computed(v.dtype).itemsize // n
        for i, (v, share, n) in enumerate(zip(values, rows, parts, strict=True))
    }


def _parts(plan: Plan, maker: str, shape: tuple[int, ...], samples: int) -> int:
    """Over how many ranks a value is divided that leaves this module. Of [samples, positions,
    features] there may be as many samples as heads."""
    edges = {s.module for s in plan.steps if s.by == "sequence" and s.output is not None}
    inside = {s.module for s in plan.steps if s.activation_sharding == "sequence"} - edges
    sequence = maker in inside and plan.layout.has_option("sequence")
    tables = [
        s
        for s in plan.steps
        if s.activation_sharding == "heads" and s.input is None and s.module.startswith(maker + ".")
    ]
    heads = {p.cut.units for s in tables for p in s.params if p.cut is not None}
    of_heads = shape[-3:-2] in heads and (len(shape) > 3 or shape[0] != samples)
    return plan.layout.size(*FEATURE_AXES) if sequence or of_heads else 1
