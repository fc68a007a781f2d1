"""Tensor parallel by hand, as in Megatron-LM (Shoeybi et al. 2019): local tensors, explicit f and
g.

x -- f -- wq wk wv (columns: this rank's heads) -- attention -- wo (rows) -- g --
x -- f -- gate up  (columns)                    -- silu, *   -- down (rows) -- g --
embedding and head: this rank's rows of the vocabulary; the cross-entropy never sees whole logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from work import MakeOptimizer, compile_blocks, decoder_file


class CopyToRanks(Function):
    """f: the identity; backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(Function):
    """g: the sum over the ranks; backward, the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class CrossEntropy(Function):
    """Mean cross-entropy of logits [n, vocab / ranks], of which this rank holds those from `start`
    on; labels [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int) -> Tensor:
        top = logits.amax(dim=-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        local = labels - start
        mine = (local >= 0) & (local < logits.size(-1))
        local = local.where(mine, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, local).squeeze(-1) * mine
        exp = shifted.exp_()
        sums = torch.stack((exp.sum(dim=-1), chosen))
        dist.all_reduce(sums)
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(-1)), local, mine)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, mine = ctx.saved_tensors
        softmax = softmax.scatter_add_(-1, local, -mine.to(softmax.dtype).unsqueeze(-1))
        return softmax.mul_(grad / len(softmax)), None, None


def rows(whole: nn.Linear | nn.Embedding) -> nn.Linear | nn.Embedding:
    """This rank's rows of its weight."""
    return with_part(whole, dim=0)


def columns(whole: nn.Linear) -> nn.Linear:
    """This rank's columns of its weight."""
    return with_part(whole, dim=1)


def with_part(whole: nn.Module, dim: int) -> nn.Module:
    """The same kind of module with this rank's part of the weight, along `dim`."""
    part = whole.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
    if isinstance(whole, nn.Embedding):
        return nn.Embedding.from_pretrained(part, freeze=False)
    made = nn.Linear(part.size(1), part.size(0), bias=False, device="meta")
    made.weight = nn.Parameter(part)
    return made


class Attention(nn.Module):
    """This rank's heads of an Attention."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.head_dim, self.rotate = whole.head_dim, decoder_file().rotate
        self.wq, self.wk, self.wv = rows(whole.wq), rows(whole.wk), rows(whole.wv)
        self.wo = columns(whole.wo)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        b, s, _ = x.shape
        x = CopyToRanks.apply(x)
        q, k, v = (
            linear(x).view(b, s, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = self.rotate(q, rotary), self.rotate(k, rotary)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1)
        )
        return SumOverRanks.apply(self.wo(y.transpose(1, 2).reshape(b, s, -1)))


class MLP(nn.Module):
    """This rank's features of an MLP."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.gate, self.up = rows(whole.gate), rows(whole.up)
        self.down = columns(whole.down)

    def forward(self, x: Tensor) -> Tensor:
        x = CopyToRanks.apply(x)
        return SumOverRanks.apply(self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, whole: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = whole.attention_norm, Attention(whole.attention)
        self.mlp_norm, self.mlp = whole.mlp_norm, MLP(whole.mlp)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """This rank's part of a decoder; input_ids, labels [b, s] -> the mean loss, 0-dim, the same on
    every rank."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.embedding = rows(whole.embedding)
        self.blocks = nn.ModuleList(Block(block) for block in whole.blocks)
        self.norm = whole.norm
        self.head = rows(whole.head)
        self.start = dist.get_rank() * self.head.out_features
        self.rope_base, self.rotary_table = whole.rope_base, decoder_file().rotary_table

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        local = input_ids - self.start
        mine = (local >= 0) & (local < self.embedding.num_embeddings)
        x = self.embedding(local.where(mine, 0)) * mine.unsqueeze(-1)
        x = SumOverRanks.apply(x)
        width = self.blocks[0].attention.head_dim
        rotary = self.rotary_table(input_ids.size(1), width, self.rope_base, x)
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(CopyToRanks.apply(self.norm(x)))
        return self.loss(logits, labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.start)

    def cut(self) -> list[nn.Parameter]:
        """The parameters of which every rank holds another part."""
        parts: list[nn.Parameter] = [self.embedding.weight, self.head.weight]
        for block in self.blocks:
            parts += [*block.attention.parameters(), *block.mlp.parameters()]
        return parts


class Trainer:
    """`step(batch)` takes the whole batch on every rank; it returns the mean loss over it,
    0-dim."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        clip: float | None,
        compiled: bool = False,
    ):
        self.model, self.clip = Decoder(model), clip
        if compiled:
            compile_blocks(self.model)
            self.model.loss = torch.compile(self.model.loss)
        self.optimizer = optimizer(self.model.parameters())
        cut = {id(p) for p in self.model.cut()}
        self.cut = [p for p in self.model.parameters() if id(p) in cut]
        self.whole = [p for p in self.model.parameters() if id(p) not in cut]

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(batch["input_ids"], batch["labels"])
        loss.backward()
        if self.clip is not None:
            self.clip_gradients(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def clip_gradients(self, clip: float) -> None:
        """By the norm of the whole model's gradient: parts are summed over the ranks, copies count
        once."""
        square = nn.utils.get_total_norm([p.grad for p in self.cut]) ** 2
        dist.all_reduce(square)
        norm = (square + nn.utils.get_total_norm([p.grad for p in self.whole]) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
