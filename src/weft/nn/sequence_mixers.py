"""Modules that mix positions by themselves, not by attention that weft can divide: convolutions
along the sequence, recurrences, state spaces, attention written out by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from inspect import isfunction
from types import CodeType, FunctionType

from torch import nn

from .eager_attention import eager_attention
from .role_types import Chain, chain_module
from .signature import named_inputs

WHOLE_SEQUENCE = "whole_sequence"
_CORE = "scaled_dot_product_attention"


def sequence_mixers(
    modules: Mapping[str, nn.Module],
    blocks: Iterable[Iterable[str]],
    chains: Iterable[Chain],
    declared: Iterable[str],
) -> tuple[str, ...]:
    """Names of the modules that need whole sequences, without those inside of others.

    Args:
        modules: by name.
        blocks: the lists of repeated blocks.
        chains: what was found of attention and feed-forward.
        declared: names for which [roles] says so.
    """
    found = {*declared}
    for name, module in modules.items():
        if isinstance(module, nn.RNNBase) or any(map(_mixes, module.children())):
            found.add(name)
    attending = {type(m): m for m in (modules[chain_module(c)] for c in chains if c.heads)}
    whole = {kind for kind, module in attending.items() if _attends_by_hand(module)}
    whole |= {type(module) for module in modules.values() if _chooses_keys(module)}
    found |= {name for name, module in modules.items() if type(module) in whole}
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


def _attends_by_hand(module: nn.Module) -> bool:
    """Whether nothing in an attention goes through torch's function or transformers' interface."""
    return not any(
        isinstance(each, nn.MultiheadAttention)
        or eager_attention(each) is not None
        or any(_mentions(code, _CORE, 3) for code in _functions_of(type(each)))
        for each in module.modules()
    )


def _functions_of(cls: type) -> Iterator[FunctionType]:
    """The methods of a class and its bases, but for those of torch."""
    for base in cls.__mro__:
        if not base.__module__.startswith("torch."):
            yield from (f for f in map(inspect.unwrap, vars(base).values()) if isfunction(f))


def _mentions(function: FunctionType, name: str, depth: int) -> bool:
    """Whether a function has this name in its code, or calls one by name that has."""
    names = set(_names(function.__code__))
    if name in names or not depth:
        return name in names
    called = (function.__globals__.get(each) for each in names)
    return any(_mentions(each, name, depth - 1) for each in called if isfunction(each))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _and_outer(name: str) -> list[str]:
    """A module and those that it is in, the innermost first, but for the root."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
