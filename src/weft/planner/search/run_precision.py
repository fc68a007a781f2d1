"""In which dtypes weft itself keeps and sends what belongs to a parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core import RunConfig
from weft.engine import Optimizers
from weft.nn import FEW_LOGITS, accepts_sharded_logits
from weft.parallel import DTYPES
from weft.pipeline import tensors_in
from weft.train import build_loss, build_optimizer

from ..cost.precision_policy import PrecisionPolicy

SHAPE = (32, 256)  # of the matrix that an optimizer is tried on
NUMEL = 32 * 256


def run_precision(run: RunConfig) -> PrecisionPolicy:
    """As the run file has it."""
    logits = run.train.logits if accepts_sharded_logits(build_loss(run)) else "whole"
    return precision_policy(run.precision.compute, build_optimizer(run), logits)


def precision_policy(
    precision: str, optimizer: Optimizers, logits: str = "auto"
) -> PrecisionPolicy:
    """Weights, gradients and optimizer state are float32, float64 under fp64, and so are sums of
    gradients and gathered weights. bf16 and fp16 are autocast's: each forward's matmuls keep a copy
    of their weights until its backward. `logits`: as for `weft.plan`."""
    compute = DTYPES[precision]
    kept = torch.float64 if compute == torch.float64 else torch.float32
    item, copy = kept.itemsize, compute.itemsize if compute.itemsize < kept.itemsize else 0
    state, moved = _measure_optimizer(optimizer, kept)
    return PrecisionPolicy(
        compute=precision,
        weight_bytes=item,
        copy_bytes=copy,
        copies_live=True,
        grad_bytes=item,
        state_bytes=state,
        reduce_bytes=item,
        gather_bytes=item,
        update_bytes=moved
        + 3 * item,  # before a step gradients are cleared, and divided by the batch's weight
        added_bytes=3 * item,
        logit_bytes=2 * compute.itemsize,  # with their gradient
        few_logits={"auto": FEW_LOGITS, "whole": math.inf, "chunks": 0}[logits],
        chunk_bytes=item + copy,
        sum_bytes=item if copy else 0,  # else they are the gradient
        always_chunks=logits == "chunks",
        overlaps=True,
        keeps_sent=True,
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
