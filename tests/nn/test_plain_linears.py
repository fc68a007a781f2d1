"""Linears with a forward of their own: those that compute what nn.Linear does, and others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.nn import is_plain_linear


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight.T)
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16().to(x.dtype))


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class BiasTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class WithAdapter(nn.Linear):
    """An adapter that begins at zero."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Linear(4, 1), nn.Linear(1, 4)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Transposed])
def test_plain(kind: type[nn.Linear], bias: bool) -> None:
    module = kind(8, 3, bias=bias)
    before = {name: p.clone() for name, p in module.named_parameters()}
    assert is_plain_linear(module)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_plain_without_elements() -> None:
    with torch.device("meta"):
        module = Transposed(8, 3)
        assert is_plain_linear(module)
    assert module.weight.is_meta


@pytest.mark.parametrize("kind", [Scaled, Rounded, Centred, BiasTwice, TwoInputs])
def test_others(kind: type[nn.Linear]) -> None:
    assert not is_plain_linear(kind(8, 3))


def test_what_holds_more_is_no_plain_linear() -> None:
    assert not is_plain_linear(WithAdapter())
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert not is_plain_linear(weighted)
    assert not is_plain_linear(nn.LayerNorm(4))
