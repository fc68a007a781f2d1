"""What a checkpoint holds of the modules that live in one process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import (
    LocalShard,
    OutlierFilter,
    Segment,
    WorkerPlacement,
    cut_segments,
    whole_shard,
)

from ..optimizers import make_state

CPU = torch.device("cpu")


class RemoteState:
    """Reads and restores the weights, buffers and optimizer state of what lives here."""

    model: nn.Module
    places: WorkerPlacement
    here: str
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    norm_filter: OutlierFilter
    loss_scale: float
    steps_done: int
    _absent_buffers: set[str]

    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]:
        """Weights, buffers and optimizer state of what lives here, by global name. Storage is live.

        `saved`: the names that a checkpoint holds, to be loaded from it: optimizer state is made
        for these alone.
        """
        for name, p in self.params.items():
            yield whole_shard(name, p.detach())
        kept = self.model.state_dict(keep_vars=True).keys()
        for name, buffer in self.model.named_buffers():
            if name in kept and name not in self._absent_buffers:
                yield whole_shard(name, buffer)
        if saved is not None:
            make_state(self.optimizer, self.params, saved)
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield whole_shard(f"optimizer/{name}/{key}", value)

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        found = {"steps_done": self.steps_done, "loss_scale": self.loss_scale, "good_steps": 0}
        return found | {"norms": [*self.norm_filter.recent]}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        self.steps_done = int(scalars["steps_done"])
        self.norm_filter.restore(scalars.get("norms", ()))

    def segments(self, name: str) -> list[list[Segment]]:
        """Per dim of a parameter that lives here: all of it."""
        return [cut_segments([(0, n)]) for n in self.params[name].shape]

    def updates(self, name: str) -> bool:
        """What lives here is updated here."""
        return True

    def holds(self, name: str) -> bool:
        """Whether a parameter lives here."""
        return self.places.of(name) == self.here

    def connect(self) -> None:
        """Nothing is to be done before the first step."""

    def gather(self, last: bool = False) -> bool:
        """What is to be saved is here."""
        return True
