"""What a unit of fsdp made, changed in place by its caller, is the caller's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.verification.nets_advised import Carries
from tests.verification.nets_in_place import Gated, Preactivated
from weft.core.errors import UnsupportedModel


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.guide, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        guide = self.guide(x)
        for block in self.blocks:
            x = block(x)
            x += guide
        return self.head(x)


def laid(model: nn.Module) -> weft.Plan:
    width = next(model.parameters()).shape[1]
    sample = {"x": torch.randn(2, 5, width), "target": torch.randn(2, 5, 4)}
    return weft.plan(model, "fsdp2", batch=8, loss=weft.losses.mse, sample=sample)


def test_a_sum_in_place_is_no_part_of_the_unit() -> None:
    assert {"blocks.0", "blocks.3"} <= {s.module for s in laid(AddsInPlace()).steps if s.gather}


def test_slices_that_are_changed_in_place_are_no_part_of_the_unit() -> None:
    assert {"blocks.0", "blocks.2"} <= {s.module for s in laid(Gated()).steps if s.gather}


def test_a_unit_that_changes_what_enters_it_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"blocks\.0 changes in place what enters it"):
        laid(Preactivated())


def test_what_a_unit_makes_after_its_output_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"blocks\.1 makes a tensor after its output"):
        laid(Carries("after"))
