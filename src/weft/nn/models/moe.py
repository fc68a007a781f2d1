"""A mixture of experts in place of a decoder's MLP: a gate picks some of the experts for each
token.

Shazeer et al. 2017; Fedus et al. 2022 (Switch); with experts that all tokens use, and a sigmoid
gate, Dai et al. 2024 (DeepSeek-MoE), DeepSeek-AI 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..moe_routing import GateBias, balance_loss, count_choices, with_loss, within_capacity, z_loss


class Gate(nn.Module):
    """Tokens [n, dim] -> (logits [n, experts], chosen experts int [n, k], their weights [n, k]):
    shares of 1, or where there is one its score, without which the gate would not learn.

    `rate`: how far a bias of the choice moves after each step, 0 for none."""

    def __init__(self, dim: int, experts: int, active: int, kind: str, rate: float):
        super().__init__()
        self.active, self.kind = active, kind
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.bias = GateBias(experts, rate) if rate else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)
        if self.bias is None:
            weights, index = scores.topk(self.active, dim=-1)
        else:
            index = (scores.detach() + self.bias.bias).topk(self.active, dim=-1).indices
            weights = scores.gather(-1, index)
            self.bias.count(index)
        if self.active > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, index, weights.to(x.dtype)


class Experts(nn.Module):
    """SwiGLU experts: tokens [n, dim], int [n, k], weights [n, k] -> [n, dim]. A choice below 0 is
    nobody's."""

    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        counts = count_choices(index, self.num_experts)
        # by expert; what nobody takes comes first
        order = torch.argsort(index.reshape(-1), stable=True)[
            index.numel() - int(counts[1:].sum()) :
        ]
        rows = order // index.shape[-1]
        gate, up = grouped(x[rows], self.up, counts[1:]).chunk(2, -1)
        made = grouped(F.silu(gate) * up, self.down, counts[1:]) * weights.reshape(-1)[
            order
        ].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows, made.to(x.dtype))


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its own weights: [n, in], [groups, out, in], how many rows each has
    -> [n, out]. By torch's grouped matmul where the device has one (CUDA, bf16, sizes of a multiple
    of 8), else by one after the other.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if (
        kind == "cuda"
        and dtype == torch.bfloat16
        and not (weights.shape[1] % 8 or weights.shape[2] % 8)
    ):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x.to(dtype), weights.to(dtype).transpose(-2, -1), offs=ends)
    parts = zip(x.split(counts.tolist()), weights, strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


class Mixture(nn.Module):
    """x [b, s, dim] -> [b, s, dim]. `shared`: what all tokens go through as well. `balance`, `z`:
    factors of the losses that the gate adds while it trains; `capacity`: how many of a sequence's
    tokens an expert takes then at most, as a multiple of what each would have of an even division,
    0 for all."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        active: int,
        kind: str,
        shared: nn.Module | None,
        balance: float,
        z: float,
        capacity: float,
        rate: float,
    ):
        super().__init__()
        self.gate = Gate(dim, experts, active, kind, rate)
        self.experts, self.shared = Experts(dim, hidden, experts), shared
        self.balance, self.z, self.capacity = balance, z, capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits, index, weights = self.gate(tokens)
        if self.training and torch.is_grad_enabled() and (self.balance or self.z):
            scores = logits.sigmoid() if self.gate.kind == "sigmoid" else logits
            shares = (
                scores / scores.sum(-1, keepdim=True)
                if self.gate.kind == "sigmoid"
                else logits.softmax(-1)
            )
            tokens = with_loss(
                tokens, self.balance * balance_loss(shares, index) + self.z * z_loss(logits)
            )
        if self.training and self.capacity:
            index = within_capacity(
                index.view(*x.shape[:2], -1), len(logits[0]), self.capacity
            ).view_as(index)
        y = self.experts(tokens, index, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)
