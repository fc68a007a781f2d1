"""Nets in the words of public code that many projects copy: a model whose MLP is called through a
lambda, positions before samples, weights that a hook computes, sampled actions, reversible layers.
"""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm

from tests.cases import BATCH, VOCAB, Subject, tokens
from weft.nn.losses import mse, next_token


class CausalAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.n_head, self.n_embd = nn.Dropout(0.1), n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class LambdaBlock(nn.Module):
    """Keeps the linears of its MLP in a dict, which is never called."""

    def __init__(self, n_embd):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalAttention(n_embd, 4)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(n_embd, 4 * n_embd),
                "c_proj": nn.Linear(4 * n_embd, n_embd),
                "act": nn.GELU(),
                "dropout": nn.Dropout(0.1),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class Medusa(nn.Module):
    """minGPT (Karpathy 2020) with heads that look further ahead (Cai et al. 2024)."""

    def __init__(self, n_embd=16, ahead=1):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, n_embd),
                "wpe": nn.Embedding(32, n_embd),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([LambdaBlock(n_embd) for _ in range(2)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, VOCAB, bias=False)
        self.medusa_head = nn.ModuleList(nn.Linear(n_embd, VOCAB) for _ in range(ahead))

    def forward(self, input_ids):
        pos = torch.arange(0, input_ids.size(1), device=input_ids.device).unsqueeze(0)
        x = self.transformer.wte(input_ids) + self.transformer.wpe(pos)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        return torch.stack([self.lm_head(x), *(head(x) for head in self.medusa_head)])


def medusa_loss(logits, batch):
    loss, labels = 0, batch["labels"]
    for i in range(logits.shape[0]):
        ahead = logits[i, :, : labels.shape[1] - i].flatten(0, 1)
        wanted = labels[:, i:].reshape(-1)
        loss += 0.8**i * F.cross_entropy(ahead, wanted, ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


class Prenet(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x):
        for linear in self.layers:
            x = F.dropout(F.relu(linear(x)), p=0.5, training=True)
        return x


class Tacotron(nn.Module):
    """The decoder of Tacotron 2 (Shen et al. 2018), as NVIDIA wrote it: [positions, samples,
    features] before its loop and [samples, channels, positions] after it. There are as many
    channels, or features of a rank, as samples."""

    def __init__(self, n_mel=4, d=6, rnn=8):
        super().__init__()
        self.n_mel, self.rnn = n_mel, rnn
        self.embedding, self.prenet = nn.Embedding(VOCAB, d), Prenet([n_mel, 8, 8])
        self.attention_rnn, self.query = nn.LSTMCell(8 + d, rnn), nn.Linear(rnn, d, bias=False)
        self.projection = nn.Linear(rnn + d, n_mel)
        self.postnet = nn.Sequential(nn.Conv1d(n_mel, n_mel, 3, padding=1), nn.BatchNorm1d(n_mel))

    def forward(self, text, mels):
        memory = self.embedding(text)
        go = memory.data.new(1, memory.size(0), self.n_mel).zero_()
        decoder_inputs = self.prenet(torch.cat((go, mels.permute(2, 0, 1)[:-1]), dim=0))
        hidden = memory.data.new(memory.size(0), self.rnn).zero_()
        cell, context = torch.zeros_like(hidden), torch.zeros_like(memory[:, 0])
        outputs = []
        while len(outputs) < decoder_inputs.size(0):
            x = torch.cat((decoder_inputs[len(outputs)], context), -1)
            hidden, cell = self.attention_rnn(x, (hidden, cell))
            hidden = F.dropout(hidden, 0.1, self.training)
            energies = torch.bmm(memory, self.query(hidden).unsqueeze(2)).squeeze(2)
            energies.data.masked_fill_(text == 0, -float("inf"))
            context = torch.bmm(F.softmax(energies, dim=1).unsqueeze(1), memory).squeeze(1)
            outputs += [self.projection(torch.cat((hidden, context), -1))]
        out = torch.stack(outputs).transpose(0, 1).transpose(1, 2)
        return out, out + F.dropout(self.postnet(out), 0.5, self.training)


def mel_loss(out, batch):
    loss = sum((each - batch["mels"]).square().sum() for each in out)
    return loss, torch.tensor(float(out[0].numel()))


class Policy(nn.Module):
    """Actor and critic, as in pytorch/examples; samples its action, and is rewarded by a table."""

    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 16)
        self.action_head, self.value_head = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x, table):
        x = F.relu(self.affine2(F.relu(self.affine1(x))))
        m = torch.distributions.Categorical(F.softmax(self.action_head(x), dim=-1))
        action = m.sample()
        reward = table.gather(1, action[:, None])
        return m.log_prob(action), self.value_head(x), reward, m.entropy()


def actor_critic(out, batch):
    log_prob, value, reward, entropy = out
    advantage = (reward - value).detach().squeeze(1)
    loss = -(log_prob * advantage).sum() - 0.01 * entropy.sum()
    return loss + F.smooth_l1_loss(value, reward, reduction="sum"), torch.tensor(len(value))


class SampledKeys(nn.Module):
    """Informer's attention (Zhou et al. 2021): the same random keys for all samples, and the
    queries that stand out of them; as many positions as several samples."""

    def __init__(self, d=8):
        super().__init__()
        self.inp, self.q, self.k, self.v = (nn.Linear(n, d) for n in (3, d, d, d))
        self.out = nn.Linear(d, 4)

    def forward(self, x_enc):
        x = self.inp(x_enc)
        q, k, v = self.q(x), self.k(x), self.v(x)
        L = k.shape[1]
        index_sample = torch.randint(L, (L, 3))
        few = k[:, index_sample]
        scores = torch.matmul(q.unsqueeze(2), few.transpose(-2, -1)).squeeze(2)
        top = (scores.max(-1)[0] - scores.sum(-1) / L).topk(4, sorted=False)[1]
        queries = q.gather(1, top.unsqueeze(-1).expand(-1, -1, q.shape[-1]))
        attended = (queries @ k.transpose(1, 2)).softmax(-1) @ v
        context = (
            v.mean(1, keepdim=True)
            .expand_as(v)
            .scatter(1, top[..., None].expand_as(attended), attended)
        )
        return self.out((x + context).mean(1))


class Chomp1d(nn.Module):
    def __init__(self, chomp):
        super().__init__()
        self.chomp = chomp

    def forward(self, x):
        return x[:, :, : -self.chomp].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_in, n_out, dilation):
        super().__init__()
        conv1 = weight_norm(nn.Conv1d(n_in, n_out, 2, padding=dilation, dilation=dilation))
        conv2 = weight_norm(nn.Conv1d(n_out, n_out, 2, padding=dilation, dilation=dilation))
        conv1.weight.data.normal_(0, 0.01)
        cut = Chomp1d(dilation)
        self.net = nn.Sequential(conv1, cut, nn.ReLU(), nn.Dropout(0.2), conv2, cut, nn.ReLU())
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, x):
        return F.relu(self.net(x) + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    """A temporal convolutional network (Bai et al. 2018) with torch's first weight norm."""

    def __init__(self, d=8, channels=(8, 12, 8)):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCAB, d), nn.Linear(channels[-1], VOCAB)
        pairs = enumerate(pairwise((d, *channels)))
        self.network = nn.Sequential(*(TemporalBlock(a, b, 2**i) for i, (a, b) in pairs))
        self.decoder.weight = self.encoder.weight

    def forward(self, input_ids):
        emb = self.encoder(input_ids)
        return self.decoder(self.network(emb.transpose(1, 2)).transpose(1, 2))


class ReversibleBlock(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x):
        x1, x2 = torch.chunk(x, 2, dim=2)
        with torch.no_grad():
            y1 = x1 + self.f(x2)
            y2 = x2 + self.g(y1)
        return torch.cat([y1, y2], dim=2)

    def backward_pass(self, y, dy):
        (y1, y2), (dy1, dy2) = torch.chunk(y, 2, dim=2), torch.chunk(dy, 2, dim=2)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy1 = self.g(y1)
            torch.autograd.backward(gy1, dy2)
        x2, dx1 = (y2 - gy1).detach().requires_grad_(), dy1 + y1.grad
        with torch.enable_grad():
            fx2 = self.f(x2)
            torch.autograd.backward(fx2, dx1)
        x1, dx2 = (y1 - fx2).detach(), dy2 + x2.grad
        return torch.cat([x1, x2.detach()], dim=2), torch.cat([dx1, dx2], dim=2)


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks):
        for block in blocks:
            x = block(x)
        ctx.y, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx, dy):
        y = ctx.y
        for block in ctx.blocks[::-1]:
            y, dy = block.backward_pass(y, dy)
        return dy, None


class Reversible(nn.Module):
    """Reversible layers (Gomez et al. 2017), as reformer-pytorch has them: backward computes their
    inputs anew, and adds to their gradients itself."""

    def __init__(self, d=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.blocks = nn.ModuleList(
            ReversibleBlock(CausalPart(d), nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d)))
            for _ in range(2)
        )

    def forward(self, input_ids):
        x = self.emb(input_ids)
        x = ReversibleFunction.apply(torch.cat([x, x], dim=-1), self.blocks)
        return self.out(torch.stack(x.chunk(2, dim=-1)).mean(dim=0))


class CausalPart(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, n, d))


class RandomStart(nn.Module):
    """Begins with a random state of each layer and sample, as tutorials of PyTorch do."""

    def __init__(self, d=10):
        super().__init__()
        self.d, self.lstm, self.fc = d, nn.LSTM(5, d, num_layers=2), nn.Linear(d, 4)

    def forward(self, x):
        x = x.transpose(0, 1)
        h, c = (torch.randn(2, x.shape[1], self.d).to(x) for _ in range(2))
        return self.fc(self.lstm(x, (h, c))[0][-1])


def speech():
    text = torch.randint(1, VOCAB, (BATCH, 6))
    text[::2, 5:] = 0
    return {"text": text, "mels": torch.randn(BATCH, 4, 5)}


def bandits():
    return {"x": torch.randn(BATCH, 4), "table": torch.randn(BATCH, 3)}


def histories():
    return {"x_enc": torch.randn(BATCH, 16, 3), "target": torch.randn(BATCH, 4)}


def series():
    return {"x": torch.randn(BATCH, 7, 5), "target": torch.randn(BATCH, 4)}


PUBLIC_CODE: dict[str, Subject] = {
    "medusa": Subject(Medusa, tokens, medusa_loss),
    "tacotron": Subject(Tacotron, speech, mel_loss),
    "actor-critic": Subject(Policy, bandits, actor_critic),
    "sampled-keys": Subject(SampledKeys, histories, mse),
    "tcn": Subject(TCN, tokens, next_token),
    "reversible": Subject(Reversible, tokens, next_token),
    "random-start": Subject(RandomStart, series, mse),
}
