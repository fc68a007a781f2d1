"""Modules that mix positions by themselves, not by attention that weft can divide: convolutions
along the sequence, recurrences, state spaces, attention written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from .eager_attention import attends_eagerly, attention_kind, eager_attention
from .role_types import Chain, chain_module
from .signature import named_inputs

WHOLE_SEQUENCE = "whole_sequence"


def sequence_mixers(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    blocks: Iterable[Iterable[str]],
    chains: Iterable[Chain],
    declared: Iterable[str],
) -> tuple[str, ...]:
    """Names of the modules that need whole sequences, without those inside of others.

    Args:
        model: the model.
        modules: by name.
        blocks: the lists of repeated blocks.
        chains: what was found of attention and feed-forward.
        declared: names for which [roles] says so.
    """
    found = {*declared}
    for name, module in modules.items():
        mixes = isinstance(module, nn.RNNBase) or any(map(_mixes, module.children()))
        if mixes or _chooses_keys(module):
            found.add(name)
    if attention_kind(model) == "eager" and not attends_eagerly(model):
        attending = {type(modules[chain_module(chain)]) for chain in chains if chain.heads}
        found |= {name for name, module in modules.items() if type(module) in attending}
    around = {outer for each in blocks for block in each for outer in _and_outer(block)[1:]}
    found -= {"", *around}
    return tuple(name for name in modules if name in found and not {*_and_outer(name)[1:]} & found)


def _mixes(module: nn.Module) -> bool:
    """What computes with neighbours along a sequence, laid as its parent lays it."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return module.kernel_size[0] > 1
    return isinstance(module, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d))


def _chooses_keys(module: nn.Module) -> bool:
    """An attention in which another module reads the mask: it chooses the keys (DeepSeek-V3.2)."""
    inner = [*module.modules()][1:] if eager_attention(module) is not None else []
    return any("attention_mask" in named_inputs(other) for other in inner)


def _and_outer(name: str) -> list[str]:
    """A module and those that it is in, the innermost first, but for the root."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
