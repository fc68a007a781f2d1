"""What cannot be a loss is refused before it is called."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.core import ConfigError
from weft.nn.loss_form import check_loss


class Own(nn.Module):
    def forward(self, output: Any, labels: Any) -> tuple[Any, int]:
        return output.sum(), 1


def scaled(scale: float, output: Any, batch: Any) -> tuple[Any, int]:
    return scale * output.sum(), 1


def three(output: Any, batch: Any, more: Any) -> tuple[Any, int]:
    return output.sum(), 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss,
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        F.cosine_similarity,
        partial(F.mse_loss, reduction="sum"),
        weft.losses.cross_entropy,
        weft.losses.positionwise,
        Own,
        three,
        scaled,
        abs,
    ],
)
def test_what_is_no_loss_is_refused(loss: Callable) -> None:
    with pytest.raises(ConfigError, match=r"^loss = '\w+': (is a class, not|does not take \(out)"):
        check_loss(loss)
    with pytest.raises(
        ConfigError, match=r"^train.loss = 'as:written': .* returns \(sum, weight\)"
    ):
        check_loss(loss, "train.loss", "as:written")
    with pytest.raises(ConfigError, match=r"^loss = "):
        weft.plan(nn.Linear(2, 2), "dp2", batch=4, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        weft.losses.mse,
        weft.losses.next_token,
        Own(),
        partial(scaled, 2.0),
        lambda *arguments: arguments,
        torch.compile(weft.losses.mse),
        operator.matmul,  # written in C: who knows
    ],
)
def test_what_may_be_a_loss_is_called(loss: Callable) -> None:
    check_loss(loss)
