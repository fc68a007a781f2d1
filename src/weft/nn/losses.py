"""Losses: (output, batch) -> (sum, weight), two 0-dim tensors whose quotient is the mean.

`sum` is over what counts (tokens, samples), `weight` is how many count, in the dtype of the sum: so
means over microbatches, ranks and padding can be taken exactly, once, at the end.

A loss marked `@vocab_parallel` also takes its logits as a DTensor whose last dim is sharded over
one mesh axis. The full logits then never exist on a rank: see `cross_entropy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from weft._torch.tensors import global_offset
from weft._torch.trees import tree_map

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]

IGNORED = -100  # the label that does not count, as in torch and transformers


def vocab_parallel(loss: Loss) -> Loss:
    """Mark a loss that accepts logits sharded on their last dim (a DTensor).

    Example:
        @weft.losses.vocab_parallel
        def loss(output, batch):
            return weft.losses.cross_entropy(output, batch["labels"])
    """
    loss.__dict__["vocab_parallel"] = True
    return loss


def accepts_sharded_logits(loss: Callable[..., Any]) -> bool:
    """Whether `loss`, or the function in a functools.partial, is marked `@vocab_parallel`.

    Example:
        >>> accepts_sharded_logits(next_token), accepts_sharded_logits(mse)
        (True, False)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return bool(getattr(loss, "vocab_parallel", False))


def positionwise(loss: Loss) -> Loss:
    """Mark a loss as a sum over positions that do not depend on one another. Under `cp` each rank
    then computes it on its part of the sequence.

    Example:
        @weft.losses.positionwise
        def loss(output, batch):
            return weft.losses.cross_entropy(output, batch["labels"])
    """
    loss.__dict__["positionwise"] = True
    return loss


def is_positionwise(loss: Callable[..., Any]) -> bool:
    """Whether `loss`, or the function in a functools.partial, is marked `@positionwise`.

    Example:
        >>> is_positionwise(next_token), is_positionwise(mse)
        (True, False)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return bool(getattr(loss, "positionwise", False))


def widened(loss: Callable[..., Any], output: Any) -> Any:
    """The output of a model that computes in bf16 or fp16, in float32, as its loss is computed in.
    A loss that is marked `@vocab_parallel` gets it as it is: `cross_entropy` widens by itself.

    Example:
        >>> widened(mse, torch.zeros(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if accepts_sharded_logits(loss):
        return output

    def wide(leaf: Any) -> Any:
        low = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
        return leaf.float() if low else leaf

    return wide(output) if isinstance(output, Tensor) else tree_map(wide, output)


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: the output itself, or its `.logits` as in transformers.

    Example:
        >>> logits_of(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    return output if isinstance(output, Tensor) else output.logits


@positionwise
@vocab_parallel
def next_token(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each next token; logits [b, s, V], weight in tokens.

    `batch["labels"]` [b, s] are the targets of the positions, -100 where none counts. Without
    labels, the targets are `batch["input_ids"]` [b, s] shifted by one; the last position has none.

    Example:
        >>> total, tokens = next_token(torch.zeros(2, 5, 7), {"input_ids": torch.ones(2, 5).long()})
        >>> int(tokens), round(float(total / tokens), 3)  # log 7
        (8, 1.946)
    """
    labels = batch.get("labels")
    if labels is None:
        # Shifting the labels, not the logits, spares a copy of the largest tensor of the step.
        labels = F.pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORED)
    return cross_entropy(logits_of(output), labels)


@vocab_parallel
def classification(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the classes `batch["label"]` or `batch["labels"]` [b]; logits [b, C], weight
    in samples.

    Example:
        >>> total, samples = classification(torch.zeros(3, 4), {"label": torch.tensor([0, 1, 2])})
        >>> int(samples), round(float(total / samples), 3)  # log 4
        (3, 1.386)
    """
    return cross_entropy(logits_of(output), batch["label"] if "label" in batch else batch["labels"])


def mse(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared error against `batch["target"]`, which has the output's shape; weight in elements.

    Example:
        >>> total, elements = mse(torch.ones(2, 3), {"target": torch.zeros(2, 3)})
        >>> float(total), int(elements)
        (6.0, 6)
    """
    output, target = logits_of(output), batch["target"]
    if output.shape != target.shape:  # broadcasting would give a number, and a wrong one
        raise ValueError(
            f"output has shape {list(output.shape)}, batch['target'] {list(target.shape)}"
        )
    dtype = torch.promote_types(output.dtype, torch.float32)
    total = F.mse_loss(output.to(dtype), target.to(dtype), reduction="sum")
    return total, torch.full_like(total, output.numel(), requires_grad=False)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(logits)[label] over the labels that count, and their number, in float32
    or wider.

    Logits [..., V], labels [...] int64; `ignore_index` does not count. A DTensor sharded on its
    last dim uses Megatron-LM's vocabulary-parallel form (Shoeybi et al. 2019): two all-reduces of
    the labels' size over that axis, none in backward, and each rank's gradient is that of its own
    slice. Any other DTensor is used as its local tensor.

    Example:
        >>> total, count = cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
        >>> round(float(total), 3), int(count)  # 2 log 4
        (2.773, 2)
    """
    counted = labels != ignore_index
    if isinstance(logits, DTensor):
        last = logits.dim() - 1
        axes = [
            i
            for i, p in enumerate(logits.placements)
            if isinstance(p, Shard) and p.dim % logits.dim() == last
        ]
        if len(axes) > 1 or any(p.is_partial() for p in logits.placements):
            raise ValueError(
                f"logits with placements {logits.placements}: one axis may shard the last dim, none"
                " be partial"
            )
        local = logits.to_local()
        if axes:
            mesh = logits.device_mesh
            offset = global_offset(logits)
            # Out of the vocabulary, no rank would hold the target: F.cross_entropy refuses such
            # labels, so do we.
            inside = (labels >= 0) & (labels < logits.size(last))
            torch._assert_async(
                (inside | ~counted).all(),
                f"a label lies outside the vocabulary of {logits.size(last)}",
            )
            total = _VocabParallel.apply(
                local, labels, counted, offset[last], mesh.get_group(axes[0])
            )
            return total, counted.sum().to(total.dtype)
        logits = local
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.reshape(-1, logits.size(-1)).to(dtype),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return total, counted.sum().to(total.dtype)


def reduced_numels(rows: int) -> tuple[int, ...]:
    """Elements of each all-reduce that the vocabulary-parallel form makes for `rows` labels:
    maxima, then two sums."""
    return rows, 2 * rows


class _VocabParallel(torch.autograd.Function):
    """Cross-entropy of local logits [..., V_local], whose first column is word `offset` of the
    vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        labels: Tensor,
        counted: Tensor,
        offset: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        # One buffer holds in turn logits, shifted logits, exponentials, softmax, and in backward
        # the gradient.
        buffer = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        width = buffer.size(-1)
        # torch.chunk leaves the last ranks nothing when the vocabulary is small.
        maximum = buffer.amax(dim=-1) if width else buffer.new_full(labels.shape, -torch.inf)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        buffer.sub_(maximum.unsqueeze(-1))

        mine = (labels >= offset) & (labels < offset + width)
        column = torch.where(mine, labels - offset, 0).unsqueeze(-1)
        sums = buffer.new_zeros(
            2, *labels.shape
        )  # of exponentials, and the target's logit from the one rank that has it
        if width:
            sums[1] = buffer.gather(-1, column).squeeze(-1).masked_fill_(~mine, 0)
            torch.sum(buffer.exp_(), dim=-1, out=sums[0])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)

        buffer.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(buffer, column, mine, counted)
        return (sums[0].log_() - sums[1]).masked_fill_(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place on the saved tensor: autograd refuses a second backward over the same graph.
        buffer, column, mine, counted = ctx.saved_tensors
        if buffer.size(-1):
            buffer.scatter_add_(-1, column, -mine.unsqueeze(-1).to(buffer.dtype))
        buffer.mul_((counted * gradient).unsqueeze(-1))
        return buffer, None, None, None, None
