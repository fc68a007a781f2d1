"""Metrics of an evaluation: functions of (output, batch) that return (sum, weight), as losses do.

Sums and weights come together over microbatches and ranks, so that the mean is taken once, and is
one device's on every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.core import ConfigError, Plan
from weft.nn import computed, is_positionwise, is_whole_batch, weighed_loss
from weft.parallel import SEQUENCE_AXES

from .microbatch import Batch
from .pipeline.stage_compute import Loss

FIELD = "train.eval_metrics"
Metrics = Mapping[str, Loss]
NO_METRICS: Metrics = MappingProxyType({})


def check_metrics(metrics: Metrics, plan: Plan) -> None:
    """Refuse metrics that are not a sum over what a rank has. Raises ConfigError."""
    shared = plan.layout.active_axes(*SEQUENCE_AXES)
    for name, metric in metrics.items():
        if is_whole_batch(metric):
            problem = (
                "compares the samples of the whole batch, and a metric is a sum over microbatches"
            )
            raise ConfigError(FIELD, name, problem, "name a metric that is a sum over samples")
        if shared and not is_positionwise(metric):
            problem = (
                f"is not known to be a sum over positions, and {'.'.join(shared)} divides the"
                " positions"
            )
            raise ConfigError(FIELD, name, problem, "mark it @weft.losses.positionwise")


def measure(metrics: Metrics, output: Any, batch: Batch) -> list[Tensor]:
    """[2] float64 of each metric, sum and weight, for one microbatch. All ranks that share its
    output call it together."""
    if not metrics:
        return []
    output, found = whole_output(output), []
    for metric in metrics.values():
        value, weight = weighed_loss(metric, output, batch, FIELD)
        found.append(torch.stack([value, torch.as_tensor(weight, device=value.device)]).double())
    return found


def whole_output(output: Any) -> Any:
    """The output with no tensor sharded or deferred."""
    if isinstance(output, Tensor):
        return computed(output.full_tensor() if isinstance(output, DTensor) else output)
    for key, value in output.items() if isinstance(output, dict) else ():
        if isinstance(value, Tensor):
            output[key] = whole_output(value)
    return output


def split_totals(totals: Tensor, metrics: Metrics) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, weight, what each metric gave) of totals [1 + metrics, 2] over all ranks."""
    (total, weight), *rest = totals
    return total / weight, weight, dict(zip(metrics, rest, strict=True))
