"""Low-rank factors beside a linear (LoRA, Hu et al. 2021): base(x) + B(A(dropout(x))) * scale.

A chain of linears is found as if there were none; then each linear's factors are cut with it. B of
a column makes the features that the base makes, and A of a row reads those that the base reads. The
other factor is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from weft.core import DimShard

from .role_types import Chain, is_linear


@dataclass(frozen=True)
class LowRankFactors:
    """Names of the modules of a linear that has factors beside it: its own, and those of each pair
    of factors. `dropouts`: of what enters A."""

    base: str
    down: tuple[str, ...]  # A [r, in]
    up: tuple[str, ...]  # B [out, r]
    dropouts: tuple[str, ...]


def low_rank_factors(modules: Mapping[str, nn.Module]) -> dict[str, LowRankFactors]:
    """The modules that are a linear with low-rank factors, as peft makes them, by name: those that
    hold nothing else."""
    found = {}
    for name, module in modules.items():
        parts = dict(module.named_children())
        base, down, up = (parts.get(key) for key in ("base_layer", "lora_A", "lora_B"))
        if base is None or not is_linear(base) or not isinstance(down, nn.ModuleDict):
            continue
        if not isinstance(up, nn.ModuleDict) or not down or getattr(module, "lora_variant", None):
            continue
        factors = [*down.items(), *up.items()]
        known = {id(p) for _, each in [*factors, ("", base)] for p in each.parameters()}
        if any(id(p) not in known for p in module.parameters()):
            continue
        if not all(type(each) is nn.Linear for _, each in factors):
            continue
        dropped = parts.get("lora_dropout", nn.ModuleDict())
        found[name] = LowRankFactors(
            f"{name}.base_layer",
            tuple(f"{name}.lora_A.{key}" for key in down),
            tuple(f"{name}.lora_B.{key}" for key in up),
            tuple(f"{name}.lora_dropout.{key}" for key, _ in dropped.named_children()),
        )
    return found


def without_factors(
    modules: Mapping[str, nn.Module], factors: Mapping[str, LowRankFactors]
) -> dict[str, nn.Module]:
    """The modules by name as if these linears had no factors: each has its base in its place."""
    inside = {n for name in factors for n, _ in modules[name].named_modules(prefix=name)}
    return {
        name: modules[factors[name].base] if name in factors else module
        for name, module in modules.items()
        if name in factors or name not in inside
    }


def with_factors(chain: Chain, factors: Mapping[str, LowRankFactors]) -> Chain:
    """A chain that was found without these factors, with them."""
    if not any(name in factors for name in chain.linears):
        return chain

    def base(name: str) -> str:
        return factors[name].base if name in factors else name

    columns, rows, inner = list[str](), list[str](), list[str]()
    cuts = {base(name): cut for name, cut in chain.cuts.items()}
    dropouts = dict[str, str]()
    for name in chain.columns:
        columns.append(base(name))
        if (own := factors.get(name)) is not None:
            columns += own.up
            cuts |= {each: _of_linear(0, chain.cuts[name]) for each in own.up}
            # where the input enters at each column, the gradient of what enters B is summed there
            inner += [f"{each}.weight" for each in own.down if chain.entry is not None]
            dropouts |= dict.fromkeys(own.dropouts, "column")
    for name in chain.rows:
        rows.append(base(name))
        if (own := factors.get(name)) is not None:
            rows += own.down
            cuts |= {each: _of_linear(1, chain.cuts[name]) for each in own.down}
            dropouts |= dict.fromkeys(own.dropouts, "row")
    row, *beside = rows
    return replace(
        chain,
        columns=tuple(columns),
        row=row,
        rows_beside=tuple(beside),
        cuts=cuts,
        inner=(*chain.inner, *inner),
        dropouts=dropouts,
    )


def _of_linear(dim: int, cut: DimShard) -> DimShard:
    """The same features of an nn.Linear; the base may hold its weight transposed."""
    return replace(cut, dim=dim)
