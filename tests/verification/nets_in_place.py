"""Nets whose blocks return views, which their callers change in place or hand to later blocks."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
from torch import nn

from tests.cases import BATCH, Subject
from weft.nn.losses import mse


class Flattened(nn.Module):
    """Returns a view of what its last linear makes."""

    def __init__(self, d=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x).flatten(0, 1)))).view(x.shape)


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Flattened() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x).mean(1)


class Transposed(Summed):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x).transpose(1, 2)
            y.add_(1.0).mul_(0.5)
            x = x + y.transpose(1, 2)
        return self.head(x).mean(1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16)) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y[..., :8] *= 0.5
            x = x + y[..., :8] * torch.sigmoid(y[..., 8:])
        return self.head(x).mean(1)


class Activated(nn.Module):
    """Its activation changes what enters it."""

    def __init__(self, d=8):
        super().__init__()
        self.act, self.up, self.down = nn.ReLU(inplace=True), nn.Linear(d, 16), nn.Linear(16, d)

    def forward(self, x):
        x = self.act(x)
        return x + self.down(self.act(self.up(x)))


class Preactivated(Summed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Activated() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


class Valued(nn.Module):
    """Values of the first block enter all others, as value residuals do (Zhou et al. 2024)."""

    def __init__(self, d=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, first=None):
        gate, value = self.qkv(x).view(*x.shape[:2], 2, -1).unbind(2)
        first = value if first is None else first
        return self.out(torch.sigmoid(gate) * (value + first)), first


class ValueResiduals(Summed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Valued() for _ in range(3))

    def forward(self, x):
        x, first = self.first(torch.nan_to_num(x)), None
        for block in self.blocks:
            y, first = block(x, first)
            x = x + y
        return self.head(x).mean(1)


def with_gaps():
    """Measurements, of which some are missing."""
    batch = positions()
    batch["x"][:, 1, 0] = torch.nan
    return batch


def positions():
    return {"x": torch.randn(BATCH, 5, 3), "target": torch.randn(BATCH, 1)}


IN_PLACE: dict[str, Subject] = {
    "summed": Subject(Summed, positions, mse),
    "transposed": Subject(Transposed, positions, mse),
    "gated": Subject(Gated, positions, mse),
    "value-residuals": Subject(ValueResiduals, with_gaps, mse),
    "preactivated": Subject(Preactivated, positions, mse),
}
