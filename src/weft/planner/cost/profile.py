"""The work of any module, read off forwards on meta tensors.

Two batches tell what goes with samples from what does not: tables of positions, weights cast to
another dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import BLOCKS, DTYPES, UnitChoice, is_inside
from weft.nn import Loss, Roles, find_roles, named_inputs
from weft.parallel import choose_units, find_parts, roles_with_parts, weights_of

from .model_work import BlockWork, ModelWork, OpWork, PartWork, UnitSizes
from .module_record import BYTES, COUNTS, ModuleRecord
from .record_forward import chain_records, record_forward

FEW, MANY = 2, 4  # samples of the two forwards; of one, a transposition would be free


def profile_model(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Loss,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    roles: Mapping[str, object] | None = None,
    inputs: Sequence[str] | None = None,
    parts: Mapping[str, str] | None = None,
    fsdp_units: UnitChoice = BLOCKS,
    name: str = "",
) -> ModelWork:
    """The work of `model` (on any device, also meta), in training, for one sample of `batch`, which
    holds one or more.

    `loss`, `precision`, `roles`, `inputs`, `parts` and `fsdp_units` as of `weft.plan`. Kernels are
    those that torch has for a CPU; with `device` "cuda" attention is one kernel too where values
    have another width than keys, and so is RMSNorm. Experts are called with choices that divide
    tokens evenly.
    `model_flops` are three forwards of all matmuls and of attention counted in full, as Megatron-LM
    counts them (Narayanan et al. 2021), two where a weight is frozen; of experts those that a token
    uses. Logits and what the loss keeps of them are `vocab`'s, and no block's. Raises
    UnsupportedModel for a forward that reads elements of a tensor into Python.
    """
    divided = find_parts(model, weights_of(model), parts or {})
    found = find_roles(model, roles_with_parts(model, divided, roles))
    called = tuple(inputs) if inputs is not None else named_inputs(model)
    fused = device != "cpu"
    few, many = (
        record_forward(model, found, _rows(batch, count), loss, precision, called, fused, divided)
        for count in (FEW, MANY)
    )
    chain = list(zip(chain_records(few), chain_records(many), strict=True))
    full = sum(two.full() - one.full() for one, two in chain) / (MANY - FEW)
    ids = [
        t
        for key in called
        if (t := batch.get(key)) is not None and t.ndim > 1 and not t.is_floating_point()
    ]
    return ModelWork(
        name or type(model).__name__,
        tuple(_merge_equal(_block(one, two) for one, two in chain)),
        tokens=float(max((t.shape[1] for t in ids), default=1)),
        model_flops=full,
        dtype=precision,
        itemsize=DTYPES[precision].itemsize,
        vocab=few.vocab,
        units=_unit_sizes(model, found, fsdp_units),
    )


def _unit_sizes(model: nn.Module, roles: Roles, asked: UnitChoice) -> UnitSizes:
    """Of the units that lie in repeated blocks. Raises ConfigError."""
    if asked == BLOCKS:
        return UnitSizes()
    weights = weights_of(model)

    def numel(modules: Iterable[str]) -> int:
        held = [w for w in weights if any(is_inside(w.name, m) for m in modules)]
        return sum(prod(w.shape) for w in held)

    blocks = [block for each in roles.blocks for block in each]
    largest, every = max((numel([b]) for b in blocks), default=0), numel(blocks)
    units = [
        numel(unit)
        for unit in choose_units(model, roles.blocks, weights, asked)
        if all(any(is_inside(m, block) for block in blocks) for m in unit)
    ]
    if not every:
        return UnitSizes()
    return UnitSizes(
        len(units) / len(blocks), max(units, default=0) / largest, 1 - sum(units) / every
    )


def _block(few: ModuleRecord, many: ModuleRecord) -> BlockWork:
    """What one sample adds; kernels and parameters do not go with samples."""

    def each(less: float, more: float) -> float:
        return (more - less) / (MANY - FEW)

    moved = sum(
        each(one.moved, many.sums[key].moved) for key, one in few.sums.items() if key.backward
    )
    again = each(few.bytes["backward_bytes"], many.bytes["backward_bytes"]) / (moved or 1.0)
    ops = []
    for key, one in few.sums.items():
        two = many.sums[key]
        backward = again if again and key.kind == "memory" and key.backward else key.backward
        op = OpWork(
            ", ".join(one.names),
            key.kind,
            key.cut,
            each(one.flops, two.flops),
            each(one.moved, two.moved),
            each(one.saved, two.saved),
            float(one.matmuls or 1),
            float(one.kernels),
            backward,
            key.core,
        )
        if op.flops or op.moved_bytes or op.saved_bytes or op.kernels:
            ops.append(op)
    sizes: dict[str, Any] = {name: each(few.bytes[name], many.bytes[name]) for name in BYTES}
    sizes |= {name: few.counts[name] for name in COUNTS}
    params = tuple((cut, float(count)) for cut, count in sorted(few.params.items()))
    frozen, in_int8 = (
        tuple((cut, float(count)) for cut, count in sorted(of.items()))
        for of in (few.frozen, few.in_int8)
    )
    parts = tuple(PartWork(*key, float(n), float(t)) for key, (n, t) in sorted(few.parts.items()))
    sizes |= {"repeated": few.repeated, "tied": few.tied, "parts": parts}
    sizes |= {"frozen": frozen, "in_int8": in_int8}
    return BlockWork(few.name, 1, tuple(ops), params, **sizes)


def _merge_equal(blocks: Iterable[BlockWork]) -> Iterator[BlockWork]:
    """Equal neighbours as one."""

    def unnamed(block: BlockWork) -> BlockWork:
        return replace(block, name="", ops=tuple(replace(op, name="") for op in block.ops))

    for _, run in groupby(blocks, unnamed):
        same = list(run)
        first, last = same[0].name, same[-1].name
        yield replace(
            same[0], name=first if first == last else f"{first} .. {last}", count=len(same)
        )


def _rows(batch: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    return {key: t[torch.arange(count) % len(t)] for key, t in batch.items()}
