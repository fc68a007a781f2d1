"""The roles that a module may have in a layout that shards it: linears in chains, experts,
vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from weft.core import DimShard, Layout, Weight

from .quantized_linears import Int8Linear

# parameters of a linear with a number for each output feature
OF_OUTPUTS = ("bias", "scale")

# a note on what names say alone; a forward that is followed tells more
NO_ROW = "a column with no row after it is left whole"


@dataclass(frozen=True)
class Chain:
    """Columns and the row that ends them. `entry`: where the shared input enters; None: at each
    column by itself.

    `cuts`: linear or table -> how its features are divided; `inner`: parameters that every rank
    holds whole and uses on its part (query and key norms); `tables`: embeddings of one number per
    head (T5's biases of relative positions); `parameters`: others that are divided by heads
    (attention sinks).
    """

    columns: tuple[str, ...]
    row: str
    cuts: Mapping[str, DimShard]
    entry: str | None
    inner: tuple[str, ...]
    heads: int = 0  # 0: a feed-forward chain
    kv_heads: int = 0
    attributes: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    cross: bool = False  # some columns read another tensor (cross-attention)
    tables: tuple[str, ...] = ()
    # an attention in the block's own forward, which may count positions before a boundary
    flat: bool = False
    parameters: Mapping[str, DimShard] = field(default_factory=dict)
    # the entry's own forward multiplies by the weights of all (nn.MultiheadAttention): no linear is
    # called, and what leaves the entry is the sum
    by_entry: bool = False
    # norms by the root mean square of features that ranks share; their weights are `parameters`
    norms: tuple[str, ...] = ()
    # module -> its arguments without a gradient that are divided by heads (ALiBi's biases)
    arguments: Mapping[str, Mapping[str, DimShard]] = field(default_factory=dict)
    # further linears that read what the row reads, each with a sum of its own (LoRA's A)
    rows_beside: tuple[str, ...] = ()
    # dropout before LoRA's A -> "column" or "row": the linear that it is beside
    dropouts: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.row, *self.rows_beside)

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows)


def chain_module(chain: Chain) -> str:
    """The innermost module that holds all linears of a chain."""
    first, *rest = [name.split(".")[:-1] for name in chain.linears]
    same = [
        i for i, part in enumerate(first) if all(other[: i + 1] == first[: i + 1] for other in rest)
    ]
    return ".".join(first[: len(same)])


@dataclass(frozen=True)
class LoneLinear:
    """A linear or convolution in no chain, divided by the features of its output, which all ranks
    gather, or of its input, where all sum what they make.

    `dim`: of its weight, which has `features` rows there; `activation_dim`: where they are in the
    output or the input, from the end.
    """

    module: str
    by: Literal["output", "input"]
    features: int
    dim: int
    activation_dim: int = -1


@dataclass(frozen=True)
class ExpertsRole:
    """A module that holds the weights of `count` experts. `cuts`: parameter -> how the features
    inside of every expert are divided; empty where its shapes do not tell. `shared`: the module
    beside it that all tokens go through, if any.
    """

    module: str
    count: int
    cuts: Mapping[str, DimShard]
    names: tuple[str, ...]  # of the forward's arguments: tokens, experts, weights
    shared: str = ""


@dataclass(frozen=True)
class Roles:
    """What was found: chains, the vocabulary's embeddings and heads, the repeated blocks, and where
    each came from. `all_seen`: the forward shows that no other linears are columns and a row.
    `read_elsewhere`: modules that are whole because something else reads their weight.
    `needs_whole`: modules that are whole because a part of them does not run.
    `uneven`: rows of chains that so many ranks do not divide, and the features or heads that enter.
    `lone`: what is divided by itself where there is nothing else to divide.

    More than one embedding or head: modules of their own that hold the same weight (a T5's encoder
    and decoder).
    """

    chains: tuple[Chain, ...]
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]  # each list of repeated blocks, in order
    source: str
    notes: tuple[str, ...] = ()
    experts: tuple[ExpertsRole, ...] = ()
    mixers: tuple[str, ...] = ()  # modules that mix positions, other than by attention weft divides
    all_seen: bool = False
    read_elsewhere: tuple[str, ...] = ()
    needs_whole: tuple[str, ...] = ()
    uneven: tuple[tuple[str, int], ...] = ()
    lone: tuple[LoneLinear, ...] = ()

    def of_experts(self, name: str) -> bool:
        """Whether a parameter has a part for each expert."""
        return any(name.startswith(each.module + ".") for each in self.experts)

    def alike(self, weights: Iterable[Weight], layout: Layout, axis: str) -> list[Weight]:
        """Those that are the same on all ranks of an axis, or a gathering of them: not experts that
        it spreads."""
        spread = layout.spreads_experts(axis)
        return [w for w in weights if not (spread and self.of_experts(w.name))]

    def stacks(self) -> tuple[tuple[str, ...], ...]:
        """The lists of blocks all of which hold a chain: where a residual stream runs from first to
        last."""
        rows = [chain.row for chain in self.chains]
        return tuple(
            blocks
            for blocks in self.blocks
            if all(any(r.startswith(b + ".") for r in rows) for b in blocks)
        )


def is_linear(module: nn.Module) -> bool:
    """A linear layer that holds its weight itself (not through a parametrization)."""
    kinds = (nn.Linear, Int8Linear)
    return (isinstance(module, kinds) and "weight" in module._parameters) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear whose weight is stored [in, out]."""
    return (
        type(module).__name__ == "Conv1D"
        and getattr(module, "weight", None) is not None
        and module.weight.ndim == 2
    )  # type: ignore[union-attr, operator]


def linear_features(module: nn.Module) -> tuple[int, int]:
    """(in, out) features of a linear."""
    rows, cols = module.weight.shape  # type: ignore[union-attr, misc]
    return (int(rows), int(cols)) if is_conv1d(module) else (int(cols), int(rows))
