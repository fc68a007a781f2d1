"""In which dtypes weft keeps and sends what belongs to a parameter: the Practice of a run."""

from __future__ import annotations

import torch
from torch import nn

from .. import build
from ..config import Run
from ..cost.practice import Practice
from ..parallelize import DTYPES

NUMEL = 1024  # of the parameter that an optimizer is tried on


def practice(run: Run) -> Practice:
    """Weights, gradients and optimizer state are float32, float64 under fp64, and so are sums of gradients and gathered
    weights. bf16 and fp16 are autocast's: each forward's matmuls keep a copy of their weights until its backward."""
    compute = DTYPES[run.precision.compute]
    kept = torch.float64 if compute == torch.float64 else torch.float32
    item, copy = kept.itemsize, compute.itemsize if compute.itemsize < kept.itemsize else 0
    state = _state_bytes(run, kept)
    return Practice(
        compute=run.precision.compute,
        weight_bytes=item,
        copy_bytes=copy,
        copies_live=True,
        grad_bytes=item,
        state_bytes=state,
        reduce_bytes=item,
        gather_bytes=item,
        update_bytes=3 * item + 2 * state,
        logit_bytes=3 * item,  # log-softmax and two gradients
        overlaps=True,
    )


def _state_bytes(run: Run, dtype: torch.dtype) -> float:
    """Of a parameter's element, as the optimizer itself keeps them after a step."""
    parameter = nn.Parameter(torch.zeros(NUMEL, dtype=dtype))
    made = build.optimizer(run)([("", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    made.step()
    state = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.itemsize for value in state if value.numel() >= NUMEL) / NUMEL
