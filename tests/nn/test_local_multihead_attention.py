"""nn.MultiheadAttention by some of its heads: the parts of all ranks add up to the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from weft.nn import LocalMultiheadAttention

DIM, HEADS, RANKS = 8, 4, 2


def part_of(whole: nn.MultiheadAttention, index: int, parts: list[Tensor]) -> nn.MultiheadAttention:
    """A rank's, which puts its part of the sum into `parts`."""
    mine = copy.deepcopy(whole)
    rows = [w.chunk(RANKS)[index] for w in whole.in_proj_weight.chunk(3)]
    biases = [b.chunk(RANKS)[index] for b in whole.in_proj_bias.chunk(3)]
    mine.in_proj_weight = nn.Parameter(torch.cat(rows))
    mine.in_proj_bias = nn.Parameter(torch.cat(biases))
    mine.out_proj.weight = nn.Parameter(whole.out_proj.weight.chunk(RANKS, 1)[index])

    def leave(part: Tensor) -> Tensor:
        parts.append(part)
        return part

    LocalMultiheadAttention.take_over(mine, index, leave)
    return mine


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_parts_add_up(batch_first: bool, need_weights: bool) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first).double()
    x, memory = torch.randn(3, 5, DIM).double(), torch.randn(3, 6, DIM).double()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, -1] = True
    mask = torch.randn(3 * HEADS, 5, 6) > 1
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    options = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": need_weights}
    want, _ = whole(x, memory, memory, **options)
    parts: list[Tensor] = []
    for index in range(RANKS):
        _, weights = part_of(whole, index, parts)(x, memory, memory, **options)
        assert weights is None
    torch.testing.assert_close(sum(parts[1:], parts[0]) + whole.out_proj.bias, want)


def test_an_encoder_layer_computes_by_it_in_evaluation() -> None:
    """Torch's own kernel of the whole layer reads the weights of all heads."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True).eval()
    parts: list[Tensor] = []
    layer.self_attn = part_of(layer.self_attn, 0, parts)
    with torch.no_grad():
        layer(torch.randn(2, 5, DIM))
    assert len(parts) == 1


def test_is_causal_needs_a_mask() -> None:
    mine = part_of(nn.MultiheadAttention(DIM, HEADS), 0, [])
    x = torch.randn(5, 2, DIM)
    with pytest.raises(RuntimeError, match="needs attn_mask beside is_causal"):
        mine(x, x, x, is_causal=True)
