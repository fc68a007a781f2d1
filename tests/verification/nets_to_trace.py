"""Mixers whose names say nothing of what they compute: what tensor parallel cuts of them, their
forward shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import VOCAB

DIM, HEADS, SIZE = 16, 4, 4


class Around(nn.Module):
    """A block: a mixer after a norm, and a residual."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.before, self.own = nn.LayerNorm(DIM), mixer

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        own = self.before(x)
        # one argument by its name, one by its place
        made = self.own(own, **others) if "bias" in others else self.own(own, *others.values())
        return x + (made[0] if isinstance(made, tuple) else made)


class Net(nn.Module):
    """Token ids [b, s] -> logits [b, s, vocab], by two blocks."""

    def __init__(self, mixer: Callable[[], nn.Module]):
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)
        self.parts = nn.ModuleList(Around(mixer()) for _ in range(2))
        self.last = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)  # a bias of zero hides how often it is added

    def forward(self, input_ids: Tensor) -> Tensor:
        x, others = self.table(input_ids), {}
        if hasattr(self.parts[0].own, "outside"):
            others = self.parts[0].own.outside(x)
        for part in self.parts:
            x = part(x, **others)
        return self.out(self.last(x))


def weigh(scores: Tensor) -> Tensor:
    """Causal weights of scores [..., s, s]."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def apart(x: Tensor) -> Tensor:
    """[..., heads * SIZE] -> [..., heads, SIZE]; a compiler knows no unflatten."""
    return x.view(*x.shape[:-1], -1, SIZE)


class ByHand(nn.Module):
    """Four linears, and an attention written as products."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(DIM, HEADS * SIZE) for _ in range(3))
        self.d, self.drop = nn.Linear(HEADS * SIZE, DIM), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (apart(each(x)) for each in (self.a, self.b, self.c))
        scores = torch.einsum("bihd,bjhd->bhij", a, b) * SIZE**-0.5
        mixed = torch.einsum("bhij,bjhd->bihd", self.drop(weigh(scores)), c)
        return self.d(mixed.flatten(-2))


class FillsPositions(ByHand):
    """Its view names heads and their size, and leaves the number of positions to torch: with half
    of the features, it runs as a module of all heads and half as many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.each = HEADS, SIZE

    def forward(self, x: Tensor) -> Tensor:
        made = (linear(x) for linear in (self.a, self.b, self.c))
        views = (each.view(len(x), -1, self.many, self.each) for each in made)
        q, k, v = (view.transpose(1, 2) for view in views)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.d(mixed.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class Interleaved(nn.Module):
    """One linear, whose features are query, key and value of each head in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)
        self.many = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.one(x).view(b, s, self.many, 3, SIZE).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.two(mixed.transpose(1, 2).reshape(b, s, self.many * SIZE))


class Tapped(Interleaved):
    """Takes the mean of as many positions as it has heads: one number is divided, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = HEADS

    def forward(self, x: Tensor) -> Tensor:
        near = F.pad(x, (0, 0, self.taps - 1, 0)).unfold(1, self.taps, 1)
        return super().forward(near.mean(-1))


class BiasedByPosition(Interleaved):
    """What a linear makes of positions is a bias of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Linear(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.one(x).view(b, s, self.many, 3, SIZE).permute(3, 0, 2, 1, 4)
        bias = self.near(x).mT.unsqueeze(-1).expand(-1, -1, -1, s)
        places = torch.arange(s).expand(*bias.shape[:2], s, s)
        bias = bias.gather(2, (places - places.mT).clamp(0))
        mixed = F.scaled_dot_product_attention(q, k, v, bias)
        return self.two(mixed.transpose(1, 2).reshape(b, s, self.many * SIZE))


class InThirds(nn.Module):
    """One linear, whose features are all queries, all keys, all values, with a norm of each head
    and a weight of each head that takes no part in the sum (a sink)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)
        self.scale, self.drain = nn.RMSNorm(SIZE), nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, -1, SIZE).transpose(1, 2) for t in self.one(x).chunk(3, -1))
        scores = self.scale(q) @ self.scale(k).mT
        drain = self.drain.reshape(1, -1, 1, 1).expand(b, -1, s, 1)
        weights = torch.cat([torch.where(torch.ones(s, s).tril() > 0, scores, -1e9), drain], -1)
        mixed = weights.softmax(-1)[..., :-1] @ v
        return self.two(mixed.transpose(1, 2).reshape(b, s, -1))


class Grouped(nn.Module):
    """Two queries share a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HEADS * SIZE), nn.Linear(DIM, HEADS * SIZE // 2)
        self.c, self.d = nn.Linear(DIM, HEADS * SIZE // 2), nn.Linear(HEADS * SIZE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (t(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in (self.a, self.b, self.c))
        b, c = b.repeat_interleave(2, 1), c.repeat_interleave(2, 1)
        return self.d((weigh(a @ b.mT) @ c).transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """A gated feed-forward of one linear, with a weight of each hidden feature."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)
        self.each = nn.Parameter(torch.rand(2 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wide(x).chunk(2, -1)
        return self.narrow(torch.tanh(left * self.each) * right)


class Convolved(nn.Module):
    """A causal convolution of each feature between two linears, as in Mamba's mixers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.along = nn.Conv1d(2 * DIM, 2 * DIM, 3, groups=2 * DIM, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.along(self.a(x).mT)[..., : x.shape[1]]).mT)


class Spectral(nn.Module):
    """Hidden features are filtered along the sequence, each by a kernel of its own (Hyena, S4)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.kernel = nn.Parameter(torch.randn(2 * DIM, 3))

    def forward(self, x: Tensor) -> Tensor:
        length = 2 * x.shape[1]
        seen, kernel = (torch.fft.rfft(t, n=length) for t in (self.a(x).mT, self.kernel))
        return self.b(torch.fft.irfft(seen * kernel, n=length)[..., : x.shape[1]].mT)


class AlongEdges(nn.Module):
    """Each head weighs the neighbours of a node by an edge list (graph attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)
        self.score = nn.Parameter(torch.randn(HEADS, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        nodes = apart(self.a(x)).flatten(0, 1)
        source = torch.arange(len(nodes)).repeat_interleave(2)
        target = source - source % x.shape[1]
        scores = (nodes * self.score).sum(-1)
        scores = (scores.index_select(0, source) + scores[target]).exp()
        total = torch.zeros_like(scores[: len(nodes)]).index_add_(0, target, scores)
        sent = nodes[source] * (scores / total[target].clamp_min(1e-9)).unsqueeze(-1)
        places = target[:, None, None].expand_as(sent)
        got = torch.zeros_like(nodes).scatter_add(0, places, sent) + nodes.gather(0, places)[::2]
        return self.b(got.flatten(1).unflatten(0, x.shape[:2]))


class LooksUpHeads(AlongEdges):
    """Heads are looked up by their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        heads = apart(self.a(x)).index_select(-2, torch.arange(HEADS).flip(0))
        return self.b((heads * self.score).flatten(-2))


class MixesChannels(Convolved):
    """A convolution of each eight features between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(2 * DIM, 2 * DIM, 3, groups=4, padding=2)


class SharedGate(nn.Module):
    """Heads share what a linear makes of the input beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)
        self.gate = nn.Linear(DIM, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).unflatten(-1, (-1, SIZE)) * self.gate(x).unsqueeze(-2)
        return self.b(heads.flatten(-2))


class WrittenBeside(nn.Module):
    """Keys are what each head has and what all heads share, written into one tensor, as in
    LongCat."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * HEADS * SIZE), nn.Linear(DIM, 2 * HEADS * SIZE)
        self.c, self.d = nn.Linear(DIM, SIZE), nn.Linear(HEADS * SIZE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (t(x).unflatten(-1, (-1, 2 * SIZE)).transpose(1, 2) for t in (self.a, self.b))
        keys = x.new_empty(b.shape)
        keys[..., :SIZE] = b[..., :SIZE]
        keys[..., SIZE:] = self.c(x).unsqueeze(1)
        return self.d((weigh(a @ keys.mT) @ b[..., SIZE:]).transpose(1, 2).flatten(-2))


class NormedWhole(nn.Module):
    """A norm over the features of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.over = nn.LayerNorm(2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.over(self.a(x)))


class Talking(ByHand):
    """Scores of all heads are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (each(x).unflatten(-1, (HEADS, SIZE)) for each in (self.a, self.b, self.c))
        scores = self.mix(torch.einsum("bihd,bjhd->bijh", a, b)).permute(0, 3, 1, 2)
        mixed = torch.einsum("bhij,bjhd->bihd", weigh(scores), c)
        return self.d(mixed.flatten(-2))


class Constant(nn.Module):
    """The number of heads is a constant, of which no rank can have a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).unflatten(-1, (HEADS, SIZE)).softmax(-1).flatten(-2))


class TwoActivations(nn.Module):
    """The first features have another activation, which the first rank alone would have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(torch.cat([hidden[..., :2].relu(), hidden[..., 2:].tanh()], -1))


class ZeroesFirst(TwoActivations):
    """A number is written over the first features."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh().clone()
        hidden[..., :2] = 0
        return self.b(hidden)


class HeadByHead(TwoActivations):
    """A loop over heads, of which each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.each = DIM // 2

    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).unflatten(-1, (-1, self.each)).unbind(-2)
        return self.b(torch.cat([head.softmax(-1) for head in heads], -1))


class Mirrored(nn.Module):
    """Each feature of the hidden layer meets that of the same number from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden * hidden.flip(-1))


class Penalized(nn.Module):
    """A weight is also read outside of its linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x))) * self.a.weight.square().mean()


class Numbered(nn.Module):
    """Hidden features are multiplied by their numbers, which no parameter holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(F.gelu(hidden * torch.arange(hidden.shape[-1]).to(x.dtype)))


class Scaled(nn.Module):
    """A norm by the root mean square, whose weight is added to one."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.randn(features) * 0.3), 0.1

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.epsilon) * (1 + self.weight)


class NormedHeads(ByHand):
    """Queries, keys and what enters the row are normalised over all heads."""

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.b, self.c = (nn.Linear(DIM, groups * SIZE) for _ in range(2))
        self.e = nn.RMSNorm(HEADS * SIZE, eps=0.1)
        self.f, self.g = Scaled(groups * SIZE), Scaled(HEADS * SIZE)
        nn.init.normal_(self.e.weight)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.e(self.a(x)), self.f(self.b(x)), self.c(x)
        a, b, c = (apart(each).transpose(1, 2) for each in (a, b, c))
        mixed = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        return self.d(self.g(mixed.transpose(1, 2).flatten(-2)))


class Picked(nn.Module):
    """Queries by a latent, and an indexer that picks the keys of each position. It gives what it
    picks and its weights too, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 4), nn.Linear(4, HEADS * SIZE)
        self.c, self.d = nn.Linear(DIM, 2 * HEADS * SIZE), nn.Linear(HEADS * SIZE, DIM)
        self.e, self.f = nn.Linear(4, SIZE), nn.Linear(DIM, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent = self.a(x)
        q = self.b(latent).unflatten(-1, (-1, SIZE))
        k, v = self.c(x).unflatten(-1, (-1, 2 * SIZE)).chunk(2, -1)
        s = x.shape[1]
        later = torch.ones(s, s, dtype=torch.bool).triu(1)
        picks = (self.e(latent) @ self.f(x).mT).masked_fill(later, -1e9).topk(3, -1).indices
        others = torch.ones_like(picks[..., :1].expand(-1, -1, s), dtype=torch.bool)
        hidden = later | others.scatter(-1, picks, False)
        scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(hidden[:, None], float("-inf"))
        weights = scores.softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v)
        return self.d(mixed.flatten(-2)), weights, picks


class Product(nn.Linear):
    """A linear by a forward of its own, as nn.Linear computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class OwnProducts(ByHand):
    """The last linear of an attention has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.d = Product(HEADS * SIZE, DIM)


class Biased(ByHand):
    """Each head has a bias for each distance, which is added to the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.randn(9, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.a, self.b, self.c))
        at = torch.arange(x.shape[1])
        away = (at[:, None] - at).clamp(-4, 4) + 4
        later = torch.zeros(away.shape).masked_fill(at > at[:, None], float("-inf"))
        mask = self.near[away].permute(2, 0, 1)[None] + later
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return self.d(mixed.transpose(1, 2).flatten(-2))


class Sloped(ByHand):
    """The model makes biases for all heads [heads, 1, s], as MPT: those of distance (ALiBi)."""

    def outside(self, x: Tensor) -> dict[str, Tensor]:
        slopes = 0.5 ** torch.arange(HEADS, dtype=x.dtype)
        return {"bias": slopes[:, None, None] * torch.arange(x.shape[1], dtype=x.dtype)}

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        a, b, c = (apart(each(x)) for each in (self.a, self.b, self.c))
        scores = torch.einsum("bihd,bjhd->bhij", a, b) + bias
        return self.d(torch.einsum("bhij,bjhd->bihd", weigh(scores), c).flatten(-2))


class SlopedSamples(Sloped):
    """The same for each sample [b * heads, 1, s], as Bloom."""

    def outside(self, x: Tensor) -> dict[str, Tensor]:
        return {"each": super().outside(x)["bias"].repeat(len(x), 1, 1)}

    def forward(self, x: Tensor, each: Tensor) -> Tensor:
        return super().forward(x, each.view(len(x), -1, *each.shape[1:]))


class SlopedByParameter(Sloped):
    """The model makes them of a parameter, so that they have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def outside(self, x: Tensor) -> dict[str, Tensor]:
        return {"bias": self.slopes[:, None, None] * torch.arange(x.shape[1], dtype=x.dtype)}


class SlopedByRow(Sloped):
    """All heads have the same."""

    def outside(self, x: Tensor) -> dict[str, Tensor]:
        return {"bias": super().outside(x)["bias"][:1]}


@dataclass(frozen=True)
class Expected:
    """A mixer, and which of its parameters tensor parallel divides."""

    mixer: Callable[[], nn.Module]
    cut: tuple[str, ...] = ()


LINEARS = ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias", "d.weight")
TO_TRACE = {
    "by-hand": Expected(ByHand, LINEARS),
    "by-hand-dropout": Expected(partial(ByHand, 0.2), LINEARS),
    "fills-positions": Expected(FillsPositions, LINEARS),
    "interleaved": Expected(Interleaved, ("one.weight", "one.bias", "two.weight")),
    "tapped": Expected(Tapped, ("one.weight", "one.bias", "two.weight")),
    "biased-by-position": Expected(
        BiasedByPosition, ("one.weight", "one.bias", "near.weight", "near.bias", "two.weight")
    ),
    "in-thirds": Expected(InThirds, ("drain", "one.weight", "one.bias", "two.weight")),
    "grouped": Expected(Grouped, LINEARS),
    "gated": Expected(Gated, ("each", "wide.weight", "wide.bias", "narrow.weight")),
    "convolved": Expected(
        Convolved, ("a.weight", "a.bias", "b.weight", "along.weight", "along.bias")
    ),
    "mixes-channels": Expected(
        MixesChannels, ("a.weight", "a.bias", "b.weight", "along.weight", "along.bias")
    ),
    "spectral": Expected(Spectral, ("kernel", "a.weight", "a.bias", "b.weight")),
    "along-edges": Expected(AlongEdges, ("score", "a.weight", "a.bias", "b.weight")),
    "looks-up-heads": Expected(LooksUpHeads),
    "shared-gate": Expected(SharedGate, ("a.weight", "a.bias", "b.weight")),
    "written-beside": Expected(WrittenBeside),
    "normed-heads": Expected(NormedHeads, (*LINEARS, "e.weight", "f.weight", "g.weight")),
    "normed-groups": Expected(
        partial(NormedHeads, 2), (*LINEARS, "e.weight", "f.weight", "g.weight")
    ),
    "picked": Expected(Picked, ("b.weight", "b.bias", "c.weight", "c.bias", "d.weight")),
    "own-products": Expected(OwnProducts, LINEARS),
    "sloped": Expected(Sloped, LINEARS),
    "sloped-samples": Expected(SlopedSamples, LINEARS),
    "sloped-by-row": Expected(SlopedByRow, LINEARS),
    "sloped-by-parameter": Expected(SlopedByParameter),
    "biased": Expected(Biased, ("near", *LINEARS)),
    "normed-whole": Expected(NormedWhole),
    "talking": Expected(Talking),
    "constant": Expected(Constant),
    "two-activations": Expected(TwoActivations),
    "zeroes-first": Expected(ZeroesFirst),
    "head-by-head": Expected(HeadByHead, ("a.weight", "a.bias", "b.weight")),
    "mirrored": Expected(Mirrored),
    "penalized": Expected(Penalized),
    "numbered": Expected(Numbered),
}
