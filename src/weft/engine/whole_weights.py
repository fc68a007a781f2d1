"""The whole weights of a model of which each rank holds a part: what the trials before the first
step compute with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import COPY, LocalShard, Plan
from weft.parallel import Mesh


class WholeWeights:
    """Gathers one weight at a time. All ranks call it together, unless each holds all of it.

    Args:
        plan: what the model is sharded by.
        mesh: where this rank computes.
        shards: this rank's part of each weight.
    """

    def __init__(self, plan: Plan, mesh: Mesh, shards: Iterable[LocalShard]):
        self._weights = {weight.name: weight for weight in plan.weights}
        self._held = {shard.name: shard for shard in shards}
        self._group, self._device = mesh.group(*mesh.layout.active_axes()), mesh.device
        copied = {
            name
            for name, axes in plan.params().items()
            if all(param.stored == COPY for param in axes.values())
        }
        self._copied = copied if plan.staging is None else set[str]()

    @property
    def local(self) -> bool:
        """Whether each rank holds all of all weights."""
        return len(self._copied) == len(self._weights)

    def __call__(self, name: str) -> Tensor:
        """The weight of this name, in a tensor of its own."""
        weight, shard = self._weights[name], self._held.get(name)
        if shard is not None and name in self._copied:
            return shard.tensor.to(self._device, copy=True)
        tensor = torch.zeros(weight.shape, dtype=weight.dtype, device=self._device)
        if shard is not None and shard.writer:
            for local, position in shard.chunks:
                tensor[position] = shard.tensor[local].to(self._device)
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor
