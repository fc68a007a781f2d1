"""Modules that backward computes again, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from weft.core import ConfigError, nearest
from weft.nn import may_drop

FIELD = "train.recompute"


def recomputed_modules(
    model: nn.Module, patterns: Sequence[str], blocks: Sequence[str]
) -> tuple[str, ...]:
    """The outermost modules that the globs match, in the model's order.

    Args:
        model: the model.
        patterns: globs of names.
        blocks: its repeated blocks, each of which is computed again as a whole.

    Raises:
        ConfigError: a glob matches no module, or one that is no whole block, or holds several.
    """
    containers = nn.ModuleList | nn.ModuleDict  # nobody calls them
    named = [n for n, m in model.named_modules() if n and not isinstance(m, containers)]
    matched = dict[str, str]()
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, named, n=5, cutoff=0.0)
            raise ConfigError(FIELD, pattern, "matches no module", nearest(pattern, near))
        for name in found:
            matched.setdefault(name, pattern)
    outermost = [name for name in named if name in matched and not _within(name, matched)]
    for name in outermost:
        if around := _within(name, blocks):
            problem = f"{name} is inside of {around}, which is recomputed as a whole or not at all"
            raise ConfigError(FIELD, matched[name], problem, f'write "{around}"')
        if inside := [block for block in blocks if _within(block, [name])]:
            problem = f"{name} holds blocks, and each block is recomputed by itself"
            fix = f'name blocks, as "{inside[0]}"'
            raise ConfigError(FIELD, matched[name], problem, fix)
        if name not in blocks and may_drop(model.get_submodule(name)):
            problem = (
                f"{name} has dropout and is in no list of blocks: recomputation would draw"
                " other masks"
            )
            fix = "hold such modules in a ModuleList, or leave it out"
            raise ConfigError(FIELD, matched[name], problem, fix)
    return tuple(outermost)


def _within(name: str, others: Sequence[str] | dict[str, str]) -> str | None:
    """Of other modules one that holds this one."""
    return next((other for other in others if name.startswith(f"{other}.")), None)
