"""Nets that call torch.utils.checkpoint by themselves, with dropout or noise inside."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.cases import BATCH, VOCAB, Subject
from weft.nn.losses import mse


class Block(nn.Module):
    def __init__(self, d=16, h=4, p=0.2, p_attn=0.2):
        super().__init__()
        self.h, self.p = h, p_attn
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down, self.drop = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Dropout(p)

    def attn(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.h, -1).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.drop(self.out(y.transpose(1, 2).reshape(b, s, d)))

    def mlp(self, x):
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Inside(Block):
    """Its two halves one by one."""

    def forward(self, x):
        x = x + checkpoint(self.attn, self.n1(x), use_reentrant=False)
        return x + checkpoint(self.mlp, self.n2(x), use_reentrant=False)


class LM(nn.Module):
    def __init__(self, block=Block, **options):
        super().__init__()
        self.emb, self.drop = nn.Embedding(VOCAB, 16), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(block(**options) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCAB, bias=False)

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids):
        return self.head(self.norm(self.body(self.drop(self.emb(input_ids)))))


class Pairs(LM):
    def __init__(self, again=True, **options):
        super().__init__(**options)
        self.again = again

    def pair(self, i, x):
        return self.blocks[i + 1](self.blocks[i](x))

    def body(self, x):
        for i in (0, 2):
            x = checkpoint(self.pair, i, x, use_reentrant=False) if self.again else self.pair(i, x)
        return x


class Gradient(nn.Module):
    """Asks for a gradient in the forward, through a function under checkpoint, and drops after."""

    def __init__(self, d=8, again=True):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, d))
        self.mlp = nn.Sequential(nn.Linear(d, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, d))
        self.drop, self.head, self.again = nn.Dropout(0.2), nn.Linear(d, 4), again

    def forward(self, x):
        x = x.clone().requires_grad_()
        e = checkpoint(self.energy, x, use_reentrant=False) if self.again else self.energy(x)
        (g,) = torch.autograd.grad(e.square().sum(), x, create_graph=True)
        y = self.drop(x + g)
        return self.head(self.drop(y + self.mlp(y)))


class Hooked(LM):
    """Has hooks of saved tensors of its own inside."""

    def part(self, x):
        with saved_tensors_hooks(torch.clone, lambda t: t):
            x = self.blocks[0](x)
        return self.blocks[1](x)

    def body(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


class Noisy(LM):
    def noisy(self, block, x):
        y = block(x)
        return y + 0.1 * torch.randn_like(y)

    def body(self, x):
        for block in self.blocks:
            x = checkpoint(self.noisy, block, x, use_reentrant=False)
        return x


class Reentrant(LM):
    def body(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Nested(LM):
    """A function under checkpoint inside of another one, which draws after it."""

    def body(self, x):
        def outer(x):
            return self.drop(checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False))

        x = checkpoint(outer, x, use_reentrant=False)
        return self.blocks[3](self.blocks[2](x))


def with_plan(build, recompute):
    return Subject(build, plan=(("accumulate", 2), ("recompute", recompute)))


def vectors():
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, 4)}


THAT_RECOMPUTE = {
    "checkpointed-pairs": Subject(Pairs),
    "checkpointed-halves": Subject(partial(LM, Inside)),
    "checkpointed-noise": Subject(Noisy),
    "checkpointed-reentrant": Subject(Reentrant),
    "checkpointed-twice": Subject(Nested),
    "checkpointed-hooks": Subject(Hooked),
    "checkpointed-gradient": Subject(Gradient, vectors, mse),
    "recomputed-halves": with_plan(partial(LM, Inside), "full"),
    "recomputed-pairs": with_plan(Pairs, "full"),
    "selective-pairs": with_plan(partial(Pairs, p_attn=0.0), "selective"),
}
