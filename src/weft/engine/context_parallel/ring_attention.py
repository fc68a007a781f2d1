"""Attention of this rank's queries with keys that arrive block by block: its own, then those of
other ranks.

Ring attention (Liu et al. 2023): keys and values travel around the ranks while each computes with
those that it has. What blocks give is merged by the log-sum-exp of their scores (online softmax,
Milakov and Gimelshein 2018), in float32 at least, so nobody ever has all scores. Backward takes the
merged log-sum-exp, with which each block's weights are what they are in the whole (Dao et al.
2022); keys and values travel again, and their gradients with them, home at last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.nn import AttentionPattern
from weft.parallel import all_gather, reduce_scatter

Span = tuple[int, int]  # (start, stop) of the whole sequence
Pair = tuple[
    slice, slice, Span, Span, Tensor | None
]  # rows of queries and keys, where these are, and the mask
ROWS = 1024  # positions of a block whose mask or scores are held


@dataclass(frozen=True)
class KeyBlocks:
    """Where queries and keys are. `spans[r]`: what rank r of `group` holds of the sequence, in the
    order of its rows; one rank without a group. `keep`: (queries, keys) -> factors of the weights
    [b, heads, q, k], of dropout."""

    pattern: AttentionPattern
    spans: Sequence[Sequence[Span]]
    rank: int
    group: dist.ProcessGroup | None
    scale: float
    keep: Callable[[Span, Span], Tensor] | None = None
    queries: Sequence[Span] = ()  # where they are others than `spans[rank]`
    gathers: bool = False  # all ranks' keys are gathered, and are the one block
    biased: bool = False  # something is added to the scores

    def pairs(self, source: int, device: torch.device, fused: bool) -> list[Pair]:
        """Those of this rank's stretches with those of `source` of which anything is seen: short
        ones, where a mask or scores are held for them."""
        found = []
        most = None if self.pattern.plain and fused and not self.biased else ROWS
        for q, queries in _rows(self.queries or self.spans[self.rank], most):
            for k, keys in _rows(self.spans[source], most):
                seen = self.pattern.between(queries, keys, device)
                if seen is not False:
                    found.append((q, k, queries, keys, seen if isinstance(seen, Tensor) else None))
        return found

    def causal(self, queries: Span, keys: Span, mask: Tensor | None) -> bool:
        return mask is None and self.pattern.causal and queries == keys


def _rows(spans: Sequence[Span], most: int | None) -> list[tuple[slice, Span]]:
    """Rows and positions of each stretch, in pieces of at most so many."""
    found, row = [], 0
    for start, stop in spans:
        each = most or max(1, stop - start)
        for first in range(start, stop, each):
            length = min(each, stop - first)
            found.append((slice(row, row + length), (first, first + length)))
            row += length
    return found


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: KeyBlocks, bias: Tensor | None = None
) -> Tensor:
    """[b, heads, q, d], [b, kv heads, k, d] twice -> [b, heads, q, d]:
    `scaled_dot_product_attention` with all keys. `bias` [b or 1, heads or 1, q or 1, all keys] is
    added to the scores; its keys are in the order of positions."""
    if bias is not None:
        blocks = replace(blocks, biased=True)
    found: Tensor = _RingAttention.apply(query, key, value, bias, blocks)
    return found


def _as_it_is(function: Callable) -> Callable:
    """Without autocast, which would compute scores in a lower precision than their log-sum-exp is
    kept in."""

    @functools.wraps(function)
    def call(ctx: Any, first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(ctx, first, *rest)

    return call


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @_as_it_is
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        blocks: KeyBlocks,
    ) -> Tensor:
        fused = _kernel(query, value, blocks) is not None
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        for source, (k, v) in _RingPasses(blocks, [key, value]):
            for q, rows, queries, keys, mask in blocks.pairs(source, query.device, fused):
                part = query[:, :, q], _heads(k[:, :, rows], query), _heads(v[:, :, rows], query)
                added = None if bias is None else _of_block(bias, q, keys)
                block, logs = _forward(*part, blocks, queries, keys, mask, added)
                merged = torch.logaddexp(total[:, :, q], logs)
                safe = merged.masked_fill(merged == -torch.inf, 0.0)  # nothing seen as yet
                out[:, :, q] *= (total[:, :, q] - safe).exp().unsqueeze(-1)
                out[:, :, q] += block.to(wide) * (logs - safe).exp().unsqueeze(-1)
                total[:, :, q] = merged
        out = out.to(query.dtype)
        logs = total.masked_fill(total == -torch.inf, 0.0)
        ctx.save_for_backward(query, key, value, bias, out, logs)
        ctx.blocks = blocks
        return out

    @staticmethod
    @_as_it_is
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, total = ctx.saved_tensors
        blocks, grad = ctx.blocks, grads[0].contiguous()
        fused = _kernel(query, value, blocks) is not None
        wide = torch.promote_types(query.dtype, torch.float32)
        dquery = torch.zeros_like(query, dtype=wide)
        dbias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[3] else None
        around = _RingPasses(blocks, [key, value])
        for source, (k, v) in around:
            found = [torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)]
            for q, rows, queries, keys, mask in blocks.pairs(source, query.device, fused):
                part = query[:, :, q], _heads(k[:, :, rows], query), _heads(v[:, :, rows], query)
                given = grad[:, :, q], out[:, :, q], total[:, :, q]
                added = None if bias is None else _of_block(bias, q, keys)
                dq, dk, dv, db = _backward(*given, *part, blocks, queries, keys, mask, added)
                dquery[:, :, q] += dq
                if dbias is not None and db is not None:
                    here = _of_block(dbias, q, keys)
                    here += db.sum_to_size(here.shape)
                found[0][:, :, rows] += _shared(dk, k)
                found[1][:, :, rows] += _shared(dv, v)
            around.add(found)
        dkey, dvalue = around.home()
        made = dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)
        return *made, None if dbias is None else dbias.to(bias.dtype), None


def _of_block(bias: Tensor, queries: slice, keys: Span) -> Tensor:
    """A view of what is added to the scores of these rows of queries with these keys."""
    rows = bias if bias.shape[2] == 1 else bias[:, :, queries]
    return rows[..., slice(*keys)]


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Each key head as often as query heads share it."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _shared(grad: Tensor, x: Tensor) -> Tensor:
    """The other way round, of gradients."""
    times = grad.shape[1] // x.shape[1]
    return grad if times == 1 else grad.unflatten(1, (-1, times)).sum(2)


# ---- one block -----------------------------------------------------------------------------------


def _kernel(
    query: Tensor, value: Tensor, blocks: KeyBlocks, mask: Tensor | None = None
) -> Literal["cpu", "flash"] | None:
    """Torch's kernel for a block that gives the log-sum-exp, and takes it back: on CPUs, and on
    CUDA flash attention (Dao et al. 2022), which takes no mask."""
    if blocks.keep is not None or blocks.biased or query.shape[-1] != value.shape[-1]:
        return None
    half = (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )
    if query.device.type == "cuda" and half and mask is None:
        return "flash"
    return "cpu" if query.device.type == "cpu" else None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: KeyBlocks,
    queries: Span,
    keys: Span,
    mask: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp of the scores [b, heads, q], -inf where nothing is seen)."""
    causal = blocks.causal(queries, keys, mask)
    kernel = _kernel(query, value, blocks, mask)
    if kernel == "flash":
        out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=blocks.scale
        )
        return out, logs
    if kernel is None:
        weights, logs = _weights(query, key, blocks, causal, mask, added, None)
        if blocks.keep is not None:
            weights = weights * blocks.keep(queries, keys).to(weights.dtype)
        return weights @ value.to(weights.dtype), logs
    bias = _bias(mask, query)
    out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=blocks.scale
    )
    if mask is not None:
        logs = logs.masked_fill(~mask.any(-1), -torch.inf)
    return out, logs


def _backward(
    grad: Tensor,
    out: Tensor,
    logs: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: KeyBlocks,
    queries: Span,
    keys: Span,
    mask: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the block's query, key and value, given the output and the log-sum-exp of all
    blocks; and of what is added to its scores."""
    causal = blocks.causal(queries, keys, mask)
    kernel = _kernel(query, value, blocks, mask)
    found: tuple[Tensor, Tensor, Tensor]
    if kernel == "flash":
        seed = torch.empty(
            2, dtype=torch.uint64, device=query.device
        )  # of dropout, which there is none of
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            logs.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            seed,
            seed.new_empty(()),
            scale=blocks.scale,
        )
        return *found, None
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            key,
            value,
            out,
            logs,
            0.0,
            causal,
            attn_mask=_bias(mask, query),
            scale=blocks.scale,
        )
        return *found, None
    weights, _ = _weights(query, key, blocks, causal, mask, added, logs)
    wide = weights.dtype
    grad, dweights = grad.to(wide), grad.to(wide) @ value.to(wide).transpose(-2, -1)
    used = weights
    if blocks.keep is not None:
        kept = blocks.keep(queries, keys).to(wide)
        used, dweights = weights * kept, dweights * kept
    dadded = weights * (dweights - (grad * out.to(wide)).sum(-1, keepdim=True))
    dscores = dadded * blocks.scale
    return (
        dscores @ key.to(wide),
        dscores.transpose(-2, -1) @ query.to(wide),
        used.transpose(-2, -1) @ grad,
        dadded,
    )


def _weights(
    query: Tensor,
    key: Tensor,
    blocks: KeyBlocks,
    causal: bool,
    mask: Tensor | None,
    added: Tensor | None,
    logs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(softmax of the scores, their log-sum-exp: this one if it is given)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * blocks.scale
    if added is not None:
        scores = scores + added.to(wide)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if logs is None:
        logs = torch.logsumexp(scores, -1)
    safe = logs.masked_fill(logs == -torch.inf, 0.0)
    return (scores - safe.unsqueeze(-1)).exp(), logs


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as the kernel takes it."""
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill_(~mask, -torch.inf)


# ---- around the ring -----------------------------------------------------------------------------


class _RingPasses:
    """Iterates over (source, its tensors) for every rank, this one first; what comes next travels
    meanwhile. Sums for what a source has travel along, each rank adding to them, and end at home.
    Gathered, there is one source."""

    def __init__(self, blocks: KeyBlocks, own: list[Tensor]):
        self._blocks, self._here = blocks, own
        self._sums: _RingTransfer | list[Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        size, rank, group = len(self._blocks.spans), self._blocks.rank, self._blocks.group
        if self._blocks.gathers and group is not None:
            yield 0, [all_gather(x, 2, group, None) for x in self._here]
            return
        here = self._here if group is None else [x.contiguous() for x in self._here]
        for step in range(size):
            coming = _RingTransfer(here, group) if group is not None and step < size - 1 else None
            yield (rank - step) % size, here
            if coming is not None:
                here = coming.wait()

    def add(self, found: list[Tensor]) -> None:
        """To the sums for the source whose tensors this rank has just had."""
        group = self._blocks.group
        if self._blocks.gathers and group is not None:
            self._sums = [reduce_scatter(x, 2, group) for x in found]
            return
        if isinstance(self._sums, _RingTransfer):
            for mine, theirs in zip(found, self._sums.wait(), strict=True):
                mine += theirs
        self._sums = found if group is None else _RingTransfer(found, group)

    def home(self) -> list[Tensor]:
        """What all ranks have added for this one."""
        assert self._sums is not None
        return self._sums.wait() if isinstance(self._sums, _RingTransfer) else self._sums


class _RingTransfer:
    """Tensors on their way to the next rank of a ring, and those of the one before on theirs to
    this one."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup):
        rank, size = group.rank(), group.size()
        self._sent, self._arriving = tensors, [torch.empty_like(x) for x in tensors]
        works = []
        for x, y in zip(tensors, self._arriving, strict=True):
            works.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size))
            works.append(dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % size))
        self._works = dist.batch_isend_irecv(works)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._arriving
