"""What context parallelism requires of a model, a loss and a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.core import (
    Layout,
    NothingToDivide,
    Step,
    UnsupportedModel,
)
from weft.nn import (
    Roles,
    attends_eagerly,
    attention_kind,
    check_padding,
    is_positionwise,
    is_whole_batch,
    named_inputs,
    sequence_length,
)

from .axes import (
    FEATURE_AXES,
    SEQUENCE_AXES,
)
from .plan_request import PlanRequest


def check_shared_sequence(
    request: PlanRequest, layout: Layout, roles: Roles, steps: Sequence[Step]
) -> None:
    """Check what can be known before any process starts of a sequence that ranks share.

    Args:
        request: The model, its loss, its inputs and a sample.
        layout: The axes; one of them divides the sequence.
        roles: What the modules of the model are.
        steps: The steps of all axes.

    Raises:
        UnsupportedModel: The model, the loss or the sample cannot be divided by positions.
    """
    model, loss, sample, inputs = request.model, request.loss, request.sample or {}, request.inputs

    def refuse(problem: str, fix: str) -> None:
        raise UnsupportedModel("layout", str(layout), problem, fix)

    axis = layout.active_axes(*SEQUENCE_AXES)[0]
    names = inputs if inputs is not None else named_inputs(model)
    length = sequence_length(names, sample)
    if sample and not length:
        raise no_sequence(layout, sample)
    if loss is not None and not is_positionwise(loss):
        raise NothingToDivide("layout", str(layout), *_unmarked(loss, names, sample, length, axis))
    methods = {
        step.sequence.method: layout.size(step.sequence.axis)
        for step in steps
        if step.sequence is not None
    }
    kind, core = attention_kind(model), "scaled_dot_product_attention"
    whole = kind == "eager" and bool(roles.mixers)
    if attends_eagerly(model):
        if set(methods) - {"gather"}:
            problem = "the model's own attention needs all keys at once, and all heads"
            refuse(problem, f"write {axis}+gather, or give the model attn_implementation 'sdpa'")
    elif kind != "sdpa" and not whole and getattr(model, "_supports_sdpa", True):
        problem = (
            f"the model computes attention by {kind!r}, so each rank would attend only to its"
            " own positions"
        )
        refuse(problem, 'build it with attn_implementation="sdpa"')
    elif kind != "sdpa" and not whole:
        problem = (
            "modules of the model mix positions outside attention, so each rank would mix"
            " only its own positions:"
        )
        problem += f" they call neither {core} nor transformers' attention interface"
        fix = 'declare them "whole_sequence" under [roles]: all ranks then compute all positions'
        refuse(problem, f"{fix}; or use dp or fsdp")
    if roles.mixers and layout.has_option("sequence"):
        problem = f"{roles.mixers[0]} needs whole sequences, and tp+sequence would split them again"
        fix = 'or, if it takes each position by itself, declare it "positionwise" under [roles]'
        refuse(problem, f"use tp without sequence, {fix}")
    parts = layout.size(*SEQUENCE_AXES)
    parts *= 1 if [*methods] == ["ulysses"] else 2  # from both ends
    if "attention_mask" in names and "attention_mask" in sample:
        check_padding(sample["attention_mask"])
    if length % parts:
        fix = f"use a multiple of {parts} positions"
        refuse(f"samples of {length} positions do not divide into {parts} pieces", fix)
    size = methods.get("ulysses", 1)
    for chain in (chain for chain in roles.chains if chain.heads):
        heads, kv = (
            chain.heads // layout.size(*FEATURE_AXES),
            max(1, chain.kv_heads // layout.size(*FEATURE_AXES)),
        )
        if heads % size or (kv % size and size % kv):
            refuse(
                f"{chain.row} has {heads} heads and {kv} key heads on a rank, and Ulysses has"
                f" {size} ranks",
                "use cp, which exchanges keys between ranks, or a size that divides the"
                " heads and key heads",
            )


def _unmarked(
    loss: Any, names: Sequence[str], sample: Mapping[str, Tensor], length: int, axis: str
) -> tuple[str, str]:
    """Why ranks cannot part the positions of this loss, and what to do."""
    if is_whole_batch(loss):
        return f"the loss compares whole samples, and {axis} parts their positions", "{others}"
    targets = {key: value for key, value in sample.items() if key not in names}
    if targets and all(length not in value.shape[1:] for value in targets.values()):
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in targets.items())
        return (
            f"the loss is of whole samples ({shapes}: no target for each of {length} positions),"
            f" and {axis} parts their positions",
            "{others}",
        )
    if rows := _feature_rows(names, sample):
        problem = f"{rows}: features of a sample, as far as is known, and {axis} parts positions"
        return problem, "{others}; if dim 1 is a sequence, mark the loss @weft.losses.positionwise"
    return (
        f"the loss is not known to be a sum over positions, and {axis} parts them",
        "mark it with @weft.losses.positionwise if it is one, or use weft.losses.next_token;"
        " otherwise {others}",
    )


def _feature_rows(names: Sequence[str], sample: Mapping[str, Tensor]) -> str:
    """The first entry, where all that a model is given may be rows of features: numbers [samples,
    ...] without tokens, and without features of positions. Else ""."""
    given = {key: sample[key] for key in names if key in sample and sample[key].ndim > 1}
    if not all(t.ndim == 2 and t.is_floating_point() for t in given.values()):
        return ""
    return next((f"{key} is {list(t.shape)}" for key, t in given.items()), "")


def no_sequence(layout: Layout, batch: Mapping[str, Tensor]) -> UnsupportedModel:
    """The error for a batch that has no positions to divide."""
    entries = ", ".join(f"{key} {list(value.shape)}" for key, value in batch.items())
    problem = "samples have no sequence, [samples, positions] or [samples, positions, features]:"
    return UnsupportedModel("layout", str(layout), f"{problem} {entries}", "use dp or fsdp")
