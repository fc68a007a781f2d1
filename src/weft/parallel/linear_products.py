"""How a linear multiplies: in the dtype of its weight, or in float8 by torchao.

In float8 a rank multiplies what it holds: its scales are those of its own part of each factor, so
no rank asks another. Parameters keep their modules, names and dtypes, and hooks stay where they
are; a module's forward alone is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.core import Float8Linears, import_extra
from weft.nn import Int8Linear, is_conv1d

# (x [..., in], weight, bias or None) -> [..., out]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class LinearProducts:
    """The products of a model's linears, by name.

    Args:
        float8: which multiply in float8; None: no one does.

    Raises:
        DataError: torchao is needed, and not installed.
    """

    def __init__(self, float8: Float8Linears | None):
        self._names = frozenset() if float8 is None else frozenset(float8.linears)
        # one function for all linears: torch.compile makes a graph for each
        self._linear: Product = F.linear
        self._conv1d: Product = _conv1d
        if self._names and float8 is not None:
            multiply = _by_torchao(float8)
            self._linear = self._either(F.linear, lambda x, weight: multiply(x, weight.t()))
            self._conv1d = self._either(_conv1d, multiply)

    def install(self, model: nn.Module) -> None:
        """Give the linears that multiply in float8 a forward that does."""
        forwards = {conv1d: _forward_by(self._of(conv1d)) for conv1d in (False, True)}
        for name in self._names:
            module = model.get_submodule(name)
            module.forward = MethodType(forwards[is_conv1d(module)], module)  # type: ignore[method-assign]

    def of(self, name: str, module: nn.Module) -> Product:
        """How a linear multiplies its input by a weight, which may be a part of its own."""
        if name in self._names:
            return self._of(is_conv1d(module))
        return plain_product(module)

    def _of(self, conv1d: bool) -> Product:
        return self._conv1d if conv1d else self._linear

    def _either(self, plain: Product, multiply: Callable[[Tensor, Tensor], Tensor]) -> Product:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if not x.numel():  # no scale is that of no numbers
                return plain(x, weight, bias)
            y = multiply(x, weight)
            return y if bias is None else y + bias

        return product


def _forward_by(product: Product) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        return product(x, module.weight, module.bias)

    return forward


def plain_product(module: nn.Module) -> Product:
    """How a linear multiplies that is not in float8; also a Conv1D of Hugging Face."""
    if isinstance(module, Int8Linear):
        return module.product
    return _conv1d if is_conv1d(module) else F.linear


def _conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight
    return y if bias is None else y + bias


def import_torchao(module: str, float8: Float8Linears) -> Any:
    """Import a module of torchao. Raises DataError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it names every kernel, of any format, that is not for here
    try:
        return import_extra(f"torchao.{module}", "precision.float8", float8.recipe, "float8")
    finally:
        logging.disable(disabled)


def _by_torchao(float8: Float8Linears) -> Callable[[Tensor, Tensor], Tensor]:
    """(x [..., in], weight [in, out]) -> [..., out], by the recipe, with its backward.

    What torchao makes of a linear reads the weight off its own module. The function below it is
    taken instead, with what that linear passes to it, so that a weight stays in its module.
    """
    torchao = import_torchao("float8", float8)
    linears = import_torchao("float8.float8_linear", float8)
    config = torchao.Float8LinearConfig.from_recipe_name(float8.recipe)
    # the gradient of a weight sums over tokens, whose number need not be a multiple of 16
    config = replace(config, emulate=float8.emulated, pad_inner_dim=True)
    linear = nn.Linear(16, 16, bias=False, device="meta")
    made: Any = torchao.convert_to_float8_training(linear, config=config)
    multiply, products = linears.matmul_with_hp_or_float8_args.apply, made.linear_mm_config

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return multiply(x, weight, products, config)

    return run
