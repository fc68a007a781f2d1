"""Parameters that do not lie row by row in memory, such as `channels_last`, under a fused
optimizer: it pairs the elements of a weight and its gradient by their places in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, Subject, reference
from weft import sync
from weft.engine.optimizers import match_strides
from weft.nn.losses import mse
from weft.verification.compare import check_layout


class Photos(nn.Module):
    """Convolutions in `channels_last`, and a linear whose weight was transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)
        self.head.weight = nn.Parameter((torch.randn(8, 4) * 0.3).t())
        assert not self.blocks[0].weight.is_contiguous() and not self.head.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = x + block(torch.relu(x))
        return self.head(x.mean((2, 3)))


def photos() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 3, 6, 6), "target": torch.randn(BATCH, 4)}


SYNCS: dict[str, Any] = {
    "": None,
    "ring": sync.make_sync("ring"),
    "central": sync.make_sync("central"),
    "servers": sync.make_sync("parameter_server", servers=2),
}


@pytest.mark.parametrize(
    ("layout", "route"),
    [
        *((layout, "") for layout in ("dp2", "fsdp2", "tp2", "pp2", "dp2.tp2", "dp2.fsdp2")),
        *(("dp2", route) for route in SYNCS if route),
    ],
)
def test_equal_to_one_device(pool: Any, layout: str, route: str) -> None:
    plan = (("accumulate", 2), *((("sync", SYNCS[route]),) if route else ()))
    subject = Subject(Photos, photos, mse, plan)
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    case, world = replace(subject.case(), optimizer=fused), weft.Layout.parse(layout).world
    result = pool.run(check_layout, case, layout, reference(subject), world=world)[0]
    assert result.passed, (result.first, result)


def test_a_gradient_lies_as_its_parameter_does() -> None:
    p = nn.Parameter(torch.randn(4, 3).t())
    p.grad = torch.arange(12.0).view(3, 4)
    match_strides(p)
    assert p.grad.stride() == p.stride()
    assert torch.equal(p.grad, torch.arange(12.0).view(3, 4))
