"""A plain decoder-only transformer, written for one device: RMSNorm, RoPE, grouped-query attention,
SwiGLU.

The architecture is that of Llama (Touvron et al. 2023); a head of `kv_heads` serves heads/kv_heads
query heads (Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention_masks import causal_mask
from .moe import Mixture

Rotary = tuple[Tensor, Tensor]  # cosines and sines [b or 1, 1, s, head_dim / 2]


def rotary_table(
    length: int, head_dim: int, base: float, like: Tensor, positions: Tensor | None = None
) -> Rotary:
    """Of the angles of rotary position embedding (Su et al. 2021) at positions [b, s], or
    0..length-1: in float32 or the wider dtype of `like`, on its device."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = head_dim // 2
    frequency = base ** (-torch.arange(half, device=like.device, dtype=dtype) / half)
    if positions is None:
        positions = torch.arange(length, device=like.device).unsqueeze(0)
    angle = positions[:, None, :, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """x [b, heads, s, head_dim] turned by the angles of a `rotary_table`, in its own dtype."""
    cos, sin = table
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; x [b, s, dim] -> [b, s, dim]. The weights decide how many heads there
    are."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020); x [b, s, dim] -> [b, s, dim]."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual; x [b, s, dim] -> [b, s, dim]."""

    def __init__(self, dim: int, heads: int, kv_heads: int, mlp: nn.Module, dropout: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Token ids [b, s] -> logits [b, s, vocab]. See `decoder` for the arguments.

    `position_ids` [b, s], 0..s-1 if left out: where they begin anew another document does, and
    neither sees the other.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        seq_len: int,
        tied: bool,
        rope_base: float,
        dropout: float,
        mixture: Mapping[str, Any] | None,
    ):
        super().__init__()
        self.seq_len, self.rope_base, self.head_dim = seq_len, rope_base, dim // heads
        self.embedding = nn.Embedding(vocab, dim)
        self.dropout = nn.Dropout(dropout)

        def mlp() -> nn.Module:
            if mixture is None:
                return MLP(dim, hidden)
            options = dict(mixture)
            shared = options.pop("shared")
            return Mixture(
                dim, hidden, shared=MLP(dim, hidden * shared) if shared else None, **options
            )

        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, mlp(), dropout) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # The 2 * layers branches add up on the residual stream: GPT-2 scales their last
                # weights down.
                branch = name.endswith(("attention.wo.weight", "down.weight", "experts.down"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if branch else 0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if input_ids.size(1) > self.seq_len:
            raise ValueError(f"{input_ids.size(1)} tokens are more than seq_len = {self.seq_len}")
        x = self.dropout(self.embedding(input_ids))
        mask = None if position_ids is None else causal_mask(position_ids)
        # not of x: so each stage of a pipeline makes the table itself, and none is sent
        rotary = rotary_table(input_ids.size(1), self.head_dim, self.rope_base, x, position_ids)
        for block in self.blocks:
            x = block(x, rotary, mask)
        return self.head(self.norm(x))


def decoder(
    vocab: int = 256,
    dim: int = 256,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int | None = None,
    hidden: int | None = None,
    seq_len: int = 1024,
    tied: bool = False,
    rope_base: float = 10000.0,
    dropout: float = 0.0,
    experts: int = 0,
    active: int = 2,
    shared: int = 0,
    gate: str = "softmax",
    balance: float = 0.01,
    z: float = 0.0,
    capacity: float = 0.0,
    bias: float = 0.0,
) -> nn.Module:
    """A decoder of `layers` blocks of width `dim`, with RMS norms, rotary positions and SwiGLU.

    Weights come from torch's global generator: the same torch.manual_seed gives the same model.

    Args:
        vocab: number of tokens.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: number of query heads.
        kv_heads: number of key and value heads. Default: `heads`.
        hidden: width inside the MLP. Default: 8/3 dim, rounded up to a multiple of 32.
        seq_len: length of the longest input.
        tied: whether the head shares the embedding's weight.
        rope_base: base of the rotary frequencies.
        dropout: dropout probability.
        experts: if above 0, each MLP is a mixture of this many experts of width `hidden`.
        active: experts per token.
        shared: experts that all tokens use.
        gate: "softmax" or "sigmoid".
        balance: factor of the load-balancing loss.
        z: factor of the loss on the size of the gate's logits.
        capacity: in training an expert takes at most this many times its even share of a sequence
            and drops later tokens; 0: no limit.
        bias: how far the bias that balances experts moves after each step; 0: no bias.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> model = decoder(vocab=100, dim=32, layers=2, heads=4)
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 100])
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = -(-8 * dim // 3 // 32) * 32 if hidden is None else hidden
    if dim % (2 * heads):
        raise ValueError(
            f"dim = {dim} must be a multiple of 2 * heads = {2 * heads}: RoPE rotates pairs in each"
            " head"
        )
    if heads % kv_heads:
        raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
    mixture = None
    if experts:
        if gate not in ("softmax", "sigmoid"):
            raise ValueError(f"gate = {gate!r} is neither softmax nor sigmoid")
        if not 1 <= active <= experts:
            raise ValueError(f"active = {active} must be from 1 to experts = {experts}")
        for name, value in {
            "shared": shared,
            "balance": balance,
            "z": z,
            "capacity": capacity,
            "bias": bias,
        }.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} = {value} must be a number from 0 up")
        mixture = {
            "experts": experts,
            "active": active,
            "kind": gate,
            "shared": shared,
            "balance": balance,
            "z": z,
            "capacity": capacity,
            "rate": bias,
        }
    return Decoder(
        vocab, dim, layers, heads, kv_heads, hidden, seq_len, tied, rope_base, dropout, mixture
    )
