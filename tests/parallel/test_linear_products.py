"""What a linear multiplies in float8: torchao's recipes beside rounding by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from weft.core import DataError, Float8Linears
from weft.parallel import LinearProducts

RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
ROUNDING = 2.0**-4


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.plain = nn.Linear(32, 48), Conv1D(48, 32), nn.Linear(32, 48)
        nn.init.normal_(self.conv.bias, std=0.1)


def made(recipe: str, emulated: bool = True) -> tuple[Two, LinearProducts]:
    torch.manual_seed(0)
    model = Two().bfloat16()
    products = LinearProducts(Float8Linears(recipe, ("linear", "conv"), (), emulated))
    products.install(model)
    return model, products


def x_of(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.bfloat16)


def error(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def rounded(factor: Tensor, recipe: str, dim: int) -> Tensor:
    """A factor as float8 has it; `dim` is summed over in the product."""
    wide = factor.double()
    if recipe == "tensorwise":
        scale = 448 / wide.abs().max()
    else:
        scale = torch.exp2(torch.floor(torch.log2(448 / wide.abs().amax(dim, keepdim=True))))
    return (wide * scale).float().to(torch.float8_e4m3fn).double() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_factors_are_rounded_and_nothing_else(recipe: str) -> None:
    model, _ = made(recipe)
    x = x_of(3, 5, 32)
    wanted = rounded(x.flatten(0, 1), recipe, 1) @ rounded(model.linear.weight, recipe, 1).t()
    found = model.linear(x).double() - model.linear.bias.double()
    assert found.shape == (3, 5, 48)
    assert error(found.flatten(0, 1), wanted) < 2.0**-7  # of the product's own rounding to bf16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["linear", "conv"])
@pytest.mark.parametrize("emulated", [True, False])  # torch multiplies float8 on a CPU too
def test_output_and_gradients_are_those_of_bf16_but_for_rounding(
    recipe: str, name: str, emulated: bool
) -> None:
    """Seven rows: the gradient of a weight sums over a number that is no multiple of 16."""
    model, _ = made(recipe, emulated)
    module, x = model.get_submodule(name), x_of(7, 32).requires_grad_()
    out = module(x)
    aim = x_of(7, 48) - 0.5
    found = out, *torch.autograd.grad((out * aim).sum(), [x, *module.parameters()])
    del module.forward  # that of its class is left
    exact = module(x)
    wanted = exact, *torch.autograd.grad((exact * aim).sum(), [x, *module.parameters()])
    errors = [error(one, other) for one, other in zip(found, wanted, strict=True)]
    assert all(e < 2 * ROUNDING for e in errors), errors
    assert errors[0] > ROUNDING / 8  # of the output: it was rounded


def test_a_device_gets_no_sum_but_over_a_multiple_of_16(monkeypatch: Any) -> None:
    """A CPU takes any; CUDA does not, and a microbatch may have any number of tokens."""
    multiply, inner = torch._scaled_mm, list[int]()

    def watched(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        inner.append(a.shape[1])
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    model, _ = made("rowwise", emulated=False)
    model.linear(x_of(7, 32).requires_grad_()).sum().backward()
    assert inner == [32, 48, 16]  # features in, features out, and seven tokens with nine of zeros


def test_a_cut_by_outputs_changes_no_number() -> None:
    """Each row of a weight has its own scale, so a rank needs no other's."""
    model, products = made("rowwise")
    product, x, weight = products.of("linear", model.linear), x_of(16, 32), model.linear.weight
    whole, parts = product(x, weight, None), [product(x, w, None) for w in weight.chunk(3)]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_only_the_named_linears_change_and_nothing_but_their_forward() -> None:
    model, products = made("rowwise")
    bare = Two()
    assert type(model.linear) is nn.Linear and "forward" not in vars(model.plain)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in bare.named_parameters()]
    assert products.of("plain", model.plain) is F.linear
    model.linear.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.bfloat16))
    assert torch.equal(model.linear(x_of(2, 32)), model.linear.bias.expand(2, 48))


def test_no_rows_have_no_scale() -> None:
    model, _ = made("tensorwise")
    assert model.linear(x_of(0, 32)).shape == (0, 48)


def test_without_torchao_it_is_refused(monkeypatch: Any) -> None:
    for module in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r'pip install "weft\[float8\]"'):
        made("rowwise")
    LinearProducts(None)  # nobody has asked for it
