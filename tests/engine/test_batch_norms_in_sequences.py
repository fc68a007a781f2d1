"""Under cp a batch norm has the statistics of one device: of text, of which each rank has a part,
and of images, which every rank has whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core import UnsupportedModel
from weft.launch.local_workers import Pool
from weft.nn.losses import next_token

from .test_later_tokens import WIDTH, Block

VOCAB, LENGTH, SAMPLES, IMAGE, PATCHES, STEPS = 67, 16, 8, 7, 5, 3


class Net(nn.Module):
    def __init__(self, norm: Callable[[Net, Tensor], Tensor]):
        super().__init__()
        self.of_text = norm
        self.tower = nn.Sequential(
            nn.Conv2d(12, WIDTH, (3, 1), padding=(1, 0)), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        self.norm, self.tokens = nn.BatchNorm1d(WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.momentary = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.block, self.head = Block(), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, picture: Tensor) -> Tensor:
        image = self.tower(picture).squeeze(-1).transpose(1, 2)
        x, where = self.tokens(input_ids), input_ids == IMAGE
        if where.any():
            x = x.masked_scatter(where.unsqueeze(-1), image)
        return self.head(self.block(x + self.of_text(self, x), input_ids))


def by_channel(net: Net, x: Tensor) -> Tensor:
    return net.norm(x.transpose(1, 2)).transpose(1, 2)


def flattened(net: Net, x: Tensor) -> Tensor:
    samples, length, width = x.shape
    return net.norm(x.reshape(samples * length, width)).reshape(samples, length, width)


def untracked(net: Net, x: Tensor) -> Tensor:
    return net.momentary(x.transpose(1, 2)).transpose(1, 2)


NORMS = {each.__name__: each for each in (by_channel, flattened, untracked)}


def batch_of(step: int) -> dict[str, Tensor]:
    """Of the first batch no token stands for an image."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(IMAGE + 1, VOCAB, (SAMPLES, LENGTH), generator=draw)
    if step:
        ids[:, step : step + PATCHES] = IMAGE
    picture = torch.randn(SAMPLES, 12, PATCHES, 1, generator=draw, dtype=torch.float64)
    return {"input_ids": ids, "picture": picture, "labels": ids.roll(-1, 1)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def trained(norm: str, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and what the norms have tracked."""
    torch.manual_seed(0)
    model = Net(NORMS[norm]).double()
    inputs = ("input_ids", "picture")
    plan = weft.plan(model, layout, batch=SAMPLES, loss=next_token, precision="fp64", inputs=inputs)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    losses = [float(engine.step(engine.local(batch_of(step))).loss) for step in range(STEPS)]
    losses.append(float(engine.evaluate(engine.local(batch_of(STEPS))).loss))
    return losses, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("layout", ["cp2", "cp2+ulysses", "dp2.cp2"])
@pytest.mark.parametrize("norm", NORMS)
def test_they_equal_one_device(pool: Pool, norm: str, layout: str) -> None:
    losses, buffers = pool.run(trained, norm, "dp1", world=1)[0]
    world = weft.Layout.parse(layout).world
    for found, tracked in pool.run(trained, norm, layout, world=world):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(tracked, buffers, rtol=1e-9, atol=0)


def of_positions(net: Net, x: Tensor) -> Tensor:
    return net.by_position(x)


def refused(layout: str) -> str:
    model = Net(of_positions)
    model.by_position = nn.BatchNorm1d(LENGTH, affine=False, track_running_stats=False)
    inputs = ("input_ids", "picture")
    plan = weft.plan(model, layout, batch=SAMPLES, loss=next_token, precision="fp32", inputs=inputs)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch_of(0).items()}
    try:
        engine.step(engine.local(batch))
    except UnsupportedModel as error:
        return error.problem
    return ""


def test_positions_as_channels_are_refused(pool: Pool) -> None:
    """Each rank has other channels, of which a mean over ranks is none."""
    for problem in pool.run(refused, "cp2", world=2):
        assert "positions for channels" in problem
