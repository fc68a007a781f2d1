"""In which dtypes weft itself keeps and sends what belongs to a parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core import OFF, DtypeRule, RunConfig
from weft.engine import Optimizers
from weft.nn import FEW_LOGITS, accepts_sharded_logits
from weft.pipeline import tensors_in
from weft.train import build_loss, build_optimizer

from ..cost.precision_policy import PrecisionPolicy

SHAPE = (32, 256)  # of the matrix that an optimizer is tried on
NUMEL = 32 * 256


def run_precision(run: RunConfig) -> PrecisionPolicy:
    """As the run file has it."""
    logits = run.train.logits if accepts_sharded_logits(build_loss(run)) else "whole"
    precision = run.precision
    policy = precision_policy(precision.compute, build_optimizer(run), logits, precision.reduce)
    ahead = run.train.fsdp_prefetch or policy.ahead
    found = replace(policy, ahead=ahead, host_activations=run.train.offload_activations)
    if run.train.ema is not None:
        found = replace(
            found,
            average_bytes=policy.weight_bytes,
            # an average and its weight are read, and the average is written
            update_bytes=policy.update_bytes + 3 * policy.weight_bytes,
        )
    return found if precision.float8 == OFF else replace(found, compute="fp8", wide_experts=True)


def precision_policy(
    precision: str, optimizer: Optimizers, logits: str = "auto", reduce: str = "fp32"
) -> PrecisionPolicy:
    """Weights, gradients and optimizer state are float32, float64 under fp64. In bf16 and fp16
    there is a copy that is computed with, and fsdp gathers copies. Gradients are summed in the
    dtype of `reduce`, and are float32 for the optimizer. `logits`: as for `weft.plan`."""
    rule = DtypeRule(precision, reduce)
    kept = torch.float64 if precision == "fp64" else torch.float32
    item, computed, summed = (
        dtype.itemsize for dtype in (kept, rule.computed(kept), rule.reduced(kept))
    )
    copy = computed if rule.low else 0
    state, moved = _measure_optimizer(optimizer, kept)
    return PrecisionPolicy(
        compute=precision,
        weight_bytes=item,
        copy_bytes=copy,
        shards_weights=rule.low,
        grad_bytes=item + (summed if summed < item else 0),
        state_bytes=state,
        reduce_bytes=summed,
        gather_bytes=computed,
        update_bytes=moved
        # before a step gradients are cleared, and divided by the batch's weight; copies are made
        + 3 * item
        + (item + copy if rule.low else 0),
        # in bf16 a gradient is widened first
        added_bytes=3 * item + (copy + item if rule.low else 0),
        logit_bytes=2 * computed,  # with their gradient
        few_logits={"auto": FEW_LOGITS, "whole": math.inf, "chunks": 0}[logits],
        chunk_bytes=item + copy,
        sum_bytes=item if copy else 0,  # else they are the gradient
        always_chunks=logits == "chunks",
        overlaps=True,
        keeps_sent=True,
        start_bytes=item,
    )


def _measure_optimizer(optimizer: Optimizers, dtype: torch.dtype) -> tuple[float, float]:
    """Of a parameter's element: bytes of the state that the optimizer itself keeps, and those that
    a step of it reads and writes."""
    parameter = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    made = optimizer([("weight", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    made.step()  # the first one makes the state
    with _Moved() as seen:
        made.step()
    state = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(v.numel() * v.itemsize for v in state if v.ndim) / NUMEL, seen.total / NUMEL


class _Moved(TorchDispatchMode):
    """Bytes that operations read and write."""

    total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        written = tensors_in(out) or _written(func, args)
        for given in (tensors_in((args, kwargs)), written):
            self.total += sum(
                t.numel() * t.itemsize
                for t in {id(t): t for t in given}.values()
                if t.numel() >= NUMEL
            )
        return out


def _written(func: Any, args: tuple) -> list[torch.Tensor]:
    """What an operation that returns nothing changes: a fused step its weights and moments."""
    kinds = zip(args, func._schema.arguments, strict=False)
    changed = [a for a, kind in kinds if kind.alias_info is not None and kind.alias_info.is_write]
    return tensors_in(changed)
