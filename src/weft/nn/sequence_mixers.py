"""Modules that mix positions by themselves, not by attention that weft can divide: convolutions
along the sequence, recurrences, state spaces, attention written out by hand."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from inspect import isfunction
from types import CodeType, FunctionType

from torch import nn

from weft.core import UnsupportedModel

from .attention_interface import calls_interface
from .role_types import Chain, chain_module
from .signature import named_inputs

WHOLE_SEQUENCE, POSITIONWISE = "whole_sequence", "positionwise"
_CORE = ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS")


def sequence_mixers(
    model: nn.Module,
    blocks: Iterable[Iterable[str]],
    chains: Iterable[Chain],
    declared: Mapping[str, str],
) -> tuple[str, ...]:
    """Names of the modules that need whole sequences, without those inside of others.

    Args:
        model: the model.
        blocks: the lists of repeated blocks.
        chains: what was found of attention and feed-forward.
        declared: module -> its role in [roles].

    Raises:
        UnsupportedModel: A module is declared that holds the blocks.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {name for name, role in declared.items() if role == WHOLE_SEQUENCE}
    for name, module in modules.items():
        if isinstance(module, nn.RNNBase) or any(map(_mixes, module.children())):
            found.add(name)
    attending = {type(m): m for m in (modules[chain_module(c)] for c in chains if c.heads)}
    whole = {kind for kind, module in attending.items() if _attends_by_hand(module)}
    whole |= {type(module) for module in modules.values() if _chooses_keys(module)}
    found |= {name for name, module in modules.items() if type(module) in whole}
    around = {outer for each in blocks for block in each for outer in _and_outer(block)[1:]}
    for name in sorted(found & around & declared.keys()):
        raise UnsupportedModel(
            f'roles."{name}"',
            WHOLE_SEQUENCE,
            "it holds the blocks, so every rank would compute all positions of the whole model",
            "name modules inside of the blocks",
        )
    found -= {"", *around, *(name for name, role in declared.items() if role == POSITIONWISE)}
    return tuple(name for name in modules if name in found and not {*_and_outer(name)[1:]} & found)


def _mixes(module: nn.Module) -> bool:
    """What computes with neighbours along a sequence, laid as its parent lays it."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return module.kernel_size[0] > 1
    return isinstance(module, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d))


def _chooses_keys(module: nn.Module) -> bool:
    """An attention in which another module reads the mask: it chooses the keys (DeepSeek-V3.2)."""
    inner = [*module.modules()][1:] if calls_interface(module) else []
    return any("attention_mask" in named_inputs(other) for other in inner)


def _attends_by_hand(module: nn.Module) -> bool:
    """Whether nothing in an attention goes through torch's function or transformers' interface."""
    return not any(
        isinstance(each, nn.MultiheadAttention)
        or calls_interface(each)
        or any(_mentions(function, _CORE, 3) for function in _functions_of(type(each)))
        for each in module.modules()
    )


def _functions_of(cls: type) -> Iterator[FunctionType]:
    """The methods of a class and its bases, but for those of torch."""
    for base in cls.__mro__:
        if not base.__module__.startswith("torch."):
            yield from (f for f in map(inspect.unwrap, vars(base).values()) if isfunction(f))


def _mentions(function: FunctionType, wanted: Collection[str], depth: int) -> bool:
    """Whether a function has one of these names in its code, or calls one by name that has."""
    names = set(_names(function.__code__))
    if not names.isdisjoint(wanted):
        return True
    called = (function.__globals__.get(each) for each in names) if depth else ()
    return any(_mentions(each, wanted, depth - 1) for each in called if isfunction(each))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _and_outer(name: str) -> list[str]:
    """A module and those that it is in, the innermost first, but for the root."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
