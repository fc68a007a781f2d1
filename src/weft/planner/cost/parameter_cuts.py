"""What divides each parameter of a model, by the roles of its modules."""

from __future__ import annotations

from torch import nn

from weft.nn import Roles

from .model_work import Cut


def parameter_cuts(model: nn.Module, roles: Roles) -> dict[int, Cut]:
    """The id of each parameter -> what divides it."""
    modules = dict(model.named_modules())
    cuts: dict[int, Cut] = {id(p): "whole" for p in model.parameters()}
    for chain in roles.chains:
        divided = [
            f"{c}.{leaf}" for c in (*chain.columns, *chain.tables) for leaf in ("weight", "bias")
        ]
        for name in (*divided, *chain.parameters, f"{chain.row}.weight"):
            module, _, leaf = name.rpartition(".")
            if (p := modules[module]._parameters.get(leaf)) is not None:
                cuts[id(p)] = "features"
    for name in (*roles.embeddings, *roles.heads):
        cuts |= {id(p): "vocabulary" for p in modules[name].parameters(recurse=False)}
    for experts in roles.experts:
        cuts |= {id(p): "expert" for p in modules[experts.module].parameters()}
    return cuts
