"""What one op computes and moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from weft.pipeline import GROUPED_MM

from .model_work import Kind

# fused kernels: (query, key, value, ...), and where among the arguments `is_causal` stands
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: 4,
    torch.ops.aten._scaled_dot_product_flash_attention: 4,
    torch.ops.aten._scaled_dot_product_efficient_attention: 6,
    torch.ops.aten._scaled_dot_product_cudnn_attention: 6,
}


_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


_ADDED = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}


NO_WORK: tuple[Kind, float, float, tuple[int, ...], int] = ("memory", 0.0, 0.0, (), 0)


def work_of_op(
    packet: Any, args: tuple, kwargs: dict, out: Any
) -> tuple[Kind, float, float, tuple[int, ...], int]:
    """Of an op: its kind; its FLOPs, and those in full; the size of a matmul, and how many of equal
    size it is."""
    if packet in _ATTENTION:
        query, key, value = args[:3]
        full = float(sdpa_flop_count(query.shape, key.shape, value.shape))
        place = _ATTENTION[packet]
        causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
        return "attention", full * (0.5 if causal else 1.0), full, (), 0
    if packet is GROUPED_MM:
        rows, weights = args[:2]
        flops = 2.0 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]
        return "matmul", flops, flops, tuple(sorted(weights.shape[-2:])), weights.shape[0]
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
        shape = (args[2] if packet in _ADDED else args[1]).shape
        return (
            "matmul",
            flops,
            flops,
            tuple(sorted(shape[-2:])) if len(shape) < 4 else tuple(shape),
            1,
        )
    return NO_WORK


def graded_operands(packet: Any, args: tuple) -> int:
    """How many of a matmul's two operands get a gradient: one where the weight is frozen, or where
    nothing before it is trained. Each takes a matmul of the same size in backward."""
    operands = args[1:3] if packet in _ADDED else args[:2]
    return sum(t.requires_grad for t in operands)


def is_heavy(packet: Any) -> bool:
    return (
        packet in flop_registry
        or packet in _ATTENTION
        or packet in (GROUPED_MM, _ATTENTION_BACKWARD)
    )


def moved_bytes(given: list[tuple[Tensor, int]], made: list[tuple[Tensor, int]]) -> int:
    """Bytes that are read and written; each storage once."""
    return sum(read_bytes(t) for t in {storage: t for t, storage in (*given, *made)}.values())


def read_bytes(t: Tensor) -> int:
    """Bytes that reading it moves: of what is repeated without a copy, once."""
    numel = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * t.itemsize
