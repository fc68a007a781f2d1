"""Logits that the loss makes itself, in chunks of tokens: neither they nor their gradient ever
exist whole.

    head (a Linear) ──▶ DeferredLogits ──▶ cross_entropy      forward: no product yet, then chunks
    head's backward ◀── DeferredGradient ◀── its backward     backward: chunks again

`DeferredLogits` stands for `hidden @ weight.T + bias`. `cross_entropy` takes hidden states and
weight from it. Whatever else touches it gets the logits, computed then, once: so a model that caps,
scales or slices its logits stays right. The graph of autograd is that of a plain head: hooks on the
logits fire, and the weight's gradient comes out of the head's own node, so FSDP2 has the weight
gathered and reduces its gradient as ever. Its price is one more product of hidden states and weight
in backward.

The idea is that of Liger Kernel (Hsu et al. 2024) and of Cut Cross-Entropy (Wijmans et al. 2024),
here in plain products of torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft._torch.tensors import make_wrapper_tensor
from weft._torch.trees import tree_map

from .chunked_softmax import gradients_of, losses_of, parts_of, wide

# Up to so many logits of one call are computed whole: their memory is not worth a product more.
FEW_LOGITS = 2**26
# Logits of a chunk at most: products of a chunk should be worth reading the weight for.
CPU_CHUNK, GPU_CHUNK = 2**24, 2**27
FEWEST_ROWS, MOST_CHUNKS = 64, 24


class _Deferred(Tensor):
    """A tensor that is not there until an operator reads it."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # printing computes nothing
        return f"{type(self).__name__}({[*self.shape]}, dtype={self.dtype})"

    def whole(self) -> Tensor:
        raise NotImplementedError

    def alias(self) -> Tensor:
        raise NotImplementedError

    # What asks for memory reaches no operator.
    def numpy(self, **options: Any) -> Any:
        return self.whole().numpy(**options)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.whole(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _ALIASES and type(args[0]) is cls and cls._same_shape(func, args):
            return args[0].alias()
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @staticmethod
    def _same_shape(func: Any, args: tuple) -> bool:
        return len(args) == 1 or [*args[1]] == [*args[0].shape]


_ALIASES = {
    torch.ops.aten.view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


def computed(value: Any) -> Any:
    """A deferred tensor computed, as a plain one; anything else as it is. No gradient flows through
    it."""
    return value.whole() if isinstance(value, _Deferred) else value


class _Product:
    """hidden [N, D] @ weight [V, D].T + bias [V], as LogitRows. `narrow`: what chunks were made in,
    in their own dtype; free for use between chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.shape, self.dtype = torch.Size((len(hidden), len(weight))), hidden.dtype
        self.empty = hidden.new_empty

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        count, width = self.shape
        most = CPU_CHUNK if self.hidden.device.type == "cpu" else GPU_CHUNK
        rows = max(FEWEST_ROWS, -(-count // MOST_CHUNKS))
        each = max(1, min(most // max(1, width), rows, count))
        buffer = self.empty((each, width), dtype=wide(self.dtype))
        self.narrow = narrow = buffer if buffer.dtype == self.dtype else self.empty((each, width))
        for start in range(0, count, each):
            of = slice(start, min(start + each, count))
            part, place = narrow[: of.stop - start], buffer[: of.stop - start]
            if self.bias is None:
                torch.mm(self.hidden[of], self.weight.t(), out=part)
            else:
                torch.addmm(self.bias, self.hidden[of], self.weight.t(), out=part)
            yield of, place if place is part else place.copy_(part), place


class DeferredLogits(_Deferred):
    """hidden [..., D] @ weight [V, D].T + bias [V], in one dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    made: list[Tensor]  # the logits, once something has read them; shared by aliases

    @staticmethod
    def of(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, made: list[Tensor] | None = None
    ) -> DeferredLogits:
        shape = (*hidden.shape[:-1], len(weight))
        logits = make_wrapper_tensor(DeferredLogits, shape, hidden.dtype, hidden.device)
        logits.hidden, logits.weight, logits.bias = hidden, weight, bias
        logits.made = [] if made is None else made
        return logits

    def alias(self) -> Tensor:
        return DeferredLogits.of(self.hidden, self.weight, self.bias, self.made)

    @property
    def unchanged(self) -> bool:
        """Whether nobody has written into the logits, or into a view of them."""
        return self._version == 0

    def whole(self) -> Tensor:
        if not self.made:
            with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                self.made.append(F.linear(self.hidden, self.weight, self.bias))
        return self.made[0]

    def product(self) -> _Product:
        return _Product(self.hidden.reshape(-1, self.hidden.size(-1)), self.weight, self.bias)

    def parts(self, column: Tensor) -> Tensor:
        """`chunked_softmax.softmax_parts` of the logits' rows."""
        return parts_of(self.product(), column)

    def losses(self, column: Tensor, parts: Tensor | None) -> Tensor:
        """`chunked_softmax.token_losses` of the logits' rows."""
        return _Losses.apply(self, column, parts)


class DeferredGradient(_Deferred):
    """The gradient of deferred logits whose losses [N] have the gradient `grad`."""

    logits: DeferredLogits
    column: Tensor
    parts: Tensor | None
    grad_of_losses: Tensor

    @staticmethod
    def of(
        logits: DeferredLogits, column: Tensor, parts: Tensor | None, grad: Tensor
    ) -> DeferredGradient:
        made = make_wrapper_tensor(DeferredGradient, logits.shape, logits.dtype, logits.device)
        made.logits, made.column, made.parts, made.grad_of_losses = logits, column, parts, grad
        return made

    def alias(self) -> Tensor:
        return DeferredGradient.of(self.logits, self.column, self.parts, self.grad_of_losses)

    def chunks(self, product: _Product, into: Tensor | None = None) -> Iterator:
        return gradients_of(product, self.column, self.parts, self.grad_of_losses, into)

    def whole(self) -> Tensor:
        product = self.logits.product()
        found = product.empty(product.shape)
        for of, own in self.chunks(product, found):
            if own.dtype != found.dtype:
                found[of] = own
        return found.view(self.shape)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, column: Tensor, parts: Tensor | None) -> Tensor:
        ctx.logits, ctx.column, ctx.parts = logits.alias(), column, parts
        return losses_of(logits.product(), column, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return DeferredGradient.of(ctx.logits, ctx.column, ctx.parts, grads[0]), None, None


class _Head(torch.autograd.Function):
    """A linear whose product is deferred, and so is its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return DeferredLogits.of(
            hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,), (hidden, weight), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        rows = hidden.reshape(-1, hidden.size(-1))
        if isinstance(grad, DeferredGradient):
            found = _backward_in_chunks(grad, rows, weight, wanted)
        else:  # something else than cross_entropy has read the logits
            dense = grad.reshape(-1, grad.size(-1))
            found = (
                dense @ weight if wanted[0] else None,
                dense.t() @ rows if wanted[1] else None,
                dense.sum(0) if wanted[2] else None,
            )
        return None if found[0] is None else found[0].view_as(hidden), *found[1:]


def _backward_in_chunks(
    grad: DeferredGradient, rows: Tensor, weight: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states [N, D], weight and bias, where they are wanted; the last two are
    added up in float32 or wider."""
    dtype = wide(rows.dtype)
    to_hidden = torch.empty_like(rows) if wanted[0] else None
    to_weight = weight.new_zeros(weight.shape, dtype=dtype) if wanted[1] else None
    to_bias = weight.new_zeros(len(weight), dtype=dtype) if wanted[2] else None
    _add_chunks(grad, _Product(rows, weight, grad.logits.bias), to_hidden, to_weight, to_bias)
    return (
        to_hidden,
        None if to_weight is None else to_weight.to(weight.dtype),
        None if to_bias is None else to_bias.to(weight.dtype),
    )


def _add_chunks(
    grad: DeferredGradient,
    product: _Product,
    to_hidden: Tensor | None,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
) -> None:
    """Make the gradient chunk by chunk, and add each to those of the product's factors."""
    dtype, rows = wide(product.dtype), product.hidden
    for of, own in grad.chunks(product):
        narrow = own if own.dtype == rows.dtype else product.narrow[: len(own)].copy_(own)
        if to_hidden is not None:
            torch.mm(narrow, product.weight, out=to_hidden[of])
        if to_weight is not None and (own.dtype == rows.dtype or own.device.type == "cpu"):
            to_weight.addmm_(own.t(), rows[of].to(dtype))
        elif to_weight is not None:  # matrix units take the narrow dtype, and add up in float32
            to_weight.add_(narrow.t() @ rows[of])
        if to_bias is not None:
            to_bias.add_(own.sum(0))


class DeferringHeads:
    """Within this context, heads of a model defer logits that are more than `few`.

    Only a plain nn.Linear does. Its forward is replaced; its hooks stay, and see what it returns.
    """

    def __init__(self, heads: Iterable[nn.Module], few: int = FEW_LOGITS):
        self.few, self.active = few, False
        for head in heads:
            if type(head) is nn.Linear and "forward" not in vars(head):
                head.forward = partial(self._forward, head)  # type: ignore[method-assign]

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *error: object) -> None:
        self.active = False

    def _forward(self, head: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        count = x.numel() // max(1, x.size(-1)) * len(weight)
        if not self.active or count <= self.few or torch.compiler.is_compiling():
            return F.linear(x, weight, bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _Head.apply(x, weight, bias)
