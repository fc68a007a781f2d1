"""Losses: (output, batch) -> (sum, weight), two 0-dim tensors whose quotient is the mean.

`sum` is over what counts (tokens, samples), `weight` is how many count, in the dtype of the sum: so
means over microbatches, ranks and padding can be taken exactly, once, at the end.

A loss marked `@vocab_parallel` also takes its logits as a DTensor whose last dim is sharded over
one mesh axis. The full logits then never exist on a rank: see `cross_entropy`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from weft._torch.functional_collectives import all_reduce
from weft._torch.trees import tree_map
from weft.core import ConfigError, DataError, function_of_partial

from .batch_labels import IGNORED, shift_labels
from .chunked_softmax import chunk_rows, softmax_parts, token_losses, wide
from .deferred_logits import DeferredLogits

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]

# (logits, labels, ignored label) -> what `cross_entropy` of them is
Definition = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
_definition: ContextVar[Definition | None] = ContextVar("definition", default=None)


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
    return bool(getattr(function_of_partial(loss), "vocab_parallel", False))


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
    return bool(getattr(function_of_partial(loss), "positionwise", False))


def whole_batch(loss: Loss) -> Loss:
    """Mark a loss that compares samples with one another: contrastive losses, triplets mined in the
    batch. It gets the output and the batch of all microbatches and data ranks, and is the same on
    every layout.

    Of the output, each tensor whose dim 0 counts samples comes whole, [batch, ...], in the order of
    the global batch; so do the entries of the batch that the loss reads. Every other tensor of the
    output, such as a temperature, comes as it is. With `accumulate` above 1 outputs are made first,
    without a graph, and each microbatch's forward runs again for its backward (GradCache, Gao et
    al. 2021, arXiv:2101.06983), or, under `pp`, all forwards come before the first backward.

    Example:
        @weft.losses.whole_batch
        def clip(output, batch):  # image, text [batch, dim]; scale []
            logits = output["scale"].exp() * output["image"] @ output["text"].T
            own = torch.arange(len(logits), device=logits.device)
            there = F.cross_entropy(logits, own, reduction="sum")
            back = F.cross_entropy(logits.T, own, reduction="sum")
            return (there + back) / 2, len(logits)
    """
    loss.__dict__["whole_batch"] = True
    return loss


def is_whole_batch(loss: Callable[..., Any]) -> bool:
    """Whether `loss`, or the function in a functools.partial, is marked `@whole_batch`.

    Example:
        >>> is_whole_batch(whole_batch(lambda output, batch: (output.sum(), 1)))
        True
    """
    return bool(getattr(function_of_partial(loss), "whole_batch", False))


def split_loss(
    loss: Callable[..., Any],
) -> tuple[Callable[[Batch], Batch], Callable[..., Any]]:
    """What a step does with a batch while its sequences are whole, and the loss of what that gives.

    A loss whose targets are other positions' has both, so that ranks may share a sequence: its
    attribute `split`. Any other loss takes the batch as it is.
    """
    return getattr(loss, "split", (dict, loss))


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


def weighed_loss(
    loss: Callable[..., Any], output: Any, batch: Batch, field: str = "loss"
) -> tuple[Tensor, Tensor]:
    """What a loss returns, (sum, weight). The output is `widened`.

    Args:
        loss: what is called.
        output: what the model returns.
        batch: what it was called with.
        field: what an error names.

    Raises:
        ConfigError: it returns anything else, such as a mean.

    Example:
        >>> total, weight = weighed_loss(mse, torch.ones(2, 3), {"target": torch.zeros(2, 3)})
        >>> float(total / weight)
        1.0
    """
    found: Any = loss(widened(loss, output), batch)
    pair = found if isinstance(found, tuple | list) and len(found) == 2 else (None, None)
    total, weight = pair
    total, weight = _without_dims(total), _without_dims(weight)
    if isinstance(weight, numbers.Real) and not isinstance(weight, int | float):
        weight = float(weight)  # of numpy
    name = getattr(loss, "__name__", type(loss).__name__)
    if isinstance(weight, int | float) and weight < 0:
        fix = "return how many items the sum has, as in return losses.sum(), losses.numel()"
        raise ConfigError(field, name, f"returns the weight {weight}, which is negative", fix)
    scalar = isinstance(weight, Tensor) and weight.ndim == 0
    if (
        isinstance(total, Tensor)
        and total.ndim == 0
        and (scalar or isinstance(weight, int | float))
    ):
        return total, weight
    fix = (
        "return (sum, weight): the sum over what counts as a tensor without dims, and how many"
        " count, as in return losses.sum(), losses.numel()"
    )
    raise ConfigError(field, name, f"returns {_described(found)}, not (sum, weight)", fix)


def _without_dims(found: Any) -> Any:
    one = isinstance(found, Tensor) and found.ndim and found.numel() == 1
    return found.reshape(()) if one else found


def check_learns(loss: Callable[..., Any], total: Tensor, weight: Tensor | float) -> None:
    """Refuse a loss that no weight has a part in: training would change nothing.

    Args:
        loss: what was called, while gradients were recorded.
        total: the sum that it returned.
        weight: the weight beside it; items of weight 0 are no samples. A sum of 0 is no fault
            either: none of these samples may count, as in torch.zeros(()).

    Raises:
        ConfigError: it has no gradient.
    """
    if total.requires_grad or not float(weight) or not (total.is_meta or float(total)):
        return
    problem = "its sum has no gradient, so no weight would ever change"
    fix = (
        "compute it from what the model returns, without detach, item, numpy or torch.no_grad in"
        " forward or in the loss"
    )
    raise ConfigError("loss", getattr(loss, "__name__", type(loss).__name__), problem, fix)


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"one tensor of shape {list(found.shape)}"
    if isinstance(found, tuple | list):
        return f"({', '.join(map(_described, found))})"
    return type(found).__name__


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: the output itself, or its `.logits` as in transformers.

    Example:
        >>> logits_of(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if isinstance(logits, Tensor):
        return logits
    problem = f"the model returns {_described(output)}, and the loss needs logits"
    fix = "let forward return the logits, as a tensor or as output.logits"
    raise ConfigError("train.loss", type(output).__name__, problem, fix)


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
    return cross_entropy(logits_of(output), _next_tokens(batch)["labels"])


def _next_tokens(batch: Batch) -> Batch:
    """The batch, with labels if it has none."""
    if "labels" in batch:
        return batch
    # Shifting the labels, not the logits, spares a copy of the largest tensor of the step.
    return {**batch, "labels": shift_labels(batch["input_ids"])}


next_token.__dict__.update(labels="shifted", split=(_next_tokens, next_token))


@positionwise
@vocab_parallel
def causal_lm(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each next token, as transformers computes it: labels are aligned with the
    input, and the loss shifts them. Logits [b, s, V], weight in tokens.

    `batch["labels"]` [b, s] are the tokens of the positions, often equal to `batch["input_ids"]`;
    -100 where none counts. Without labels, they are `batch["input_ids"]`.

    Example:
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> aligned = causal_lm(torch.randn(1, 3, 7), {"input_ids": ids, "labels": ids})
        >>> int(aligned[1])
        2
    """
    return next_token(output, _shifted(batch))


def _shifted(batch: Batch) -> Batch:
    return {**batch, "labels": shift_labels(batch.get("labels", batch["input_ids"]))}


causal_lm.__dict__.update(labels="aligned", split=(_shifted, next_token))


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
    slice. Any other DTensor is used as its local tensor. Large logits are taken in chunks of
    tokens: they stay in their dtype, and so does their gradient (`chunked_softmax.py`).

    Example:
        >>> total, count = cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
        >>> round(float(total), 3), int(count)  # 2 log 4
        (2.773, 2)
    """
    definition = None if torch.compiler.is_compiling() else _definition.get()
    if definition is not None:
        return definition(logits, labels, ignore_index)
    counted = labels != ignore_index
    if isinstance(logits, DTensor):
        cut = _vocabulary_axis(logits)
        local = logits.to_local()
        if cut is not None:
            offset, group = cut
            rows = _rows(local, labels)
            _refuse_outside(labels, counted, logits.size(-1))
            total = sharded_token_losses(rows, labels.reshape(-1) - offset, group)
            return _sum_of(total, counted)
        logits = local
    rows, vocab = _rows(logits, labels), logits.size(-1)
    if _deferred(rows) or len(rows) > chunk_rows(rows):
        _refuse_outside(labels, counted, vocab)
        return _sum_of(_token_losses(rows, labels.reshape(-1)), counted)
    wide_rows, column = rows.to(wide(rows.dtype)), labels.reshape(-1)
    try:
        total = F.cross_entropy(wide_rows, column, ignore_index=ignore_index, reduction="sum")
    except IndexError:  # which names the label, and no more
        odd = labels[((labels < 0) | (labels >= vocab)) & counted]
        raise _unknown_label(int(odd[0]), vocab) from None
    return total, counted.sum().to(total.dtype)


@contextmanager
def cross_entropy_by(definition: Definition) -> Iterator[None]:
    """In this context `cross_entropy` is what a definition says."""
    token = _definition.set(definition)
    try:
        yield
    finally:
        _definition.reset(token)


def _rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits [N, V] of labels [...]; deferred ones as they are."""
    return logits if _deferred(logits) else logits.reshape(labels.numel(), logits.size(-1))


def _deferred(logits: Tensor) -> TypeGuard[DeferredLogits]:
    return isinstance(logits, DeferredLogits) and logits.unchanged


def _token_losses(logits: Tensor, column: Tensor, parts: Tensor | None = None) -> Tensor:
    if _deferred(logits):
        return logits.losses(column, parts)
    return token_losses(logits, column, parts)


def _sum_of(losses: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Of losses [N], and how many are `counted`."""
    total = losses.masked_fill(~counted.reshape(-1), 0).sum()
    return total, counted.sum().to(total.dtype)


def _unknown_label(label: int, vocab: int) -> DataError:
    problem = f"is not one of the {vocab} classes of the logits, which are numbered from 0"
    fix = f"correct the data ({IGNORED} does not count), or give the model more classes"
    return DataError("label", label, problem, fix)


def _refuse_outside(labels: Tensor, counted: Tensor, vocab: int) -> None:
    """A label that no rank holds would count as a logit of 0. F.cross_entropy refuses it too."""
    inside = (labels >= 0) & (labels < vocab)
    torch._assert_async(
        (inside | ~counted).all(), f"a label lies outside the vocabulary of {vocab}"
    )


def _vocabulary_axis(logits: DTensor) -> tuple[int, dist.ProcessGroup] | None:
    """(the word of the first column, the process group that shares the vocabulary); None: each rank
    has all words."""
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
    if not axes:
        return None
    mesh, (axis,) = logits.device_mesh, axes
    each = -(-logits.size(last) // mesh.size(axis))  # torch.chunk's rule
    first = min(each * mesh.get_local_rank(axis), logits.size(last))
    return first, mesh.get_group(axis)


def reduced_numels(rows: int) -> tuple[int, ...]:
    """Elements of each all-reduce that the vocabulary-parallel form makes for `rows` labels:
    maxima, then two sums."""
    return rows, 2 * rows


def sharded_token_losses(logits: Tensor, column: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Cross-entropy [N] of the logits [N, V_local] of this rank's words, whose first is column 0.

    Args:
        logits: of this rank's words.
        column: [N], where the target lies; not from 0 to V_local - 1 if another rank has it.
        group: the ranks that share the vocabulary.
    """
    parts = logits.parts(column) if _deferred(logits) else softmax_parts(logits.detach(), column)
    maximum = all_reduce(parts[0], "max", group)
    sums = torch.stack([parts[1] * (parts[0] - maximum).exp(), parts[2]])
    sums = all_reduce(sums, "sum", group)
    return _token_losses(logits, column, torch.cat([maximum.unsqueeze(0), sums, parts[:2]]))
