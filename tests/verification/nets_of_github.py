"""Nets as repositories of one paper write them: windows by strides, latent keys, layers copied by
deepcopy, weights that are set before each call, neurons that remember, recursion over trees.
"""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import copy
import math
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import BATCH, VOCAB, Subject, images, tokens
from weft.nn.losses import classification, mse, next_token


class Residual(nn.Module):
    def __init__(self, norm, fn):
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs) + x


def feed_forward(d, mult=2):
    return nn.Sequential(nn.Linear(d, d * mult), nn.GELU(), nn.Linear(d * mult, d))


class LongformerAttention(nn.Module):
    """Longformer's sliding chunks (Beltagy et al. 2020): overlapping windows by as_strided."""

    def __init__(self, d, heads, w):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.num_heads, self.head_dim, self.w = heads, d // heads, w

    @staticmethod
    def _chunk(x, w):
        x = x.view(x.size(0), x.size(1) // (w * 2), w * 2, x.size(2))
        size, stride = list(x.size()), list(x.stride())
        size[1] = size[1] * 2 - 1
        stride[1] = stride[1] // 2
        return x.as_strided(size=size, stride=stride)

    def forward(self, hidden_states):
        hidden_states = hidden_states.transpose(0, 1)
        seq_len, batch_size, embed_dim = hidden_states.size()
        q, k, v = (f(hidden_states) for f in (self.query, self.key, self.value))
        q /= math.sqrt(self.head_dim)
        q, k, v = (
            t.view(seq_len, batch_size, self.num_heads, self.head_dim)
            .permute(1, 2, 0, 3)
            .reshape(batch_size * self.num_heads, seq_len, self.head_dim)
            for t in (q, k, v)
        )
        w = self.w
        qc, kc, vc = (self._chunk(t.contiguous(), w) for t in (q, k, v))
        scores = torch.einsum("bcxd,bcyd->bcxy", (qc, kc))
        mask = torch.ones(2 * w, 2 * w).triu(1).bool()
        scores.masked_fill_(mask, -float("inf"))
        out = torch.einsum("bcxy,bcyd->bcxd", (scores.softmax(dim=-1), vc))
        full = out.new_zeros(q.shape)
        full[:, : 2 * w] = out[:, 0]
        for c in range(1, out.size(1)):
            full[:, (c + 1) * w : (c + 2) * w] = out[:, c, w:]
        full = full.view(batch_size, self.num_heads, seq_len, self.head_dim)
        return full.transpose(1, 2).reshape(batch_size, seq_len, embed_dim)


class Longformer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.layers = nn.ModuleList([])
        for _ in range(2):
            self.layers.append(
                nn.ModuleList(
                    [
                        Residual(nn.LayerNorm(d), LongformerAttention(d, 4, 3)),
                        Residual(nn.LayerNorm(d), feed_forward(d)),
                    ]
                )
            )

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for attn, ff in self.layers:
            x = ff(attn(x))
        return self.head(x)


def rotate_half(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): keys and values from one small latent, and one
    rotary key for all heads."""

    def __init__(self, d, heads, nope=4, rope=4, v_dim=6, q_rank=8, kv_rank=6):
        super().__init__()
        self.n_heads, self.nope, self.rope, self.v_dim, self.kv_rank = (
            heads,
            nope,
            rope,
            v_dim,
            kv_rank,
        )
        self.wq_a, self.q_norm = nn.Linear(d, q_rank, bias=False), nn.RMSNorm(q_rank)
        self.wq_b = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(d, kv_rank + rope, bias=False), nn.RMSNorm(kv_rank)
        self.wkv_b = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.wo = nn.Linear(heads * v_dim, d, bias=False)
        self.softmax_scale = (nope + rope) ** -0.5

    def forward(self, x, freqs_cis, mask):
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(bsz, seqlen, self.n_heads, -1)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_rank, self.rope], dim=-1)
        cos, sin = freqs_cis
        q_pe = q_pe * cos.unsqueeze(1) + rotate_half(q_pe) * sin.unsqueeze(1)
        k_pe = (k_pe * cos + rotate_half(k_pe) * sin).unsqueeze(2)
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, self.n_heads, self.nope + self.v_dim)
        k_nope, v = torch.split(kv, [self.nope, self.v_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        x = torch.einsum("bsht,bthd->bshd", scores, v)
        return self.wo(x.flatten(2))


class DeepSeek(nn.Module):
    def __init__(self, d=16, heads=4):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, d), nn.RMSNorm(d)
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.attn, layer.ffn = MLA(d, heads), feed_forward(d)
            layer.attn_norm, layer.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)
            self.layers.append(layer)
        self.head = nn.Linear(d, VOCAB, bias=False)
        t = torch.outer(torch.arange(32), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))
        t = t.repeat_interleave(2, -1)
        self.register_buffer("cos", t.cos(), persistent=False)
        self.register_buffer("sin", t.sin(), persistent=False)

    def forward(self, input_ids):
        seqlen = input_ids.size(1)
        h = self.embed(input_ids)
        freqs = self.cos[:seqlen], self.sin[:seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf"), device=h.device).triu_(1)
        for layer in self.layers:
            h = h + layer.attn(layer.attn_norm(h), freqs, mask)
            h = h + layer.ffn(layer.ffn_norm(h))
        return self.head(self.norm(h))


class DiffAttention(nn.Module):
    """Differential attention (Ye et al. 2024): one map minus a learned share of another."""

    def __init__(self, d, heads, depth):
        super().__init__()
        self.num_heads, self.head_dim = heads, d // heads // 2
        self.q_proj, self.k_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v_proj, self.out_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1)))
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=1e-5)

    def forward(self, x):
        bsz, tgt_len, _ = x.size()
        q = self.q_proj(x).view(bsz, tgt_len, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, tgt_len, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, tgt_len, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        q *= self.head_dim**-0.5
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights += torch.triu(torch.zeros([tgt_len, tgt_len]).fill_(float("-inf")), 1)
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1).float()).type_as(q)
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1).float()).type_as(q)
        lambda_full = lambda_1 - lambda_2 + self.lambda_init
        weights = weights.view(bsz, self.num_heads, 2, tgt_len, tgt_len)
        weights = weights[:, :, 0] - lambda_full * weights[:, :, 1]
        attn = self.subln(torch.matmul(weights, v)) * (1 - self.lambda_init)
        return self.out_proj(
            attn.transpose(1, 2).reshape(bsz, tgt_len, self.num_heads * 2 * self.head_dim)
        )


class DiffTransformer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(torch.randn(1, 32, d) * 0.02)
        self.blocks = nn.ModuleDict()
        for i in range(2):
            self.blocks[f"attn{i}"] = DiffAttention(d, 4, i)
            self.blocks[f"mlp{i}"] = feed_forward(d)
            self.blocks[f"n{i}"] = nn.RMSNorm(d)
        self.head = nn.Linear(d, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, input_ids):
        x = self.tok(input_ids) + self.pos[:, : input_ids.size(-1)]
        for i in range(2):
            x = x + self.blocks[f"attn{i}"](F.rms_norm(x, x.shape[-1:]))
            x = x + self.blocks[f"mlp{i}"](self.blocks[f"n{i}"](x))
        return self.head(x)


class SqrtBoundDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output / torch.sqrt(torch.clip(4.0 * x, min=1 / 1000.0**2))


class BlockDiagonalLinear(nn.Module):
    def __init__(self, width, num_blocks):
        super().__init__()
        self.num_blocks, block = num_blocks, width // num_blocks
        self.w = nn.Parameter(torch.randn(num_blocks, block, block) * block**-0.5)
        self.b = nn.Parameter(torch.zeros(num_blocks, block))

    def forward(self, x):
        x = x.view(*x.shape[:-1], self.num_blocks, -1)
        y = torch.einsum("... h i, h i j -> ... h j", x, self.w) + self.b
        return y.flatten(-2)


class RecurrentBlock(nn.Module):
    """Griffin's recurrent block (De et al. 2024): a gated linear recurrence beside a GELU."""

    def __init__(self, d, width, heads=4):
        super().__init__()
        self.linear_y, self.linear_x = nn.Linear(d, width), nn.Linear(d, width)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.input_gate, self.a_gate = (BlockDiagonalLinear(width, heads) for _ in range(2))
        self.a_param = nn.Parameter(torch.rand(width) + 0.5)
        self.linear_out = nn.Linear(width, d)

    def rglru(self, x):
        gate_x, gate_a = torch.sigmoid(self.input_gate(x)), torch.sigmoid(self.a_gate(x))
        log_a = -8.0 * gate_a * F.softplus(self.a_param)
        a, a_square = torch.exp(log_a), torch.exp(2 * log_a)
        x = x * gate_x
        normed = x * SqrtBoundDerivative.apply(1 - a_square)
        h, ys = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + normed[:, t]
            ys.append(h)
        return torch.stack(ys, dim=1)

    def forward(self, x):
        y = F.gelu(self.linear_y(x), approximate="tanh")
        x = self.linear_x(x)
        x = self.conv(x.transpose(1, 2))[..., : y.shape[1]].transpose(1, 2)
        return self.linear_out(self.rglru(x) * y)


class Griffin(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.d, self.embedder = d, nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(Residual(nn.RMSNorm(d), m), Residual(nn.RMSNorm(d), feed_forward(d)))
            for m in (RecurrentBlock(d, 24), RecurrentBlock(d, 24))
        )

    def forward(self, input_ids):
        x = self.embedder(input_ids) * math.sqrt(self.d)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embedder.weight.t()
        return torch.tanh(logits / 30.0) * 30.0


class Sin(nn.Module):
    def __init__(self, dim, w=10):
        super().__init__()
        self.freq = nn.Parameter(w * torch.ones(1, dim))

    def forward(self, x):
        return torch.sin(self.freq * x)


def fftconv(u, k, D):
    seqlen = u.shape[-1]
    k_f = torch.fft.rfft(k, n=2 * seqlen) / (2 * seqlen)
    u_f = torch.fft.rfft(u.to(dtype=k.dtype), n=2 * seqlen)
    y = torch.fft.irfft(u_f * k_f, n=2 * seqlen, norm="forward")[..., :seqlen]
    return (y + u * D.unsqueeze(-1)).to(dtype=u.dtype)


class HyenaOperator(nn.Module):
    """Long convolutions whose kernels an MLP of the position computes (Poli et al. 2023)."""

    def __init__(self, d, l_max, order=2):
        super().__init__()
        self.order, self.d_model, inner = order, d, d * (order + 1)
        self.in_proj, self.out_proj = nn.Linear(d, inner), nn.Linear(d, d)
        self.short_filter = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        t = torch.linspace(0, 1, l_max)[None, :, None]
        w = 2 * math.pi * torch.linspace(0, l_max - 1, l_max)[None, :, None] / l_max
        z = torch.exp(-1j * torch.linspace(1e-4, 1, 2)[None, None] * w)
        self.register_buffer("z", torch.cat([t, z.real, z.imag], dim=-1))
        self.register_buffer("t", t)
        self.register_buffer("deltas", torch.linspace(-4.6, -15.3, d)[None, None])
        act = Sin(8)
        self.implicit_filter = nn.Sequential(nn.Linear(5, 8), act, nn.Linear(8, 8), act)
        self.implicit_filter.append(nn.Linear(8, d * (order - 1), bias=False))
        self.bias = nn.Parameter(torch.randn(d * (order - 1)))

    def forward(self, u):
        L = u.size(-2)
        u = self.in_proj(u).transpose(1, 2)
        uc = self.short_filter(u)[..., :L]
        *x, v = uc.split(self.d_model, dim=1)
        k = self.implicit_filter(self.z[:, :L]) * torch.exp(-self.t[:, :L] * self.deltas.abs())
        k = k.transpose(1, 2).reshape(self.order - 1, self.d_model, L)
        for o, x_i in enumerate(reversed(x[1:])):
            v = fftconv(v * x_i, k[o], self.bias.view(self.order - 1, -1)[o])
        return self.out_proj((v * x[0]).transpose(1, 2))


class Hyena(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.emb, self.ln_f = nn.Embedding(VOCAB, d), nn.LayerNorm(d)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "mixer": HyenaOperator(d, 16),
                    "norm1": nn.LayerNorm(d),
                    "norm2": nn.LayerNorm(d),
                    "mlp": feed_forward(d),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids):
        hidden, residual = self.emb(input_ids), None
        for layer in self.layers:
            residual = hidden if residual is None else hidden + residual
            hidden = layer["mixer"](layer["norm1"](residual))
            residual = hidden + residual
            hidden = layer["mlp"](layer["norm2"](residual))
        return self.head(self.ln_f(hidden + residual))


def moore_penrose_iter_pinv(x, iters=6):
    abs_x = torch.abs(x)
    col, row = abs_x.sum(dim=-1), abs_x.sum(dim=-2)
    z = x.transpose(-1, -2) / (torch.max(col) * torch.max(row))
    eye = torch.eye(x.shape[-1], device=x.device)[None]
    for _ in range(iters):
        xz = x @ z
        z = 0.25 * z @ (13 * eye - (xz @ (15 * eye - (xz @ (7 * eye - xz)))))
    return z


class NystromAttention(nn.Module):
    """Landmarks and an iterative inverse, which begins from the largest sum of the whole batch."""

    def __init__(self, d, heads, landmarks=4):
        super().__init__()
        self.heads, self.m, self.scale = heads, landmarks, (d // heads) ** -0.5
        self.to_qkv, self.to_out = nn.Linear(d, d * 3, bias=False), nn.Linear(d, d)
        self.res_conv = nn.Conv2d(heads, heads, (3, 1), padding=(1, 0), groups=heads, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (
            t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        q = q * self.scale
        each = math.ceil(n / self.m)
        ql, kl = (t.reshape(b, self.heads, self.m, each, -1).sum(dim=3) / each for t in (q, k))
        attn1 = (q @ kl.transpose(-1, -2)).softmax(dim=-1)
        attn2 = (ql @ kl.transpose(-1, -2)).softmax(dim=-1)
        attn3 = (ql @ k.transpose(-1, -2)).softmax(dim=-1)
        out = (attn1 @ moore_penrose_iter_pinv(attn2)) @ (attn3 @ v)
        out = out + self.res_conv(v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class Nystromformer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    Residual(nn.LayerNorm(d), NystromAttention(d, 4)),
                    Residual(nn.LayerNorm(d), feed_forward(d)),
                ]
            )
            for _ in range(2)
        )

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for attn, ff in self.layers:
            x = attn(x)
            x = ff(x)
        return self.out(x)


class LockedDropout(nn.Module):
    def forward(self, x, dropout=0.5):
        if not self.training or not dropout:
            return x
        m = x.data.new(x.size(0), 1, x.size(2)).bernoulli_(1 - dropout)
        return m.div_(1 - dropout).expand_as(x) * x


class AWDCell(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ih, self.hh = nn.Linear(d, 4 * d), nn.Linear(d, 4 * d, bias=False)

    def forward(self, x):
        h = c = torch.zeros_like(x[:, 0])
        outs = []
        for x_t in x.unbind(1):
            i, f, g, o = (self.ih(x_t) + self.hh(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return torch.stack(outs, 1)


class AWDLSTM(nn.Module):
    """Weights that are set before each call, and masks of whole sequences (Merity et al. 2018)."""

    def __init__(self, d=12):
        super().__init__()
        self.lockdrop, self.encoder = LockedDropout(), nn.Embedding(VOCAB, d)
        self.rnns = [AWDCell(d) for _ in range(2)]
        for rnn in self.rnns:
            w = rnn.hh.weight
            del rnn.hh._parameters["weight"]
            rnn.hh.register_parameter("weight_raw", nn.Parameter(w.data))
            rnn.hh.weight = w.data
        self.rnns = nn.ModuleList(self.rnns)
        self.decoder = nn.Linear(d, VOCAB)
        self.decoder.weight = self.encoder.weight

    def forward(self, input_ids):
        raw_output = self.encoder(input_ids)
        for rnn in self.rnns:
            rnn.hh.weight = rnn.hh.weight_raw * 0.9
            raw_output = rnn(raw_output)
            raw_output = self.lockdrop(raw_output, 0.3)
        return self.decoder(raw_output)


class TTTLinear(nn.Module):
    """Test-time training (Sun et al. 2024): the hidden state is a weight, which the gradient of an
    inner loss moves, chunk by chunk."""

    def __init__(self, d, heads=4):
        super().__init__()
        self.h = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.W1 = nn.Parameter(torch.randn(heads, d // heads, d // heads) * 0.1)
        self.b1 = nn.Parameter(torch.zeros(heads, 1, d // heads))
        self.lr = nn.Linear(d, heads)

    def forward(self, x):
        B, L, C = x.shape
        q, k, v = (f(x).view(B, L, self.h, -1).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        eta = self.lr(x).sigmoid().transpose(1, 2)[..., None] * 0.1
        W = self.W1.unsqueeze(0).expand(B, -1, -1, -1)
        b = self.b1.unsqueeze(0).expand(B, -1, -1, -1)
        outs = []
        for i in range(0, L, 4):
            kc, vc, qc, ec = (t[:, :, i : i + 4] for t in (k, v, q, eta))
            with torch.enable_grad():
                loss = (ec * (kc @ W + b - vc + kc) ** 2).sum()
                gW, gb = torch.autograd.grad(loss, (W, b), create_graph=True)
            W, b = W - gW, b - gb
            outs.append(qc + F.layer_norm(qc @ W + b, qc.shape[-1:]))
        return self.wo(torch.cat(outs, 2).transpose(1, 2).reshape(B, L, C))


class TTT(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.net = nn.Sequential()
        for i in range(2):
            self.net.add_module(f"ttt{i}", Residual(nn.LayerNorm(d), TTTLinear(d)))
            self.net.add_module(f"ff{i}", Residual(nn.LayerNorm(d), feed_forward(d)))

    def forward(self, input_ids):
        return self.out(self.net(self.emb(input_ids)))


class ACTBasic(nn.Module):
    """Adaptive computation time (Graves 2016), as universal transformers copy it: positions halt
    one by one, until none is left."""

    def __init__(self, d):
        super().__init__()
        self.p, self.threshold = nn.Linear(d, 1), 0.9
        self.p.bias.data.fill_(0.2)

    def forward(self, state, fn, max_hop):
        halting, remainders, n_updates = (torch.zeros(state.shape[:2]) for _ in range(3))
        previous, step = torch.zeros_like(state), 0
        while ((halting < self.threshold) & (n_updates < max_hop)).byte().any():
            p = torch.sigmoid(self.p(state)).squeeze(-1)
            running = (halting < 1.0).double()
            new_halted = (halting + p * running > self.threshold).double() * running
            running = (halting + p * running <= self.threshold).double() * running
            halting = halting + p * running
            remainders = remainders + new_halted * (1 - halting)
            halting = halting + new_halted * remainders
            n_updates = n_updates + running + new_halted
            weights = p * running + new_halted * remainders
            state = fn(state)
            previous = state * weights.unsqueeze(-1) + previous * (1 - weights.unsqueeze(-1))
            step += 1
        return previous, (remainders, n_updates)


class UniversalACT(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.act, self.out = nn.Embedding(VOCAB, d), ACTBasic(d), nn.Linear(d, VOCAB)
        self.enc = nn.Sequential(
            Residual(nn.LayerNorm(d), LongformerAttention(d, 4, 3)),
            Residual(nn.LayerNorm(d), feed_forward(d)),
        )

    def forward(self, input_ids):
        x, (remainders, n_updates) = self.act(self.emb(input_ids), self.enc, 3)
        return self.out(x), remainders + n_updates


def act_loss(out, batch):
    logits, p_t = out
    loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
    return loss + 0.001 * p_t.sum(), (batch["labels"] != -100).sum()


class ConformerConv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(d),
            Transpose(),
            nn.Conv1d(d, d * 2, 1),
            nn.GLU(dim=1),
            nn.Conv1d(d, d, 3, padding=1, groups=d),
            nn.BatchNorm1d(d),
            nn.SiLU(),
            nn.Conv1d(d, d, 1),
            Transpose(),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return self.net(x)


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2).contiguous()


class RelPosAttention(nn.Module):
    def __init__(self, d, heads, max_pos=16):
        super().__init__()
        self.h, self.scale, self.max_pos = heads, (d // heads) ** -0.5, max_pos
        self.to_q, self.to_kv = nn.Linear(d, d, bias=False), nn.Linear(d, d * 2, bias=False)
        self.to_out, self.rel_pos_emb = nn.Linear(d, d), nn.Embedding(2 * max_pos + 1, d // heads)

    def forward(self, x):
        n, h = x.shape[-2], self.h
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.view(*t.shape[:2], h, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        seq = torch.arange(n, device=x.device)
        dist = (seq[:, None] - seq[None, :]).clamp(-self.max_pos, self.max_pos) + self.max_pos
        rel = self.rel_pos_emb(dist).to(q)
        dots = dots + torch.einsum("b h n d, n r d -> b h n r", q, rel) * self.scale
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 2, 1, 3).flatten(2))


class Conformer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(5, d, 3, stride=2, padding=1), nn.ReLU())
        self.layers = nn.ModuleList()
        for _ in range(2):
            ff1, ff2 = (nn.Sequential(nn.LayerNorm(d), feed_forward(d)) for _ in range(2))
            attn = nn.Sequential(nn.LayerNorm(d), RelPosAttention(d, 4))
            self.layers.append(nn.ModuleList([ff1, attn, ConformerConv(d), ff2, nn.LayerNorm(d)]))
        self.ctc = nn.Linear(d, 7)

    def forward(self, mel, lengths):
        x = self.subsample(mel.transpose(1, 2)).transpose(1, 2)
        for ff1, attn, conv, ff2, post in self.layers:
            x = ff1(x) * 0.5 + x
            x = attn(x) + x
            x = conv(x) + x
            x = post(ff2(x) * 0.5 + x)
        return self.ctc(x).log_softmax(-1), lengths // 2


def utterances():
    return {
        "mel": torch.randn(BATCH, 16, 5),
        "lengths": 12 + torch.arange(BATCH) % 5,
        "text": torch.randint(1, 7, (BATCH, 3)),
    }


def ctc(out, batch):
    log_probs, lengths = out
    n = torch.full((len(lengths),), 3)
    loss = F.ctc_loss(log_probs.transpose(0, 1), batch["text"], lengths, n, reduction="sum")
    return loss, torch.tensor(float(len(lengths)))


def window_partition(x, w):
    B, H, W, C = x.shape
    x = x.view(B, H // w, w, W // w, w, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, C)


def window_reverse(windows, w, H, W):
    B = int(windows.shape[0] / (H * W / w / w))
    x = windows.view(B, H // w, W // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinAttention(nn.Module):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.num_heads, self.scale, w = num_heads, (dim // num_heads) ** -0.5, window_size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * w - 1) ** 2, num_heads))
        coords = torch.stack(torch.meshgrid([torch.arange(w), torch.arange(w)], indexing="ij"))
        coords = torch.flatten(coords, 1)
        rel = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        rel[:, :, 0] += w - 1
        rel[:, :, 1] += w - 1
        rel[:, :, 0] *= 2 * w - 1
        self.register_buffer("relative_position_index", rel.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        x = (attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, dim, res, heads, shift, w=2):
        super().__init__()
        self.res, self.w, self.shift_size = res, w, shift
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), feed_forward(dim)
        self.attn = SwinAttention(dim, w, heads)
        attn_mask = None
        if shift:
            img_mask, cnt = torch.zeros((1, res, res, 1)), 0
            for h in (slice(0, -w), slice(-w, -shift), slice(-shift, None)):
                for v in (slice(0, -w), slice(-w, -shift), slice(-shift, None)):
                    img_mask[:, h, v, :] = cnt
                    cnt += 1
            m = window_partition(img_mask, w).view(-1, w * w)
            attn_mask = m.unsqueeze(1) - m.unsqueeze(2)
            attn_mask = attn_mask.masked_fill(attn_mask != 0, -100.0)
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, x):
        H = W = self.res
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = window_partition(x, self.w).view(-1, self.w * self.w, C)
        windows = self.attn(windows, mask=self.attn_mask).view(-1, self.w, self.w, C)
        x = window_reverse(windows, self.w, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        x = shortcut + x.view(B, H * W, C)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, res, dim):
        super().__init__()
        self.res, self.norm = res, nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        B, _, C = x.shape
        x = x.view(B, self.res, self.res, C)
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1).view(B, -1, 4 * C)
        return self.reduction(self.norm(x))


class Swin(nn.Module):
    """Shifted windows (Liu et al. 2021): windows of all samples side by side, a mask as buffer."""

    def __init__(self, dim=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, 2, 2)
        self.layers = nn.ModuleList(
            nn.Sequential(
                SwinBlock(dim * 2**i, 4 // 2**i, 2 * 2**i, 0),
                SwinBlock(dim * 2**i, 4 // 2**i, 2 * 2**i, 1 if i == 0 else 0),
                PatchMerging(4, dim) if i == 0 else nn.Identity(),
            )
            for i in range(2)
        )
        self.norm, self.avgpool = nn.LayerNorm(dim * 2), nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(dim * 2, 5)

    def forward(self, image):
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.flatten(self.avgpool(self.norm(x).transpose(1, 2)), 1))


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTAttention(nn.Module):
    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads, self.qkv, self.proj = (
            num_heads,
            nn.Linear(dim, dim * 3),
            nn.Linear(dim, dim),
        )

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class DiTBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp = DiTAttention(d), feed_forward(d)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(self, x, c):
        a, b, g, a2, b2, g2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + g.unsqueeze(1) * self.attn(modulate(self.norm1(x), a, b))
        return x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), a2, b2))


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes, d, dropout_prob):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, d)
        self.num_classes, self.dropout_prob = num_classes, dropout_prob

    def forward(self, labels, train):
        if train and self.dropout_prob > 0:
            drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
            labels = torch.where(drop_ids, self.num_classes, labels)
        return self.embedding_table(labels)


class DiT(nn.Module):
    """A diffusion transformer (Peebles & Xie 2023): a frozen table of positions, labels that are
    dropped, zeroed gates, patches put together by einsum."""

    def __init__(self, d=16, p=2):
        super().__init__()
        self.p, self.x_embedder = p, nn.Conv2d(1, d, p, p)
        self.t_embedder = nn.Sequential(nn.Linear(8, d), nn.SiLU(), nn.Linear(d, d))
        self.y_embedder = LabelEmbedder(5, d, 0.3)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, d), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(d) for _ in range(2)])
        self.final, self.final_ada = nn.Linear(d, p * p * 2), nn.Linear(d, 2 * d)
        self.pos_embed.data.copy_(torch.linspace(-1, 1, 16 * d).sin().view(1, 16, d))
        for block in self.blocks:
            nn.init.constant_(block.adaLN_modulation[-1].weight, 0)
            nn.init.constant_(block.adaLN_modulation[-1].bias, 0)

    def unpatchify(self, x):
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(shape=(x.shape[0], h, w, self.p, self.p, 2))
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 2, h * self.p, w * self.p)

    def forward(self, image, t, label):
        x = self.x_embedder(image).flatten(2).transpose(1, 2) + self.pos_embed
        args = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(4) / 4)[None]
        t = self.t_embedder(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))
        c = t + self.y_embedder(label, self.training)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_ada(F.silu(c)).chunk(2, dim=1)
        x = self.final(modulate(F.layer_norm(x, x.shape[-1:]), shift, scale))
        return self.unpatchify(x).chunk(2, dim=1)[0]


def noised():
    return images() | {
        "t": torch.randint(0, 100, (BATCH,)),
        "target": torch.randn(BATCH, 1, 8, 8),
    }


class TriangleMultiplication(nn.Module):
    def __init__(self, d, mix):
        super().__init__()
        self.norm, self.to_out_norm, self.mix = nn.LayerNorm(d), nn.LayerNorm(d), mix
        self.left, self.right, self.left_gate, self.right_gate, self.out_gate, self.out = (
            nn.Linear(d, d) for _ in range(6)
        )
        for gate in (self.left_gate, self.right_gate, self.out_gate):
            nn.init.constant_(gate.bias, 1.0)

    def forward(self, x):
        x = self.norm(x)
        left = self.left(x) * self.left_gate(x).sigmoid()
        right = self.right(x) * self.right_gate(x).sigmoid()
        out = torch.einsum(self.mix, left, right)
        return self.out(self.to_out_norm(out)) * self.out_gate(x).sigmoid()


class AxialAttention(nn.Module):
    def __init__(self, d, heads, row, pair=None):
        super().__init__()
        self.row, self.h, self.norm = row, heads, nn.LayerNorm(d)
        self.to_q, self.to_kv = nn.Linear(d, d, bias=False), nn.Linear(d, d * 2, bias=False)
        self.gating, self.to_out = nn.Linear(d, d), nn.Linear(d, d)
        self.edges_to_attn_bias = nn.Linear(pair, heads, bias=False) if pair else None

    def forward(self, x, edges=None):
        b = x.shape[0]
        x = self.norm(x)
        if not self.row:
            x = x.transpose(1, 2)
        folded = x.reshape(-1, *x.shape[2:])
        q, k, v = (self.to_q(folded), *self.to_kv(folded).chunk(2, dim=-1))
        q, k, v = (t.view(*t.shape[:2], self.h, -1).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if edges is not None:
            bias = self.edges_to_attn_bias(edges).permute(0, 3, 1, 2)
            dots = dots + bias.repeat_interleave(dots.shape[0] // b, dim=0)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(-1), v).transpose(1, 2).flatten(2)
        out = self.to_out(out * self.gating(folded).sigmoid())
        out = out.view(b, -1, *out.shape[1:])
        return out if self.row else out.transpose(1, 2)


class EvoformerBlock(nn.Module):
    def __init__(self, m, z):
        super().__init__()
        self.row, self.col = AxialAttention(m, 2, True, z), AxialAttention(m, 2, False)
        self.ff, self.pair_ff = (nn.Sequential(nn.LayerNorm(n), feed_forward(n)) for n in (m, z))
        self.left, self.right, self.outer = nn.Linear(m, 4), nn.Linear(m, 4), nn.Linear(16, z)
        self.outgoing = TriangleMultiplication(z, "... i k d, ... j k d -> ... i j d")
        self.ingoing = TriangleMultiplication(z, "... k j d, ... k i d -> ... i j d")

    def forward(self, inputs):
        x, m = inputs
        m = self.row(m, edges=x) + m
        m = self.col(m) + m
        m = self.ff(m) + m
        outer = torch.einsum("b s i c, b s j d -> b i j c d", self.left(m), self.right(m))
        x = x + self.outer(outer.flatten(-2) / m.shape[1])
        x = self.outgoing(x) + x
        x = self.ingoing(x) + x
        return self.pair_ff(x) + x, m


class Evoformer(nn.Module):
    """AlphaFold 2's trunk: two streams, a tuple through nn.Sequential."""

    def __init__(self, m=8, z=6):
        super().__init__()
        self.msa, self.pair_l, self.pair_r = nn.Embedding(21, m), nn.Embedding(21, z), None
        self.pair_r = nn.Embedding(21, z)
        self.layers = nn.Sequential(*[EvoformerBlock(m, z) for _ in range(2)])
        self.to_dist = nn.Sequential(nn.LayerNorm(z), nn.Linear(z, 5))

    def forward(self, msa):
        seq = msa[:, 0]
        x = self.pair_l(seq)[:, :, None] + self.pair_r(seq)[:, None]
        x, _ = self.layers((x, self.msa(msa)))
        return {"distogram": self.to_dist((x + x.transpose(1, 2)) * 0.5)}


def proteins():
    return {
        "msa": torch.randint(21, (BATCH, 3, 6)),
        "bins": torch.randint(5, (BATCH, 6, 6)),
    }


def distances(out, batch):
    logits = out["distogram"].permute(0, 3, 1, 2)
    return F.cross_entropy(logits, batch["bins"], reduction="sum"), batch["bins"].numel()


class SpectralConv2d(nn.Module):
    def __init__(self, i, o, m1, m2):
        super().__init__()
        self.o, self.m1, self.m2 = o, m1, m2
        scale = 1 / (i * o)
        self.weights1 = nn.Parameter(scale * torch.rand(i, o, m1, m2, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(i, o, m1, m2, dtype=torch.cfloat))

    def forward(self, x):
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(
            x.shape[0], self.o, x.size(-2), x.size(-1) // 2 + 1, dtype=x_ft.dtype, device=x.device
        )
        mul = "bixy,ioxy->boxy"
        top, bottom = x_ft[:, :, : self.m1, : self.m2], x_ft[:, :, -self.m1 :, : self.m2]
        out_ft[:, :, : self.m1, : self.m2] = torch.einsum(mul, top, self.weights1)
        out_ft[:, :, -self.m1 :, : self.m2] = torch.einsum(mul, bottom, self.weights2)
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class FNO2d(nn.Module):
    """A Fourier neural operator (Li et al. 2021): complex weights, layers numbered by hand."""

    def __init__(self, width=6, modes=3):
        super().__init__()
        self.fc0 = nn.Linear(3, width)
        for i in range(4):
            setattr(self, f"conv{i}", SpectralConv2d(width, width, modes, modes))
            setattr(self, f"w{i}", nn.Conv2d(width, width, 1))
        self.fc1, self.fc2 = nn.Linear(width, 16), nn.Linear(16, 1)

    def get_grid(self, shape, device):
        n, sx, sy = shape[0], shape[1], shape[2]
        gx = torch.linspace(0, 1, sx).reshape(1, sx, 1, 1).repeat([n, 1, sy, 1])
        gy = torch.linspace(0, 1, sy).reshape(1, 1, sy, 1).repeat([n, sx, 1, 1])
        return torch.cat((gx, gy), dim=-1).to(device)

    def forward(self, x):
        x = torch.cat((x, self.get_grid(x.shape, x.device)), dim=-1)
        x = self.fc0(x).permute(0, 3, 1, 2)
        x = F.pad(x, [0, 2, 0, 2])
        for i in range(4):
            x1 = getattr(self, f"conv{i}")(x)
            x2 = getattr(self, f"w{i}")(x)
            x = x1 + x2
            if i < 3:
                x = F.gelu(x)
        x = x[..., :-2, :-2].permute(0, 2, 3, 1)
        return self.fc2(F.gelu(self.fc1(x)))


def fields():
    return {"x": torch.randn(BATCH, 8, 8, 1), "target": torch.randn(BATCH, 8, 8, 1)}


class KANLinear(nn.Module):
    """A layer of a Kolmogorov-Arnold network, as efficient-kan writes it."""

    def __init__(self, i, o, grid_size=4, k=3):
        super().__init__()
        self.in_features, self.out_features, self.k = i, o, k
        h = 2 / grid_size
        grid = (torch.arange(-k, grid_size + k + 1) * h - 1).expand(i, -1).contiguous()
        self.register_buffer("grid", grid)
        self.base_weight = nn.Parameter(torch.randn(o, i) * i**-0.5)
        self.spline_weight = nn.Parameter(torch.randn(o, i, grid_size + k) * 0.1)
        self.spline_scaler = nn.Parameter(torch.rand(o, i))
        self.base_activation = nn.SiLU()

    def b_splines(self, x):
        assert x.dim() == 2 and x.size(1) == self.in_features
        grid = self.grid
        x = x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.k + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)])
            bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
        return bases.contiguous()

    @property
    def scaled_spline_weight(self):
        return self.spline_weight * self.spline_scaler.unsqueeze(-1)

    def forward(self, x):
        original_shape = x.shape
        x = x.reshape(-1, self.in_features)
        base_output = F.linear(self.base_activation(x), self.base_weight)
        spline_output = F.linear(
            self.b_splines(x).view(x.size(0), -1),
            self.scaled_spline_weight.view(self.out_features, -1),
        )
        return (base_output + spline_output).reshape(*original_shape[:-1], self.out_features)


class KAN(nn.Module):
    def __init__(self, widths=(6, 10, 8, 4)):
        super().__init__()
        self.layers = nn.ModuleList()
        for i, o in pairwise(widths):
            self.layers.append(KANLinear(i, o))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def rows(n=6, out=4):
    return {"x": torch.randn(BATCH, n), "target": torch.randn(BATCH, out)}


class SparsemaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, dim=-1):
        ctx.dim = dim
        max_val, _ = input.max(dim=dim, keepdim=True)
        input -= max_val
        srt, _ = torch.sort(input, descending=True, dim=dim)
        cumsum = srt.cumsum(dim) - 1
        rhos = torch.arange(1, input.size(dim) + 1, dtype=input.dtype)
        support = rhos * srt > cumsum
        support_size = support.sum(dim=dim).unsqueeze(dim)
        tau = cumsum.gather(dim, support_size - 1) / support_size.to(input.dtype)
        output = torch.clamp(input - tau, min=0)
        ctx.save_for_backward(support_size, output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        support_size, output = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[output == 0] = 0
        v_hat = grad_input.sum(dim=ctx.dim) / support_size.to(output.dtype).squeeze()
        grad_input = torch.where(output != 0, grad_input - v_hat.unsqueeze(ctx.dim), grad_input)
        return grad_input, None


class GBN(nn.Module):
    """Ghost batch normalization: the statistics of each few samples."""

    def __init__(self, d, virtual_batch_size=4):
        super().__init__()
        self.virtual_batch_size, self.bn = virtual_batch_size, nn.BatchNorm1d(d, momentum=0.01)

    def forward(self, x):
        chunks = x.chunk(math.ceil(x.shape[0] / self.virtual_batch_size), 0)
        return torch.cat([self.bn(x_) for x_ in chunks], dim=0)


class GLULayer(nn.Module):
    def __init__(self, i, o, fc=None):
        super().__init__()
        self.o, self.fc = o, fc if fc else nn.Linear(i, 2 * o, bias=False)
        self.bn = GBN(2 * o)

    def forward(self, x):
        x = self.bn(self.fc(x))
        return torch.mul(x[:, : self.o], torch.sigmoid(x[:, self.o :]))


class FeatTransformer(nn.Module):
    def __init__(self, i, o, shared):
        super().__init__()
        self.shared, self.specific = GLULayer(i, o, shared), GLULayer(o, o)
        self.scale = torch.sqrt(torch.FloatTensor([0.5]))

    def forward(self, x):
        x = self.shared(x)
        return torch.add(x, self.specific(x)) * self.scale.to(x.device)


class TabNet(nn.Module):
    """Attentive tabular learning (Arik & Pfister 2021): shared layers, sparsemax masks, ghost batch
    norms, and a loss of the masks."""

    def __init__(self, d=6, n_d=4, n_a=4, steps=2, out=4):
        super().__init__()
        self.n_d, self.initial_bn = n_d, nn.BatchNorm1d(d, momentum=0.01)
        shared = nn.Linear(d, 2 * (n_d + n_a), bias=False)
        self.initial_splitter = FeatTransformer(d, n_d + n_a, shared)
        self.feat_transformers, self.att = nn.ModuleList(), nn.ModuleList()
        for _ in range(steps):
            self.feat_transformers.append(FeatTransformer(d, n_d + n_a, shared))
            self.att.append(nn.ModuleList([nn.Linear(n_a, d, bias=False), GBN(d)]))
        self.final_mapping = nn.Linear(n_d, out, bias=False)

    def forward(self, x):
        x = self.initial_bn(x)
        prior, m_loss, outs = torch.ones(x.shape).to(x.device), 0, []
        att = self.initial_splitter(x)[:, self.n_d :]
        for (fc, bn), transform in zip(self.att, self.feat_transformers, strict=True):
            M = SparsemaxFunction.apply(torch.mul(bn(fc(att)), prior))
            m_loss += torch.sum(torch.mul(M, torch.log(M + 1e-6)), dim=1)
            prior = torch.mul(1.3 - M, prior)
            out = transform(torch.mul(M, x))
            outs.append(F.relu(out[:, : self.n_d]))
            att = out[:, self.n_d :]
        return self.final_mapping(torch.sum(torch.stack(outs, dim=0), dim=0)), m_loss


def tabnet_loss(out, batch):
    y, m_loss = out
    return (y - batch["target"]).square().sum() - 1e-3 * m_loss.sum(), torch.tensor(float(len(y)))


class ATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.gt(0).to(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output / (1 + (math.pi * x).pow_(2))


class LIF(nn.Module):
    """A leaky neuron that keeps its potential between calls (snnTorch, SpikingJelly)."""

    def __init__(self, beta=0.9):
        super().__init__()
        self.beta, self.mem = nn.Parameter(torch.tensor(beta)), 0.0

    def reset(self):
        self.mem = 0.0

    def forward(self, x):
        if not isinstance(self.mem, torch.Tensor):
            self.mem = torch.zeros_like(x)
        self.mem = self.beta.clamp(0, 1) * self.mem + x
        spk = ATan.apply(self.mem - 0.2)
        self.mem = self.mem - spk.detach()
        return spk


def reset_net(net):
    for m in net.modules():
        if hasattr(m, "reset"):
            m.reset()


class SpikingNet(nn.Module):
    def __init__(self, T=3):
        super().__init__()
        self.T = T
        self.conv_fc = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            LIF(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 16),
            LIF(),
            nn.Linear(16, 5),
            LIF(),
        )

    def forward(self, image):
        reset_net(self)
        out_spikes_counter = self.conv_fc(image)
        for _ in range(1, self.T):
            out_spikes_counter += self.conv_fc(image)
        return out_spikes_counter / self.T


class TreeLSTM(nn.Module):
    """A child-sum Tree-LSTM (Tai et al. 2015): recursion over each sample's tree."""

    def __init__(self, d=8):
        super().__init__()
        self.mem_dim, self.emb = d, nn.Embedding(VOCAB, d)
        self.ioux, self.iouh = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d)
        self.fx, self.fh = nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 5)

    def node_forward(self, inputs, child_c, child_h):
        child_h_sum = torch.sum(child_h, dim=0, keepdim=True)
        iou = self.ioux(inputs) + self.iouh(child_h_sum)
        i, o, u = torch.split(iou, iou.size(1) // 3, dim=1)
        i, o, u = torch.sigmoid(i), torch.sigmoid(o), torch.tanh(u)
        f = torch.sigmoid(self.fh(child_h) + self.fx(inputs).repeat(len(child_h), 1))
        c = torch.mul(i, u) + torch.sum(torch.mul(f, child_c), dim=0, keepdim=True)
        return c, torch.mul(o, torch.tanh(c))

    def walk(self, tree, inputs):
        children = [self.walk(child, inputs) for child in tree.children]
        if not children:
            child_c = inputs[0].detach().new(1, self.mem_dim).fill_(0.0)
            child_h = inputs[0].detach().new(1, self.mem_dim).fill_(0.0)
        else:
            child_c, child_h = (torch.cat(t, dim=0) for t in zip(*children, strict=True))
        return self.node_forward(inputs[tree.idx][None], child_c, child_h)

    def forward(self, words, parents):
        roots = []
        for sentence, parent in zip(self.emb(words), parents.tolist(), strict=True):
            nodes = [SimpleNamespace(idx=i, children=[]) for i in range(len(parent))]
            for i, p in enumerate(parent):
                if p >= 0:
                    nodes[p].children.append(nodes[i])
            roots.append(self.walk(nodes[0], sentence)[1])
        return self.out(torch.cat(roots))


def trees():
    parents = torch.stack(
        [torch.tensor([-1, *(torch.randint(i, ()) for i in range(1, 6))]) for _ in range(BATCH)]
    )
    return {
        "words": torch.randint(VOCAB, (BATCH, 6)),
        "parents": parents,
        "label": torch.randint(5, (BATCH,)),
    }


class MessagePassing(nn.Module):
    """PyG's base class in small: looks at the arguments of `message` and collects them."""

    def __init__(self):
        super().__init__()
        self.params = list(signature(self.message).parameters)

    def propagate(self, edge_index, size=None, **kwargs):
        row, col = edge_index
        coll = {}
        for name in self.params:
            if name.endswith("_j"):
                coll[name] = kwargs[name[:-2]].index_select(0, row)
            elif name.endswith("_i"):
                coll[name] = kwargs[name[:-2]].index_select(0, col)
            else:
                coll[name] = kwargs.get(name)
        out = self.message(**coll)
        n = kwargs["x"].size(0)
        agg = out.new_zeros(n, *out.shape[1:]).index_add_(0, col, out)
        return self.update(agg, **kwargs)


class EGNNConv(MessagePassing):
    def __init__(self, d):
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * d + 1, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU()
        )
        self.coord_mlp = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1, bias=False))
        self.node_mlp = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, x, pos, edge_index):
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_i, x_j, pos_i, pos_j):
        rel = pos_i - pos_j
        m = self.edge_mlp(torch.cat([x_i, x_j, (rel**2).sum(-1, keepdim=True)], dim=-1))
        return torch.cat([m, rel * self.coord_mlp(m)], dim=-1)

    def update(self, agg, x, pos):
        m, shift = agg[:, :-3], agg[:, -3:]
        return x + self.node_mlp(torch.cat([x, m], dim=-1)), pos + shift / 10


class EGNN(nn.Module):
    """An E(n)-equivariant graph net (Satorras et al. 2021) on one graph of all molecules."""

    def __init__(self, d=8):
        super().__init__()
        self.node_emb, self.convs = nn.Embedding(5, d), nn.ModuleList(EGNNConv(d) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, z, pos):
        b, n = z.shape
        batch = torch.arange(b, device=z.device).repeat_interleave(n)
        dist = torch.cdist(pos, pos) + 1e3 * torch.eye(n)
        g, i, j = torch.nonzero(dist < 2.0, as_tuple=True)
        edge_index = torch.stack([g * n + j, g * n + i])
        x, pos = self.node_emb(z.view(-1)), pos.view(-1, 3)
        for conv in self.convs:
            x, pos = conv(x, pos, edge_index)
        out = torch.zeros(b, x.size(1)).to(x).scatter_add_(0, batch[:, None].expand_as(x), x)
        return self.mlp(out).squeeze(-1)


def molecules():
    return {
        "z": torch.randint(5, (BATCH, 5)),
        "pos": torch.randn(BATCH, 5, 3),
        "target": torch.randn(BATCH),
    }


class ResBlock(nn.Module):
    def __init__(self, i, o, emb):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(2, i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, o))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(2, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1)
        )
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, emb):
        h = self.in_layers(x) + self.emb_layers(emb)[..., None, None]
        return self.skip(x) + self.out_layers(h)


class TimestepSequential(nn.Sequential):
    def forward(self, x, emb):
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


def zero_module(module):
    for p in module.parameters():
        p.detach().zero_()
    return module


class ControlNet(nn.Module):
    """ControlNet (Zhang et al. 2023): a frozen U-Net, a trained copy of its encoder, and
    convolutions that begin at zero."""

    def __init__(self, c=4, emb=8):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(1, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.input_blocks = nn.ModuleList(
            [
                TimestepSequential(nn.Conv2d(1, c, 3, padding=1)),
                TimestepSequential(ResBlock(c, c, emb)),
                TimestepSequential(nn.Conv2d(c, c, 3, stride=2, padding=1)),
                TimestepSequential(ResBlock(c, 2 * c, emb)),
            ]
        )
        self.middle_block = TimestepSequential(ResBlock(2 * c, 2 * c, emb))
        self.output_blocks = nn.ModuleList(
            [
                TimestepSequential(ResBlock(4 * c, 2 * c, emb)),
                TimestepSequential(ResBlock(3 * c, c, emb), nn.Upsample(scale_factor=2)),
                TimestepSequential(ResBlock(2 * c, c, emb)),
                TimestepSequential(ResBlock(2 * c, c, emb)),
            ]
        )
        self.out = nn.Conv2d(c, 1, 3, padding=1)
        for p in self.parameters():
            p.requires_grad_(False)
        self.control_blocks = copy.deepcopy(self.input_blocks).requires_grad_(True)
        self.control_middle = copy.deepcopy(self.middle_block).requires_grad_(True)
        self.hint_block = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.SiLU())
        widths = (c, c, c, 2 * c)
        self.zero_convs = nn.ModuleList(zero_module(nn.Conv2d(n, n, 1)) for n in widths)
        self.middle_out = zero_module(nn.Conv2d(2 * c, 2 * c, 1))

    def forward(self, x, hint, t):
        emb = self.time_embed(t[:, None].to(x))
        control, h, guided = [], x, self.hint_block(hint)
        for module, zero_conv in zip(self.control_blocks, self.zero_convs, strict=True):
            h = module(h, emb)
            if guided is not None:
                h += guided
                guided = None
            control.append(zero_conv(h))
        control.append(self.middle_out(self.control_middle(h, emb)))
        hs = []
        with torch.no_grad():
            h = x
            for module in self.input_blocks:
                h = module(h, emb)
                hs.append(h)
            h = self.middle_block(h, emb)
        h = h + control.pop()
        for module in self.output_blocks:
            h = torch.cat([h, hs.pop() + control.pop()], dim=1)
            h = module(h, emb)
        return self.out(h)


def hinted():
    return {
        "x": torch.randn(BATCH, 1, 8, 8),
        "hint": torch.randn(BATCH, 1, 8, 8),
        "t": torch.rand(BATCH),
        "target": torch.randn(BATCH, 1, 8, 8),
    }


class BayesLinear(nn.Module):
    """Bayes by backprop (Blundell et al. 2015): weights are sampled; their divergence is kept."""

    def __init__(self, i, o):
        super().__init__()
        self.W_mu, self.W_rho = (nn.Parameter(torch.randn(o, i) * 0.1 - s) for s in (0.0, 3.0))
        self.b_mu, self.b_rho = (nn.Parameter(torch.randn(o) * 0.1 - s) for s in (0.0, 3.0))
        self.kl = 0

    def sample(self, mu, rho):
        sigma = torch.log1p(torch.exp(rho))
        w = mu + sigma * torch.empty(mu.size()).normal_(0, 1).to(mu)
        self.kl += (0.5 * (sigma**2 + mu**2 - 1) - torch.log(sigma)).sum()
        return w

    def forward(self, x):
        self.kl = 0
        return F.linear(x, self.sample(self.W_mu, self.W_rho), self.sample(self.b_mu, self.b_rho))


class BayesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = BayesLinear(6, 12), BayesLinear(12, 12), BayesLinear(12, 4)

    def forward(self, x):
        y = self.l3(F.relu(self.l2(F.relu(self.l1(x)))))
        kl = 0.0
        for module in self.modules():
            if hasattr(module, "kl"):
                kl = kl + module.kl
        return y, kl


def elbo(out, batch):
    y, kl = out
    return (y - batch["target"]).square().sum() + 1e-3 * kl * len(y), len(y)


class NeRF(nn.Module):
    """A radiance field (Mildenhall et al. 2020): positions encoded, skips, rays rendered."""

    def __init__(self, D=4, W=16, L=3, skips=(2,)):
        super().__init__()
        self.skips, ch = list(skips), 3 + 3 * 2 * L
        self.register_buffer("freqs", 2.0 ** torch.arange(L), persistent=False)
        self.pts_linears = nn.ModuleList(
            [nn.Linear(ch, W)]
            + [nn.Linear(W, W) if i not in skips else nn.Linear(W + ch, W) for i in range(D - 1)]
        )
        self.views_linears = nn.ModuleList([nn.Linear(ch + W, W // 2)])
        self.feature_linear, self.alpha_linear = nn.Linear(W, W), nn.Linear(W, 1)
        self.rgb_linear = nn.Linear(W // 2, 3)

    def embed(self, x):
        return torch.cat([x] + [f(x * w) for w in self.freqs for f in (torch.sin, torch.cos)], -1)

    def network(self, x, views):
        h = x
        for i, _ in enumerate(self.pts_linears):
            h = F.relu(self.pts_linears[i](h))
            if i in self.skips:
                h = torch.cat([x, h], -1)
        alpha = self.alpha_linear(h)
        h = torch.cat([self.feature_linear(h), views], -1)
        for layer in self.views_linears:
            h = F.relu(layer(h))
        return torch.cat([self.rgb_linear(h), alpha], -1)

    def forward(self, rays_o, rays_d):
        z_vals = torch.linspace(0.0, 1.0, 6).expand(rays_o.shape[0], 6)
        mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        upper = torch.cat([mids, z_vals[..., -1:]], -1)
        lower = torch.cat([z_vals[..., :1], mids], -1)
        z_vals = lower + (upper - lower) * torch.rand(z_vals.shape)
        pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
        dirs = F.normalize(rays_d, dim=-1)[:, None].expand(pts.shape)
        flat, views = (self.embed(t.reshape(-1, 3)) for t in (pts, dirs))
        raw = torch.cat(
            [self.network(a, v) for a, v in zip(flat.split(8), views.split(8), strict=True)], 0
        )
        raw = raw.view(*pts.shape[:-1], 4)
        dists = z_vals[..., 1:] - z_vals[..., :-1]
        dists = torch.cat([dists, torch.tensor([1e10]).to(dists).expand(dists[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        ones = torch.ones((alpha.shape[0], 1)).to(alpha)
        weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        rgb = torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2)
        return {"rgb": rgb, "disp": 1.0 / torch.clamp(torch.sum(weights * z_vals, -1), min=1e-3)}


def rays():
    return {
        "rays_o": torch.randn(BATCH, 3),
        "rays_d": torch.randn(BATCH, 3),
        "target": torch.rand(BATCH, 3),
    }


def rgb_loss(out, batch):
    return (out["rgb"] - batch["target"]).square().sum(), torch.tensor(float(len(out["rgb"])))


class ProductKeyMemory(nn.Module):
    """Product keys (Lample et al. 2019): the best of two halves, values by nn.EmbeddingBag."""

    def __init__(self, d, heads=2, n_keys=6, knn=3):
        super().__init__()
        self.heads, self.n_keys, self.knn, self.half = heads, n_keys, knn, d // 2
        self.keys = nn.Parameter(torch.randn(heads, 2, n_keys, d // 2) * 0.3)
        self.values = nn.EmbeddingBag(n_keys**2, d, mode="sum", sparse=False)
        self.query_proj = nn.Sequential(nn.Linear(d, heads * d), nn.LayerNorm(heads * d))

    def forward(self, x):
        prefix, bs = x.shape[:-1], x.shape[:-1].numel()
        q = self.query_proj(x.contiguous().view(bs, -1)).view(bs, self.heads, 2, self.half)
        scores = torch.einsum("bhpd,hpkd->bhpk", q, self.keys)
        s, i = scores.topk(self.knn, dim=-1)
        all_s = (s[:, :, 0, :, None] + s[:, :, 1, None, :]).view(bs, self.heads, -1)
        all_i = (i[:, :, 0, :, None] * self.n_keys + i[:, :, 1, None, :]).view(bs, self.heads, -1)
        s, best = torch.topk(all_s, k=self.knn, dim=2, largest=True, sorted=True)
        i = all_i.gather(2, best).view(bs, self.heads * self.knn)
        s = F.softmax(s, dim=-1).view(bs, self.heads * self.knn)
        return self.values(i, per_sample_weights=s).view(*prefix, -1)


class PKMLM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.norm, self.out = nn.Embedding(VOCAB, d), nn.LayerNorm(d), nn.Linear(d, VOCAB)
        self.attns = nn.ModuleList(DiTAttention(d) for _ in range(2))
        self.memories = nn.ModuleDict({"1": ProductKeyMemory(d)})
        self.ffns = nn.ModuleList([feed_forward(d), None])

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for i, attn in enumerate(self.attns):
            x = x + attn(self.norm(x))
            if str(i) in self.memories:
                x = x + self.memories[str(i)](x)
            else:
                x = x + self.ffns[i](self.norm(x))
        return self.out(x)


class MMoE(nn.Module):
    """Multi-gate mixture of experts for click-through (Ma et al. 2018), weights in two tensors."""

    def __init__(self, fields=4, d=4, experts=4, units=6, tasks=("ctr", "cvr")):
        super().__init__()
        n = fields * d + 3
        self.embedding_dict = nn.ModuleDict({f"C{i}": nn.Embedding(11, d) for i in range(fields)})
        self.expert_kernels = nn.Parameter(torch.randn(n, units, experts) * n**-0.5)
        self.expert_bias = nn.Parameter(torch.zeros(units, experts))
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(n, experts)) for _ in tasks])
        self.towers = nn.ModuleDict(
            {t: nn.Sequential(nn.Linear(units, 8), nn.ReLU(), nn.Linear(8, 1)) for t in tasks}
        )

    def forward(self, dense, sparse):
        embs = [m(sparse[:, i].long()) for i, m in enumerate(self.embedding_dict.values())]
        x = torch.cat([torch.cat(embs, dim=-1), dense], dim=-1)
        h = F.relu(torch.einsum("ij,jkl->ikl", (x, self.expert_kernels)) + self.expert_bias)
        outs = []
        for gate, tower in zip(self.gates, self.towers.values(), strict=True):
            g = x.mm(gate).softmax(dim=-1).unsqueeze(1)
            outs.append(tower((h * g.expand_as(h)).sum(2)).sigmoid())
        return torch.cat([outs[0], outs[0] * outs[1]], -1)


def clicks():
    return {
        "dense": torch.randn(BATCH, 3),
        "sparse": torch.randint(11, (BATCH, 4)).float(),
        "y": torch.randint(2, (BATCH, 2)).float(),
    }


def bce(out, batch):
    return F.binary_cross_entropy(out, batch["y"], reduction="sum"), torch.tensor(float(len(out)))


NYSTROM = Subject(Nystromformer, tokens, next_token)  # mixes samples, by a small amount
GITHUB: dict[str, Subject] = {
    "longformer": Subject(Longformer, tokens, next_token),
    "latent-attention": Subject(DeepSeek, tokens, next_token),
    "differential": Subject(DiffTransformer, tokens, next_token),
    "griffin": Subject(Griffin, tokens, next_token),
    "hyena": Subject(Hyena, tokens, next_token),
    "awd-lstm": Subject(AWDLSTM, tokens, next_token),
    "test-time": Subject(TTT, tokens, next_token),
    "halting": Subject(UniversalACT, tokens, act_loss),
    "conformer": Subject(Conformer, utterances, ctc),
    "swin": Subject(Swin, images, classification),
    "dit": Subject(DiT, noised, mse),
    "evoformer": Subject(Evoformer, proteins, distances),
    "fno": Subject(FNO2d, fields, mse),
    "kan": Subject(KAN, rows, mse),
    "tabnet": Subject(TabNet, rows, tabnet_loss, plan=()),
    "spiking": Subject(SpikingNet, images, classification),
    "tree-lstm": Subject(TreeLSTM, trees, classification),
    "egnn": Subject(EGNN, molecules, mse),
    "controlnet": Subject(ControlNet, hinted, mse),
    "bayes": Subject(BayesNet, rows, elbo),
    "nerf": Subject(NeRF, rays, rgb_loss),
    "product-keys": Subject(PKMLM, tokens, next_token),
    "mmoe": Subject(MMoE, clicks, bce),
}
