"""An optimizer with the groups that a run file asks for, read from its patterns alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.engine import AdamW8bit, Lion, MuonWithAdamW, OptimizerFactory, Optimizers

from .given_options import option_faults
from .names import matches
from .optimizers import PLAIN, AnyOptimizer

Named = tuple[str, nn.Parameter]


def plain_optimizer(make: Optimizers, named: Sequence[Named]) -> AnyOptimizer:
    """What `make` is to make of parameters on one device.

    Args:
        make: a function of named parameters. Of one that weft made from a table [optimizer], what
            was asked for is read, and its groups are made here; an optimizer of weft's own has
            the definition of `optimizers`.
        named: the parameters that are trained.
    """
    if isinstance(make, partial) and make.func in PLAIN:
        return PLAIN[make.func](list(named), *make.args, **make.keywords)
    if not isinstance(make, OptimizerFactory):
        return make(list(named))
    kind = PLAIN.get(make.kind, make.kind)
    groups: list[dict[str, Any]] = []
    for name, weight in named:
        own = asked_for(make, name, len(weight.shape))
        alike = (g for g in groups if {k: v for k, v in g.items() if k != "params"} == own)
        group = next(alike, None)
        if group is None:
            groups.append(group := {"params": [], **own})
        group["params"].append((name, weight))
    if len(groups) == 1 and groups[0].keys() == {"params"}:
        return kind(groups[0]["params"], **make.arguments)
    return kind(groups, **make.arguments)


def asked_for(make: OptimizerFactory, name: str, dims: int) -> dict[str, Any]:
    """What a table says of one parameter, beyond what it says of all."""
    own: dict[str, Any] = {}
    if dims < make.decay_min_dims:
        own["weight_decay"] = 0.0
    for pattern in make.no_decay:
        if matches(pattern, name):
            own["weight_decay"] = 0.0
    for pattern, settings in make.groups.items():
        if matches(pattern, name):
            own.update(settings)  # also over what spares it of weight decay
            break
    return own


def factory_faults(made: OptimizerFactory, name: str | None, asked: Mapping[str, Any]) -> list[str]:
    """What an optimizer does not have that a table [optimizer] asks for.

    Args:
        made: what weft made of the table.
        name: of one of torch's or weft's own; None: the user's.
        asked: all other keys.
    """
    found = option_faults("[optimizer]", made, asked)
    kinds = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_one(kind)}
    kinds |= {"lion": Lion, "adamw8bit": AdamW8bit, "muon": MuonWithAdamW}
    if name is not None and made.kind is not kinds.get(name):
        found.append(f"[optimizer] name: {made.kind.__name__}, where {name} is asked for")
    return found


def _is_one(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def leave_frozen(model: nn.Module, patterns: Sequence[str]) -> None:
    """What [model] freeze names has no gradient, whoever built the model."""
    for name, weight in model.named_parameters():
        if any(matches(pattern, name) for pattern in patterns):
            weight.requires_grad = False
