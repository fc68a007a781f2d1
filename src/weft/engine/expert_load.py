"""Counts how many tokens each expert gets in training, and what its gate adds to the loss."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._torch.autograd import in_backward
from weft.nn import ExpertsRole, count_choices, routing_arguments
from weft.parallel import Mesh


class ExpertLoad:
    """Of the modules of a model that hold experts. Made before the model is cut: what is counted is
    what each rank's own tokens choose."""

    def __init__(self, model: nn.Module, experts: Iterable[ExpertsRole], mesh: Mesh):
        device, self._mesh = mesh.device, mesh
        self.active: dict[
            str, int
        ] = {}  # module -> how many experts a token goes to, where this rank has run it
        self.loss = torch.zeros(
            (), dtype=torch.float64, device=device
        )  # that gates have added, summed over tokens
        self._counts: dict[str, Tensor] = {}
        self._asked: Tensor | None = None
        self.inside = 0  # how many modules that hold experts run
        for each in experts:
            # choices that none took, then all choices of every expert
            self._counts[each.module] = torch.zeros(
                1 + each.count, dtype=torch.int64, device=device
            )
            module = model.get_submodule(each.module)
            module.register_forward_pre_hook(partial(self._enter, each), with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self._counts)

    def _enter(
        self, experts: ExpertsRole, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.inside += 1
        _, index, _ = routing_arguments(experts.names, args, kwargs)
        asked, self._asked = self._asked, None
        if module.training and torch.is_grad_enabled() and not in_backward():
            self.active[experts.module] = index.shape[-1]
            found = count_choices(index, experts.count)
            if asked is not None and len(asked) == len(found):
                found[1:] = asked[1:]
            self._counts[experts.module] += found

    def choose(self, index: Tensor, experts: int) -> None:
        """The choices, some of which find no room, of the module that runs next."""
        self._asked = count_choices(index, experts)

    def _leave(self, *_: Any) -> None:
        self.inside -= 1

    def add(self, loss: Tensor) -> None:
        """A gate adds this to the loss, summed over the tokens that are here."""
        self.loss += loss.detach()

    def take(self) -> tuple[dict[str, list[int]], float]:
        """(module -> choices that none took, then all of every expert; what gates have added),
        since the last call and over the ranks of this replica: all call it together. Ranks that
        have the same tokens are all counted."""
        every = torch.cat(
            [*self._counts.values(), self.loss.unsqueeze(0)]
        )  # float64, which counts exactly
        active = torch.tensor(
            [self.active.get(name, 0) for name in self._counts], device=every.device
        )
        live = self._mesh.layout.active_axes()
        if live:
            group = self._mesh.group(*live)
            dist.all_reduce(every, group=group)
            dist.all_reduce(active, dist.ReduceOp.MAX, group=group)
        self.active = dict(zip(self._counts, active.tolist(), strict=True))
        *counts, loss = every.split([*map(len, self._counts.values()), 1])
        for own in (*self._counts.values(), self.loss):
            own.zero_()
        return {
            name: row.long().tolist() for name, row in zip(self._counts, counts, strict=True)
        }, float(loss)
