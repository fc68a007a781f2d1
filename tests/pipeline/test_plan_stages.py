"""Where weft itself cuts a model into stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.core import Layout, PipelineRequest, Staging, UnsupportedModel
from weft.pipeline import make_stages

WIDTH = 8


class Looks(nn.Module):
    """Reads what some layers give into Python, where a later stage does not have it."""

    def __init__(self, *read: int):
        super().__init__()
        self.read = read
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if i in self.read and float(x.detach().sum()) > 0:
                x = x + 1
        return x


def staged(model: nn.Module, cut: str | tuple[str, ...] = "parameters", ranks: int = 2) -> Staging:
    return make_stages(
        model,
        Layout.parse(f"pp{ranks}"),
        ranks,
        PipelineRequest(cut=cut),
        [],
        None,
        {"x": torch.randn(2, WIDTH)},
    )[0]


def firsts(staging: Staging) -> list[str]:
    return [stage.first for stage in staging.stages]


def test_a_cut_that_is_refused_is_moved() -> None:
    assert firsts(staged(Looks())) == ["layers.0", "layers.3"]
    # the stage begins with what is read, before the call
    assert firsts(staged(Looks(2))) == ["layers.0", "layers.3"]
    assert firsts(staged(Looks(1))) == ["layers.0", "layers.2"]
    assert firsts(staged(Looks(2), ranks=3)) == ["layers.0", "layers.2", "layers.3"]


def test_a_cut_that_is_named_is_not_moved() -> None:
    with pytest.raises(UnsupportedModel, match=r"pipeline.cut = 'layers.3': .* into Python"):
        staged(Looks(2), ("layers.3",))


def test_where_every_cut_is_refused_the_first_says_why() -> None:
    with pytest.raises(UnsupportedModel, match=r"pipeline.cut = 'layers.2': .* into Python"):
        staged(Looks(*range(6)), ranks=3)
