"""Nets of papers that broke a layout once: a stem that is shared, positions before samples, weights
that another module reads."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from weft.nn.losses import classification, next_token

DIM = 32


class BasicBlock(nn.Module):
    def __init__(self, i, o, s=1):
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, s, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.downsample = None
        if s != 1 or i != o:
            self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        identity = x
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return F.relu(out)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 8)

    def embed(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(x.mean((2, 3)))

    def forward(self, a, b):
        return self.embed(a), self.embed(b)


def contrast_loss(out, batch):
    a, b = out
    d = F.pairwise_distance(a, b)
    y = batch["same"]
    loss = y * d.pow(2) + (1 - y) * F.relu(1 - d).pow(2)
    return loss.sum(), torch.tensor(float(len(d)))


class CrossAttn(nn.Module):
    def __init__(self, qdim, kvdim, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(qdim, qdim, bias=False)
        self.to_kv = nn.Linear(kvdim, qdim * 2, bias=False)
        self.to_out = nn.Linear(qdim, qdim)

    def forward(self, x, context=None):
        context = x if context is None else context
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        b, h = q.shape[0], self.heads
        q, k, v = (t.view(b, t.shape[1], h, -1).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class Perceiver(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, DIM))
        self.cross = CrossAttn(DIM, 8)
        self.cross_ff = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 8 * DIM), GEGLU(), nn.Linear(4 * DIM, DIM)
        )
        self.layers = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        CrossAttn(DIM, DIM),
                        nn.Sequential(
                            nn.LayerNorm(DIM),
                            nn.Linear(DIM, 8 * DIM),
                            GEGLU(),
                            nn.Linear(4 * DIM, DIM),
                        ),
                    ]
                )
                for _ in range(depth)
            ]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5))

    def forward(self, x):
        z = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        z = self.cross(z, x) + z
        z = self.cross_ff(z) + z
        for attn, ff in self.layers:
            z = attn(z) + z
            z = ff(z) + z
        return self.to_logits(z.mean(dim=-2))


class PositionalEncoding(nn.Module):
    def __init__(self, d, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        pe = torch.zeros(max_len, 1, d)
        pos = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        pe[:, 0, 0::2] = torch.sin(pos * div)
        pe[:, 0, 1::2] = torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=DIM,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=64,
            dropout=0.1,
        )
        self.generator = nn.Linear(DIM, VOCAB)
        self.src_tok_emb = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.tgt_tok_emb = nn.Embedding(VOCAB, DIM)
        self.positional_encoding = PositionalEncoding(DIM)

    def forward(self, src, tgt):
        src_pad = src == 0
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
        tgt_mask = torch.triu(torch.ones(tgt.shape[0], tgt.shape[0], device=tgt.device), 1).bool()
        s = self.positional_encoding(self.src_tok_emb(src) * math.sqrt(DIM))
        t = self.positional_encoding(self.tgt_tok_emb(tgt) * math.sqrt(DIM))
        out = self.transformer(s, t, None, tgt_mask, None, src_pad, None, src_pad)
        return self.generator(out).transpose(0, 1)


class FiLMBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1)
        self.norm = nn.InstanceNorm2d(c, affine=False)

    def forward(self, x, gamma, beta):
        x = F.relu(self.conv1(x))
        h = self.norm(self.conv2(x))
        h = gamma[:, :, None, None] * h + beta[:, :, None, None]
        return x + F.relu(h)


class FiLM(nn.Module):
    def __init__(self, c=8, n=3):
        super().__init__()
        self.n, self.c = n, c
        self.embed = nn.Embedding(VOCAB, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.film_gen = nn.Linear(16, 2 * n * c)
        self.stem = nn.Conv2d(3, c, 3, 2, 1)
        self.blocks = nn.ModuleList([FiLMBlock(c) for _ in range(n)])
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(c, 5))

    def forward(self, image, question):
        _, h = self.gru(self.embed(question))
        film = self.film_gen(h[-1]).view(-1, self.n, 2, self.c)
        x = self.stem(image)
        for i, block in enumerate(self.blocks):
            x = block(x, film[:, i, 0], film[:, i, 1])
        return self.head(x)


class RelBias(nn.Module):
    def __init__(self, heads, buckets=16):
        super().__init__()
        self.buckets = buckets
        self.emb = nn.Embedding(2 * buckets + 1, heads)

    def forward(self, n):
        pos = torch.arange(n, device=self.emb.weight.device)
        rel = (pos[None, :] - pos[:, None]).clamp(-self.buckets, self.buckets) + self.buckets
        return self.emb(rel).permute(2, 0, 1).unsqueeze(0)


class RelAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.d = n_heads, dim // n_heads
        self.q, self.k, self.v = (
            nn.Linear(dim, dim, bias=False),
            nn.Linear(dim, dim, bias=False),
            nn.Linear(dim, dim, bias=False),
        )
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, bias):
        B, L, _ = x.shape
        q = self.q(x).view(B, L, self.n_heads, self.d).transpose(1, 2)
        k = self.k(x).view(B, L, self.n_heads, self.d).transpose(1, 2)
        v = self.v(x).view(B, L, self.n_heads, self.d).transpose(1, 2)
        s = q @ k.transpose(-1, -2) + bias
        s = s.masked_fill(
            torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, L, -1))


class RelBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = RelAttention(dim, heads)
        self.wi, self.wo = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, bias):
        x = x + self.attn(self.ln1(x), bias)
        return x + self.wo(F.relu(self.wi(self.ln2(x))))


class Universal(nn.Module):
    def __init__(self, steps=3):
        super().__init__()
        self.steps = steps
        self.emb, self.step_emb = (
            nn.Embedding(VOCAB, DIM),
            nn.Parameter(torch.randn(steps, DIM) * 0.02),
        )
        self.block = RelBlock(DIM, 4)
        self.rel = RelBias(4)
        self.halt = nn.Linear(DIM, 1)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        remain = torch.ones_like(x[..., :1])
        out = torch.zeros_like(x)
        bias = self.rel(x.shape[1])
        for s in range(self.steps):
            x = self.block(x + self.step_emb[s], bias)
            p = torch.sigmoid(self.halt(x)) if s < self.steps - 1 else torch.ones_like(remain)
            out = out + remain * p * x
            remain = remain * (1 - p)
        return self.head(out)


class VectorQuantizer(nn.Module):
    def __init__(self, n=16, d=8):
        super().__init__()
        self.embedding = nn.Embedding(n, d)
        self.embedding.weight.data.uniform_(-1 / n, 1 / n)

    def forward(self, z):
        zp = z.permute(0, 2, 3, 1).contiguous()
        flat = zp.view(-1, zp.shape[-1])
        d = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.embedding.weight.t()
            + self.embedding.weight.pow(2).sum(1)
        )
        idx = d.argmin(1)
        q = self.embedding(idx).view(zp.shape).permute(0, 3, 1, 2)
        return z + (q - z).detach(), q


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.vq = VectorQuantizer()
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, 1, 1)
        )

    def forward(self, x):
        z = self.enc(x)
        st, q = self.vq(z)
        return self.dec(st), q, z


def vq_loss(out, batch):
    rec, q, z = out
    loss = (
        (rec - batch["x"]).square().sum()
        + (q - z.detach()).square().sum()
        + 0.25 * (q.detach() - z).square().sum()
    )
    return loss, torch.tensor(float(rec.numel()))


def pairs():
    a, b = torch.randn(2, BATCH, 3, 16, 16)
    return {"a": a, "b": b, "same": torch.rand(BATCH).round()}


def pictures():
    return {"x": torch.rand(BATCH, 3, 16, 16)}


def sequences():
    return {"x": torch.randn(BATCH, LENGTH, 8), "label": torch.randint(0, 5, (BATCH,))}


def translations():
    src = torch.randint(1, VOCAB, (BATCH, LENGTH))
    src[::2, -3:] = 0
    return {"src": src, "tgt": torch.randint(1, VOCAB, (BATCH, LENGTH)), "labels": src}


def questions():
    return {
        "image": torch.randn(BATCH, 3, 16, 16),
        "question": torch.randint(0, VOCAB, (BATCH, 6)),
        "label": torch.randint(0, 5, (BATCH,)),
    }


PAPERS = {
    "siamese": Subject(Siamese, pairs, contrast_loss),
    "perceiver": Subject(Perceiver, sequences, classification),
    "time-major": Subject(Seq2SeqTransformer, translations, next_token),
    "film": Subject(FiLM, questions, classification),
    "universal": Subject(Universal, tokens, next_token),
    "vq-vae": Subject(VQVAE, pictures, vq_loss),
}
