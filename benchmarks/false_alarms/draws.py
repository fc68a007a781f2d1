"""Right models, layouts and optimizers, drawn at random: verify must find nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import weft
from weft.core.data_order import data_rank_indices
from weft.losses import classification, mse, next_token
from weft.models import convnet, decoder
from weft.optimizers import make_optimizer
from weft.train import in_dtype
from weft.verification.case import Batch, Case, to_float64

LENGTH = 12


class Norms(nn.Module):
    """Biases before batch norms, whose true gradient is zero."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
            for _ in range(depth)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class KeyBiases(nn.Module):
    """Attention whose keys have a bias, which softmax does not see."""

    def __init__(self, vocab: int, dim: int, heads: int, depth: int):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(vocab, dim), heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(dim, dim) for n in ("q", "k", "v", "out")})
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            q, k, v = (
                block[n](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("q", "k", "v")
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).flatten(2))
        return self.head(self.norm(x))


class Spectral(nn.Module):
    """Weights divided by their largest singular value, which each forward refines."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(spectral_norm(nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Filters(nn.Module):
    """Complex filters between linears."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.filters = nn.ParameterList(
            nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.cfloat)) for _ in range(depth)
        )
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for f, block in zip(self.filters, self.blocks, strict=True):
            x = x + torch.fft.irfft(torch.fft.rfft(block(x)) * f, n=x.shape[-1])
        return self.head(torch.tanh(x))


class Bags(nn.Module):
    """A sparse embedding, averaged; word counts as floats."""

    def __init__(self, vocab: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, sparse=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).mean(1) + 0.01 * input_ids.float().mean(1, keepdim=True)
        return self.down(torch.relu(self.up(x)))


@dataclass(frozen=True)
class Draw:
    """A case by its number: everything follows from it."""

    number: int

    @property
    def random(self) -> random.Random:
        return random.Random(f"false alarm {self.number}")

    def choose(self) -> tuple[str, Callable[[], nn.Module], Any, str, dict[str, Any], str, int]:
        """(model, its build, loss, layout, arguments of weft.plan, optimizer, batch)."""
        r = self.random
        dim, depth, heads = r.choice((8, 12, 16, 24, 32)), r.choice((2, 3)), 4
        vocab, dropout = r.randint(19, 90), r.choice((0.0, 0.0, 0.1, 0.3))
        build: Callable[[], nn.Module]
        kind = r.choice((*["decoder"] * 4, "experts", "convnet", "norms", "keys", *FLOATS, "bags"))
        if kind in ("decoder", "experts"):
            more = {"experts": 4, "active": r.choice((1, 2))} if kind == "experts" else {}
            build = partial(
                decoder, vocab, 4 * dim, depth, heads, r.choice((1, 2, 4)), seq_len=LENGTH,
                dropout=dropout, tied=r.random() < 0.3, **more,
            )  # fmt: skip
        elif kind == "keys":
            build = partial(KeyBiases, vocab, 4 * dim, heads, depth)
        elif kind == "convnet":
            build = partial(convnet, r.choice((4, 8)), 5)
        elif kind == "bags":
            build = partial(Bags, vocab, dim)
        else:
            build = partial(FLOATS[kind], dim, depth)
        loss = {"decoder": next_token, "experts": next_token, "keys": next_token}.get(
            kind, classification if kind == "convnet" else mse
        )
        layouts = ["dp2", "fsdp2", "pp2", "dp2.fsdp2", "pp2.dp2", "pp2.fsdp2"]
        layouts += ["fsdp2+zero1", "fsdp2+zero2", "pp2+gpipe", "pp2+zb-h1"]
        if kind not in FLOATS and kind != "convnet":
            layouts += ["tp2", "dp2.tp2", "fsdp2.tp2"]
        if loss is next_token:
            layouts += ["cp2", "tp2+sequence", "cp2.dp2", "pp2.tp2", "ulysses2", "cp2+gather"]
        layouts += ["ep2", "dp2+ep"] if kind == "experts" else []
        batch = r.choice((4, 8, 12))
        plan: dict[str, Any] = {"accumulate": 2 if batch % 4 == 0 and r.random() < 0.6 else 1}
        plan["accumulate"] = 1 if batch == 4 and r.random() < 0.5 else plan["accumulate"]
        if loss is next_token and r.random() < 0.3:
            plan["recompute"] = r.choice(("full", "selective"))
        optimizer = r.choice(("adamw", "adamw", "sgd", "adam", "rmsprop", "adagrad"))
        return kind, build, loss, r.choice(layouts), plan, optimizer, batch

    def case(self) -> tuple[str, str, Case]:
        """(what was drawn, the layout, its Case)."""
        kind, build, loss, layout, plan, optimizer, batch = self.choose()
        r = random.Random(f"run {self.number}")
        lr = 10 ** r.uniform(-4, -1.5)
        arguments: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
        arguments["weight_decay"] = r.choice((0.0, 0.1))
        clip = r.choice((None, None, 0.1, 1.0))
        case = Case(
            build=partial(_seeded, build, self.number),
            plan=partial(_laid, self, loss, plan, batch),
            batch=partial(_part, self, plan["accumulate"], batch),
            loss=loss,
            optimizer=make_optimizer(optimizer, lr=lr, **arguments),
            clip=clip,
            seed=self.number,
        )
        what = f"{kind} {layout} batch {batch} {plan} {optimizer} lr {lr:.1e} clip {clip}"
        return what, layout, case

    def whole(self, step: int, batch: int) -> Batch:
        """The global batch of a step."""
        kind, build, *_ = self.choose()
        g = torch.Generator().manual_seed(1000 * self.number + step)
        if kind in FLOATS:
            width = build.args[0]  # type: ignore[attr-defined]
            x = torch.randn(batch, width, generator=g)
            return {"x": x, "target": torch.randn(batch, 3, generator=g)}
        if kind == "convnet":
            image = torch.randn(batch, 1, 8, 8, generator=g)
            return {"image": image, "label": torch.randint(5, (batch,), generator=g)}
        vocab = build.args[0]  # type: ignore[attr-defined]
        ids = torch.randint(vocab, (batch, LENGTH), generator=g)
        if kind == "bags":
            return {"input_ids": ids, "target": torch.randn(batch, 3, generator=g)}
        labels = torch.randint(vocab, (batch, LENGTH), generator=g)
        labels[torch.rand(batch, LENGTH, generator=g) < 0.2] = -100
        return {"input_ids": ids, "labels": labels}


FLOATS: dict[str, Callable[..., nn.Module]] = {
    "norms": Norms,
    "spectral": Spectral,
    "filters": Filters,
}


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return in_dtype(build(), torch.float64)


def _laid(
    draw: Draw, loss: Any, arguments: dict[str, Any], batch: int, model: nn.Module, layout: str
) -> weft.Plan:
    given = {k: v for k, v in arguments.items() if layout != "dp1" or k != "recompute"}
    sample = {key: value[:2] for key, value in to_float64(draw.whole(0, batch)).items()}
    return weft.plan(
        model, layout, batch=batch, loss=loss, precision="fp64", sample=sample, **given
    )


def _part(
    draw: Draw, accumulate: int, batch: int, step: int, data_rank: int, data_size: int
) -> Batch:
    index = torch.tensor(data_rank_indices(batch, accumulate, data_rank, data_size))
    return {key: value[index] for key, value in draw.whole(step, batch).items()}
