"""MNIST as PyTorch's own example has it, on any layout: net, dropout, StepLR, test accuracy.

    python examples/mnist.py --layout dp2  # two processes on this machine
    python examples/mnist.py --layout dp2 --data DIR  # torchvision's MNIST, which DIR holds

Without --data the digits are drawn here, as those of a pocket calculator. `weft verify
examples/mnist.toml` compares the same net under a layout with one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.data import Loader, collate, named_samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.conv1(image))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def nll(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum over samples, and how many: weft takes the mean over all ranks."""
    return F.nll_loss(output, batch["label"], reduction="sum"), len(output)


class Digits:
    """Samples as torchvision has them: tuples of an image [1, 28, 28] and a class."""

    # which strokes a digit has: top, upper left, upper right, middle, lower left, lower right,
    # bottom
    STROKES = ("1110111", "0010010", "1011101", "1011011", "0111010")
    STROKES += ("1101011", "1101111", "1010010", "1111111", "1111011")
    PLACES = ((0, 0, 1, 8), (0, 0, 8, 1), (0, 7, 8, 1), (7, 0, 1, 8), (7, 0, 8, 1), (7, 7, 8, 1))
    PLACES += ((14, 0, 1, 8),)

    def __init__(self, size: int = 4000, split: str = "train"):
        self.size, self.first = size, 0 if split == "train" else 10**6

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.first + index)
        digit, down, right = (int(torch.randint(n, (), generator=random)) for n in (10, 6, 8))
        image = 0.3 * torch.randn(1, 28, 28, generator=random)
        for drawn, (y, x, height, width) in zip(self.STROKES[digit], self.PLACES, strict=True):
            image[0, down + y + 4 :, right + x + 6 :][:height, :width] += 2.0 * int(drawn)
        return image, digit


def mnist(folder: str, split: str = "train") -> Any:
    """torchvision's MNIST in a folder that holds it; nothing is downloaded."""
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return datasets.MNIST(folder, train=split == "train", transform=transforms.Compose(steps))


def train(options: argparse.Namespace) -> float:
    """What each rank does; the accuracy on the test set."""
    torch.manual_seed(0)
    model = Net()
    make = partial(mnist, options.data) if options.data else partial(Digits, options.samples)
    entries = ("image", "label")  # the arguments of the model's forward, and what the loss reads
    data, test = (named_samples(make(split=split), entries) for split in ("train", "test"))

    sample = collate([data[0], data[1]])  # what a pipeline is cut along
    plan = weft.plan(model, options.layout, batch=options.batch, loss=nll, sample=sample)
    adadelta = partial(torch.optim.Adadelta, lr=1.0)
    engine = weft.Engine(model, plan, optimizer=adadelta, loss=nll)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.7)

    loader = Loader(data, options.batch, 0, data_rank=engine.data_rank, data_size=engine.data_size)
    for epoch in range(options.epochs):
        for batch in islice(loader, loader.steps_per_epoch):
            result = engine.step(batch)
            if torch.distributed.get_rank() == 0 and engine.steps_done % 10 == 0:
                print(f"epoch {epoch}, step {engine.steps_done}: {result.loss:.3f}", flush=True)
        schedule.step()

    right = 0
    whole = Loader(
        test, min(250, len(test)), seed=0, shuffle=False
    )  # the same samples on every rank
    for batch in islice(whole, whole.steps_per_epoch):
        right += int((engine.forward(batch).argmax(1).cpu() == batch["label"]).sum())
    engine.close()
    return right / (whole.batch * whole.steps_per_epoch)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="dp2", help='as in "dp1", "fsdp2", "pp2"')
    parser.add_argument("--data", help="a folder with torchvision's MNIST")
    parser.add_argument("--samples", type=int, default=4000, help="digits to draw")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    accuracy = weft.launch(train, options, layout=options.layout)
    print(f"accuracy {accuracy:.1%}")
