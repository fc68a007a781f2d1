"""Nets as public repositories have them, in small."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from weft.nn.losses import classification, next_token


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


class NBeatsBlock(nn.Module):
    def __init__(self, length, ahead, units=16):
        super().__init__()
        self.fc = nn.ModuleList([nn.Linear(length, units), nn.Linear(units, units)])
        self.back, self.fore = nn.Linear(units, length), nn.Linear(units, ahead)

    def forward(self, x):
        for layer in self.fc:
            x = F.relu(layer(x))
        return self.back(x), self.fore(x)


class NBeats(nn.Module):
    """Blocks add their forecasts to a tensor of zeros, in place, one of them to a part of it."""

    def __init__(self, length=12, ahead=4):
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock(length, ahead) for _ in range(4))
        self.ahead, self.norm = ahead, nn.Parameter(torch.ones(1))

    def forward(self, history):
        x, forecast = history * self.norm, history.new_zeros(len(history), self.ahead)
        near = forecast[:, :2]
        for i, block in enumerate(self.blocks):
            back, ahead = block(x)
            x = x - back
            if i == 0:
                near += ahead[:, :2]
            else:
                forecast += ahead
        return torch.cat((forecast, near), 1)


class GATLayer(nn.Module):
    def __init__(self, ins, outs, heads, concat=True):
        super().__init__()
        self.heads, self.outs, self.concat = heads, outs, concat
        self.proj = nn.Linear(ins, heads * outs, bias=False)
        self.skip = nn.Linear(ins, heads * outs, bias=False)
        self.sends, self.takes = (nn.Parameter(torch.randn(heads, outs)) for _ in "12")

    def forward(self, data):
        x, (src, trg) = data
        h = self.proj(x).view(-1, self.heads, self.outs)
        s, t = (h * self.sends).sum(-1), (h * self.takes).sum(-1)
        scores = F.leaky_relu(s.index_select(0, src) + t.index_select(0, trg), 0.2).exp()
        total = torch.zeros_like(s).index_add_(0, trg, scores)
        sent = h.index_select(0, src) * (scores / total.index_select(0, trg)).unsqueeze(-1)
        places = trg[:, None, None].expand_as(sent)
        out = torch.zeros_like(h).scatter_add_(0, places, sent) + self.skip(x).view_as(h)
        return F.elu(out.flatten(1) if self.concat else out.mean(1)), data[1]


class GAT(nn.Module):
    """Graph attention by a list of edges; what a layer makes enters two linears of the next."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(GATLayer(6, 8, 4), GATLayer(32, 8, 2, concat=False))
        self.readout = nn.Linear(8, 5)

    def forward(self, nodes, edges):
        b, n, _ = nodes.shape
        edges = (edges + torch.arange(b, device=nodes.device)[:, None, None] * n).permute(1, 0, 2)
        x, _ = self.net((nodes.flatten(0, 1), edges.reshape(2, -1)))
        return self.readout(x.view(b, n, -1).mean(1))


class S4D(nn.Module):
    """A diagonal state space, whose kernel is a convolution in frequency space."""

    def __init__(self, h, n=2):
        super().__init__()
        self.log_dt, self.a_log = nn.Parameter(torch.rand(h) - 4), nn.Parameter(torch.zeros(h, n))
        self.c, self.skip = nn.Parameter(torch.randn(h, n, 2)), nn.Parameter(torch.randn(h))
        self.mix = nn.Sequential(nn.Conv1d(h, 2 * h, 1), nn.GLU(dim=-2))

    def forward(self, u):
        length, a = u.size(-1), -self.a_log.exp() * self.log_dt.exp().unsqueeze(-1)
        powers = torch.exp(a.unsqueeze(-1) * torch.arange(length, device=a.device))
        kernel = torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), powers + 0j).real
        made = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(made, n=2 * length)[..., :length] + u * self.skip.unsqueeze(-1)
        return self.mix(F.gelu(y))


class S4Model(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, d), nn.Linear(d, 5)
        self.layers, self.norms = (
            nn.ModuleList(make(d) for _ in "12") for make in (S4D, nn.LayerNorm)
        )

    def forward(self, x):
        x = self.encoder(x).mT
        for layer, norm in zip(self.layers, self.norms):
            x = norm((layer(x) + x).mT).mT
        return self.decoder(x.mT.mean(1))


def mse(out, batch):
    return F.mse_loss(out, batch["target"], reduction="sum"), torch.tensor(out.numel())


def squares(out, batch):
    return F.mse_loss(out, batch["image"].to(out.dtype), reduction="sum"), torch.tensor(out.numel())


def waves():
    return {"real": torch.randn(BATCH, 1, 32), "made": torch.randn(BATCH, 1, 32)}


def histories():
    return {"history": torch.randn(BATCH, 12), "target": torch.randn(BATCH, 6)}


def graphs():
    edges = torch.cat((torch.arange(5).expand(BATCH, 2, -1), torch.randint(5, (BATCH, 2, 9))), -1)
    return {"nodes": torch.randn(BATCH, 5, 6), "edges": edges, "labels": torch.arange(BATCH) % 5}


def series():
    return {"x": torch.randn(BATCH, 12, 6), "labels": torch.arange(BATCH) % 5}


def pictures():
    return {"image": torch.randn(BATCH, 3, 8, 8)}


REPOSITORIES = {
    "gshard": Subject(GShard, tokens, balanced),
    "n-beats": Subject(NBeats, histories, mse),
    "gat": Subject(GAT, graphs, classification),
    "s4d": Subject(S4Model, series, classification),
    "multi-period": Subject(MultiPeriod, waves, hinge),
    "skips-to-the-end": Subject(SkipsToTheEnd, pictures, squares),
}
