"""In which precision, and on how many positions, a trial before the first step computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from weft.core import DTYPES, Plan, UnsupportedModel
from weft.parallel import Mesh, same_operators

from .context_parallel.sequence import ContextParallel
from .microbatch import Batch

POSITIONS = 256  # of a trial: few enough for float64; all, if the model computes otherwise on more
SHARE = 0.25  # of a GPU's free memory, which the weights of a trial may take in more than they need


@dataclass(frozen=True)
class TrialWay:
    """How a trial computes."""

    precision: str
    sample: Batch


def trial_ways(
    model: nn.Module, plan: Plan, mesh: Mesh, sequence: ContextParallel, sample: Batch
) -> Iterator[TrialWay]:
    """The ways to compute a trial, the best first. A model may not run in each. All ranks call it
    together.

    Args:
        model: the whole model; it may be on the meta device.
        plan: what it is trained by.
        mesh: where this rank computes.
        sequence: finds the sequences of a batch.
        sample: a batch of a few samples.
    """
    own = plan.precision
    short = _shortened(model, plan, sequence, sample)
    for precision in dict.fromkeys(("fp64", "fp32", own)):
        if precision != own and (DTYPES[precision].itemsize < 8 and own == "fp64"):
            continue
        if precision == own or affordable(plan, mesh, precision):
            yield TrialWay(precision, short)
    if short is not sample:
        yield TrialWay(own, sample)


def undivided(plan: Plan, precision: str) -> Plan:
    """The plan of a model that runs whole, in this precision."""
    return replace(
        plan,
        steps=(),
        heads=(),
        batchnorms=(),
        staging=None,
        staged=None,
        sync=None,
        precision=precision,
        reduce="fp32",
        float8=None,
    )


def positions_of(sequence: ContextParallel, sample: Batch) -> int:
    """Positions of a sequence; 0 if the model is given none."""
    try:
        return sequence.length(sample)
    except UnsupportedModel:
        return 0


def _shortened(model: nn.Module, plan: Plan, sequence: ContextParallel, sample: Batch) -> Batch:
    """The sample's first positions, where it has many, and the model computes alike on these."""
    length = positions_of(sequence, sample)
    unit = 2 * prod(size for _, size in plan.layout.sizes)
    if length <= max(POSITIONS, unit):
        return sample
    short = max(unit, POSITIONS // unit * unit)
    whole = {key: value.cpu() for key, value in sample.items()}
    first = {
        key: value[:, :short] if value.ndim > 1 and value.shape[1] == length else value
        for key, value in whole.items()
    }
    if not same_operators(model, sequence.inputs, first, whole):
        return sample
    return {key: value.to(sample[key].device) for key, value in first.items()}


def affordable(plan: Plan, mesh: Mesh, precision: str) -> bool:
    """Whether every rank has memory for these weights, and the gradients of one block."""
    if mesh.device.type != "cuda":
        return True
    blocks: dict[str, int] = {}
    for weight in plan.weights:
        inside = [b for b in plan.blocks if weight.name.startswith(f"{b}.")]
        unit = max(inside, key=len, default="")
        blocks[unit] = blocks.get(unit, 0) + prod(weight.shape)
    root = blocks.pop("", 0)
    needed = DTYPES[precision].itemsize * 2 * (root + max(blocks.values(), default=0))
    free = torch.tensor(float(torch.cuda.mem_get_info(mesh.device)[0]))
    free = free.to(mesh.device)
    group = mesh.group(*mesh.layout.active_axes())
    if group is not None:
        dist.all_reduce(free, dist.ReduceOp.MIN, group=group)
    return needed < SHARE * float(free)
