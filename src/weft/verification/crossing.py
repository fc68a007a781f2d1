"""How large the values are that cross stages: from a forward on one device, of one rank's microbatch."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..chart import chart
from ..cutting import cut
from ..engine.engine import named_inputs
from ..engine.work import arguments_of
from ..plans import Plan
from .case import Case


def value_bytes(case: Case, plan: Plan, batch: dict[str, Tensor]) -> dict[int, int]:
    """Value -> bytes of one microbatch on one rank. What leaves a block that `tp` cuts along the sequence is a part."""
    if plan.staging is None:
        return {}
    model = case.build().double()
    taken = max(2, plan.microbatch)  # batch norm asks for two
    micro = {key: value[:taken] for key, value in batch.items()}
    recorded = chart(model, arguments_of(case.inputs or named_inputs(model), micro))
    values = cut(recorded, [stage.first for stage in plan.staging.stages[1:]]).values
    size = plan.layout.size("tp") if "sequence" in plan.layout.option("tp") else 1
    edges = {s.module for s in plan.steps if s.by == "sequence" and s.output is not None}
    inside = {s.module for s in plan.steps if s.interior == "sequence"} - edges
    parts = [size if v.name.rpartition(" of ")[2] in inside else 1 for v in values]
    rows = [plan.microbatch / taken if v.shape[:1] and v.shape[0] % taken == 0 else 1 for v in values]
    return {
        i: round(prod(v.shape) * share) * v.dtype.itemsize // n
        for i, (v, share, n) in enumerate(zip(values, rows, parts, strict=True))
    }
