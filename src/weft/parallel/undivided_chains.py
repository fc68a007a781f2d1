"""Chains that were guessed, and whose features or heads `tp` does not divide, beside others that it
divides."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from weft.core import is_inside
from weft.nn import Chain, Roles, chain_module

from .plan_request import PlanRequest


def without_undivided(request: PlanRequest, roles: Roles, size: int) -> Roles:
    """The roles without such chains, which are left whole; a note says which. Those that stand in
    every repeated block stay, to be refused: they are most of the model, and other numbers of ranks
    divide them."""
    fit = [chain for chain in roles.chains if is_divided(chain, size)]
    kinds = {_kind(request.model, chain) for chain in fit}
    blocks = [block for stack in roles.stacks() for block in stack]
    gone = [
        chain
        for chain in roles.chains
        if fit
        and chain not in fit
        and not _is_declared(request, chain)
        and (
            _kind(request.model, chain) in kinds
            or not any(is_inside(chain.row, block) for block in blocks)
        )
    ]
    if not gone:
        return roles
    notes = (
        f"{chain.row} takes {chain.heads or chain.cuts[chain.row].parts[0]} features or heads,"
        f" which tp{size} does not divide: left whole under tp"
        for chain in gone
    )
    rest = tuple(chain for chain in roles.chains if chain not in gone)
    return replace(roles, chains=rest, notes=(*roles.notes, *notes))


def is_divided(chain: Chain, size: int) -> bool:
    """Whether so many ranks divide its heads, or its features."""
    if not chain.heads:
        return chain.cuts[chain.row].parts[0] % size == 0
    shared = chain.kv_heads % size == 0 or size % chain.kv_heads == 0
    return chain.heads % size == 0 and shared


def _kind(model: nn.Module, chain: Chain) -> tuple[type[nn.Module], bool]:
    return type(model.get_submodule(chain_module(chain))), bool(chain.heads)


def _is_declared(request: PlanRequest, chain: Chain) -> bool:
    patterns = [*(request.roles or ())]
    return any(fnmatchcase(name, pattern) for name in chain.linears for pattern in patterns)
