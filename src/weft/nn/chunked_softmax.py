"""Softmax over a large vocabulary in chunks of tokens: no float32 copy of all logits ever exists.

Forward keeps three numbers per token: the largest logit, the sum of exponentials below it, and the
target's logit (the online softmax of Milakov and Gimelshein 2018). Backward makes the softmax
again from the logits. A rank may hold some words of the vocabulary: the numbers of all ranks
combine into those of the whole.

The functions are torch operators, so a compiler sees one node for each, whatever the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of a chunk. On a CPU it stays in the cache, on a GPU it is worth the launch of a kernel.
CPU_CHUNK, GPU_CHUNK = 2**19, 2**25

_library = torch.library.Library("weft", "FRAGMENT")


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(logits: Tensor) -> int:
    """How many rows of logits [N, V] are worked on together."""
    elements = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    return max(1, elements // max(1, logits.size(-1)))


def softmax_parts(logits: Tensor, column: Tensor) -> Tensor:
    """[3, N] in float32 or wider, of some words' logits [N, V]: the largest of each row, the sum of
    the exponentials of all less the largest, and the logit in `column` [N] (0 where that is not
    from 0 to V - 1)."""
    return torch.ops.weft.softmax_parts(logits, column)


def token_losses(logits: Tensor, column: Tensor, parts: Tensor | None = None) -> Tensor:
    """-log softmax in `column` [N], float32 or wider; the gradient of the logits is in their dtype.

    Args:
        logits: [N, V], of all words or of some.
        column: [N], from 0 to V - 1; elsewhere where the logits are of some words.
        parts: [3, N], what `softmax_parts` would give of all words. None: the logits are of all.
    """
    return torch.ops.weft.token_losses(logits, column, parts)


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows that are worked on together, and a buffer for them in float32 or wider."""
    rows, each = len(logits), min(chunk_rows(logits), len(logits))
    buffer = logits.new_empty((each, logits.size(-1)), dtype=wide(logits.dtype))
    for start in range(0, rows, max(1, each)):
        stop = min(start + each, rows)
        yield slice(start, stop), buffer[: stop - start]


def _widened(part: Tensor, buffer: Tensor) -> Tensor:
    """Kernels for two dtypes at once are slow: copy first."""
    return part if part.dtype == buffer.dtype else buffer.copy_(part)


def _mine(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[N, 1]: columns that exist, 0 for others; and which do."""
    mine = (column >= 0) & (column < width)
    return torch.where(mine, column, 0).unsqueeze(-1), mine.unsqueeze(-1)


def _softmax_parts(logits: Tensor, column: Tensor) -> Tensor:
    rows, width = logits.shape
    parts = logits.new_zeros((3, rows), dtype=wide(logits.dtype))
    if not width:  # the last ranks hold nothing where the vocabulary is small
        parts[0] = -torch.inf
        return parts
    lowest = torch.finfo(parts.dtype).min
    for of, buffer in _chunks(logits):
        part, (maximum, total, _) = _widened(logits[of], buffer), parts[:, of]
        torch.amax(part, -1, out=maximum)
        # words that all have -inf add nothing
        torch.sub(part, maximum.clamp(min=lowest).unsqueeze(-1), out=buffer).exp_()
        torch.sum(buffer, -1, out=total)
    at, mine = _mine(column, width)
    parts[2] = logits.gather(-1, at).masked_fill_(~mine, 0).squeeze(-1)
    return parts


def _token_losses(logits: Tensor, column: Tensor, parts: Tensor | None) -> Tensor:
    if parts is not None:
        return parts[1].log() + (parts[0] - parts[2])
    losses = logits.new_empty((len(logits), 1), dtype=wide(logits.dtype))
    at = _mine(column, logits.size(-1))[0]
    for of, buffer in _chunks(logits):
        torch.log_softmax(_widened(logits[of], buffer), -1, out=buffer)
        torch.gather(buffer, -1, at[of], out=losses[of])
    return losses.squeeze(-1).neg_()


def _logit_gradient(logits: Tensor, column: Tensor, parts: Tensor | None, grad: Tensor) -> Tensor:
    found, width = torch.empty_like(logits), logits.size(-1)
    if not width:
        return found
    at, mine = _mine(column, width)
    grad = grad.unsqueeze(-1)
    taken = torch.where(mine, -grad, 0)
    factor = grad if parts is None else grad / parts[1].unsqueeze(-1)
    for of, buffer in _chunks(logits):
        own = found[of] if found.dtype == buffer.dtype else buffer
        part = _widened(logits[of], buffer)
        if parts is None:
            torch.softmax(part, -1, out=own)
        else:
            torch.sub(part, parts[0, of].unsqueeze(-1), out=own).exp_()
        own.mul_(factor[of]).scatter_add_(-1, at[of], taken[of])
        if own is buffer:
            found[of] = own
    return found


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.weft.logit_gradient(*ctx.saved_tensors, grad), None, None


def _define(schema: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_library)


def _like_rows(logits: Tensor, *shape: int) -> Tensor:
    return logits.new_empty((*shape, logits.size(0)), dtype=wide(logits.dtype))


_define(
    "softmax_parts(Tensor logits, Tensor column) -> Tensor",
    _softmax_parts,
    lambda logits, column: _like_rows(logits, 3),
)
_define(
    "token_losses(Tensor logits, Tensor column, Tensor? parts) -> Tensor",
    _token_losses,
    lambda logits, column, parts: _like_rows(logits),
)
_define(
    "logit_gradient(Tensor logits, Tensor column, Tensor? parts, Tensor grad) -> Tensor",
    _logit_gradient,
    lambda logits, column, parts, grad: torch.empty_like(logits),
)
torch.library.register_autograd("weft::token_losses", _backward, setup_context=_keep, lib=_library)
