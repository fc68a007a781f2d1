"""Nets with a quirk that broke a layout once: experts at the root, gradients in a forward, a weight
that is returned, sparse gradients, state set from the first batch."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cases import BATCH, VOCAB, Subject, tokens
from weft.nn.losses import classification, cross_entropy, mse, next_token, vocab_parallel

DIM = 32


class ODEFunc(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, 32), nn.Tanh(), nn.Linear(32, d))
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return self.net(torch.cat([y, t.expand(y.shape[0], 1)], -1))


class NeuralODE(nn.Module):
    def __init__(self, steps=4):
        super().__init__()
        self.func, self.steps, self.readout = ODEFunc(), steps, nn.Linear(8, 4)

    def forward(self, x):
        h = 1.0 / self.steps
        for i in range(self.steps):
            t = torch.tensor(i * h, dtype=x.dtype, device=x.device)
            k1 = self.func(t, x)
            k2 = self.func(t + h / 2, x + h / 2 * k1)
            k3 = self.func(t + h / 2, x + h / 2 * k2)
            k4 = self.func(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.readout(x)


class Heads(NamedTuple):
    seg: torch.Tensor
    cls: torch.Tensor
    log_vars: torch.Tensor


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.InstanceNorm2d(8, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(),
        )
        self.seg_head = nn.Sequential(nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))
        self.cls_head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        f = self.backbone(x)
        return Heads(self.seg_head(f), self.cls_head(f), self.log_vars)


def mt_loss(out, batch):
    seg = F.binary_cross_entropy_with_logits(out.seg, batch["mask"], reduction="none").mean(
        (1, 2, 3)
    )
    cls = F.cross_entropy(out.cls, batch["label"], reduction="none")
    lv = out.log_vars
    total = (seg * torch.exp(-lv[0]) + lv[0] + cls * torch.exp(-lv[1]) + lv[1]).sum()
    return total, torch.tensor(float(len(cls)))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        import copy

        self.online = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    @torch.no_grad()
    def update(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.mul_(0.9).add_(o, alpha=0.1)

    def forward(self, a, b):
        self.update()
        with torch.no_grad():
            t = self.target(b)
        return self.predictor(self.online(a)), t


def byol_loss(out, batch):
    p, t = out
    return (2 - 2 * F.cosine_similarity(p, t.detach(), dim=-1)).sum(), torch.tensor(float(len(p)))


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.s = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 8), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 8))

    def forward(self, x):
        xm = x * self.mask
        s, t = self.s(xm) * (1 - self.mask), self.t(xm) * (1 - self.mask)
        return xm + (1 - self.mask) * (x * s.exp() + t), s.sum(-1)


class ActNorm(nn.Module):
    """Data-dependent init at the first forward (Glow)."""

    def __init__(self, d):
        super().__init__()
        self.loc, self.logs = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0))
                self.logs.data.copy_(-torch.log(x.std(0) + 1e-6))
                self.initialized.fill_(1)
        return (x + self.loc) * self.logs.exp(), self.logs.sum().expand(x.shape[0])


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        m = torch.tensor([0.0, 1.0] * 4)
        self.flows = nn.ModuleList([ActNorm(8), Coupling(m), ActNorm(8), Coupling(1 - m)])

    def forward(self, x):
        total = x.new_zeros(x.shape[0])
        for f in self.flows:
            x, ld = f(x)
            total = total + ld
        return x, total


def flow_loss(out, batch):
    z, logdet = out
    ll = -0.5 * (z**2 + math.log(2 * math.pi)).sum(-1) + logdet
    return -ll.sum(), torch.tensor(float(len(z)))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u_embeddings = nn.Embedding(VOCAB, 16, sparse=True)
        self.v_embeddings = nn.Embedding(VOCAB, 16, sparse=True)
        self.u_embeddings.weight.data.uniform_(-0.5, 0.5)

    def forward(self, center, context, negatives):
        u = self.u_embeddings(center)
        pos = (u * self.v_embeddings(context)).sum(-1)
        neg = torch.bmm(self.v_embeddings(negatives), u.unsqueeze(2)).squeeze(2)
        return pos, neg


def sgns_loss(out, batch):
    pos, neg = out
    return -(F.logsigmoid(pos).sum() + F.logsigmoid(-neg).sum()), torch.tensor(float(len(pos)))


class RootExperts(nn.Module):
    def __init__(self, n=4, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(8, n)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(n)]
        )
        with torch.no_grad():
            self.gate.bias[-1] = -100.0  # nobody chooses it

    def forward(self, x):
        w, idx = torch.topk(self.gate(x).softmax(-1), self.k, dim=-1)
        out = torch.zeros(x.size(0), 4, dtype=x.dtype, device=x.device)
        for i, expert in enumerate(self.experts):
            hit = idx == i
            rows = hit.any(-1)
            if rows.any():
                out[rows] += expert(x[rows]) * (w * hit).sum(-1)[rows].unsqueeze(-1)
        return out


class HNN(nn.Module):
    """Hamiltonian net: the output is a gradient."""

    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            H = self.h(x).sum()
            (g,) = torch.autograd.grad(H, x, create_graph=True)
        dq, dp = g.chunk(2, -1)
        return torch.cat([dp, -dq], -1)


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lambd):
        ctx.lambd = lambd
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lambd * g, None


class BinarySTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * (w.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, BinarySTE.apply(self.weight), self.bias)


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), BinaryLinear(32, 32), nn.ReLU())
        self.class_classifier = nn.Linear(32, 5)
        self.domain_classifier = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        f = self.feature(x)
        return self.class_classifier(f), self.domain_classifier(GradReverse.apply(f, 0.5))


def dann_loss(out, batch):
    y, d = out
    return F.cross_entropy(y, batch["label"], reduction="sum") + F.cross_entropy(
        d, batch["domain"], reduction="sum"
    ), torch.tensor(float(len(y)))


class LucidAttention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=16, dropout=0.0):
        super().__init__()
        inner = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = self.norm(x)
        b, n, _ = x.shape
        q, k, v = (
            t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        out = torch.matmul(attn, v).transpose(1, 2).reshape(b, n, -1)
        return self.to_out(out)


class PreNormFF(nn.Module):
    def __init__(self, dim, hidden, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class ViT(nn.Module):
    def __init__(self, dim=DIM, depth=2, p=4):
        super().__init__()
        self.p = p
        self.to_patch_embedding = nn.Sequential(
            nn.LayerNorm(3 * p * p), nn.Linear(3 * p * p, dim), nn.LayerNorm(dim)
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList([LucidAttention(dim, dropout=0.1), PreNormFF(dim, 64, 0.1)])
            )
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(dim, 5)

    def forward(self, x):
        b, c, h, w = x.shape
        p = self.p
        x = (
            x.reshape(b, c, h // p, p, w // p, p)
            .permute(0, 2, 4, 3, 5, 1)
            .reshape(b, (h // p) * (w // p), p * p * c)
        )
        x = self.to_patch_embedding(x)
        cls = self.cls_token.expand(b, -1, -1)
        x = torch.cat((cls, x), dim=1)
        x += self.pos_embedding[:, : x.shape[1]]
        x = self.dropout(x)
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(self.to_latent(x[:, 0]))


class TiedByFunction(nn.Module):
    """Scores the vocabulary with the embedding's weight, without a module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, input_ids):
        return F.linear(self.mlp(self.embedding(input_ids)), self.embedding.weight)


class ZeroExperts(nn.Module):
    """Experts in one parameter, beside some that do nothing (LongCat)."""

    def __init__(self, n=2, zero=2):
        super().__init__()
        self.n, self.gate = n, nn.Linear(8, n + zero, bias=False)
        self.w = nn.Parameter(torch.empty(n, 8, 8))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.w, std=0.3)

    def forward(self, x):
        p, idx = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for e in range(self.n):
            rows = (idx == e).nonzero().flatten()
            if rows.numel() == 0:
                continue
            y[rows] += p[rows, None] * torch.tanh(x[rows] @ self.w[e])
        return y


class ZeroExpertsBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.moe = nn.Parameter(torch.ones(8)), ZeroExperts()
        with torch.no_grad():  # the second half of the samples goes to those that do nothing
            self.moe.gate.weight.zero_()
            self.moe.gate.weight[:2, :2] = self.moe.gate.weight[2:, 2:] = 1.0

    def forward(self, x):
        x = x * self.scale
        return x + self.moe(x)


class ZeroExpertsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ZeroExpertsBlock() for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Patcher(nn.Module):
    """A second stack, listed last and run first, to which no gradient comes (BLT)."""

    def __init__(self):
        super().__init__()
        self.embed, self.small = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([self.block(DIM) for _ in range(3)])
        self.patcher = nn.ModuleList([self.block(16) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCAB)

    def block(self, d):
        return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, input_ids):
        p = self.small(input_ids)
        for layer in self.patcher:
            p = p + layer(p)
        x = self.embed(input_ids) * (1 + p.argmax(-1, keepdim=True) % 3)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class SeqFirst(nn.Module):
    """Positions before samples, without a module that says so (XLNet)."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Patcher.block(self, DIM) for _ in range(2)])
        self.drop = nn.Dropout(0.2)

    def forward(self, input_ids):
        x = self.drop(self.emb(input_ids.t()))
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x).transpose(0, 1)


@vocab_parallel
def tail_loss(logits, batch):
    """Scores the last positions alone."""
    return cross_entropy(logits[:, -3:], batch["input_ids"][:, -3:])


def vectors(width=4):
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, width)}


def clustered():
    """Each data rank has samples of its own kind: not all ranks choose the same experts."""
    batch = vectors()
    batch["x"] = torch.eye(8)[torch.arange(BATCH) // 2] * 20
    return batch


def labelled():
    x = torch.randn(BATCH, 8)
    label, domain = torch.randint(0, 5, (BATCH,)), torch.randint(0, 2, (BATCH,))
    return {"x": x, "label": label, "domain": domain}


def views():
    return {"a": torch.randn(BATCH, 8), "b": torch.randn(BATCH, 8)}


def pictures():
    x, mask = torch.randn(BATCH, 3, 16, 16), torch.rand(BATCH, 1, 16, 16).round()
    return {"x": x, "label": torch.randint(0, 5, (BATCH,)), "mask": mask}


def words():
    center, context = torch.randint(0, VOCAB, (2, BATCH))
    return {"center": center, "context": context, "negatives": torch.randint(0, VOCAB, (BATCH, 5))}


class Recurrent(nn.Module):
    """Two blocks that all tokens go through twice, each time with other dropout; the last dropout
    changes its input."""

    def __init__(self, d=DIM):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.Dropout(0.2))
            for _ in range(2)
        )
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for _ in range(2):
            for block in self.blocks:
                x = x + block(x)
        x = x + 0.0
        F.dropout(x, 0.2, self.training, inplace=True)
        return self.head(x)


QUIRKS = {
    "neural-ode": Subject(NeuralODE, vectors, mse),
    "multi-task": Subject(MultiTask, pictures, mt_loss),
    "byol": Subject(BYOL, views, byol_loss),
    "glow": Subject(Glow, vectors, flow_loss),
    "skip-gram": Subject(SkipGram, words, sgns_loss),
    "root-experts": Subject(RootExperts, clustered, mse),
    "hamiltonian": Subject(HNN, partial(vectors, 8), mse),
    "binary-dann": Subject(DANN, labelled, dann_loss),
    "lucid-vit": Subject(ViT, pictures, classification),
    "zero-experts": Subject(ZeroExpertsNet, clustered, mse),
    "patcher": Subject(Patcher, tokens, next_token),
    "seq-first": Subject(SeqFirst, tokens, next_token),
    "tail-loss": Subject(Patcher, tokens, tail_loss),
    "recurrent": Subject(Recurrent, tokens, next_token),
    "tied-by-function": Subject(TiedByFunction, tokens, next_token),
}
