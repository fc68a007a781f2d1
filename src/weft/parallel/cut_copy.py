"""A copy of a model, or of a part of it, as the first of its ranks has it, without elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode
from weft.core import DimShard
from weft.nn import OF_OUTPUTS, Chain, LocalMultiheadAttention, ShardedRMSNorm, is_conv1d, rms_rule

from .without_elements import copy_without_elements

# What a forward may raise that runs on a part of its features.
FAILS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)


def cut_copy(
    module: nn.Module, model: nn.Module, chains: Iterable[Chain], size: int, mode: FakeTensorMode
) -> nn.Module:
    """A module of `model`, or the model itself, with the first of `size` ranks' part of each weight
    that a chain divides. Its numbers of heads and features stay as they are."""
    cuts: dict[int, DimShard] = {}
    chains = [*chains]
    for chain in chains:
        cuts |= _cuts(model, chain)

    def local(t: Tensor) -> tuple[int, ...]:
        shape = list(t.shape)
        if (cut := cuts.get(id(t))) is not None:
            shape[cut.dim] = sum(stop - start for start, stop in cut.intervals(0, size))
        return tuple(shape)

    norms = {id(model.get_submodule(name)) for chain in chains for name in chain.norms}
    shared = [name for name, each in module.named_modules() if id(each) in norms]
    copied = copy_without_elements(module, mode, local)
    for name in shared:
        norm, rule = copied.get_submodule(name), rms_rule(module.get_submodule(name))
        assert rule is not None
        ShardedRMSNorm.take_over(norm, rule, 1, lambda squares: squares)
    for each in copied.modules():
        if is_conv1d(each):
            each.nf = each.weight.shape[1]  # type: ignore[assignment, union-attr]
        if isinstance(each, nn.MultiheadAttention) and _has_part(each):
            LocalMultiheadAttention.take_over(each, 0, lambda part: part)
    return copied


def _has_part(attention: nn.MultiheadAttention) -> bool:
    return attention.out_proj.weight.shape[1] < attention.embed_dim


def _cuts(model: nn.Module, chain: Chain) -> Mapping[int, DimShard]:
    """id of a parameter -> how the chain divides it."""
    named = {name: model.get_parameter(name) for name in chain.parameters}
    found = {id(p): chain.parameters[name] for name, p in named.items()}
    for linear, cut in chain.cuts.items():
        module = model.get_submodule(linear)
        found[id(module.weight)] = cut
        for leaf in OF_OUTPUTS if linear not in chain.rows else ():
            if (each := getattr(module, leaf, None)) is not None:
                found[id(each)] = DimShard(0, cut.parts, cut.units)
    return found
