"""Nets as courses write them: recommenders, speech, state spaces, sparse experts."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from tests.verification.nets import features, mse
from weft.nn.losses import classification, next_token, whole_batch


class Tower(nn.Module):
    def __init__(self, n, d, dense=0):
        super().__init__()
        self.bag = nn.EmbeddingBag(n, d, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(d + dense, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))

    def forward(self, ids, dense=None):
        x = self.bag(ids)
        if dense is not None:
            x = torch.cat([x, dense], dim=1)
        return F.normalize(self.mlp(x), dim=-1)


class TwoTower(nn.Module):
    """Users and items, scored by cosine (YouTube's retrieval)."""

    def __init__(self, d=8):
        super().__init__()
        self.user, self.item = Tower(50, d, dense=3), Tower(70, d)
        self.log_t = nn.Parameter(torch.tensor(1.0))

    def forward(self, history, dense, item):
        return {"u": self.user(history, dense), "v": self.item(item), "t": self.log_t.exp()}


def visits():
    return {
        "history": torch.randint(50, (BATCH, 6)),
        "dense": torch.randn(BATCH, 3),
        "item": torch.randint(70, (BATCH, 2)),
    }


@whole_batch
def in_batch_softmax(out, batch):
    logits = out["t"] * out["u"] @ out["v"].T
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2)).to(t.device)
    args = t[:, None].double() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(2, cin), nn.GroupNorm(2, cout)
        self.c1, self.c2 = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1)
        self.t = nn.Linear(temb, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, temb):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(temb))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.skip(x)


class TimeUNet(nn.Module):
    """DDPM: a U-Net with time embedding, and skips kept in a list."""

    def __init__(self, ch=4):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, 4 * ch), nn.SiLU(), nn.Linear(4 * ch, 4 * ch))
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.downs = nn.ModuleList([ResBlock(ch, ch, 4 * ch), ResBlock(ch, 2 * ch, 4 * ch)])
        self.mid = ResBlock(2 * ch, 2 * ch, 4 * ch)
        self.ups = nn.ModuleList([ResBlock(4 * ch, ch, 4 * ch), ResBlock(2 * ch, ch, 4 * ch)])
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        temb = self.time(timestep_embedding(t, self.ch).to(x.dtype))
        h, hs = self.inp(x), []
        for down in self.downs:
            h = down(h, temb)
            hs.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.mid(h, temb)
        for up in self.ups:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = up(torch.cat([h, hs.pop()], dim=1), temb)
        return self.out(h)


def noised():
    return {
        "x": torch.randn(BATCH, 1, 8, 8),
        "t": torch.randint(1000, (BATCH,)),
        "target": torch.randn(BATCH, 1, 8, 8),
    }


class MixerBlock(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.token = nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))
        self.channel = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.token(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.ln2(x))


class Mixer(nn.Module):
    """MLP-Mixer, patches by unfold."""

    def __init__(self, d=8):
        super().__init__()
        self.stem = nn.Linear(4, d)
        self.blocks = nn.Sequential(*[MixerBlock(16, d) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 5)

    def forward(self, image):
        b, c, h, w = image.shape
        x = image.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


def pictures():
    return {"image": torch.randn(BATCH, 1, 8, 8), "label": torch.randint(0, 5, (BATCH,))}


class Wav2Vec(nn.Module):
    """Convolutions over a wave, a weight-normed positional convolution, a torch encoder."""

    def __init__(self, d=8):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, d, 4, stride=2, bias=False),
            nn.GroupNorm(d, d),
            nn.GELU(),
            nn.Conv1d(d, d, 3, stride=2, bias=False),
            nn.GELU(),
        )
        self.norm, self.proj = nn.LayerNorm(d), nn.Linear(d, 16)
        self.pos = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(16, 16, 4, padding=2, groups=4), dim=2
        )
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, wave):
        x = self.conv(wave.unsqueeze(1)).transpose(1, 2)
        x = self.proj(self.norm(x))
        p = F.gelu(self.pos(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return self.head(self.encoder(x + p).mean(dim=1))


def waves():
    return {"wave": torch.randn(BATCH, 40), "label": torch.randint(0, 5, (BATCH,))}


class MambaBlock(nn.Module):
    """mamba-minimal: the selective scan as a loop."""

    def __init__(self, d=8, n=4, k=3, r=2):
        super().__init__()
        self.n, self.r, e = n, r, 2 * d
        self.norm = nn.RMSNorm(d)
        self.in_proj = nn.Linear(d, 2 * e, bias=False)
        self.conv1d = nn.Conv1d(e, e, k, groups=e, padding=k - 1)
        self.x_proj = nn.Linear(e, r + 2 * n, bias=False)
        self.dt_proj = nn.Linear(r, e)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, n + 1).repeat(e, 1)))
        self.D = nn.Parameter(torch.ones(e))
        self.out_proj = nn.Linear(e, d, bias=False)

    def forward(self, x):
        skip, n = x, x.shape[1]
        x, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :n].transpose(1, 2))
        dt, B, C = self.x_proj(x).split([self.r, self.n, self.n], dim=-1)
        dt, A = F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log)
        dA = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
        dBx = torch.einsum("bld,bln,bld->bldn", dt, B, x)
        h, ys = torch.zeros_like(dA[:, 0]), []
        for i in range(n):
            h = dA[:, i] * h + dBx[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i]))
        y = torch.stack(ys, dim=1) + x * self.D
        return skip + self.out_proj(y * F.silu(z))


class Mamba(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(MambaBlock(d) for _ in range(2))
        self.norm_f = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, VOCAB, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


class TimeMix(nn.Module):
    """RWKV-4: numerically safe weighted averages, step by step."""

    def __init__(self, d):
        super().__init__()
        self.time_decay = nn.Parameter(-torch.rand(d))
        self.time_first = nn.Parameter(torch.rand(d))
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.rand(1, 1, d)) for _ in range(3))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.receptance, self.output = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        xx = self.time_shift(x)
        k = self.key(x * self.mix_k + xx * (1 - self.mix_k))
        v = self.value(x * self.mix_v + xx * (1 - self.mix_v))
        r = torch.sigmoid(self.receptance(x * self.mix_r + xx * (1 - self.mix_r)))
        w, u = -torch.exp(self.time_decay), self.time_first
        aa, bb = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        pp, out = torch.full_like(k[:, 0], -1e38), []
        for t in range(x.shape[1]):
            kt, vt = k[:, t], v[:, t]
            q = torch.maximum(pp, u + kt)
            e1, e2 = torch.exp(pp - q), torch.exp(u + kt - q)
            out.append((e1 * aa + e2 * vt) / (e1 * bb + e2))
            q = torch.maximum(pp + w, kt)
            e1, e2 = torch.exp(pp + w - q), torch.exp(kt - q)
            aa, bb, pp = e1 * aa + e2 * vt, e1 * bb + e2, q
        return self.output(r * torch.stack(out, 1))


class ChannelMix(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(1, 1, d))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.receptance = nn.Linear(d, d, bias=False)

    def forward(self, x):
        xk = x * self.mix + self.time_shift(x) * (1 - self.mix)
        return torch.sigmoid(self.receptance(xk)) * self.value(torch.square(F.relu(self.key(xk))))


class RWKV(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln1": nn.LayerNorm(d),
                    "att": TimeMix(d),
                    "ln2": nn.LayerNorm(d),
                    "ffn": ChannelMix(d),
                }
            )
            for _ in range(2)
        )
        self.ln_out, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for b in self.blocks:
            x = x + b["att"](b["ln1"](x))
            x = x + b["ffn"](b["ln2"](x))
        return self.head(self.ln_out(x))


class T5Attention(nn.Module):
    def __init__(self, d, h, bias=False, buckets=8):
        super().__init__()
        self.h, self.dk, self.buckets = h, d // h, buckets
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        if bias:
            self.rel = nn.Embedding(buckets, h)
        self.has_bias = bias

    def make_bias(self, n):
        pos = torch.arange(n)
        rel = (pos[None, :] - pos[:, None]).clamp(-self.buckets // 2, self.buckets // 2 - 1)
        return self.rel(rel + self.buckets // 2).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x, context=None, mask=None, bias=None):
        b, n, _ = x.shape
        context = x if context is None else context

        def split(y):
            return y.view(b, -1, self.h, self.dk).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(context)), split(self.v(context))
        scores = torch.matmul(q, k.transpose(-1, -2))
        if bias is None and self.has_bias:
            bias = self.make_bias(n)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        y = torch.matmul(scores.softmax(-1), v).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o(y), bias


class T5Layer(nn.Module):
    def __init__(self, d, h, first, cross):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn = T5Attention(d, h, bias=first)
        if cross:
            self.n3, self.cross = nn.RMSNorm(d), T5Attention(d, h)
        self.wi_0, self.wi_1 = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.wo = nn.Linear(2 * d, d, bias=False)

    def forward(self, x, bias=None, memory=None, mask=None):
        y, bias = self.attn(self.n1(x), mask=mask, bias=bias)
        x = x + y
        if memory is not None:
            x = x + self.cross(self.n3(x), memory)[0]
        h = self.n2(x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h)), bias


class TinyT5(nn.Module):
    """Relative biases, made by the first layer and handed on to all others."""

    def __init__(self, d=16, h=4):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, d)
        self.encoder = nn.ModuleList(T5Layer(d, h, i == 0, False) for i in range(2))
        self.decoder = nn.ModuleList(T5Layer(d, h, i == 0, True) for i in range(2))
        self.d = d

    def forward(self, input_ids):
        x, bias = self.shared(input_ids), None
        for layer in self.encoder:
            x, bias = layer(x, bias)
        memory, n = x, input_ids.shape[1]
        y = self.shared(F.pad(input_ids, (1, 0))[:, :-1])
        mask, bias = torch.ones(n, n, dtype=torch.bool).triu(1), None
        for layer in self.decoder:
            y, bias = layer(y, bias, memory, mask)
        return F.linear(y * self.d**-0.5, self.shared.weight)


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    return torch.polar(torch.ones(end, dim // 2), torch.outer(torch.arange(end), freqs))


class LlamaAttention(nn.Module):
    def __init__(self, d, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = n_heads, n_kv_heads, n_heads // n_kv_heads
        self.head_dim = d // n_heads
        self.wq = nn.Linear(d, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(d, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(d, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, d, bias=False)

    def forward(self, x, freqs_cis, mask):
        b, n, _ = x.shape
        xq = self.wq(x).view(b, n, self.n_heads, self.head_dim)
        xk = self.wk(x).view(b, n, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(b, n, self.n_kv_heads, self.head_dim)
        xq, xk = rotate(xq, freqs_cis), rotate(xk, freqs_cis)
        xk, xv = (
            t[:, :, :, None, :]
            .expand(b, n, self.n_kv_heads, self.n_rep, self.head_dim)
            .reshape(b, n, self.n_heads, self.head_dim)
            for t in (xk, xv)
        )
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        out = torch.matmul(F.softmax(scores, dim=-1), xv)
        return self.wo(out.transpose(1, 2).contiguous().view(b, n, -1))


def rotate(x, freqs_cis):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * freqs_cis.to(z.dtype)[None, :, None, :]).flatten(3)


class LlamaBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attention = LlamaAttention(d, 4, 2)
        self.w1, self.w3 = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.w2 = nn.Linear(2 * d, d, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, x, freqs_cis, mask):
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """Meta's llama: rotation by complex numbers that are no buffer, checkpointed blocks."""

    def __init__(self, d=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(LlamaBlock(d) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(d), nn.Linear(d, VOCAB, bias=False)
        self.freqs_cis = precompute_freqs_cis(4, 2 * LENGTH)

    def forward(self, input_ids):
        h, n = self.tok_embeddings(input_ids), input_ids.shape[1]
        freqs_cis = self.freqs_cis[:n]
        mask = torch.full((n, n), float("-inf")).triu(1).type_as(h)
        for layer in self.layers:
            h = checkpoint(layer, h, freqs_cis, mask, use_reentrant=False)
        return self.output(self.norm(h))


class ExpertChoice(nn.Module):
    """Experts choose their tokens within a sequence; one shared expert sees all."""

    def __init__(self, d, e=4, capacity=3):
        super().__init__()
        self.capacity, self.router = capacity, nn.Linear(d, e, bias=False)
        self.w1 = nn.Parameter(torch.randn(e, d, 2 * d) / d**0.5)
        self.w2 = nn.Parameter(torch.randn(e, 2 * d, d) / d**0.5)
        self.shared = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        scores = self.router(x).softmax(-1).transpose(1, 2)  # [b, e, n]
        gate, index = scores.topk(self.capacity, dim=-1)
        picked = torch.gather(
            x.unsqueeze(1).expand(-1, scores.shape[1], -1, -1),
            2,
            index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]),
        )
        h = F.silu(torch.einsum("becd,edf->becf", picked, self.w1))
        h = torch.einsum("becf,efd->becd", h, self.w2) * gate.unsqueeze(-1)
        onehot = F.one_hot(index, x.shape[1]).to(h.dtype)
        return self.shared(x) + torch.einsum("becd,becn->bnd", h, onehot)


class ExpertChoiceLM(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, d)
        self.moes = nn.ModuleList(ExpertChoice(d) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for norm, moe in zip(self.norms, self.moes):
            x = x + moe(norm(x))
        return self.head(x)


class Seq2Seq(nn.Module):
    """LSTM encoder; LSTM cell with Bahdanau attention, under teacher forcing."""

    def __init__(self, d=8):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, d), nn.Embedding(VOCAB, d)
        self.encoder = nn.LSTM(d, d, batch_first=True, bidirectional=True)
        self.bridge_h, self.bridge_c = nn.Linear(2 * d, d), nn.Linear(2 * d, d)
        self.Wa, self.Ua, self.va = nn.Linear(d, d), nn.Linear(2 * d, d), nn.Linear(d, 1)
        self.cell, self.out = nn.LSTMCell(3 * d, d), nn.Linear(4 * d, VOCAB)

    def forward(self, input_ids, labels):
        memory, (h, c) = self.encoder(self.src(input_ids))
        h = torch.tanh(self.bridge_h(torch.cat([h[0], h[1]], dim=-1)))
        c = torch.tanh(self.bridge_c(torch.cat([c[0], c[1]], dim=-1)))
        keys, words, logits = self.Ua(memory), self.tgt(labels.clamp(min=0)), []
        for t in range(labels.shape[1]):
            e = self.va(torch.tanh(self.Wa(h).unsqueeze(1) + keys)).squeeze(-1)
            ctx = torch.bmm(e.softmax(-1).unsqueeze(1), memory).squeeze(1)
            x = words[:, t - 1] if t else torch.zeros_like(words[:, 0])
            h, c = self.cell(torch.cat([x, ctx], -1), (h, c))
            logits.append(self.out(torch.cat([h, ctx, x], -1)))
        return torch.stack(logits, dim=1)


def teacher_forced(out, batch):
    labels = batch["labels"]
    total = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, r) * 0.1)

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class LoRALlama(Llama):
    """minLoRA: wraps the projections of a pretrained model, and freezes the rest."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.attention.wq = LoRALinear(layer.attention.wq)
            layer.attention.wv = LoRALinear(layer.attention.wv)
            layer.w2 = LoRALinear(layer.w2)


@dataclass
class Exits:
    logits: list
    confidence: torch.Tensor


class EarlyExit(nn.Module):
    """BranchyNet: a head after each block, the losses weighted, a dataclass out."""

    def __init__(self, d=12, depth=3):
        super().__init__()
        self.stem = nn.Linear(8, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
            for _ in range(depth)
        )
        self.heads = nn.ModuleList(nn.Linear(d, 4) for _ in range(depth))

    def forward(self, x):
        h, logits = self.stem(x), []
        for block, head in zip(self.blocks, self.heads):
            h = h + block(h)
            logits.append(head(h))
        return Exits(logits, logits[-1].detach().abs().mean(-1))


def of_exits(out, batch):
    total = 0.0
    for i, logits in enumerate(out.logits):
        total = total + (i + 1) * ((logits - batch["target"]) ** 2).sum()
    return total / len(out.logits), batch["target"].numel()


class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, scale):
        q = torch.round(w / scale)
        ctx.save_for_backward(q.abs() <= 7)
        return q.clamp(-7, 7) * scale

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask, None


class QuantLinear(nn.Linear):
    def forward(self, x):
        w = FakeQuant.apply(self.weight, self.weight.detach().abs().max() / 7)
        s = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
        x = x + (torch.round(x / s) * s - x).detach()
        return F.linear(x, w, self.bias)


class QAT(nn.Module):
    """Quantisation-aware: per-tensor weights, per-row activations, straight-through."""

    def __init__(self, d=16):
        super().__init__()
        self.stem = nn.Linear(8, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(QuantLinear(d, 2 * d), nn.ReLU(), QuantLinear(2 * d, d)) for _ in range(2)
        )
        self.head = nn.Linear(d, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class PerformerAttention(nn.Module):
    def __init__(self, d, h, m=6):
        super().__init__()
        self.h, self.d = h, d // h
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.register_buffer("proj", torch.randn(m, d // h))
        self.register_buffer("calls", torch.tensor(0))

    def phi(self, x):
        u = torch.einsum("bhnd,md->bhnm", x * self.d**-0.25, self.proj)
        return torch.exp(u - (x**2).sum(-1, keepdim=True) * self.d**-0.5 / 2) + 1e-4

    def forward(self, x):
        b, n, _ = x.shape
        if self.training:
            self.calls += 1
        q, k, v = self.to_qkv(x).view(b, n, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        q, k = self.phi(q), self.phi(k)
        kv = torch.einsum("bhnm,bhnd->bhnmd", k, v).cumsum(2)
        z = 1 / torch.einsum("bhnm,bhnm->bhn", q, k.cumsum(2))
        y = torch.einsum("bhnm,bhnmd,bhn->bhnd", q, kv, z)
        return self.to_out(y.transpose(1, 2).reshape(b, n, -1))


class Performer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(torch.randn(1, LENGTH, d) * 0.1)
        self.layers = nn.ModuleList([])
        for _ in range(2):
            ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d))
            self.layers.append(nn.ModuleList([nn.LayerNorm(d), PerformerAttention(d, 4), ff]))
        self.out = nn.Linear(d, VOCAB)

    def forward(self, input_ids):
        x = self.emb(input_ids) + self.pos[:, : input_ids.shape[1]]
        for norm, attn, ff in self.layers:
            x = x + attn(norm(x))
            x = x + ff(x)
        return self.out(x)


class GCN(nn.Module):
    """Dense adjacency, weights of the hops in ParameterLists, two tasks in a dict."""

    def __init__(self, d=8, hops=2):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(5 if i == 0 else d, d) * 0.4) for i in range(hops)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(d)) for _ in range(hops))
        self.node, self.graph = nn.Linear(d, 3), nn.Linear(2 * d, 2)

    def forward(self, x, adj):
        adj = adj + torch.eye(adj.shape[-1], dtype=adj.dtype)
        deg = adj.sum(-1).rsqrt()
        adj = deg.unsqueeze(-1) * adj * deg.unsqueeze(-2)
        for w, b in zip(self.weights, self.biases):
            x = F.relu(torch.einsum("bij,bjf,fo->bio", adj, x, w) + b)
        pooled = torch.cat([x.amax(1), x.mean(1)], -1)
        return {"node": self.node(x), "graph": self.graph(pooled)}


def graphs():
    adj = (torch.rand(BATCH, 6, 6) < 0.4).double()
    return {
        "x": torch.randn(BATCH, 6, 5),
        "adj": ((adj + adj.transpose(1, 2)) > 0).double(),
        "y": torch.randint(2, (BATCH,)),
        "nodes": torch.randn(BATCH, 6, 3),
    }


def of_graphs(out, batch):
    node = F.smooth_l1_loss(out["node"], batch["nodes"], reduction="none").mean((1, 2)).sum()
    return node + 0.5 * F.cross_entropy(out["graph"], batch["y"], reduction="sum"), len(batch["y"])


class Tagger(nn.Module):
    """A ViT with a class token and registers whose blocks rescale by a learned temperature."""

    def __init__(self, d=16, h=4):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 2, stride=2)
        self.cls, self.reg = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 2, d))
        self.pos = nn.Parameter(torch.randn(1, 17, d) * 0.1)
        self.blocks = nn.ModuleList(CosineBlock(d, h) for _ in range(2))
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(2 * d, 5)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        b = x.shape[0]
        x = torch.cat([self.cls.expand(b, -1, -1), x], 1) + self.pos
        x = torch.cat([x[:, :1], self.reg.expand(b, -1, -1), x[:, 1:]], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.fc(torch.cat([x[:, 0], x[:, 3:].mean(1)], -1))


class CosineBlock(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.num_heads = h
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(h, 1, 1)))
        self.ls1, self.ls2 = nn.Parameter(0.1 * torch.ones(d)), nn.Parameter(0.1 * torch.ones(d))
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = (attn * self.logit_scale.clamp(max=math.log(100.0)).exp()).softmax(-1)
        y = (attn @ v).transpose(1, 2).reshape(B, N, C)
        x = x + self.ls1 * self.proj(y)
        return x + self.ls2 * self.mlp(self.norm2(x))


class Equilibrium(nn.Module):
    """A deep equilibrium model (Bai et al. 2019): one layer is run to its fixed point, and in
    backward its linear system is solved by as many products with the layer's Jacobian."""

    def __init__(self, d=8, rounds=12):
        super().__init__()
        self.rounds = rounds
        self.inject, self.out = nn.Linear(d, d), nn.Linear(d, 4)
        self.up, self.down, self.norm = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d)

    def layer(self, z, x):
        return 0.3 * self.norm(self.down(torch.tanh(self.up(z))) + x)

    def forward(self, x):
        x = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(self.rounds):
                z = self.layer(z, x)
        z = self.layer(z, x)
        z0 = z.detach().requires_grad_()
        f0 = self.layer(z0, x.detach())

        def solve(grad):
            g = grad
            for _ in range(self.rounds):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        if z.requires_grad:
            z.register_hook(solve)
        return self.out(z)


WEB: dict[str, Subject] = {
    "two-tower": Subject(TwoTower, visits, in_batch_softmax, plan=()),
    "time-unet": Subject(TimeUNet, noised, mse),
    "mixer": Subject(Mixer, pictures, classification),
    "wav2vec": Subject(Wav2Vec, waves, classification),
    "mamba": Subject(Mamba, tokens, next_token),
    "rwkv": Subject(RWKV, tokens, next_token),
    "tiny-t5": Subject(TinyT5, tokens, next_token),
    "llama": Subject(Llama, tokens, next_token),
    "expert-choice": Subject(ExpertChoiceLM, tokens, next_token),
    "seq2seq": Subject(Seq2Seq, tokens, teacher_forced),
    "lora": Subject(LoRALlama, tokens, next_token),
    "early-exit": Subject(EarlyExit, features, of_exits),
    "qat": Subject(QAT, features, mse),
    "performer": Subject(Performer, tokens, next_token),
    "gcn": Subject(GCN, graphs, of_graphs),
    "equilibrium": Subject(Equilibrium, features, mse),
    "cosine-vit": Subject(Tagger, pictures, classification),
}
