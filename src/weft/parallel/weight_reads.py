"""Weights that a forward reads elsewhere than in the module they belong to, as in
`F.linear(x, self.embedding.weight)`: there it would meet a rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from weft.core import ConfigError, Part, Step, UnsupportedModel, field_of_part, is_inside
from weft.nn import Chain, Roles, callable_blocks, chain_module

from .axes import FEATURE_AXES, VOCABULARY_AXES
from .forward_record import record_forward
from .plan_request import PlanRequest


def without_weights_read_elsewhere(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without modules whose weight something else reads; a note says which. Raises
    UnsupportedModel if such a module is declared in [roles]."""
    axes = dict.fromkeys((*FEATURE_AXES, *VOCABULARY_AXES))
    if request.sample is None or request.layout.size(*axes) == 1:
        return roles
    owned = {w for chain in roles.chains for w in _weights(chain)}
    owned |= {(f"{name}.weight", name) for name in (*roles.embeddings, *roles.heads)}
    owned |= {(f"{each.module}.weight", each.module) for each in roles.lone}
    owned |= {(f"{each.module}.bias", each.module) for each in roles.lone if each.by == "output"}
    read = _read_elsewhere(request, owned)
    if not read:
        return roles
    declared = [n for n in read if any(fnmatchcase(n, p) for p in request.roles or ())]
    for name in declared:
        problem = f"its weight is read by {read[name]}, which would see only a shard of it"
        raise UnsupportedModel(f"roles.{name}", "cut", problem, 'declare it "whole"')
    chains = tuple(c for c in roles.chains if not {owner for _, owner in _weights(c)} & read.keys())
    gone = [chain_module(c) for c in roles.chains if c not in chains]
    notes = [f"{name}: its weight is read by {read[name]}: left whole under tp" for name in read]
    notes += [f"{module}: left whole under tp with it" for module in dict.fromkeys(gone) if module]
    return replace(
        roles,
        chains=chains,
        embeddings=tuple(n for n in roles.embeddings if n not in read),
        heads=tuple(n for n in roles.heads if n not in read),
        lone=tuple(each for each in roles.lone if each.module not in read),
        notes=(*roles.notes, *notes),
        read_elsewhere=tuple(read),
    )


def _weights(chain: Chain) -> set[tuple[str, str]]:
    """Its weights, each with the module that is to read it."""
    if not chain.by_entry:
        biases = {(f"{name}.bias", name) for name in chain.columns}
        return {(f"{name}.weight", name) for name in chain.linears} | biases
    return {(name, chain.entry or "") for name in (f"{chain.row}.weight", *chain.parameters)}


def without_blocks_read_elsewhere(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without blocks of which a weight is read where they do not run, as by a forward
    that calls the modules in a block, and never the block: nobody would make its weights whole.
    And without those that an autograd function of the model calls: its backward may run them again,
    as a reversible network does, where no hook of theirs makes weights whole."""
    if request.sample is None or not roles.blocks:
        return roles
    blocks = callable_blocks(request.model, (b for each in roles.blocks for b in each))
    owned = [
        (f"{block}.{name}", block)
        for block in blocks
        for name, _ in request.model.get_submodule(block).named_parameters()
    ]
    read = _read_elsewhere(request, owned, again=True)
    if not read:
        return roles
    left = (
        tuple(b for b in callable_blocks(request.model, each) if b not in read)
        for each in roles.blocks
    )
    notes = [f"{name}: its weights are read by {read[name]}: no block" for name in read]
    return replace(roles, blocks=tuple(each for each in left if each), notes=(*roles.notes, *notes))


def check_unit_reads(request: PlanRequest, parts: Iterable[Part], steps: Iterable[Step]) -> None:
    """Refuse a part that is gathered by itself, of which something outside reads a weight.

    Raises:
        UnsupportedModel: It would meet a rank's rows.
    """
    together = [s for s in steps if s.gather is not None and s.gather.copies > 1]
    units = [m for s in together if s.gather is not None for m in (s.module, *s.gather.beside)]
    if request.sample is None or not units:
        return
    names = [name for name, _ in request.model.named_modules()]
    unit_of = {n: max((u for u in units if is_inside(n, u)), key=len, default=None) for n in names}
    inside = [(f"{n}.weight", n) for n, unit in unit_of.items() if unit is not None]
    read = _read_elsewhere(request, inside)
    for name, reader in read.items():
        if not is_inside(reader, str(unit_of[name])):
            weight = f"{name}.weight"
            part = next(part for part in parts if weight in part.weights)
            raise UnsupportedModel(
                field_of_part(part.pattern),
                str(part.placed),
                f"{weight} is read by {reader}, which would see only one rank's rows of it",
                f"leave +{part.placed.beside[0]} out",
            )


def check_named_units(request: PlanRequest, steps: Iterable[Step]) -> None:
    """Refuse a unit that `fsdp_units` names, of which a weight is read where the unit does not run.

    Raises:
        ConfigError: It would meet a rank's rows.
    """
    if request.sample is None or not isinstance(request.fsdp_units, tuple):
        return
    units = [s for s in steps if s.gather is not None and s.module]
    owned = [(p.name, s.module) for s in units for p in s.params]
    read = _read_elsewhere(request, owned, again=True)
    for unit, reader in read.items():
        problem = f"its weights are read by {reader}, which runs outside of it"
        fix = "leave it out, or name "
        fix += reader if is_inside(unit, reader) else "a module that holds both"
        raise ConfigError("layout.fsdp_units", unit, problem, fix)


def _read_elsewhere(
    request: PlanRequest, owned: Iterable[tuple[str, str]], again: bool = False
) -> dict[str, str]:
    """Those of the modules a weight of which is read by another -> which one. Nothing where the
    forward does not run without elements.

    Args:
        request: what is planned.
        owned: each weight with its module.
        again: an autograd function of the model reads all weights of what it calls.
    """
    record, found = record_forward(request), dict[str, str]()
    holders: dict[str, list[str]] = {}
    for weight, owner in owned:
        holders.setdefault(weight, []).append(owner)
    for read in record.reads if record is not None else ():
        owners = [owner for name in read.weight for owner in holders.get(name, ())]
        outside = read.inside[: read.outside] if again else read.inside
        if not owners or any(name in outside for name in owners):
            continue
        called = any(name in read.inside for name in owners)
        reader = read.function if called else read.inside[-1] if read.inside else ""
        by = reader or type(request.model).__name__
        found |= {name: by for name in owners if name not in found}
    return found
