"""A mixture of experts in place of a decoder's MLP: a gate picks some of the experts for each token.

Shazeer et al. 2017; Fedus et al. 2022 (Switch); with experts that all tokens use, and a sigmoid gate, Dai et al. 2024
(DeepSeek-MoE), DeepSeek-AI 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.routing import balance_loss, with_loss, z_loss


class Gate(nn.Module):
    """Tokens [n, dim] -> (logits [n, experts], chosen experts int [n, k], their weights [n, k], which sum to 1)."""

    def __init__(self, dim: int, experts: int, active: int, kind: str):
        super().__init__()
        self.active, self.kind = active, kind
        self.weight = nn.Parameter(torch.empty(experts, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight).to(torch.promote_types(x.dtype, torch.float32))
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)
        weights, index = scores.topk(self.active, dim=-1)
        return logits, index, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


class Experts(nn.Module):
    """SwiGLU experts: tokens [n, dim], int [n, k], weights [n, k] -> [n, dim]."""

    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            rows, place = torch.where(index == expert)
            gate, up = F.linear(x[rows], self.up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert])
            out = out.index_add(0, rows, (made * weights[rows, place].unsqueeze(-1)).to(out.dtype))
        return out


class Mixture(nn.Module):
    """x [b, s, dim] -> [b, s, dim]. `shared`: what all tokens go through as well. `balance`, `z`: factors of the losses
    that the gate adds while it trains."""

    def __init__(
        self, dim: int, hidden: int, experts: int, active: int, kind: str, shared: nn.Module | None, balance: float,
        z: float,
    ):  # fmt: skip
        super().__init__()
        self.gate, self.experts, self.shared = Gate(dim, experts, active, kind), Experts(dim, hidden, experts), shared
        self.balance, self.z = balance, z

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits, index, weights = self.gate(tokens)
        if self.training and torch.is_grad_enabled() and (self.balance or self.z):
            scores = logits.sigmoid() if self.gate.kind == "sigmoid" else logits
            shares = scores / scores.sum(-1, keepdim=True) if self.gate.kind == "sigmoid" else logits.softmax(-1)
            tokens = with_loss(tokens, self.balance * balance_loss(shares, index) + self.z * z_loss(logits))
        y = self.experts(tokens, index, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)
