"""Nets whose layers are not called as such, or keep a tensor of the batch for a later call."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import BATCH, Subject
from weft.nn.losses import mse


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CallsParts(nn.Module):
    """Calls the modules of a layer, and never the layer (openpi, whose layers of two models attend
    together)."""

    def __init__(self, d=8):
        super().__init__()
        self.inp, self.out = nn.Linear(6, d), nn.Linear(d, 4)
        self.layers = nn.ModuleList(Layer(d) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            h = layer.up(layer.norm(x))
            x = x + layer.down(F.gelu(h))
        return self.out(x)


class Holder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.gamma = nn.Parameter(torch.full((d,), 0.5))


class HoldsParts(CallsParts):
    """Layers without a forward."""

    def __init__(self, d=8):
        super().__init__()
        self.layers = nn.ModuleList(Holder(d) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            h = layer.up(layer.norm(x))
            x = x + layer.gamma * layer.down(F.gelu(h))
        return self.out(x)


class RevIN(nn.Module):
    def __init__(self, c, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + self.eps).detach()
            return (x - self.mean) / self.stdev * self.weight + self.bias
        return (x - self.bias) / (self.weight + self.eps**2) * self.stdev + self.mean


class Forecaster(nn.Module):
    """Reversible instance norm (Kim et al. 2022): its first call keeps what its second reads, and
    that depends on no weight."""

    def __init__(self, c=3, length=8, d=16, horizon=4):
        super().__init__()
        self.revin = RevIN(c)
        self.inp, self.head = nn.Linear(length, d), nn.Linear(d, horizon)
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))

    def forward(self, x):
        h = self.inp(self.revin(x, "norm").transpose(1, 2))
        for layer in self.layers:
            h = layer(h)
        return self.revin(self.head(h).transpose(1, 2), "denorm")


class LightGCN(nn.Module):
    """A graph of users and items, sparse, in a buffer."""

    def __init__(self, n=11, d=8):
        super().__init__()
        self.table = nn.Embedding(n, d)
        self.out = nn.Linear(d, 4)
        graph = torch.eye(n) + torch.eye(n).roll(1, 0)
        self.register_buffer("graph", graph.to_sparse_coo())

    def forward(self, node):
        return self.out(torch.sparse.mm(self.graph, self.table.weight)[node])


def features():
    return {"x": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 4)}


def series():
    return {"x": torch.randn(BATCH, 8, 3), "target": torch.randn(BATCH, 4, 3)}


def nodes():
    return {"node": torch.randint(11, (BATCH,)), "target": torch.randn(BATCH, 4)}


LAYERS_IN_PARTS: dict[str, Subject] = {
    "calls-parts": Subject(CallsParts, features, mse),
    "holds-parts": Subject(HoldsParts, features, mse),
    "reversible-norm": Subject(Forecaster, series, mse),
    "sparse-graph": Subject(LightGCN, nodes, mse),
}
