"""Arguments of a module that hold a part for each head, as biases of positions that the model makes
for all of them (ALiBi, Press et al. 2022): a rank takes those of its heads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.core import DimShard

from .tensor_shards import shard_of


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Of the forward's parameters that may be given by position."""
    found = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def named_arguments(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a module is called with, by name. `names`: of its positional arguments."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def take_part(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cuts: Mapping[str, DimShard],
    index: int,
    size: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with on rank `index` of `size`.

    Args:
        names: of its positional arguments.
        cuts: argument -> how its heads are divided. Its dim holds them once, or once for each
            sample: [heads, ...] or [samples * heads, ...].
    """
    given, named = list(args), dict(kwargs)
    for place, name in enumerate(names[: len(given)]):
        if name in cuts:
            given[place] = _part(given[place], cuts[name], index, size)
    for name in cuts:
        if name in named:
            named[name] = _part(named[name], cuts[name], index, size)
    return tuple(given), named


def _part(value: Any, cut: DimShard, index: int, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    before, after = value.shape[: cut.dim], value.shape[cut.dim + 1 :]
    each = value.reshape(*before, -1, sum(cut.parts), *after)  # a compiler knows no unflatten
    part = shard_of(each, replace(cut, dim=cut.dim + 1), index, size)
    return part.reshape(*before, -1, *after)
