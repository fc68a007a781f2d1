"""Nets that are refused on some layout, each beside the same after what the refusal says to do; and
families of transformers in small."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import VOCAB, FusedBlock, Subject
from tests.verification.nets_with_quirks import BYOL, RootExperts
from weft.losses import classification, next_token
from weft.nn.attention_masks import causal_mask

DIM = 16


def ran_once(build: Callable[[], nn.Module], data: Callable[[], Mapping[str, Tensor]]) -> nn.Module:
    """Run on a batch in the function that builds it."""
    model = build()
    names = [name for name in data() if name not in ("target", "labels", "label")]
    with torch.no_grad():
        model(**{name: data()[name] for name in names})
    return model


class TakesEntry(nn.Module):
    """Its forward names an entry of the batch, not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BatchNormed(TakesEntry):
    """Statistics of the batch in nn.BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class DropsBetween(nn.Module):
    """Recurrent layers with nn.Dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(width, DIM, batch_first=True) for width in (8, DIM))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.second(self.dropout(self.first(x)[0]))
        return self.head(out[:, -1])


class Noise(nn.Module):
    """Adds numbers of `rows`, which all samples share, and one row of each sample; or one number
    for each of its input."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.net = rows, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.rows:
            return self.net(x) + torch.randn_like(x[:, :4])
        return self.net(x) + torch.randn(self.rows, 4).mean(0) + torch.randn(len(x), 4)


class ChosenExperts(RootExperts):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.k, dim=-1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            hit = chosen == i
            rows = hit.any(-1).nonzero()[:, 0]
            if len(rows):
                share = (weights * hit).sum(-1)[rows].unsqueeze(-1)
                out = out.index_add(0, rows, expert(x[rows]) * share)
        return out


class ReadsInside(nn.Module):
    """Experts that are chosen, in a module that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.experts, self.head = nn.Linear(8, 8), ChosenExperts(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(self.stem(x)))


class UpdatedOutside(BYOL):
    """Its target is changed between steps, if at all."""

    def update(self) -> None:
        pass


class Blocks(nn.Module):
    """Token ids [b, s] -> logits [b, s, vocab] by blocks of this kind."""

    def __init__(self, make: Callable[[], nn.Module], residual: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.residual = residual

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x) if self.residual else block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal, by a mask that the model makes, by `is_causal`, or by `causal_mask`."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.qkv, self.proj = by, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        length, mask = x.shape[1], None
        if self.by == "own":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.by == "weft":
            mask = causal_mask(torch.arange(length).expand(len(x), -1))
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.proj(out.transpose(1, 2).flatten(2))


class DropsLayers(Blocks):
    """Leaves out a block with this chance, by Python's generator (LayerDrop, Fan et al. 2019).
    Blocks give zeros at first."""

    def __init__(self, chance: float) -> None:
        super().__init__(partial(Attention, "causal"))
        self.chance = chance
        for block in self.blocks:
            nn.init.zeros_(block.proj.weight)
            nn.init.zeros_(block.proj.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            if random.uniform(0, 1) < self.chance:
                continue
            x = x + block(x)
        return self.head(x)


class Jitters(TakesEntry):
    """Scales its input by a number of numpy's, up to this."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1 + self.most * float(numpy.random.rand())))


class FixedWidth(Attention):
    """Its code holds the width of all heads."""

    def __init__(self) -> None:
        super().__init__("causal")
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class ReadsElement(Blocks):
    """Reads an element of what it computes, before its blocks."""

    def __init__(self) -> None:
        super().__init__(FixedWidth)

    def forward(self, input_ids: Tensor) -> Tensor:
        if (self.embedding(input_ids) > 100).any():
            raise ValueError("the table is no table of small numbers")
        return super().forward(input_ids)


class OfTwo(nn.Module):
    """Attention whose queries and keys are of one tensor, and values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(DIM, DIM) for _ in range(4)
        )
        self.num_heads = 4

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(y))
        q, k, v = (z.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for z in projected)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class OfTwoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.narrow = OfTwo(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(torch.tanh(self.narrow(x)), x)


class OddNames(nn.Module):
    """A feed-forward outside of blocks, whose names tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.beta(torch.tanh(self.alpha(x)))


class NormedBetween(OddNames):
    """All features of its first linear meet before the second."""

    def forward(self, x: Tensor) -> Tensor:
        return self.beta(self.alpha(x).softmax(-1))


class ColumnAlone(nn.Module):
    """Two linears take what the first makes, whose name is that of a feed-forward's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.scale = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        return self.mean(h) * self.scale(h).exp()


class Scaled(nn.Module):
    """A feed-forward that gets a second tensor, which needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * scale.mean(-1, keepdim=True))


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.scale = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Scaled()}) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        scale = self.scale(x)
        for block in self.blocks:
            x = x + block["mlp"](x, scale)  # type: ignore[index]
        return self.head(x)


class Checkpointed(Blocks):
    """Computes its blocks again by itself."""

    def __init__(self, itself: bool) -> None:
        super().__init__(partial(FusedBlock, DIM, 4, 0.2))
        self.itself = itself

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.itself else block(x)
        return self.head(x)


class DropsFeatures(nn.Module):
    """Drops out by a function that is not made the same on every layout, or by nn.Dropout."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.own, self.dropout = own, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.feature_alpha_dropout(x, 0.3, self.training) if self.own else self.dropout(x)
        return self.second(x)


# ---- families of transformers --------------------------------------------------------------------

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "families"))


def family(name: str, task: str = "causal-lm") -> nn.Module:
    """A family of benchmarks/families, in small."""
    pytest.importorskip("transformers")
    from families import Family, build_alone, small_config

    return build_alone(Family(name, task), small_config(Family(name, task)))


def samples_of(name: str, task: str = "causal-lm") -> dict[str, Tensor]:
    from families import DATA, Family, samples

    held = samples(task, **DATA.get(Family(name, task).name, {}))
    rows = [held[i] for i in torch.randint(0, len(held), (8,)).tolist()]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def of_family(name: str, task: str = "causal-lm") -> Subject:
    loss = classification if "classification" in task else next_token
    return Subject(partial(family, name, task), partial(samples_of, name, task), loss)


def without_cache(name: str) -> nn.Module:
    from weft.nn import set_use_cache

    model: Any = family(name)
    set_use_cache(model.config, False)
    return model


def without_dropout(task: str) -> nn.Module:
    """Switch Transformers, with a dropout of 0 in its configuration."""
    pytest.importorskip("transformers")
    from families import Family, build_alone, small_config

    one = Family("switch_transformers", task)
    config = small_config(one)
    config.dropout_rate = 0.0
    return build_alone(one, config)


def big_bird() -> nn.Module:
    return ran_once(partial(family, "big_bird"), partial(samples_of, "big_bird"))


def ibert() -> nn.Module:
    """Its ranges of activations are changed outside of the forward, if at all."""
    model = family("ibert", "masked-lm")
    for module in model.modules():
        if "x_min" in module._buffers:
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
            module.training = False
    return model


class Carries(nn.Module):
    """Blocks, the second of which hands a tensor to the third by an attribute: it makes it "after"
    what it returns, "before" that, or has it "returned" too."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carrying(made if i == 1 else "") for i in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2:
                x = x + torch.tanh(self.blocks[1].carry)
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        return self.head(x)


class Carrying(nn.Module):
    carry: Tensor

    def __init__(self, made: str) -> None:
        super().__init__()
        self.up, self.down, self.made = nn.Linear(8, 8), nn.Linear(8, 8), made

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.made == "before":
            self.carry = self.up(x)
        out = x + self.down(torch.tanh(self.up(x)))
        if self.made in ("after", "returned"):
            self.carry = self.up(x)
        return (out, self.carry) if self.made == "returned" else out
