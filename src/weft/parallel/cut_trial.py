"""Runs a model as `tp` would cut it, on tensors without elements, before any process starts: what
does not run on its part of the heads or features is left whole."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from weft._torch.tensors import fake_mode
from weft.core import UnsupportedModel
from weft.nn import (
    Roles,
    chain_module,
    local_attributes,
    module_calls,
    numbers_read,
    set_attribute,
    unknown_forward,
)

from .axes import FEATURE_AXES
from .cut_copy import FAILS, cut_copy
from .plan_request import PlanRequest
from .undivided_chains import without_undivided
from .without_elements import without_elements


def runnable_roles(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without chains whose module does not run as it is cut, or which ranks do not divide
    beside others; a note says which, and why.

    Without a sample nothing is known: then the roles stay as they are. Raises UnsupportedModel if
    such a chain is declared in [roles], or is an attention's under `+sequence`.
    """
    size = request.layout.size(*FEATURE_AXES)
    if size == 1 or request.sample is None:
        return roles
    model, roles = request.model, without_undivided(request, roles, size)
    for chain in roles.chains:
        # another of its kind may have gone with those of its class
        if chain in roles.chains and (reason := unknown_forward(model, chain, size)):
            roles = _without(model, roles, chain_module(chain), reason, request)
    while roles.chains:
        found = _first_failure(request, roles, size)
        if found is None:
            break
        kind = type(model.get_submodule(found[0]))
        with_widths = _with_widths(model, roles, kind)
        again = _first_failure(request, with_widths, size) if with_widths != roles else found
        if again is None or type(model.get_submodule(again[0])) is not kind:
            roles = with_widths
        else:
            roles = _without(model, roles, *found, request)
    return roles


def _with_widths(model: nn.Module, roles: Roles, kind: type[nn.Module]) -> Roles:
    """The roles in which a rank has its part of every number of attention modules of a class that
    is as large as the row, and that their forward reads: a width by a name of its own."""
    chains = []
    for chain in roles.chains:
        name = chain_module(chain)
        module = model.get_submodule(name)
        if chain.heads and type(module) is kind:
            own = dict(chain.attributes.get(name, ()))
            width = sum(chain.cuts[chain.row].parts)
            own |= {key: value for key, value in numbers_read(module) if value == width}
            chain = replace(chain, attributes={**chain.attributes, name: tuple(own.items())})
        chains.append(chain)
    return replace(roles, chains=tuple(chains))


def _without(
    model: nn.Module, roles: Roles, module: str, reason: str, request: PlanRequest
) -> Roles:
    """The roles without the chains of modules of this one's class."""
    kind = type(model.get_submodule(module))
    gone = [c for c in roles.chains if type(model.get_submodule(chain_module(c))) is kind]
    linears = [name for chain in gone for name in chain.linears]
    if any(fnmatchcase(name, pattern) for pattern in request.roles or () for name in linears):
        problem = f"it fails on a rank's shard ({reason})"
        raise UnsupportedModel(
            f"roles.{module}", kind.__name__, problem, 'declare its linears "whole"'
        )
    if request.layout.has_option("sequence") and any(chain.heads for chain in gone):
        problem = f"{module} fails on a rank's shard of the heads ({reason}), and kept whole it"
        problem += " would see only a part of the positions"
        raise UnsupportedModel("layout", str(request.layout), problem, "use tp without sequence")
    note = f"{kind.__name__} does not run on its part ({reason}): left whole under tp"
    rest = tuple(chain for chain in roles.chains if chain not in gone)
    whole = (*roles.needs_whole, *map(chain_module, gone))
    return replace(roles, chains=rest, notes=(*roles.notes, note), needs_whole=whole)


def _first_failure(request: PlanRequest, roles: Roles, size: int) -> tuple[str, str] | None:
    """The innermost module with a chain in which a forward of the cut model fails, and why. None:
    it runs, or fails elsewhere."""
    mode = fake_mode()
    model = cut_copy(request.model, request.model, roles.chains, size, mode)
    for chain in roles.chains:
        for name, attributes in local_attributes(chain, size).items():
            for key, value in attributes:
                set_attribute(model.get_submodule(name), key, value)
    with_chain = {chain_module(chain) for chain in roles.chains}
    inside: list[str] = []
    try:
        with module_calls(model) as inside, without_elements(mode):
            model(**request.arguments())
    except FAILS as problem:
        within = [name for name in inside if name in with_chain]
        if within:
            return within[-1], (str(problem).splitlines() or [type(problem).__name__])[0]
    return None
