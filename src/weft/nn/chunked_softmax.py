"""Softmax over a large vocabulary in chunks of tokens: no float32 copy of all logits ever exists.

Forward keeps a number or three per token: the loss; or the largest logit, the sum of exponentials
below it, and the target's logit (the online softmax of Milakov and Gimelshein 2018), which those of
the ranks that share a vocabulary combine into. Backward makes the softmax again from the logits.

The functions on logits are torch operators, so a compiler sees one node for each, whatever the
chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

# Elements of a chunk. On a CPU it stays in the cache, on a GPU it is worth the launch of a kernel.
CPU_CHUNK, GPU_CHUNK = 2**19, 2**25


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


class LogitRows(Protocol):
    """Logits [N, V] that come in chunks of rows, each in float32 or wider."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor: ...

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which rows, their logits, a buffer of that shape); the logits may be the buffer."""


def parts_of(rows: LogitRows, column: Tensor) -> Tensor:
    """What `softmax_parts` says."""
    count, width = rows.shape
    parts = rows.empty(3, count, dtype=wide(rows.dtype)).zero_()
    if not width:  # the last ranks hold nothing where the vocabulary is small
        parts[0] = -torch.inf
        return parts
    at, mine = _mine(column, width)
    for of, logits, buffer in rows.chunks():
        maximum, most, target = parts[:, of]
        torch.gather(logits, -1, at[of], out=target.unsqueeze(-1))
        torch.amax(logits, -1, out=maximum)
        # one kernel, in place of a difference, its exponential and their sum
        torch.softmax(logits, -1, out=buffer)
        torch.amax(buffer, -1, out=most)
    # the largest probability is exp(0) / sum; words that all have -inf add nothing
    parts[1].reciprocal_().masked_fill_(parts[0] == -torch.inf, 0)
    parts[2].masked_fill_(~mine.squeeze(-1), 0)
    return parts


def losses_of(rows: LogitRows, column: Tensor, parts: Tensor | None) -> Tensor:
    """What `token_losses` says."""
    if parts is not None:
        return parts[1].log() + (parts[0] - parts[2])
    losses = rows.empty(rows.shape[0], 1, dtype=wide(rows.dtype))
    at = _mine(column, rows.shape[1])[0]
    for of, logits, buffer in rows.chunks():
        torch.log_softmax(logits, -1, out=buffer)
        torch.gather(buffer, -1, at[of], out=losses[of])
    return losses.squeeze(-1).neg_()


def gradients_of(
    rows: LogitRows, column: Tensor, parts: Tensor | None, grad: Tensor, into: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """(which rows, the gradient of their logits in float32 or wider), given that of the losses [N].
    It is in `into` [N, V] if that has its dtype, else in a buffer until the next."""
    at, mine = _mine(column, rows.shape[1])
    grad = grad.unsqueeze(-1)
    taken = torch.where(mine, -grad, 0)
    share = None if parts is None else parts[4] * (parts[3] - parts[0]).exp() / parts[1]
    factor = grad if share is None else grad * share.unsqueeze(-1)
    for of, logits, buffer in rows.chunks():
        own = into[of] if into is not None and into.dtype == buffer.dtype else buffer
        torch.softmax(logits, -1, out=own).mul_(factor[of])
        if share is not None:
            _clear(own, share[of] == 0)
        yield of, own.scatter_add_(-1, at[of], taken[of])


def _clear(rows: Tensor, which: Tensor) -> None:
    """Zero the rows [N] where all of a rank's words have -inf: the softmax of these is undefined.
    They are rare, and a CPU can ask."""
    if rows.device.type != "cpu" or bool(which.any()):
        rows.masked_fill_(which.unsqueeze(-1), 0)


def _mine(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[N, 1]: columns that exist, 0 for others; and which do."""
    mine = (column >= 0) & (column < width)
    return torch.where(mine, column, 0).unsqueeze(-1), mine.unsqueeze(-1)


# ---- logits that exist ---------------------------------------------------------------------------


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
        parts: [5, N], what `softmax_parts` would give of all words, and the first two numbers that
            it gives of these. None: the logits are of all.
    """
    return torch.ops.weft.token_losses(logits, column, parts)


class _Rows:
    """Logits in memory, as LogitRows."""

    def __init__(self, logits: Tensor):
        self.logits, self.shape, self.dtype = logits, logits.shape, logits.dtype
        self.empty = logits.new_empty

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        count = self.shape[0]
        each = max(1, min(chunk_rows(self.logits), count))
        buffer = self.empty((each, self.shape[1]), dtype=wide(self.dtype))
        for start in range(0, count, each):
            of = slice(start, min(start + each, count))
            part, place = self.logits[of], buffer[: of.stop - start]
            # kernels for two dtypes at once are slow: copy first
            yield of, part if part.dtype == place.dtype else place.copy_(part), place


def _softmax_parts(logits: Tensor, column: Tensor) -> Tensor:
    return parts_of(_Rows(logits), column)


def _token_losses(logits: Tensor, column: Tensor, parts: Tensor | None) -> Tensor:
    return losses_of(_Rows(logits), column, parts)


def _logit_gradient(logits: Tensor, column: Tensor, parts: Tensor | None, grad: Tensor) -> Tensor:
    found = torch.empty_like(logits)
    if logits.size(-1):
        for of, own in gradients_of(_Rows(logits), column, parts, grad, found):
            if own.dtype != found.dtype:
                found[of] = own
    return found


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.weft.logit_gradient(*ctx.saved_tensors, grad), None, None


_library = torch.library.Library("weft", "FRAGMENT")


def _define(schema: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_library)


def _per_row(logits: Tensor, *shape: int) -> Tensor:
    return logits.new_empty((*shape, logits.size(0)), dtype=wide(logits.dtype))


_define(
    "softmax_parts(Tensor logits, Tensor column) -> Tensor",
    _softmax_parts,
    lambda logits, column: _per_row(logits, 3),
)
_define(
    "token_losses(Tensor logits, Tensor column, Tensor? parts) -> Tensor",
    _token_losses,
    lambda logits, column, parts: _per_row(logits),
)
_define(
    "logit_gradient(Tensor logits, Tensor column, Tensor? parts, Tensor grad) -> Tensor",
    _logit_gradient,
    lambda logits, column, parts, grad: torch.empty_like(logits),
)
torch.library.register_autograd("weft::token_losses", _backward, setup_context=_keep, lib=_library)
