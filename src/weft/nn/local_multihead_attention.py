"""nn.MultiheadAttention with the weights of some of its heads.

torch's own takes the number of features in its input for that of all heads, so it runs on no part.
This one has the same parameters, and computes with as many heads as they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LocalMultiheadAttention(nn.MultiheadAttention):
    """Attention with biases of its projections by this rank's heads. It returns no weights of
    attention: no rank has those of all heads."""

    _index: int
    _leave: Callable[[Tensor], Tensor]

    @staticmethod
    def take_over(module: nn.MultiheadAttention, index: int, leave: Callable[[Tensor], Tensor]):
        """Compute with what a rank holds of a module's weights from now on.

        Args:
            module: nn.MultiheadAttention, changed in place.
            index: this rank's place among those that share the heads.
            leave: turns a rank's part of the sum over all heads into the sum.
        """
        module.__class__ = LocalMultiheadAttention
        # where this is true, nn.TransformerEncoderLayer computes by a kernel that needs all heads
        module._qkv_same_embed_dim = False
        module._index, module._leave = index, leave  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As torch's own, of inputs with a dim of samples."""
        if query.ndim != 3:
            raise ValueError("nn.MultiheadAttention is called without a dim of samples")
        if is_causal and attn_mask is None:
            raise RuntimeError("nn.MultiheadAttention needs attn_mask beside is_causal")
        q, k, v = map(self._by_heads, self._project(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights  # as in torch's own
        mask = None if causal else self._mask(q, k, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        y = y.permute(*((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3))).flatten(2)
        y = self._leave(F.linear(y, self.out_proj.weight))
        # every rank has the whole bias: it is added after the sum
        return y if self.out_proj.bias is None else y + self.out_proj.bias, None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = weights if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _by_heads(self, x: Tensor) -> Tensor:
        """[samples, positions, features], or positions first -> [samples, heads, positions, width
        of a head]."""
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        return x.permute(*((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)))

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """What is added to scores [samples, heads, queries, keys]. As in torch's own, True hides a
        key."""
        masks = []
        samples, heads = q.shape[:2]
        if attn_mask is not None:
            attn_mask = _added(attn_mask, q.dtype)
            if attn_mask.ndim == 3:  # of every head
                every = attn_mask.reshape(samples, -1, *attn_mask.shape[1:])
                attn_mask = every.narrow(1, self._index * heads, heads)
            masks.append(attn_mask)
        if key_padding_mask is not None:
            masks.append(_added(key_padding_mask, q.dtype)[:, None, None])
        return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
