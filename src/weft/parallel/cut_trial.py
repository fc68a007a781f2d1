"""Runs a model as `tp` would cut it, on tensors without elements, before any process starts: what
does not run on its part of the heads or features is left whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode, fake_mode, make_fake, quiet_fake_tensors
from weft.core import DimShard, UnsupportedModel
from weft.nn import (
    Chain,
    Roles,
    chain_module,
    local_attributes,
    model_arguments,
    module_calls,
    named_inputs,
    set_attribute,
    unknown_forward,
)
from weft.pipeline import copy_with_tensors, is_parameter

from .axes import FEATURE_AXES
from .plan_request import PlanRequest

_FAILS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)


def runnable_roles(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without chains whose module does not run as it is cut; a note says which, and why.

    Without a sample nothing is known: then the roles stay as they are. Raises UnsupportedModel if
    such a chain is declared in [roles], or is an attention's under `+sequence`.
    """
    size = request.layout.size(*FEATURE_AXES)
    if size == 1 or request.sample is None:
        return roles
    model = request.model
    for chain in roles.chains:
        # another of its kind may have gone with those of its class
        if chain in roles.chains and (reason := unknown_forward(model, chain, size)):
            roles = _without(model, roles, chain_module(chain), reason, request)
    while roles.chains:
        found = _first_failure(request, roles, size)
        if found is None:
            break
        roles = _without(model, roles, *found, request)
    return roles


def _without(
    model: nn.Module, roles: Roles, module: str, reason: str, request: PlanRequest
) -> Roles:
    """The roles without the chains of modules of this one's class."""
    kind = type(model.get_submodule(module))
    gone = [c for c in roles.chains if type(model.get_submodule(chain_module(c))) is kind]
    linears = [name for chain in gone for name in (*chain.columns, chain.row)]
    if any(fnmatchcase(name, pattern) for pattern in request.roles or () for name in linears):
        problem = f"it does not run on its part ({reason})"
        raise UnsupportedModel(
            f"roles.{module}", kind.__name__, problem, 'declare its linears "whole"'
        )
    if request.layout.has_option("sequence") and any(chain.heads for chain in gone):
        problem = f"{module} does not run on its part of the heads ({reason}), and whole it would"
        problem += " have a part of the positions"
        raise UnsupportedModel("layout", str(request.layout), problem, "use tp without sequence")
    note = f"{kind.__name__} does not run on its part ({reason}): left whole under tp"
    rest = tuple(chain for chain in roles.chains if chain not in gone)
    return replace(roles, chains=rest, notes=(*roles.notes, note))


def _first_failure(request: PlanRequest, roles: Roles, size: int) -> tuple[str, str] | None:
    """The innermost module with a chain in which a forward of the cut model fails, and why. None:
    it runs, or fails elsewhere."""
    names = request.inputs if request.inputs is not None else named_inputs(request.model)
    mode = fake_mode()
    model = _cut_copy(request.model, roles, size, mode)
    with_chain = {chain_module(chain) for chain in roles.chains}
    inside: list[str] = []
    arguments = model_arguments(names, dict(request.sample or {}))
    try:
        with (
            module_calls(model) as inside,
            torch.random.fork_rng([]),
            quiet_fake_tensors(),
            mode,
            torch.no_grad(),
        ):
            model(**arguments)
    except _FAILS as problem:
        within = [name for name in inside if name in with_chain]
        if within:
            return within[-1], (str(problem).splitlines() or [type(problem).__name__])[0]
    return None


def _cut_copy(model: nn.Module, roles: Roles, size: int, mode: FakeTensorMode) -> nn.Module:
    """What the first rank of `tp` computes with, without elements."""
    cuts: dict[int, DimShard] = {}
    for chain in roles.chains:
        cuts |= _cuts(model, chain)
    cpu = torch.device("cpu")

    def local(t: Tensor) -> Tensor:
        if not (t.is_meta or is_parameter(t)):
            return t.clone()
        shape = list(t.shape)
        if (cut := cuts.get(id(t))) is not None:
            shape[cut.dim] = sum(stop - start for start, stop in cut.intervals(0, size))
        bare = torch.empty(shape, dtype=t.dtype, device="meta")
        return make_fake(mode, nn.Parameter(bare, False) if is_parameter(t) else bare, cpu)

    copied = copy_with_tensors(model, local)
    for chain in roles.chains:
        for name, attributes in local_attributes(chain, size).items():
            for key, value in attributes:
                set_attribute(copied.get_submodule(name), key, value)
    return copied


def _cuts(model: nn.Module, chain: Chain) -> Mapping[int, DimShard]:
    """id of a parameter -> how the chain divides it."""
    named = {name: model.get_parameter(name) for name in chain.parameters}
    found = {id(p): chain.parameters[name] for name, p in named.items()}
    for linear, cut in chain.cuts.items():
        module = model.get_submodule(linear)
        found[id(module.weight)] = cut
        if linear != chain.row and getattr(module, "bias", None) is not None:
            found[id(module.bias)] = DimShard(0, cut.parts, cut.units)
    return found
