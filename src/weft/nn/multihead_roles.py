"""Chains of nn.MultiheadAttention, whose projections are one tensor of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from weft.core import DimShard

from .plain_linears import is_plain_linear
from .role_types import Chain


def multihead_chains(
    modules: Mapping[str, nn.Module], whole: Collection[str], notes: list[str]
) -> list[Chain]:
    """A chain for each nn.MultiheadAttention that can be divided by heads.

    Args:
        modules: all modules of the model by name.
        whole: modules that are declared whole.
        notes: gets a note on each that is left whole.
    """
    chains = []
    for name, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        prefix = f"{name}." if name else ""
        if name in whole or f"{prefix}out_proj" in whole:
            continue
        if why := _undivided(module):
            notes.append(f"{name or type(module).__name__}: {why}: left whole under tp")
            continue
        chains.append(_chain(name, prefix, module))
    return chains


def _undivided(module: nn.MultiheadAttention) -> str:
    """Why it is left whole; "" if it need not be."""
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is made from nn.MultiheadAttention"
    if module.bias_k is not None or module.add_zero_attn:
        return "keys are added to those of its input (add_bias_kv, add_zero_attn)"
    if not is_plain_linear(module.out_proj):
        return "another module stands for its output projection"
    return ""


def _chain(name: str, prefix: str, module: nn.MultiheadAttention) -> Chain:
    width, heads = module.embed_dim, module.num_heads
    row = f"{prefix}out_proj"
    three, one = (DimShard(0, (width,) * n, (heads,) * n) for n in (3, 1))
    parts = {
        "in_proj_weight": three,
        "in_proj_bias": three,
        "q_proj_weight": one,
        "k_proj_weight": one,
        "v_proj_weight": one,
    }
    return Chain(
        columns=(),
        row=row,
        cuts={row: DimShard(1, (width,), (heads,))},
        entry=name,
        inner=(),
        heads=heads,
        kv_heads=heads,
        parameters={
            f"{prefix}{leaf}": cut
            for leaf, cut in parts.items()
            if getattr(module, leaf) is not None
        },
        by_entry=True,
    )
