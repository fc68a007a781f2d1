"""Parameters that a run leaves as they are, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from weft.core import ConfigError, nearest

FIELD = "model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the globs: they get no gradient.

    Raises ConfigError for a glob that matches no parameter, and where nothing would be trained.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> freeze(model, ["0.*"])
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias']
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not found:
            raise _nothing(model, pattern)
        for p in found:
            p.requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        problem, fix = "no parameter is left to be trained", "leave some parameters out"
        raise ConfigError(FIELD, list(patterns), problem, fix)


def _nothing(model: nn.Module, pattern: str) -> ConfigError:
    named = dict(model.named_parameters())
    for alias, p in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(alias, pattern):
            first = next(name for name, other in named.items() if other is p)
            problem = f"matches another name of the tied parameter {first}"
            return ConfigError(FIELD, pattern, problem, f'write "{first}"')
    near = get_close_matches(pattern, named, n=5, cutoff=0.0)  # of the thousands that may be there
    return ConfigError(FIELD, pattern, "matches no parameter", nearest(pattern, near))
