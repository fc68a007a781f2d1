"""Frozen linears whose weights are held in 8 bits or 4, for adapters beside them (QLoRA, Dettmers
et al. 2023).

In 8 bits torchao rounds each row of a weight to int8, with a scale in float32. Both are plain
parameters, so a layout divides, gathers and saves them as any others.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import ConfigError, import_extra

from .nf4_linear import Nf4Linear, to_nf4

FIELD = "model.quantize"
LOWEST, HIGHEST = -128, 127


class Int8Linear(nn.Module):
    """y = x W^T + b, where W is int8 `weight` [out, in] times `scale` [out], row by row."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: nn.Parameter | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What x makes with a part of the weight's columns, and this bias or none."""
        y: Tensor = _Int8Product.apply(x, weight, self.scale)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Int8Product(torch.autograd.Function):
    """It keeps the weight in 8 bits for backward; a product of torch would keep it in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return (x @ weight.t().to(x.dtype)) * scale.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        (grad,) = grads
        return (grad * scale.to(grad.dtype)) @ weight.to(grad.dtype), None, None


def quantize_frozen(model: nn.Module, kind: str) -> None:
    """Put an Int8Linear or Nf4Linear in the place of every frozen nn.Linear of the model, but for
    its head and tied weights.

    Args:
        model: The model, which is changed.
        kind: "int8" or "nf4".

    Raises:
        ConfigError: The model has no such linear, or one that cannot be held so.
        DataError: torchao is not installed, which rounds to int8.
    """
    ends = getattr(model, "get_output_embeddings", lambda: None)()
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = [
        (parent, name, child, path)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.weight.requires_grad
        if child is not ends and uses[id(child.weight)] == 1
    ]
    if not found:
        problem = "the model has no nn.Linear that is frozen, beside its head and tied weights"
        raise ConfigError(FIELD, kind, problem, "leave it out")
    for parent, name, linear, path in found:
        weight = linear.weight.detach()
        if kind == "int8":
            made: nn.Module = Int8Linear(*_rounded(weight, kind), linear.bias)
        elif linear.in_features % 2:
            named, odd = f"{path}.{name}".strip("."), linear.in_features
            raise ConfigError(
                FIELD, kind, f"{named} has {odd} input features, an odd number", 'use "int8"'
            )
        else:
            made = Nf4Linear(*to_nf4(weight), linear.bias)
        setattr(parent, name, made.train(linear.training))


def _rounded(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and the scale [out], as torchao's Int8WeightOnlyConfig makes them."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it names every kernel that is not for here
    try:
        torchao = import_extra("torchao.quantization", FIELD, kind, "quantize")
    finally:
        logging.disable(disabled)
    row, bounds = (1, weight.shape[1]), (LOWEST, HIGHEST)
    weight = weight.float()  # float64 is not taken
    scale, zero = torchao.choose_qparams_affine(
        weight,
        torchao.MappingType.SYMMETRIC,
        row,
        torch.int8,
        *bounds,
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
    )
    return torchao.quantize_affine(weight, row, scale, zero, torch.int8, *bounds), scale.flatten()
