"""Where weft itself cuts a model into stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.core import Layout, PipelineRequest, Staging, UnsupportedModel
from weft.pipeline import make_stages

WIDTH = 8


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.calls


class Changes(nn.Module):
    """Counts for a layer before another layer is called: one stage has to hold both."""

    def __init__(self, layer: int, before: int, looks: bool = False):
        super().__init__()
        self.layer, self.before, self.looks = layer, before, looks
        self.layers = nn.ModuleList(Counts() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == self.before:
                self.layers[self.layer].calls += 1
            if self.looks and float(x.detach().sum()) > 0:
                x = x + 1
            x = torch.relu(layer(x))
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
    assert firsts(staged(Changes(0, 0))) == ["layers.0", "layers.3"]
    # the stage begins with what is changed before the call
    assert firsts(staged(Changes(3, 3))) == ["layers.0", "layers.3"]
    assert firsts(staged(Changes(3, 2))) == ["layers.0", "layers.2"]
    assert firsts(staged(Changes(4, 1))) == ["layers.0", "layers.1"]


def test_a_cut_that_is_named_is_not_moved() -> None:
    with pytest.raises(UnsupportedModel, match=r"pipeline.cut = 'layers.3': .* stages 0 and 1"):
        staged(Changes(3, 3), ("layers.3",))


def test_where_every_cut_is_refused_the_first_says_why() -> None:
    with pytest.raises(UnsupportedModel, match=r"pipeline.cut = 'layers.3': .* stages 0 and 1"):
        staged(Changes(5, 0))


def test_what_is_read_into_python_moves_no_cut() -> None:
    """Where the cut would be, a later batch could still take another path."""
    with pytest.raises(UnsupportedModel, match=r"pipeline.cut = 'layers.3': .* into Python"):
        staged(Changes(0, 0, looks=True))
