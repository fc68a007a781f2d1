"""Nets of tutorials and of their followers: weights that forward hooks, loops, checkpoints of the
model's own and operations in place come to in other ways than by one call."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.cases import BATCH, VOCAB, Subject, tokens
from weft.nn.losses import classification, mse, next_token


def squash(t):
    sq = (t**2).sum(dim=-1, keepdim=True)
    return sq / (1 + sq) * t / (sq.sqrt() + 1e-8)


class Capsules(nn.Module):
    """Routing by agreement, with the classes before the samples."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 5)
        self.primary = nn.ModuleList([nn.Conv2d(8, 4, 5, 2) for _ in range(4)])
        self.digits = Routing(5, 64, 4, 8)
        self.decoder = nn.Sequential(
            nn.Linear(40, 32), nn.ReLU(inplace=True), nn.Linear(32, 768), nn.Sigmoid()
        )

    def forward(self, x):
        h = F.relu(self.conv(x), inplace=True)
        u = squash(torch.cat([c(h).view(x.size(0), -1, 1) for c in self.primary], dim=-1))
        v = self.digits(u).squeeze(3).squeeze(2).transpose(0, 1)
        classes = F.softmax((v**2).sum(dim=-1) ** 0.5, dim=-1)
        y = torch.eye(5, dtype=x.dtype).index_select(0, classes.max(dim=1)[1])
        return classes, self.decoder((v * y[:, :, None]).reshape(x.size(0), -1))


class Routing(nn.Module):
    def __init__(self, capsules, nodes, i, o):
        super().__init__()
        self.route_weights = nn.Parameter(0.1 * torch.randn(capsules, nodes, i, o))

    def forward(self, x):
        priors = x[None, :, :, None, :] @ self.route_weights[:, None, :, :, :]
        logits = torch.zeros(*priors.size(), dtype=x.dtype)
        for i in range(3):
            outputs = squash((F.softmax(logits, dim=2) * priors).sum(dim=2, keepdim=True))
            if i < 2:
                logits = logits + (priors * outputs).sum(dim=-1, keepdim=True)
        return outputs


def margin_loss(out, batch):
    classes, rec = out
    labels = F.one_hot(batch["label"], 5).to(classes.dtype)
    margin = labels * F.relu(0.9 - classes) ** 2
    margin = margin + 0.5 * (1.0 - labels) * F.relu(classes - 0.1) ** 2
    images = batch["x"].reshape(len(rec), -1)
    return margin.sum() + 0.0005 * ((rec - images) ** 2).sum(), torch.tensor(float(len(rec)))


class TNet(nn.Module):
    """Biases before batch norms, whose gradients are zero but for rounding."""

    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(16), nn.BatchNorm1d(32), nn.BatchNorm1d(16)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = nn.Flatten(1)(nn.MaxPool1d(h.size(-1))(h))
        h = F.relu(self.bn3(self.fc1(h)))
        init = torch.eye(self.k, requires_grad=True, dtype=x.dtype).repeat(x.size(0), 1, 1)
        return self.fc2(h).view(-1, self.k, self.k) + init


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_transform, self.feature_transform = TNet(3), TNet(16)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, 5)

    def forward(self, points):
        x = points.transpose(1, 2)
        m = self.input_transform(x)
        x = torch.bmm(x.transpose(1, 2), m).transpose(1, 2)
        x = F.relu(self.bn1(self.conv1(x)))
        x = torch.bmm(x.transpose(1, 2), self.feature_transform(x)).transpose(1, 2)
        x = torch.max(self.bn2(self.conv2(x)), 2)[0]
        return F.log_softmax(self.fc(x), dim=1), m


def regularised(out, batch):
    logp, m = out
    loss = F.nll_loss(logp, batch["label"], reduction="sum")
    eye = torch.eye(m.shape[-1], dtype=m.dtype)
    return loss + 1e-3 * (eye - torch.bmm(m, m.mT)).pow(2).sum(), torch.tensor(float(len(m)))


class Seq2Seq(nn.Module):
    """Bahdanau's: the head scores one word at a time."""

    def __init__(self, h=16):
        super().__init__()
        self.embedding, self.decoder_embedding = nn.Embedding(VOCAB, h), nn.Embedding(VOCAB, h)
        self.encoder = nn.GRU(h, h, batch_first=True)
        self.decoder = nn.GRU(2 * h, h, batch_first=True)
        self.Wa, self.Ua, self.Va = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, 1)
        self.out = nn.Linear(h, VOCAB)

    def forward(self, src, tgt):
        keys, hidden = self.encoder(self.embedding(src))
        word, outs = torch.zeros_like(src[:, :1]), []
        for i in range(tgt.size(1)):
            scores = self.Va(torch.tanh(self.Wa(hidden.permute(1, 0, 2)) + self.Ua(keys)))
            context = torch.bmm(F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1), keys)
            step = torch.cat((self.decoder_embedding(word), context), dim=2)
            out, hidden = self.decoder(step, hidden)
            outs.append(self.out(out))
            word = tgt[:, i : i + 1] if i % 3 != 2 else outs[-1].argmax(-1).detach()
        return F.log_softmax(torch.cat(outs, dim=1), dim=-1)


def nll(out, batch):
    loss = F.nll_loss(out.flatten(0, 1), batch["tgt"].flatten(), reduction="sum")
    return loss, torch.tensor(float(batch["tgt"].numel()))


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = torch.unbind(self.qkv(x).reshape(B, N, 3, self.h, C // self.h), 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(d), Attention(d, h), nn.LayerNorm(d)
        self.gamma = nn.Parameter(0.1 * torch.ones(d))
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class Registers(nn.Module):
    """A ViT with registers that checkpoints its blocks."""

    reentrant = False

    def __init__(self, d=32, n=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, d, 4, 4)
        self.register_tokens = nn.Parameter(torch.randn(1, 2, d) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, d) * 0.02)
        self.blocks = nn.ModuleList([Block(d, 4) for _ in range(n)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 5)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        x = torch.cat((self.register_tokens.expand(x.shape[0], -1, -1), x), 1)
        for blk in self.blocks:
            x = checkpoint(blk, x, use_reentrant=self.reentrant) if self.training else blk(x)
        return self.head(self.norm(x)[:, 2:].mean(1))


class OldRegisters(Registers):
    reentrant = True


class CheckpointedConv(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, c, 3, padding=1), nn.Linear(c, 5)
        layer = [(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)) for _ in range(4)]
        self.body = nn.Sequential(*[nn.Sequential(*two, nn.ReLU(inplace=True)) for two in layer])

    def forward(self, x):
        x = checkpoint_sequential(self.body, 2, self.stem(x), use_reentrant=False)
        return self.fc(x.mean((2, 3)))


class HookedDepth(nn.Module):
    """DPT: features that forward hooks keep."""

    def __init__(self, d=32):
        super().__init__()
        self.stem = nn.Conv2d(3, d, 4, 4)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.activations = {}
        for i in (1, 3):
            self.encoder.layers[i].register_forward_hook(self.keep(i))
        self.reassemble = nn.ModuleList([nn.ConvTranspose2d(d, 8, 2, 2) for _ in range(2)])
        self.out = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 1))

    def keep(self, i):
        def hook(module, inputs, output):
            self.activations[i] = output

        return hook

    def forward(self, img):
        x = self.stem(img)
        self.encoder(x.flatten(2).transpose(1, 2))
        kept = [self.activations[i].transpose(1, 2).unflatten(2, x.shape[-2:]) for i in (1, 3)]
        a, b = (m(t) for m, t in zip(self.reassemble, kept))
        return self.out(F.relu(a + b)).squeeze(1)


class MemN2N(nn.Module):
    """One table for questions and for stories, which are longer."""

    def __init__(self, hops=3, d=16):
        super().__init__()
        self.hops = hops
        for i in range(hops + 1):
            self.add_module(f"C_{i}", nn.Embedding(VOCAB, d, padding_idx=0))
        self.TA = nn.Parameter(torch.randn(5, d) * 0.1)

    def C(self, i):
        return getattr(self, f"C_{i}")

    def forward(self, story, query):
        s = story.size()
        u = self.C(0)(query).sum(1)
        for hop in range(self.hops):
            a = self.C(hop)(story.view(s[0], -1)).view((*s, -1)).sum(2) + self.TA
            c = self.C(hop + 1)(story.view(s[0], -1)).view((*s, -1)).sum(2)
            prob = F.softmax((a * u.unsqueeze(1)).sum(2), dim=1)
            u = u + (c * prob.unsqueeze(2)).sum(1)
        return u @ self.C(self.hops).weight.transpose(0, 1)


class SlotAttention(nn.Module):
    def __init__(self, k=4, d=16):
        super().__init__()
        self.k, self.scale = k, d**-0.5
        self.mu, self.logsigma = (nn.Parameter(torch.randn(1, 1, d)) for _ in range(2))
        self.to_q, self.to_k, self.to_v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.gru = nn.GRUCell(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 32), nn.ReLU(inplace=True), nn.Linear(32, d))
        self.norm_input, self.norm_slots, self.norm_ff = (nn.LayerNorm(d) for _ in range(3))

    def forward(self, inputs):
        b, _, d = inputs.shape
        mu = self.mu.expand(b, self.k, -1)
        slots = mu + self.logsigma.exp() * torch.randn(mu.shape, dtype=mu.dtype)
        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(3):
            q = self.to_q(self.norm_slots(slots))
            attn = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            new = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(new.reshape(-1, d), slots.reshape(-1, d)).reshape(b, -1, d)
            slots = slots + self.mlp(self.norm_ff(slots))
        return slots


class Slots(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.enc, self.slot = nn.Conv2d(3, d, 5, 2, padding=2), SlotAttention(4, d)
        self.dec = nn.Conv2d(d, 4, 3, padding=1)

    def forward(self, x):
        slots = self.slot(F.relu(self.enc(x)).flatten(2).permute(0, 2, 1))
        y = slots.reshape(-1, 1, 1, slots.shape[-1]).repeat(1, 16, 16, 1).permute(0, 3, 1, 2)
        rgb, a = self.dec(y).view(x.shape[0], 4, 4, 16, 16).split([3, 1], 2)
        return (rgb * a.softmax(1)).sum(1)


class XLLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv_net, self.o_net = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.norm, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(inplace=True), nn.Linear(2 * d, d))

    def forward(self, w, mem):
        q, k, v = self.qkv_net(w if mem is None else torch.cat([mem, w], 1)).chunk(3, -1)
        b, n = w.shape[:2]
        q, k, v = (t.view(b, t.size(1), self.h, -1) for t in (q[:, -n:], k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5
        m = torch.ones(n, k.size(1)).triu(1 + k.size(1) - n).bool()
        o = torch.einsum("bhij,bjhd->bihd", s.masked_fill(m, -1e30).softmax(-1), v)
        w = self.norm(w + self.o_net(o.reshape(b, n, -1)))
        return self.norm2(w + self.ff(w))


class TransformerXL(nn.Module):
    """Segments one after the other, each with the states of the one before."""

    def __init__(self, d=32, h=4, n=2):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.layers = nn.ModuleList([XLLayer(d, h) for _ in range(n)])

    def forward(self, input_ids):
        mems, logits = [None] * len(self.layers), []
        for ids in input_ids.split(6, 1):
            x, new = self.emb(ids), []
            for layer, mem in zip(self.layers, mems):
                new.append(x.detach())
                x = layer(x, mem)
            mems = new
            logits.append(self.out(x))
        return torch.cat(logits, 1)


@torch.jit.script
def swish(x, beta: float):
    return x * torch.sigmoid(beta * x)


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.fc = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, input_ids):
        return self.fc(swish(self.emb(input_ids), 1.5))


class Scripted(Swish):
    def __init__(self):
        super().__init__()
        self.fc = torch.jit.script(self.fc)


class DLRM(nn.Module):
    """Several tables of bags, and the products of all pairs."""

    def __init__(self, tables=(31, 50, 17, 23), d=8):
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, d, mode="sum") for n in tables])
        self.bot_l = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, d), nn.ReLU())
        n = len(tables) + 1
        self.top_l = nn.Sequential(
            nn.Linear(d + n * (n - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()
        )

    def forward(self, dense_x, bags):
        x = self.bot_l(dense_x)
        t = torch.stack([x, *(emb(bags[:, k]) for k, emb in enumerate(self.emb_l))], dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(t.shape[1], t.shape[1], -1)
        return self.top_l(torch.cat([x, z[:, li, lj]], dim=1))


def bce(out, batch):
    loss = F.binary_cross_entropy(out, batch["click"], reduction="sum")
    return loss, torch.tensor(float(len(out)))


class HyperNet(nn.Module):
    """Weights that another net makes."""

    def __init__(self, shapes=((16, 8), (16, 16), (4, 16))):
        super().__init__()
        self.shapes = shapes
        self.z = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in shapes])
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, o * i + o) for o, i in shapes])

    def forward(self, x):
        for z, head, (o, i) in zip(self.z, self.heads, self.shapes):
            theta = head(self.trunk(z))
            x = torch.tanh(F.linear(x, theta[: o * i].view(o, i), theta[o * i :]))
        return x


class RealNVP(nn.Module):
    def __init__(self, d=8, n=4):
        super().__init__()
        self.register_buffer("mask", torch.stack([(torch.arange(d) + i) % 2 for i in range(n)]))
        self.s = nn.ModuleList([self.net(d, nn.Tanh()) for _ in range(n)])
        self.t = nn.ModuleList([self.net(d, nn.Identity()) for _ in range(n)])

    def net(self, d, last):
        return nn.Sequential(nn.Linear(d, 16), nn.LeakyReLU(), nn.Linear(16, d), last)

    def forward(self, x):
        log_det, z = x.new_zeros(x.shape[0]), x
        for m, s, t in zip(self.mask.to(x.dtype), self.s, self.t):
            kept = m * z
            scale = s(kept) * (1 - m)
            z = (1 - m) * (z - t(kept)) * torch.exp(-scale) + kept
            log_det -= scale.sum(dim=1)
        return log_det - 0.5 * (z.square() + math.log(2 * math.pi)).sum(1)


def likelihood(out, batch):
    return -out.sum(), torch.tensor(float(len(out)))


def pictures():
    return {"x": torch.randn(BATCH, 3, 16, 16), "label": torch.randint(0, 5, (BATCH,))}


def images():
    x = torch.rand(BATCH, 3, 16, 16)
    return {"x": x, "target": x}


def depths():
    return {"img": torch.randn(BATCH, 3, 16, 16), "target": torch.rand(BATCH, 16, 16)}


def clouds():
    return {"points": torch.randn(BATCH, 20, 3), "label": torch.randint(0, 5, (BATCH,))}


def translations():
    src, tgt = torch.randint(0, VOCAB, (BATCH, 7)), torch.randint(0, VOCAB, (BATCH, 6))
    return {"src": src, "tgt": tgt}


def stories():
    story, query = torch.randint(0, VOCAB, (BATCH, 5, 4)), torch.randint(0, VOCAB, (BATCH, 4))
    return {"story": story, "query": query, "label": torch.randint(0, VOCAB, (BATCH,))}


def clicks():
    bags, click = torch.randint(0, 17, (BATCH, 4, 3)), torch.rand(BATCH, 1).round()
    return {"dense_x": torch.rand(BATCH, 6), "bags": bags, "click": click}


def points():
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, 4)}


TUTORIALS = {
    "capsules": Subject(Capsules, pictures, margin_loss),
    "pointnet": Subject(PointNet, clouds, regularised),
    "word-by-word": Subject(Seq2Seq, translations, nll),
    "registers": Subject(Registers, pictures, classification),
    "registers-twice": Subject(
        Registers, pictures, classification, plan=(("accumulate", 2), ("recompute", "full"))
    ),
    "old-registers": Subject(OldRegisters, pictures, classification),
    "checkpointed-conv": Subject(CheckpointedConv, pictures, classification),
    "hooked-depth": Subject(HookedDepth, depths, mse),
    "memn2n": Subject(MemN2N, stories, classification),
    "slots": Subject(Slots, images, mse),
    "transformer-xl": Subject(TransformerXL, tokens, next_token),
    "swish": Subject(Swish, tokens, next_token),
    "scripted": Subject(Scripted, tokens, next_token),
    "dlrm": Subject(DLRM, clicks, bce),
    "hypernet": Subject(HyperNet, points, mse),
    "real-nvp": Subject(RealNVP, points, likelihood),
}
