"""What divides each parameter of a model, by the roles of its modules and the parts it lies in."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from weft.core import Part
from weft.nn import OF_OUTPUTS, Roles
from weft.parallel import STATE_AXES

from .model_work import Cut


def parameter_cuts(model: nn.Module, roles: Roles) -> dict[int, Cut]:
    """The id of each parameter -> what divides it."""
    modules = dict(model.named_modules())
    cuts: dict[int, Cut] = {id(p): "whole" for p in model.parameters()}
    for chain in roles.chains:
        made = (*chain.columns, *chain.tables)
        divided = [f"{name}.{leaf}" for name in made for leaf in ("weight", *OF_OUTPUTS)]
        divided += [f"{row}.weight" for row in chain.rows]
        for name in (*divided, *chain.parameters):
            module, _, leaf = name.rpartition(".")
            if (p := modules[module]._parameters.get(leaf)) is not None:
                cuts[id(p)] = "features"
    for name in (*roles.embeddings, *roles.heads):
        cuts |= {id(p): "vocabulary" for p in modules[name].parameters(recurse=False)}
    for experts in roles.experts:
        cuts |= {id(p): "expert" for p in modules[experts.module].parameters()}
    return cuts


def part_storage(model: nn.Module, parts: Iterable[Part]) -> dict[int, tuple[str, ...]]:
    """The id of each parameter of a part that is not sharded as others are -> the axes over which
    its rows are stored."""
    found: dict[int, tuple[str, ...]] = {}
    for part in parts:
        sharded = [axis for axis in part.placed.axes if axis in STATE_AXES]
        axes = (*sharded, *part.placed.beside)
        if not sharded or part.placed.beside:
            found |= {id(model.get_parameter(name)): axes for name in part.weights}
    return found
