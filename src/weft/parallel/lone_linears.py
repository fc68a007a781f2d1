"""Linears and convolutions that are divided each by itself, where a model has no chain, vocabulary
or experts to divide: each rank makes a part of the output features, and all gather them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from weft.nn import (
    LoneLinear,
    Roles,
    chosen_modules,
    is_conv1d,
    is_plain_linear,
    linear_features,
)

from .axes import FEATURE_AXES
from .forward_record import record_forward
from .free_modules import free_modules
from .plan_request import PlanRequest
from .weight_reads import without_weights_read_elsewhere

NO_SAMPLE = "weft.plan got no `sample`, with which it follows the forward"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def with_lone_linears(request: PlanRequest, roles: Roles) -> Roles:
    """The roles, with `lone` where they have nothing else that the ranks of tp could divide. None
    where the elements of the data decide which modules run: how often ranks gather would depend on
    them; and none without a sample, in whose forward there might be a chain. A forward that does
    not run to its end without elements may have only shapes that follow from them, as `x[mask]`
    has: its source tells."""
    size = request.layout.size(*FEATURE_AXES)
    others = (*roles.chains, *roles.embeddings, *roles.heads, *roles.uneven)
    if size == 1 or others or any(each.cuts for each in roles.experts):
        return roles
    record = record_forward(request)
    if record is None:
        return replace(roles, notes=(*roles.notes, NO_SAMPLE))
    if not record.ended and chosen_modules(request.model):
        return roles
    found = free_modules(request.model, roles, request.roles or {}, _is_plain)
    # a model that is one layer by itself has no name to shard it by
    lone = (_lone(name, module, size) for name, module in found.items() if name)
    return without_weights_read_elsewhere(
        request, replace(roles, lone=tuple(each for each in lone if each is not None))
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether a module computes what torch's own linear or convolution does, of all features."""
    if type(module).forward in [kind.forward for kind in _CONVOLUTIONS]:
        return module.groups == 1 and "weight" in module._parameters
    return is_plain_linear(module)


def _lone(name: str, module: nn.Module, size: int) -> LoneLinear | None:
    """None: so many ranks divide neither its outputs nor its inputs."""
    return next((each for each in _ways(name, module) if each.features % size == 0), None)


def _ways(name: str, module: nn.Module) -> Iterator[LoneLinear]:
    if isinstance(module, _CONVOLUTIONS):
        dim = 1 if isinstance(module, _TRANSPOSED) else 0
        yield LoneLinear(name, "output", module.out_channels, dim, -1 - len(module.kernel_size))
    else:
        reads, makes = linear_features(module)
        dim = 1 if is_conv1d(module) else 0
        yield LoneLinear(name, "output", makes, dim)
        yield LoneLinear(name, "input", reads, 1 - dim)
