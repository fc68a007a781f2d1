"""A forward and loss of a small model with its weights, where the one without weights has failed,
and may have done so for want of values, or does not see whether dtypes fit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core import ConfigError, Plan, Refusal, RunConfig, told_fault
from weft.engine import own_device
from weft.nn import Loss, check_learns, find_roles, model_arguments, named_inputs, weighed_loss

from .build import build_model, planned_dtype

PARAMETERS = 50_000_000  # of the largest model that is built: a second
ELEMENTS = 2_000_000  # of the largest batch
NOT_HERE = "process group", "torch.distributed"  # of a forward that only a rank can run


def has_odd_dtypes(
    bare: nn.Module, inputs: Sequence[str] | None, batch: Mapping[str, Tensor]
) -> bool:
    """Whether an input of the model has another dtype of floats than its weights, or is of whole
    numbers where no embedding looks them up: on the meta device a product takes both."""
    given = [batch[name].dtype for name in inputs or named_inputs(bare) if name in batch]
    weights = {p.dtype for p in bare.parameters()}
    embeds = bool(find_roles(bare).embeddings)
    return any(t not in weights if t.is_floating_point else not embeds for t in given)


def samples_together(plan: Plan) -> int:
    """How many samples a forward or the loss of a rank sees: batch norms and losses of the whole
    batch see those of other ranks too."""
    if plan.whole_batch:
        return plan.batch
    return plan.microbatch * (plan.data_size if plan.batchnorms else 1)


def confirm_fault(
    run: RunConfig,
    bare: nn.Module,
    loss: Loss,
    inputs: Sequence[str] | None,
    batch: Mapping[str, Tensor],
    metrics: Sequence[Loss] = (),
) -> None:
    """Refuse a model, a loss or a metric that fails on a microbatch on the CPU, where ranks run
    there too. Not in bf16 or fp16, where ranks cast weights and inputs.

    Args:
        run: the run.
        bare: its model without weights.
        loss: its loss.
        inputs: as of `dry_run`.
        batch: of `samples_together`.
        metrics: of a validation.

    Raises:
        ConfigError: it fails, or the loss has no gradient.
    """
    large = sum(p.numel() for p in bare.parameters()) > PARAMETERS
    large |= sum(entry.numel() for entry in batch.values()) > ELEMENTS
    low = run.precision.compute in ("bf16", "fp16")
    if large or low or run.workers or own_device().type != "cpu":
        return
    shapes = ", ".join(
        f"{key} {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
        for key, entry in batch.items()
    )
    field, value, fix = "model", type(bare).__name__, f"correct it, or the data: {shapes}"
    try:
        with torch.random.fork_rng([]):
            model = build_model(run, dtype=planned_dtype(run))
            output = model(**model_arguments(inputs or named_inputs(model), dict(batch)))
            for function in (loss, *metrics):
                field = "train.loss" if function is loss else "train.eval_metrics"
                value = getattr(function, "__name__", type(function).__name__)
                total, weight = weighed_loss(function, output, batch, field)
                if function is loss:
                    check_learns(loss, total, weight)
    except Refusal:
        raise
    except Exception as error:  # a user's code may fail in any way
        told = told_fault(error)
        if any(name in told for name in NOT_HERE):
            return
        what = "its forward fails" if field == "model" else "fails on the model's output"
        if inputs is None and field != "model" and (left_out := _labels_left_out(bare, batch)):
            names = [*named_inputs(bare), *left_out]
            called = ", ".join(f'"{name}"' for name in names if name in batch)
            fix = (
                f"correct it, or the data: {shapes}; the model is called without labels, and to"
                f" pass them, write model.inputs = [{called}]"
            )
        raise ConfigError(field, value, f"{what}: {told}", fix) from error


def _labels_left_out(model: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    """The entries of a batch that the forward names and is not called with: labels that have a
    default, with which a model computes a loss of its own."""
    named = inspect.signature(model.forward).parameters
    return [name for name in named if name in batch and name not in named_inputs(model)]
