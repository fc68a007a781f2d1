"""Which other layouts a refusal names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.verification.nets_of_architectures import ARCHITECTURES
from weft.core import Layout
from weft.core.errors import ConfigError, NeedsData, NothingToDivide, Refusal, UnsupportedModel
from weft.losses import classification
from weft.parallel.forward_record import ForwardRecord
from weft.parallel.other_layouts import name_others
from weft.parallel.plan_request import PlanRequest

REFUSED = NothingToDivide("layout", "tp2", "finds nothing", "{others}, or declare roles")
OF_MODEL = UnsupportedModel("layout", "dp2", "reads samples", "change it")


@pytest.mark.parametrize(
    ("why", "says"),
    [
        ({}, "Use dp or fsdp, or declare roles."),
        ({"fsdp": OF_MODEL}, "Use dp, or declare roles."),
        ({"dp": OF_MODEL}, "Use fsdp, or declare roles."),
        ({"dp": OF_MODEL, "fsdp": OF_MODEL}, "Change it, or declare roles."),
        ({"dp": ConfigError("batch", 3, "does not divide", "use 4")}, "Use dp or fsdp, or"),
        ({"fsdp": NeedsData("model", "net", "reads elements", "build it")}, "Use dp or fsdp, or"),
    ],
)
def test_those_that_take_the_model_are_named(why: Mapping[str, Refusal], says: str) -> None:
    asked: list[str] = []

    def plan(request: PlanRequest) -> weft.Plan:
        asked.append(str(request.layout))
        if request.layout.axes[0] in why:
            raise why[request.layout.axes[0]]
        return weft.plan(request.model, request.layout, batch=8)

    request = PlanRequest(nn.Linear(2, 2), Layout.parse("dp2.tp2"), 8)
    assert says in str(name_others(REFUSED, request, plan))
    assert asked == ["dp4", "fsdp4"]


class Scales(nn.Module):
    """Multiplies by a weight; in place, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        if self.in_place:
            self.second.weight.data.mul_(2)
        else:
            made = made * self.second.weight[0]
        return self.second(made.relu_())


def test_weights_that_a_forward_changes() -> None:
    request = ARCHITECTURES["pixel-cnn"]
    data = {key: value[:2] for key, value in request.data().items()}
    asked = PlanRequest(request.build(), Layout.parse("fsdp2"), 8, sample=data)
    assert ForwardRecord(asked).changed_weights() == (
        "net.0.weight",
        "net.3.weight",
        "net.6.weight",
    )
    sample = {"x": torch.randn(2, 4)}
    for in_place, names in ((True, ("second.weight",)), (False, ())):
        asked = PlanRequest(Scales(in_place), Layout.parse("fsdp2"), 8, sample=sample)
        assert ForwardRecord(asked).changed_weights() == names


def test_without_experts_layouts_of_samples_and_stages_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModel, match=r"no experts in this model\. Use dp, fsdp or pp: "):
        weft.plan(net, "ep2", batch=8, loss=classification)
