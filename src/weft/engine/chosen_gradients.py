"""Gradients of weights that no sample of a rank may use, as those of experts, where FSDP2 shards
them: the rank reduces zeros in their place, and an all-reduce finds those that no rank used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from weft._torch.fsdp import reduce_unused
from weft.core import Plan
from weft.parallel import TOKEN_AXES, Mesh, chosen_weights

from .fsdp_units import FSDPUnits


class ChosenGradients:
    """Of the units that hold a weight whose module runs only where data say so.

    Args:
        model: the sharded model.
        plan: this rank's part of a plan.
        params: its parameters, by name.
        units: what FSDP2 gathers and reduces.
        mesh: the process groups.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        params: Mapping[str, nn.Parameter],
        units: FSDPUnits,
        mesh: Mesh,
    ):
        self._names, self._params, self._mesh = chosen_weights(plan), params, mesh
        self._reached: set[str] = set()
        mine = set(self._names)
        for unit in units if mine else ():
            step = next(s for s in plan.steps if s.gather is not None and s.module == unit.name)
            if any(param.name in mine for param in step.params):
                reduce_unused(unit.module, model, self._reached.add)

    def clear(self) -> None:
        """A step begins."""
        self._reached.clear()

    def drop_unused(self) -> None:
        """Leave no gradient where no rank's backward reached a weight, as on one device. All ranks
        call it."""
        if not self._names:
            return
        used = torch.tensor(
            [name in self._reached for name in self._names],
            dtype=torch.int32,
            device=self._mesh.device,
        )
        group = self._mesh.group(*TOKEN_AXES)
        if group is not None:
            dist.all_reduce(used, group=group)
        for name, count in zip(self._names, used.tolist(), strict=True):
            if count == 0:
                self._params[name].grad = None
