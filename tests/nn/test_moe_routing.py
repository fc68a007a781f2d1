"""What a gate asks of tokens, on one device: shares, capacity, a bias that balances, and grouped
products."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.nn.expert_roles import find_experts
from weft.nn.models import decoder
from weft.nn.models.moe import Experts, Gate, grouped
from weft.nn.module_roles import find_roles
from weft.nn.moe_routing import (
    NOWHERE,
    GateBias,
    count_choices,
    expert_shares,
    rebalance_gates,
    within_capacity,
)


def test_choices_are_counted_with_those_that_none_took() -> None:
    index = torch.tensor([[0, 2], [NOWHERE, 2], [1, -5]])
    assert count_choices(index, 4).tolist() == [2, 1, 1, 2, 0]
    assert expert_shares(index, 4).tolist() == [0.25, 0.25, 0.5, 0.0]


def in_line(index: torch.Tensor, experts: int, factor: float) -> torch.Tensor:
    """`within_capacity` as its definition reads."""
    b, s, k = index.shape
    out = index.clone()
    for row in range(b):
        taken = [0] * experts
        for position, choice in product(range(s), range(k)):
            expert = int(index[row, position, choice])
            taken[expert] += 1
            if taken[expert] > math.ceil(factor * k * s / experts):
                out[row, position, choice] = NOWHERE
    return out


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 4.0])
def test_capacity_is_a_sequence_s_and_in_the_order_of_positions(factor: float) -> None:
    torch.manual_seed(0)
    index = torch.rand(3, 10, 5).argsort(-1)[..., :2] % 4
    found = within_capacity(index, 4, factor)
    assert torch.equal(found, in_line(index, 4, factor))
    assert bool((found == NOWHERE).any()) == (factor < 4.0)
    # neither other sequences nor later positions decide
    assert torch.equal(within_capacity(index[1:2], 4, factor), found[1:2])
    other = index.clone()
    other[:, 6:] = 0
    assert torch.equal(within_capacity(other, 4, factor)[:, :6], found[:, :6])


def test_a_gate_of_one_expert_learns_from_what_it_does() -> None:
    """Shares of one would be 1, whatever the score."""
    torch.manual_seed(0)
    mixture = decoder(16, 8, 1, 2, experts=4, active=1, hidden=12, balance=0.0)
    mixture(torch.randint(0, 16, (2, 6))).square().sum().backward()
    gate = mixture.get_submodule("blocks.0.mlp.gate")
    assert gate.weight.grad is not None and float(gate.weight.grad.norm()) > 1e-6  # type: ignore[union-attr]


def test_low_scores_are_shares_too() -> None:
    gate = Gate(4, 4, 2, "sigmoid", rate=0.0)
    nn.init.constant_(gate.weight, -100.0)
    assert bool(gate(torch.ones(3, 4))[2].isfinite().all())


def test_a_bias_keeps_its_precision_and_is_not_moved_by_a_step_that_is_not_taken() -> None:
    bias = GateBias(2, rate=0.001).to(torch.bfloat16)
    assert bias.state.dtype == torch.float32
    assert GateBias(2, rate=0.001).double().state.dtype == torch.float64
    for _ in range(1000):
        bias.count(torch.tensor([[0], [0]]))
    assert bias.state[1].tolist() == [2000.0, 0.0]
    rebalance_gates(bias, taken=False)
    assert bias.state.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_bias_moves_towards_experts_that_had_few() -> None:
    bias = GateBias(4, rate=0.5)
    bias.count(torch.tensor([[0, 1], [0, 1], [0, 2]]))
    rebalance_gates(bias)
    assert bias.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert bias.state[1].tolist() == [0.0] * 4
    bias.eval()
    bias.count(torch.tensor([[0, 1]]))
    assert bias.state[1].tolist() == [0.0] * 4


def test_a_bias_chooses_and_does_not_weigh() -> None:
    torch.manual_seed(0)
    gate = Gate(8, 4, 2, "sigmoid", rate=0.1)
    nn.init.normal_(gate.weight)
    x = torch.randn(6, 8)
    assert gate.bias is not None
    gate.bias.state[0, 3] = 100.0
    logits, index, weights = gate(x)
    assert bool((index == 3).any(-1).all())
    chosen = logits.sigmoid().gather(-1, index)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))


def test_a_bias_balances_where_a_gate_prefers_one_expert() -> None:
    """The tokens of its busiest expert fall, step by step, to the mean."""
    torch.manual_seed(0)
    gate = Gate(8, 4, 1, "sigmoid", rate=0.01)
    nn.init.normal_(gate.weight, std=0.2)
    x = torch.randn(64, 8) + 8 * gate.weight[0].detach()
    busiest = []
    for _ in range(100):
        index = gate(x)[1]
        busiest.append(int(count_choices(index, 4)[1:].max()))
        rebalance_gates(gate)
    assert busiest[0] > 40 > 24 > sum(busiest[-10:]) / 10


def test_experts_are_each_token_s_own() -> None:
    """Against every token through its experts, one by one; what nobody takes gives nothing."""
    torch.manual_seed(0)
    experts = Experts(8, 12, 3).double()
    for p in experts.parameters():
        nn.init.normal_(p)
    x, index = (
        torch.randn(5, 8, dtype=torch.float64),
        torch.tensor([[0, 2], [2, 0], [NOWHERE, 2], [2, NOWHERE], [0, 2]]),
    )
    weights = torch.rand(5, 2, dtype=torch.float64)
    want = torch.zeros_like(x)
    for token, choice in product(range(5), range(2)):
        expert = int(index[token, choice])
        if expert >= 0:
            gate, up = (experts.up[expert] @ x[token]).chunk(2)
            want[token] += weights[token, choice] * (experts.down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(experts(x, index, weights), want)
    experts(x, index, weights).sum().backward()
    assert experts.up.grad is not None and bool(
        (experts.up.grad[1] == 0).all()
    )  # nobody's, and yet with a gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_s_grouped_product_gives_the_same(dtype: torch.dtype) -> None:
    """What a GPU runs, here on the CPU."""
    torch.manual_seed(0)
    x, weights, counts = (
        torch.randn(10, 16).to(dtype),
        torch.randn(4, 8, 16).to(dtype),
        torch.tensor([4, 0, 5, 1]),
    )
    want = F.grouped_mm(x, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    torch.testing.assert_close(grouped(x, weights, counts), want)


class Turned(nn.Module):
    """Experts whose weights are [experts, in, out], with one product on the way."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = 2
        self.last, self.first = (
            nn.Parameter(torch.ones(2, hidden, dim)),
            nn.Parameter(torch.ones(2, dim, hidden)),
        )

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


def inside(module: nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {
        name: (cut.dim, cut.parts)
        for each in find_experts(module)
        for name, cut in each.cuts.items()
    }


def test_what_is_inside_of_an_expert() -> None:
    model = decoder(16, 8, 1, 2, experts=4, hidden=12, shared=1)
    assert inside(model) == {
        "blocks.0.mlp.experts.up": (1, (12, 12)),
        "blocks.0.mlp.experts.down": (2, (12,)),
    }
    assert [each.shared for each in find_roles(model).experts] == ["blocks.0.mlp.shared"]
    gate = nn.Linear(8, 2, bias=False)
    assert inside(nn.ModuleDict({"gate": gate, "experts": Turned(8, 12)})) == {
        "experts.first": (2, (12,)),
        "experts.last": (1, (12,)),
    }
    # with no gate it could be the tokens that have 12, and with 8 of both it could be either dim
    assert inside(nn.ModuleDict({"experts": Turned(8, 12)})) == {}
    assert inside(nn.ModuleDict({"gate": gate, "experts": Turned(8, 8)})) == {}
    assert (
        "left whole under tp"
        in find_roles(nn.ModuleDict({"gate": gate, "experts": Turned(8, 8)})).notes[0]
    )
