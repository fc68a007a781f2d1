"""Modules that nothing else has a claim to, so that their weights may be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from weft.nn import Roles, low_rank_factors


def free_modules(
    model: nn.Module,
    roles: Roles,
    declared: Mapping[str, object],
    wanted: Callable[[nn.Module], bool],
) -> dict[str, nn.Module]:
    """The modules of a kind that may be cut: in order, no other module's weight, of no role."""
    used = {name for chain in roles.chains for name in chain.linears}
    used |= {*roles.heads}
    modules = dict(model.named_modules())
    owned = [n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)]
    owned += [each.module for each in roles.experts]
    owned += low_rank_factors(modules)
    weights = [id(p) for m in modules.values() for p in m.parameters(recurse=False)]
    found = {}
    for name, module in modules.items():
        if (
            wanted(module)
            and name not in used
            and not any(each in owned for each in _above(name))
            and not is_declared(name, declared)
            and weights.count(id(module.weight)) == 1
        ):
            found[name] = module
    return found


def is_declared(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern of [roles] means a module, or one that holds it."""
    return any(fnmatchcase(each, pattern) for each in _above(name) for pattern in patterns)


def _above(name: str) -> list[str]:
    """A module, and those that hold it."""
    return [name[:i] for i in range(len(name)) if name[i] == "."] + [name]
