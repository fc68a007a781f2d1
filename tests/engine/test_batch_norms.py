"""Batch norms have the statistics of one device: of rows that the data select, of which ranks have
unequal numbers, and in evaluation, where a norm keeps none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.launch.local_workers import Pool

LENGTH, WIDTH, CLASSES, SAMPLES, STEPS = 6, 8, 3, 8, 3


class RowsNet(nn.Module):
    """Normalises the positions that are no padding, as pyramids of text and point clouds do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(LENGTH) < lengths[:, None]
        x = self.inner(x)
        normed = torch.zeros_like(x)
        normed[valid] = self.norm(x[valid])
        return self.head(normed.sum(1))


class MomentaryNet(nn.Module):
    """Its norm keeps no statistics: in evaluation it has those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(WIDTH, track_running_stats=False).eval()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(self.inner(x).transpose(1, 2)).relu() + self.frozen(x.transpose(1, 2))
        return self.head(x.mean(2) * lengths[:, None])


class UntrackedNet(RowsNet):
    """Its norm stops to track: it keeps its statistics, and takes them in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.track_running_stats = False


class ForgetfulNet(RowsNet):
    """Its norm has lost its statistics, and counts batches (TENT, Wang et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.running_mean = self.norm.running_var = None


class AveragingNet(RowsNet):
    """Its statistics are those of all batches alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.momentum = None


class UncountedNet(RowsNet):
    """Its norm tracks, and counts no batches, as one of an old checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.num_batches_tracked = None


class ListedNet(RowsNet):
    """Its norms stand in a list of their own, where each is a unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.inners = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for inner, norm in zip(self.inners, self.norms, strict=True):
            x = norm(inner(x).transpose(1, 2)).relu().transpose(1, 2)
        return super().forward(x, lengths)


NETS = {
    "listed": ListedNet,
    "uncounted": UncountedNet,
    "rows": RowsNet,
    "momentary": MomentaryNet,
    "untracked": UntrackedNet,
    "forgetful": ForgetfulNet,
    "averaging": AveragingNet,
}


def batch_of(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=draw)
    if step == 1:
        lengths[SAMPLES // 2 :] = 0  # nothing is left to the second of two ranks
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return {"x": x, "lengths": lengths, "labels": labels}


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum"), len(output)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def trained(net: str, layout: str, accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps and of an evaluation, and the buffers of the model."""
    torch.manual_seed(0)
    model = NETS[net]().double()
    inputs = ("x", "lengths")
    plan = weft.plan(
        model,
        layout,
        batch=SAMPLES,
        accumulate=accumulate,
        loss=loss,
        precision="fp64",
        inputs=inputs,
    )
    engine = weft.Engine(model, plan, optimizer=sgd, loss=loss, device="cpu")
    losses = [float(engine.step(engine.local(batch_of(step))).loss) for step in range(STEPS)]
    losses.append(float(engine.evaluate(engine.local(batch_of(STEPS))).loss))
    return losses, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
@pytest.mark.parametrize("net", NETS)
def test_they_equal_one_device(pool: Pool, net: str, layout: str, accumulate: int) -> None:
    losses, buffers = pool.run(trained, net, "dp1", accumulate, world=1)[0]
    for found, tracked in pool.run(trained, net, layout, accumulate, world=2):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(tracked, buffers, rtol=1e-9, atol=1e-12)
