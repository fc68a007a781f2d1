"""A GAN (Goodfellow et al. 2014, arXiv:1406.2661): two engines that take turns in one loop.

    python examples/gan.py --layout dp2  # two processes on this machine

It learns to draw circles, squares, triangles and crosses. Each engine trains one of the two nets
against a frozen copy of the other, which is refreshed before its turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.data import Loader, shapes

NOISE, SIDE = 16, 12
Batch = dict[str, Tensor]


class GeneratorTurn(nn.Module):
    """What the discriminator, frozen, says of the generator's pictures."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.discriminator(self.generator(noise))


class DiscriminatorTurn(nn.Module):
    """What the discriminator says of real pictures, and of those of the generator, frozen."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module):
        super().__init__()
        self.generator = generator.requires_grad_(False)
        self.discriminator = discriminator

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            drawn = self.generator(noise)
        return self.discriminator(image), self.discriminator(drawn)


def generator_loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.softplus(-output).sum(), len(output)


def discriminator_loss(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    real, drawn = output
    return F.softplus(-real).sum() + F.softplus(drawn).sum(), len(real)


def make_nets() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, the same at every call."""
    torch.manual_seed(0)
    pixels = SIDE * SIDE
    picture = nn.Unflatten(1, (1, SIDE, SIDE))
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, pixels), picture)
    judge = nn.Sequential(nn.Linear(pixels, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    return generator, nn.Sequential(nn.Flatten(), judge)


@torch.no_grad()
def refresh(copy: nn.Module, net: nn.Module) -> None:
    """Give a frozen copy the weights of now, or under fsdp this rank's shards of them."""
    for ours, theirs in zip(copy.state_dict().values(), net.state_dict().values(), strict=True):
        ours.copy_(theirs)


def draw_noise(step: int, batch: int) -> Tensor:
    """Of a whole batch, the same on every layout."""
    return torch.randn(batch, NOISE, generator=torch.Generator().manual_seed(step))


def train(options: argparse.Namespace) -> list[tuple[float, float]]:
    """What each rank does; the losses of both."""
    adam = partial(torch.optim.Adam, lr=options.lr, betas=(0.5, 0.999))
    engines = []
    for turn, loss in ((DiscriminatorTurn, discriminator_loss), (GeneratorTurn, generator_loss)):
        model = turn(*make_nets())
        plan = weft.plan(model, options.layout, batch=options.batch, loss=loss)
        engines.append(weft.Engine(model, plan, optimizer=adam, loss=loss))
    judging, drawing = engines

    losses = []
    whole = Loader(shapes(size=options.samples, image=SIDE, noise=0.05), options.batch, seed=0)
    for step, batch in enumerate(islice(whole, options.steps)):
        refresh(judging.model.generator, drawing.model.generator)
        real = {"image": batch["image"], "noise": draw_noise(2 * step, options.batch)}
        judged = judging.step(judging.local(real))

        refresh(drawing.model.discriminator, judging.model.discriminator)
        noise = {"noise": draw_noise(2 * step + 1, options.batch)}
        drawn = drawing.step(drawing.local(noise))

        losses.append((float(judged.loss), float(drawn.loss)))
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            judge, generator = losses[-1]
            print(f"step {step + 1}: discriminator {judge:.3f}, generator {generator:.3f}")
    weft.checkpoint.save(drawing, f"{options.output}/generator")
    weft.checkpoint.save(judging, f"{options.output}/discriminator")
    for engine in engines:
        engine.close()
    return losses


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="dp2", help='as in "fsdp2"')
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", default="runs/gan")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    weft.launch(train, options, layout=options.layout)
