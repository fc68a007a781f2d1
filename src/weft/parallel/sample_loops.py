"""Along which samples stages are cut: a forward whose Python loops over samples takes another path
for each number of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .axes import DATA_AXES
from .forward_record import record_forward
from .plan_request import PlanRequest


def traced_sample(request: PlanRequest) -> Mapping[str, Tensor] | None:
    """The request's sample, or one of as many samples as a microbatch has, where the path of the
    forward follows from their number, or may do so."""
    microbatch = request.batch // (request.layout.size(*DATA_AXES) * request.accumulate)
    record = record_forward(request)
    if record is None or request.samples == microbatch or not record.loops_over_samples:
        return request.sample
    return request.with_samples(microbatch).sample
