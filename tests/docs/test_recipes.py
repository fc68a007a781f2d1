"""The examples in Python run as they stand, in small, and compute what plain torch computes."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.core import DataError
from weft.data import Loader, named_samples

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """examples/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def options(module: ModuleType, *arguments: str) -> Namespace:
    return module.parse(arguments)


# ---- mnist ---------------------------------------------------------------------------------------

EPOCHS = 3


def plain_accuracy(mnist: ModuleType, samples: int, batch: int) -> float:
    """As PyTorch's own example trains: a DataLoader of tuples, a mean loss, no weft but its order
    of samples."""
    torch.manual_seed(0)
    model, data, test = mnist.Net(), mnist.Digits(samples), mnist.Digits(samples, "test")
    for dropout in (model.dropout1, model.dropout2):
        dropout.p = 0.0
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    order = Loader(named_samples(data, ("image", "label")), batch, 0)
    for step in range(EPOCHS * order.steps_per_epoch):
        images, labels = stacked([data[i] for i in order.indices(step)])
        optimizer.zero_grad()
        torch.nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()
        if (step + 1) % order.steps_per_epoch == 0:
            schedule.step()
    images, labels = stacked([test[i] for i in range(samples)])
    return float((model.eval()(images).argmax(1) == labels).double().mean())


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_mnist_learns_as_plain_torch_does(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = load("mnist")
    net = mnist.Net

    def without_dropout() -> Any:  # whose masks are weft's own
        made = net()
        made.dropout1.p = made.dropout2.p = 0.0
        return made

    monkeypatch.setattr(mnist, "Net", without_dropout)
    small = options(
        mnist, "--layout", layout, "--samples", "240", "--batch", "16", "--epochs", f"{EPOCHS}"
    )
    found = weft.launch(mnist.train, small, layout=layout)
    monkeypatch.setattr(mnist, "Net", net)
    expected = plain_accuracy(mnist, 240, 16)
    assert expected > 0.4 and abs(found - expected) <= 4 / 240


def test_samples_that_are_tuples_get_names() -> None:
    mnist = load("mnist")
    data = named_samples(mnist.Digits(4), ("image", "label"))
    assert {key: tuple(value.shape) for key, value in data[1].items()} == {
        "image": (1, 28, 28),
        "label": (),
    }
    with pytest.raises(DataError, match="a tuple of 2 items"):
        named_samples(mnist.Digits(4), ("image",))
