"""Frozen weights in int8 or NF4 are priced as they lie: a byte, or half of one, each, and their
scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.planner.test_cost_start import FP32, peak
from weft.nn import quantize_frozen
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.planner.cost.model_work import ModelWork
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.profile import profile_model

pytest.importorskip("torchao.quantization")


def quantized(kind: str = "int8") -> nn.Module:
    """The linears of its blocks are held so."""
    torch.manual_seed(0)
    model: Any = decoder(vocab=67, dim=32, layers=4, heads=4, hidden=96, seq_len=8)
    for block in model.blocks:
        block.requires_grad_(False)
    quantize_frozen(model, kind)
    return model


def work_of(model: nn.Module) -> ModelWork:
    ids = torch.arange(16).view(2, 8) % 67
    return profile_model(model, {"input_ids": ids, "labels": ids}, next_token)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(("layout", "ranks"), [("dp1", 1), ("dp2", 1), ("fsdp2", 2)])
def test_they_take_what_they_take(layout: str, ranks: int, kind: str) -> None:
    model = quantized(kind)
    held = sum(p.nbytes for p in model.parameters())
    assert held < 0.6 * sum(4 * p.numel() for p in model.parameters())
    assert peak(work_of(model), layout)["weights"] == pytest.approx(held / ranks)


def test_they_have_no_copy_in_the_dtype_computed_in() -> None:
    model, low = quantized(), PrecisionPolicy(copy_bytes=2.0)
    wide = sum(p.numel() for p in model.parameters() if p.dtype != torch.int8)
    found = [peak(work_of(model), "dp1", each)["weights"] for each in (low, FP32)]
    assert found[0] - found[1] == pytest.approx(2 * wide)


def test_what_is_gathered_is_narrower() -> None:
    narrow = peak(work_of(quantized()), "fsdp2")["gathered weights"]
    model: Any = decoder(vocab=67, dim=32, layers=4, heads=4, hidden=96, seq_len=8)
    assert narrow < peak(work_of(model), "fsdp2")["gathered weights"]
