"""Nets after well-known architectures: gates, scans, masks and tables that are shared by positions,
samples or channels."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from weft.nn.losses import classification, mse, next_token


class WaveNet(nn.Module):
    """Dilated causal convolutions, gated; skips add up to what the head takes."""

    def __init__(self, c=8, dilations=(1, 2, 4)):
        super().__init__()
        self.emb, self.dilations = nn.Embedding(VOCAB, c), dilations
        self.convs = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=d) for d in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(c, 16, 1) for _ in dilations)
        self.residuals = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in dilations)
        self.end = nn.Sequential(
            nn.ReLU(), nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, VOCAB, 1)
        )

    def forward(self, input_ids):
        x, total = self.emb(input_ids).transpose(1, 2), 0
        for d, conv, skip, residual in zip(self.dilations, self.convs, self.skips, self.residuals):
            f, g = conv(F.pad(x, (d, 0))).chunk(2, dim=1)
            z = torch.tanh(f) * torch.sigmoid(g)
            total = total + skip(z)
            x = x + residual(z)
        return self.end(total).transpose(1, 2)


class SpatialGatingUnit(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(d), nn.Linear(n, n)
        nn.init.constant_(self.proj.bias, 1.0)

    def forward(self, x):
        u, v = x.chunk(2, dim=-1)
        v = self.proj(self.norm(v).transpose(1, 2)).transpose(1, 2)
        return u * v


class GMLPBlock(nn.Module):
    def __init__(self, d, hidden, n):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(d), nn.Linear(d, 2 * hidden)
        self.sgu, self.down = SpatialGatingUnit(hidden, n), nn.Linear(hidden, d)

    def forward(self, x):
        return x + self.down(self.sgu(F.gelu(self.up(self.norm(x)))))


class GMLP(nn.Module):
    """A linear over positions gates half of the features."""

    def __init__(self, d=16, n=16):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.blocks = nn.Sequential(*[GMLPBlock(d, 24, n) for _ in range(3)])
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(dim=1))


class MoDBlock(nn.Module):
    """Mixture of depths: a block computes the tokens that its router scores highest."""

    def __init__(self, d, heads, k):
        super().__init__()
        self.router, self.k, self.heads = nn.Linear(d, 1, bias=False), k, heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, _, d = x.shape
        weights, chosen = torch.topk(self.router(x).squeeze(-1), self.k, dim=1)
        chosen, order = torch.sort(chosen, dim=1)
        weights = weights.gather(1, order)
        index = chosen.unsqueeze(-1).expand(-1, -1, d)
        h = x.gather(1, index)
        q, k, v = self.qkv(self.n1(h)).view(b, self.k, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, -1, d)
        )
        h = h + self.out(a)
        h = h + self.ff(self.n2(h))
        return x.scatter_add(1, index, h * torch.sigmoid(weights).unsqueeze(-1))


class MixtureOfDepths(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(torch.randn(1, LENGTH, d) * 0.02)
        self.layers = nn.ModuleList(MoDBlock(d, 4, 6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.tok(input_ids) + self.pos[:, : input_ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MAB(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(d, d) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, q, k):
        q, k, v = self.fc_q(q), self.fc_k(k), self.fc_v(k)
        each = q.size(-1) // self.heads
        q_, k_, v_ = (torch.cat(t.split(each, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(q.size(-1)), 2)
        o = self.ln0(torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2))
        return self.ln1(o + F.relu(self.fc_o(o)))


class ISAB(nn.Module):
    def __init__(self, d, heads, inducing):
        super().__init__()
        self.points = nn.Parameter(torch.empty(1, inducing, d))
        nn.init.xavier_uniform_(self.points)
        self.mab0, self.mab1 = MAB(d, heads), MAB(d, heads)

    def forward(self, x):
        return self.mab1(x, self.mab0(self.points.repeat(x.size(0), 1, 1), x))


class SetTransformer(nn.Module):
    """Heads are laid along the samples, and attend to learned points."""

    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.Linear(3, d)
        self.enc = nn.Sequential(ISAB(d, 4, 3), ISAB(d, 4, 3))
        self.seed, self.pool = nn.Parameter(torch.randn(1, 1, d)), MAB(d, 4)
        self.dec = nn.Linear(d, 5)

    def forward(self, points):
        x = self.enc(self.embed(points))
        return self.dec(self.pool(self.seed.repeat(x.size(0), 1, 1), x)).squeeze(1)


class ModulatedConv2d(nn.Module):
    """A kernel for each sample: the samples become the groups of one convolution."""

    def __init__(self, ins, outs, w, k=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, outs, ins, k, k))
        self.style, self.k = nn.Linear(w, ins), k
        self.noise, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(outs))

    def forward(self, x, w):
        b, c, h, width = x.shape
        weight = self.weight * (self.style(w) + 1).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        weight = weight.view(-1, c, self.k, self.k)
        out = F.conv2d(x.reshape(1, b * c, h, width), weight, padding=self.k // 2, groups=b)
        out = out.view(b, -1, h, width)
        out = out + self.noise * torch.randn(b, 1, h, width, dtype=x.dtype, device=x.device)
        return F.leaky_relu(out + self.bias.view(1, -1, 1, 1), 0.2) * math.sqrt(2)


class StyleGenerator(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.mapping = nn.Sequential(
            *[m for _ in "123" for m in (nn.Linear(w, w), nn.LeakyReLU(0.2))]
        )
        self.const = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.convs = nn.ModuleList([ModulatedConv2d(8, 8, w), ModulatedConv2d(8, 6, w)])
        self.to_rgb = nn.ModuleList([nn.Conv2d(8, 3, 1), nn.Conv2d(6, 3, 1)])

    def forward(self, z):
        w = self.mapping(z * torch.rsqrt(z.pow(2).mean(1, keepdim=True) + 1e-8))
        x, rgb = self.const.repeat(z.shape[0], 1, 1, 1), None
        for i, (conv, to_rgb) in enumerate(zip(self.convs, self.to_rgb)):
            if i:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
                rgb = F.interpolate(rgb, scale_factor=2, mode="nearest")
            x = conv(x, w)
            rgb = to_rgb(x) if rgb is None else rgb + to_rgb(x)
        return torch.tanh(rgb)


def rotate(t, freqs):
    a, b = t.chunk(2, dim=-1)
    return t * freqs.cos() + torch.cat((-b, a), dim=-1) * freqs.sin()


class ParallelBlock(nn.Module):
    """PaLM's: one linear for many queries, one key, one value and a gated feed-forward."""

    def __init__(self, d, heads, each):
        super().__init__()
        self.heads, self.scale, self.norm = heads, each**-0.5, nn.LayerNorm(d)
        self.dims = (heads * each, each, each, 4 * d)
        self.fused = nn.Linear(d, sum(self.dims), bias=False)
        self.attn_out = nn.Linear(heads * each, d, bias=False)
        self.ff_out = nn.Sequential(nn.Linear(2 * d, d, bias=False))
        freq = 1.0 / (10000 ** (torch.arange(0, each, 2).float() / each))
        self.register_buffer("inv_freq", freq, persistent=False)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v, ff = self.fused(self.norm(x)).split(self.dims, dim=-1)
        q = q.view(b, n, self.heads, -1).transpose(1, 2)
        at = torch.arange(n, device=x.device).type_as(self.inv_freq)
        freqs = torch.einsum("i,j->ij", at, self.inv_freq).repeat(1, 2)
        q, k = rotate(q, freqs) * self.scale, rotate(k, freqs)
        sim = torch.einsum("bhid,bjd->bhij", q, k)
        mask = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
        attn = sim.masked_fill(mask, -torch.finfo(sim.dtype).max).softmax(dim=-1)
        out = torch.einsum("bhij,bjd->bhid", attn, v).transpose(1, 2).reshape(b, n, -1)
        gate, ff = ff.chunk(2, dim=-1)
        return x + self.attn_out(out) + self.ff_out(F.silu(gate) * ff)


class PaLM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(VOCAB, d),
            *[ParallelBlock(d, 4, 8) for _ in range(2)],
            nn.LayerNorm(d),
            nn.Linear(d, VOCAB, bias=False),
        )
        self.net[-1].weight = self.net[0].weight
        nn.init.normal_(self.net[0].weight, std=0.02)

    def forward(self, input_ids):
        return self.net(input_ids)


class MaskedAutoencoder(nn.Module):
    """Random patches of each sample are left out, and put back as one learned token."""

    def __init__(self, d=16, n=16, keep=6):
        super().__init__()
        self.patch, self.keep = nn.Linear(48, d), keep
        self.pos = nn.Parameter(torch.randn(1, n, d) * 0.02)
        self.decoder_pos = nn.Parameter(torch.randn(1, n, d) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        layer = {"d_model": d, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True)
        self.head = nn.Linear(d, 48)

    def forward(self, imgs):
        b = imgs.size(0)
        patches = imgs.view(b, 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, 16, 48)
        x = self.patch(patches) + self.pos
        noise = torch.rand(b, x.size(1), device=x.device)
        shuffle = noise.argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        kept = shuffle[:, : self.keep].unsqueeze(-1).expand(-1, -1, x.size(-1))
        x = self.encoder(x.gather(1, kept))
        x = torch.cat([x, self.mask_token.expand(b, restore.size(1) - self.keep, -1)], dim=1)
        x = x.gather(1, restore.unsqueeze(-1).expand(-1, -1, x.size(-1))) + self.decoder_pos
        mask = (restore >= self.keep).to(x.dtype)
        return ((self.head(self.decoder(x)) - patches) ** 2).mean(-1), mask


def of_masked(out, batch):
    error, mask = out
    return (error * mask).sum(), mask.sum()


class MaskedConv2d(nn.Conv2d):
    """Its forward sets weights to zero, in place, behind autograd's back."""

    def __init__(self, kind, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.ones_like(self.weight))
        _, _, h, w = self.weight.shape
        self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
        self.mask[:, :, h // 2 + 1 :] = 0

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class PixelCNN(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        layers = [MaskedConv2d("A", 1, c, 5, padding=2, bias=False), nn.GroupNorm(2, c), nn.ReLU()]
        for _ in range(2):
            layers += [
                MaskedConv2d("B", c, c, 3, padding=1, bias=False),
                nn.GroupNorm(2, c),
                nn.ReLU(),
            ]
        self.net = nn.Sequential(*layers, nn.Conv2d(c, 4, 1))

    def forward(self, image):
        return self.net(image)


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))
        self.transitions = nn.Parameter(torch.randn(tags, tags))

    def forward(self, emissions, tags):
        emissions, tags = emissions.transpose(0, 1), tags.transpose(0, 1)
        at = torch.arange(tags.size(1), device=tags.device)
        score = self.start[tags[0]] + emissions[0, at, tags[0]]
        alpha = self.start + emissions[0]
        for i in range(1, tags.size(0)):
            score += self.transitions[tags[i - 1], tags[i]] + emissions[i, at, tags[i]]
            each = alpha.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            alpha = torch.logsumexp(each, dim=1)
        score += self.end[tags[-1]]
        return torch.logsumexp(alpha + self.end, dim=1) - score


class BiLSTMCRF(nn.Module):
    """The model computes the likelihood of its tags, of which the loss takes the mean."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.hidden2tag, self.crf = nn.Linear(12, 5), CRF(5)

    def forward(self, words, tags):
        return self.crf(self.hidden2tag(self.lstm(self.emb(words))[0]), tags)


def nll(out, batch):
    return out.sum(), torch.tensor(float(len(out)))


class WindowAttention(nn.Module):
    def __init__(self, d, heads, w, shift):
        super().__init__()
        self.heads, self.w, self.shift = heads, w, shift
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.table = nn.Parameter(torch.zeros((2 * w - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        at = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        gap = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + w - 1
        self.register_buffer("index", gap[..., 0] * (2 * w - 1) + gap[..., 1])

    def forward(self, x):
        b, h, _, d = x.shape
        w, n = self.w, self.w**2
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = x.view(b, h // w, w, h // w, w, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, n, d)
        q, k, v = self.qkv(x).reshape(-1, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        attn = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        x = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(-1, n, d))
        x = x.view(b, h // w, h // w, w, w, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h, h, d)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class Windows(nn.Module):
    """Attention in windows, which lie along the samples; every other block shifts them."""

    def __init__(self, d=16):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 2, 2)
        self.attns = nn.ModuleList(WindowAttention(d, 4, 4, 2 * (i % 2)) for i in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d)) for _ in range(2)
        )
        self.reduce, self.head = nn.Linear(4 * d, 2 * d, bias=False), nn.Linear(2 * d, 5)

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        for i, (attn, mlp) in enumerate(zip(self.attns, self.mlps)):
            x = x + attn(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.head(self.reduce(x).mean((1, 2)))


def pictures():
    return {"x": torch.randn(BATCH, 3, 16, 16), "label": torch.randint(0, 5, (BATCH,))}


def clouds():
    return {"points": torch.randn(BATCH, 7, 3), "label": torch.randint(0, 5, (BATCH,))}


def latents():
    return {"z": torch.randn(BATCH, 8), "target": torch.rand(BATCH, 3, 8, 8)}


def unlabelled():
    return {"imgs": torch.randn(BATCH, 3, 16, 16)}


def digits():
    image = torch.randint(0, 4, (BATCH, 1, 8, 8))
    return {"image": image / 3.0, "label": image[:, 0]}


def tagged():
    words, tags = torch.randint(0, VOCAB, (BATCH, 7)), torch.randint(0, 5, (BATCH, 7))
    return {"words": words, "tags": tags}


def of_pixels(out, batch):
    total = F.cross_entropy(out, batch["label"], reduction="sum")
    return total, torch.tensor(batch["label"].numel())


ARCHITECTURES = {
    "wavenet": Subject(WaveNet, tokens, next_token),
    "gmlp": Subject(GMLP, pictures, classification),
    "mixture-of-depths": Subject(MixtureOfDepths, tokens, next_token),
    "set-transformer": Subject(SetTransformer, clouds, classification),
    "style-generator": Subject(StyleGenerator, latents, mse),
    "palm": Subject(PaLM, tokens, next_token),
    "masked-autoencoder": Subject(MaskedAutoencoder, unlabelled, of_masked),
    "pixel-cnn": Subject(PixelCNN, digits, of_pixels),
    "lstm-crf": Subject(BiLSTMCRF, tagged, nll),
    "windows": Subject(Windows, pictures, classification),
}
