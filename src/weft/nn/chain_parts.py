"""What a rank has of a chain of linears, beside its part of their weights."""

from __future__ import annotations

import copy

from torch import nn

from .linear_chains import GROUPS
from .plain_linears import is_plain_linear
from .quantized_linears import Int8Linear
from .role_types import Chain


def local_attributes(chain: Chain, size: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Module -> its own numbers of heads and features, as a rank of `size` has them."""
    heads, kv_heads = max(1, chain.heads // size), max(1, chain.kv_heads // size)
    found = {}
    for module, attributes in chain.attributes.items():
        found[module] = tuple(
            (key, heads // kv_heads if key.rpartition(".")[2] in GROUPS else max(1, old // size))
            for key, old in attributes
        )
    return found


def set_attribute(module: nn.Module, key: str, value: int) -> None:
    """Give a module its local number. "config.heads" is that of a configuration that other modules
    share: the module gets a copy of its own."""
    holder, _, inner = key.rpartition(".")
    if not holder:
        setattr(module, key, value)
        return
    own = copy.copy(getattr(module, holder))
    setattr(own, inner, value)
    setattr(module, holder, own)


def unknown_forward(model: nn.Module, chain: Chain, size: int) -> str:
    """Why a linear of a chain cannot run on part of its parameters, which takes one that computes
    what nn.Linear does; "" if all can."""
    for name in chain.linears:
        module = model.get_submodule(name)
        partly = chain.cuts[name].shared(size) or (
            name in chain.rows
            and getattr(module, "bias", None) is not None
            and not isinstance(module, Int8Linear)
        )
        if partly and not is_plain_linear(module):
            kind = type(module).__name__
            return f"{name} is a {kind}, whose forward is its own: it needs all its parameters"
    return ""
