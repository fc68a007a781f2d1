"""A forward before the first step, which checks that the sharded model computes what the whole
model does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.core import LocalShard, Plan, UnsupportedModel
from weft.nn import initial_weights
from weft.parallel import Mesh

from .context_parallel.sequence import ContextParallel
from .function_overrides import FunctionOverrides
from .inference import unsharded_output
from .microbatch import Batch
from .pipeline.stage_compute import StageModel
from .unsharded_forward import UnshardedForward

SHARDED_FAILS = (RuntimeError, ValueError, IndexError, TypeError)
SEQUENCE = 256  # positions of a trial in parts, which is run whole too


def first_tensor_of(output: Any) -> Tensor:
    """The first tensor of a model's output: usually the logits."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


class ShardingTrial:
    """Compares what a model computes before and after it is sharded. Make it before.

    Args:
        stages: the whole model.
        sample: a batch, the same on every rank.
    """

    def __init__(self, stages: StageModel, sample: Batch):
        self._stages, self._sample = stages, sample
        self._before = self._later = None
        if initial_weights(stages.model) is None:
            self._before = unsharded_output(stages, sample)
        else:  # the ranks' shards will be its weights
            plan = stages.plan
            self._later = UnshardedForward(stages.model, plan.blocks, plan.dtypes)

    @torch.no_grad()
    def check(self, run: Any, shards: Iterable[LocalShard], mesh: Mesh, experts: bool) -> None:
        """Refuse sharding that changes what the model computes.

        Args:
            run: `run(sample)` gives the sharded model's output.
            shards: this rank's part of each weight.
            mesh: the ranks.
            experts: whether experts are sharded.
        """
        plan, before = self._stages.plan, self._before
        if self._later is not None:
            group = mesh.group(*plan.layout.active_axes())
            held = {shard.name: shard for shard in shards}
            before = self._later.run(self._output_of, held, mesh, group)
        check_sharded_output(run, before, self._sample, plan, experts)

    def _output_of(self, model: nn.Module) -> Any:
        return unsharded_output(replace(self._stages, model=model), self._sample)


def check_sharded_output(run: Any, before: Any, sample: Batch, plan: Plan, experts: bool) -> None:
    """Refuse sharding that changes what the model computes.

    Args:
        run: `run(sample)` gives the sharded model's output.
        before: the output before the model was sharded.
        sample: the batch of both.
        plan: what the model was sharded by.
        experts: whether experts are sharded.
    """

    try:
        after = run(sample)
    except SHARDED_FAILS as problem:
        raise does_not_run(plan, problem, experts) from problem
    error = _distance(first_tensor_of(before), first_tensor_of(after))
    if not error < _tolerance(plan):
        changed = f"sharding changes the model's output by {error:.2g} of its norm"
        raise _unsharded(plan, changed, experts)


def does_not_run(plan: Plan, problem: Exception, experts: bool) -> UnsupportedModel:
    """The error for a sharded model whose forward fails by `problem`, one of SHARDED_FAILS."""
    reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    return _unsharded(plan, f"the sharded model does not run ({reason})", experts)


def _unsharded(plan: Plan, problem: str, experts: bool) -> UnsupportedModel:
    fix = (
        'declare modules that count the features of the whole "whole" in [roles], or correct the'
        " roles; weft verify names the first module that differs"
    )
    if experts:
        fix = (
            "experts must take each token by itself, and count themselves by num_experts;"
            f" otherwise {fix}"
        )
    return UnsupportedModel("layout", str(plan.layout), problem, fix)


@torch.no_grad()
def check_sequence_parts(run: Any, sample: Batch, plan: Plan, sequence: ContextParallel) -> None:
    """Refuse a model whose output changes when ranks share the sequence: it mixes or counts
    positions outside what weft replaces. The first positions tell, few enough to run whole.

    Args:
        run: `run(sample, in_parts)` gives the model's output.
        sample: a batch of at least one sample, the same on every rank.
        plan: the plan that divides the sequence.
        sequence: what divides it at run time.
    """
    device = next(iter(sample.values())).device
    length, parts = sequence.length(sample), sequence.multiple * 2
    sequence.positions(length, device)  # refuses what does not divide
    most = min(length, max(parts, SEQUENCE // parts * parts))
    short = most // sequence.multiple * sequence.multiple
    sample = {
        k: v[:, :short] if v.ndim > 1 and v.shape[1] == length else v for k, v in sample.items()
    }
    whole, part = first_tensor_of(run(sample, False)), first_tensor_of(run(sample, True))
    whole, part = (x.full_tensor() if isinstance(x, DTensor) else x for x in (whole, part))
    if whole.ndim > 1 and whole.shape[1] == short:
        part = sequence.whole(part)
    elif whole.shape[0] == len(next(iter(sample.values()))) * short:
        # samples and positions in one dim
        rows = short // plan.sequence_size
        part = sequence.whole(part.unflatten(0, (-1, rows))).flatten(0, 1)
    error = _distance(whole, part) if whole.shape == part.shape else float("inf")
    if not error < _tolerance(plan):
        raise UnsupportedModel(
            "layout",
            str(plan.layout),
            f"splitting the sequence changes the model's output by {error:.2g} of its norm: it"
            " mixes or counts positions outside attention and position_ids",
            "use dp, fsdp or tp, or let its forward take position_ids, and use them",
        )


def check_attention(
    plan: Plan, sequence: ContextParallel, functions: FunctionOverrides | None
) -> None:
    """After a step: what the plan does with attention has happened. A stage may have none."""
    core = "torch.nn.functional.scaled_dot_product_attention"
    problem = "the model never calls scaled_dot_product_attention"
    if sequence and plan.staging is None and sequence.calls == 0:
        fix = f"use dp or fsdp, or attention through {core}"
        raise UnsupportedModel("layout", str(plan.layout), problem, fix)
    if plan.recompute == "selective" and functions and not functions.attended:
        fix = f'use "full" or "none", or attention through {core}'
        raise UnsupportedModel("train.recompute", "selective", problem, fix)


def _distance(one: Tensor, other: Tensor) -> float:
    size = float(one.double().norm())
    return float((one.double() - other.double()).norm()) / (size or 1.0)


def _tolerance(plan: Plan) -> float:
    return 5e-2 if plan.dtypes.low else 1e-3
