"""The two models that both sides run, each a chain of parts: one whose parts only sleep, and a real
decoder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.models import decoder

WIDTH = 1024  # float32: messages of 4 kB


class Through(torch.autograd.Function):
    """The way from a stage's input to its output, which takes time and no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad.clone(), None, None


class Weigh(torch.autograd.Function):
    """What a weight adds; its gradient takes time and no core."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_s: float) -> Tensor:
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.weight_s)
        return grad.clone(), None


class Sleeps(NamedTuple):
    """Seconds that a stage sleeps: in its forward, and in each half of its backward."""

    forward_s: float
    backward_s: float


class Sleeper(nn.Module):
    """x [b, WIDTH] -> [b, WIDTH]. Its backward has two halves, the input's gradient and the
    weight's.

    The first stage has a further weight below all that sleeps, as an embedding is: there is a
    gradient to carry down.
    """

    def __init__(self, sleeps: Sleeps, first: bool = False):
        super().__init__()
        self.sleeps = sleeps
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.start = nn.Parameter(torch.zeros(WIDTH)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x = x + self.start
        return Through.apply(x, *self.sleeps) + Weigh.apply(self.weight, self.sleeps.backward_s)


def sleepers(stages: int, sleeps: Sleeps) -> nn.Sequential:
    """One Sleeper per stage."""
    return nn.Sequential(*(Sleeper(sleeps, first=i == 0) for i in range(stages)))


def alone(sleeps: Sleeps, rounds: int) -> Sleeps:
    """What a Sleeper's forward and half its backward take where no runtime is around it:
    medians."""
    stage, times = Sleeper(sleeps), []
    for _ in range(rounds):
        x = torch.ones(1, WIDTH, requires_grad=True)
        begin = time.perf_counter()
        y = stage(x)
        middle = time.perf_counter()
        y.backward(x.detach())
        times.append(Sleeps(middle - begin, (time.perf_counter() - middle) / 2))
    return Sleeps(*(statistics.median(column) for column in zip(*times, strict=True)))


SIZE = {"vocab": 256, "dim": 256, "layers": 8, "heads": 8, "seq_len": 128}


def real() -> nn.Module:
    """weft's decoder; the same weights at every call."""
    torch.manual_seed(0)
    return decoder(**SIZE)  # type: ignore[arg-type]


def starts(stages: int) -> list[int]:
    """The block with which each stage of the decoder begins; they are shared out evenly."""
    assert SIZE["layers"] % stages == 0, (
        f"{SIZE['layers']} blocks are not divided evenly by {stages} stages"
    )
    return list(range(0, SIZE["layers"], SIZE["layers"] // stages))


def decoder_parts(model: Any, stages: int) -> Sequence[nn.Module]:
    """The decoder's stages as modules of their own."""
    parts = [
        list(model.blocks[start:stop])
        for start, stop in pairwise([*starts(stages), SIZE["layers"]])
    ]
    parts[0].insert(0, model.embedding)
    parts[-1] += [model.norm, model.head]
    return [nn.Sequential(*part) for part in parts]
