"""Nets whose forward asks for gradients, and trains on them: third derivatives of an equation, the
gradient penalty of a critic, forces of an energy."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
from torch import nn

from tests.cases import BATCH, Subject


def count(n):
    return torch.tensor(float(n))


class KdV(nn.Module):
    """A physics-informed net (Raissi et al. 2019) for u_t + 6 u u_x + u_xxx = 0."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 1),
        )

    def forward(self, xt):
        x, t = (xt[:, i : i + 1].clone().requires_grad_() for i in (0, 1))
        u = self.net(torch.cat([x, t], 1))

        def d(y, z):
            return torch.autograd.grad(y.sum(), z, create_graph=True)[0]

        u_x = d(u, x)
        return u, d(u, t) + 6 * u * u_x + d(d(u_x, x), x)


def solitons():
    x = torch.rand(BATCH, 2)
    return {"xt": x, "u": x.sum(1, keepdim=True)}


def residual(out, batch):
    u, f = out
    return ((u - batch["u"]) ** 2).sum() + (f**2).sum(), count(len(u))


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Critic(nn.Module):
    """The critic of WGAN-GP (Gulrajani et al. 2017), which is called again after the penalty."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))

    def score(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def forward(self, real, fake):
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        score = self.score(mixed)
        (g,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        return self.score(fake) - self.score(real), 10 * (g.norm(2, 1) - 1) ** 2


def two_kinds():
    return {"real": torch.randn(BATCH, 4), "fake": torch.randn(BATCH, 4)}


def wasserstein(out, batch):
    distance, penalty = out
    return distance.sum() + penalty.sum(), count(len(distance))


class Interaction(nn.Module):
    def __init__(self, d=8, heads=2):
        super().__init__()
        self.heads, self.mlp = heads, Residual(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, -1, d // self.heads).transpose(1, 2) for f in self.qkv())
        a = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        return self.mlp(x + self.out(a.transpose(1, 2).reshape(b, n, -1)))

    def qkv(self):
        return self.q, self.k, self.v


class Energy(nn.Module):
    """An energy of atoms, and the forces that are its gradient, as in molecular dynamics."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))

    def forward(self, pos):
        pos = pos.clone().requires_grad_()
        x = self.embed(pos)
        for interaction in self.interactions:
            x = interaction(x)
        energy = self.head(x).sum(1)
        (g,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return energy, -g


def molecules():
    pos = torch.randn(BATCH, 5, 3)
    return {"pos": pos, "energy": torch.randn(BATCH, 1), "forces": torch.randn(BATCH, 5, 3)}


def energy_and_forces(out, batch):
    energy, forces = out
    total = ((energy - batch["energy"]) ** 2).sum() + ((forces - batch["forces"]) ** 2).sum()
    return total, count(len(energy))


class Descent(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, 1)

    def forward(self, x):
        energy = self.down(torch.tanh(self.up(self.norm(x)))).sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


class EnergyTransformer(nn.Module):
    """Blocks that each descend an energy of their own (Hoover et al. 2023)."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Descent(8) for _ in range(4))

    def forward(self, pos):
        x = self.embed(pos)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum(1)


def energies(out, batch):
    return ((out - batch["energy"]) ** 2).sum(), count(len(out))


class Readout(nn.Module):
    """A gradient by features: backward in the forward ends after the last of the blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(4))

    def forward(self, pos):
        x = self.embed(pos)
        for block in self.blocks:
            x = block(x)
        energy = torch.tanh(self.head(x)).sum(1)
        (g,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, g[..., :3]


WITH_GRADIENTS: dict[str, Subject] = {
    "kdv": Subject(KdV, solitons, residual),
    "critic": Subject(Critic, two_kinds, wasserstein),
    "forces": Subject(Energy, molecules, energy_and_forces),
    "energy-transformer": Subject(EnergyTransformer, molecules, energies),
    "readout": Subject(Readout, molecules, energy_and_forces),
}
