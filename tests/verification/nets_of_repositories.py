"""Nets as public repositories have them, in small."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from weft.nn.losses import next_token


class Top2Gate(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.wg, self.experts = nn.Linear(dim, experts, bias=False), experts

    def forward(self, x):
        gates, capacity = self.wg(x).softmax(-1), x.shape[1]
        first = F.one_hot(gates.argmax(-1), self.experts).to(x.dtype)
        others = gates.masked_fill(first.bool(), float("-inf"))
        second = F.one_hot(others.argmax(-1), self.experts).to(x.dtype)
        places = first.cumsum(1) - first, second.cumsum(1) - second + first.sum(1, keepdim=True)
        aux = (gates.mean(1) * first.mean(1)).sum(-1) * self.experts
        combine = 0
        for mask, place in zip((first, second), places):
            mask = mask * (place < capacity)
            at = F.one_hot((place * mask).sum(-1).long(), capacity).to(x.dtype)
            combine = combine + (gates * mask)[..., None] * at[:, :, None]
        return aux, combine, combine.bool()


class MOELayer(nn.Module):
    """Keeps its loss for who reads it."""

    def __init__(self, dim=16, experts=4):
        super().__init__()
        self.gate = Top2Gate(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim)) for _ in range(experts)
        )
        self.aux = None

    def forward(self, x):
        self.aux, combine, dispatch = self.gate(x)
        sent = torch.einsum("bsec,bsm->ebcm", dispatch.to(x.dtype), x)
        made = torch.stack([expert(part) for expert, part in zip(self.experts, sent.unbind(0))])
        return torch.einsum("bsec,ebcm->bsm", combine, made)


class GShard(nn.Module):
    """Experts chosen by products, and their balance loss, which the model adds up."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, 16), nn.Embedding(LENGTH, 16)
        self.attns = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in "12")
        self.moes = nn.ModuleList(MOELayer() for _ in "12")
        self.n1 = nn.ModuleList(nn.LayerNorm(16) for _ in "12")
        self.n2 = nn.ModuleList(nn.LayerNorm(16) for _ in "12")
        self.out = nn.Linear(16, VOCAB)

    def forward(self, input_ids):
        s = input_ids.shape[1]
        x, aux = self.emb(input_ids) + self.pos.weight[:s], 0
        mask = nn.Transformer.generate_square_subsequent_mask(s, device=x.device, dtype=x.dtype)
        for attn, moe, n1, n2 in zip(self.attns, self.moes, self.n1, self.n2):
            h = n1(x)
            x = x + attn(h, h, h, attn_mask=mask, need_weights=False)[0]
            x = x + moe(n2(x))
            aux = aux + moe.aux
        return self.out(x), aux


def balanced(out, batch):
    total, count = next_token(out[0], batch)
    return total + 0.01 * out[1].sum() * LENGTH, count


class DiscriminatorP(nn.Module):
    def __init__(self, period, norm_f):
        super().__init__()
        self.period = period
        shape = {"kernel_size": (5, 1), "stride": (3, 1), "padding": (2, 0)}
        self.convs = nn.ModuleList(
            [norm_f(nn.Conv2d(1, 4, **shape)), norm_f(nn.Conv2d(4, 8, **shape))]
        )
        self.conv_post = norm_f(nn.Conv2d(8, 1, (3, 1), 1, padding=(1, 0)))

    def forward(self, x):
        fmap, (b, c, t) = [], x.shape
        if t % self.period:
            x = F.pad(x, (0, self.period - t % self.period), "reflect")
        x = x.view(b, c, -1, self.period)
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            fmap.append(x)
        x = self.conv_post(x)
        return x.flatten(1), [*fmap, x]


class MultiPeriod(nn.Module):
    """HiFi-GAN's discriminators, each called on what is real and on what was made."""

    def __init__(self):
        super().__init__()
        self.discriminators = nn.ModuleList(
            [
                DiscriminatorP(2, weight_norm),
                DiscriminatorP(3, weight_norm),
                DiscriminatorP(5, spectral_norm),
            ]
        )

    def forward(self, real, made):
        return [(*d(real), *d(made)) for d in self.discriminators]


def hinge(out, batch):
    total = 0
    for real, real_maps, made, made_maps in out:
        total = total + ((1 - real) ** 2).mean(1).sum() + (made**2).mean(1).sum()
        for one, other in zip(real_maps, made_maps):
            total = total + (one - other).abs().flatten(1).mean(1).sum()
    return total, torch.tensor(len(out[0][0]))


class ResnetBlock(nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, outs), nn.Conv2d(ins, outs, 3, padding=1)
        self.res_conv = nn.Conv2d(ins, outs, 1) if ins != outs else nn.Identity()

    def forward(self, x):
        return F.silu(self.norm(self.conv(x))) + self.res_conv(x)


class SkipsToTheEnd(nn.Module):
    """What enters the first block, and leaves its nn.Identity, meets the output of the last."""

    def __init__(self):
        super().__init__()
        self.init_conv, self.final_conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.blocks = nn.ModuleList([ResnetBlock(8, 8), ResnetBlock(8, 8)])
        self.final_block = ResnetBlock(16, 16)

    def forward(self, image):
        x = first = self.init_conv(image)
        for block in self.blocks:
            x = block(x)
        return self.final_conv(self.final_block(torch.cat((x, first), 1)))


def squares(out, batch):
    return F.mse_loss(out, batch["image"].to(out.dtype), reduction="sum"), torch.tensor(out.numel())


def waves():
    return {"real": torch.randn(BATCH, 1, 32), "made": torch.randn(BATCH, 1, 32)}


def pictures():
    return {"image": torch.randn(BATCH, 3, 8, 8)}


REPOSITORIES = {
    "gshard": Subject(GShard, tokens, balanced),
    "multi-period": Subject(MultiPeriod, waves, hinge),
    "skips-to-the-end": Subject(SkipsToTheEnd, pictures, squares),
}
