"""Weight versions of an asynchronous pipeline (PipeDream, Harlap et al. 2018; 2BW, Narayanan et al.
2021).

A stage's weights change while microbatches are under way. Each microbatch computes its forward and
its backward with one version: `delays.versions_used` says which. A version is a copy of the stage's
parameters, kept until the last microbatch that uses it is through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    Action,
    Plan,
)
from weft.parallel import (
    TOKEN_AXES,
    Mesh,
)
from weft.pipeline import update_shares, versions_used

from ..compute_copies import ComputeCopies, rounded

Leaves = dict[str, nn.Parameter]


class WeightStash:
    """The versions of this rank's stages. `low`: what the optimizer changes, and what the
    model holds outside of microbatches; `update`: takes the optimizer's step."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        low: ComputeCopies,
        update: Callable[[], None],
    ):
        assert plan.staging is not None
        params = low.masters
        self._take_step, self._params, self._mesh = update, params, mesh
        self._plan, self._shown = plan, low.filled
        self._used = versions_used(plan.schedule)
        mine = plan.stages(mesh.rank)
        names = {w.name: (w.name, *w.aliases) for w in plan.weights}
        self._names = {s: [n for n in plan.staging.stages[s].weights if n in params] for s in mine}
        self._places = {
            name: [
                (model.get_submodule(full.rpartition(".")[0]), full.rpartition(".")[2])
                for full in names[name]
            ]
            for stage in mine
            for name in self._names[stage]
        }
        self._shared = update_shares(plan.schedule)
        table = plan.params()
        self._axes = {name: plan.reduced_over(name, table) for name in self._places}
        self._kept: dict[tuple[int, int], Leaves] = {}  # (stage, version) -> its copies
        self._left: Counter[tuple[int, int]] = Counter()  # uses that are still to come
        self._current: dict[int, int] = {}

    def begin(self) -> None:
        """A call of the schedule begins: the weights are version 0."""
        self._left = Counter(
            (stage, v) for (stage, _), v in self._used.items() if stage in self._names
        )
        self._current = dict.fromkeys(self._names, 0)
        self._kept.clear()
        for stage in self._names:
            self._keep(stage)

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """The model computes with the version of this microbatch."""
        leaves = self._kept[stage, self._used[stage, microbatch]]
        try:
            self._put(leaves)
            yield
        finally:
            self._put({name: self._shown[name] for name in leaves})

    def divisor(self, weight: Tensor, microbatch: int) -> Tensor:
        """What the loss sum of a microbatch is multiplied by: its own mean over all replicas, in
        the update's mean."""
        group = self._mesh.group(*TOKEN_AXES)
        weight = weight.clone()
        if group is not None:
            dist.all_reduce(weight, group=group)
        return 1.0 / (weight * self._shared[microbatch])

    def done(self, stage: int, microbatch: int) -> None:
        """The backward of a microbatch is complete: its gradient joins the next update's, its
        version may go."""
        key = stage, self._used[stage, microbatch]
        for name, leaf in self._kept[key].items():
            if leaf.grad is not None:
                p = self._params[name]
                grad = leaf.grad.detach().to(p.dtype)
                p.grad = grad if p.grad is None else p.grad + grad
                leaf.grad = None
        self._left[key] -= 1
        if self._left[key] == 0:
            del self._kept[key]

    def update(self, action: Action) -> None:
        """The optimizer step of one stage."""
        stage = action.stage
        mine = {
            self._params[name]: self._axes[name]
            for name in self._names[stage]
            if self._params[name].requires_grad
        }
        together: dict[tuple, list[nn.Parameter]] = {}
        for p, axes in mine.items():
            if self._mesh.group(*axes) is not None:
                together.setdefault((axes, p.dtype), []).append(p)
        for (axes, _), params in together.items():
            self._reduce(params, axes)
        others = {p: p.grad for p in self._params.values() if p not in mine}
        for p in others:
            p.grad = None
        self._take_step()
        for p in mine:
            p.grad = None
        for p, grad in others.items():
            p.grad = grad
        self._current[stage] += 1
        self._keep(stage)

    def _reduce(self, params: list[nn.Parameter], axes: tuple[str, ...]) -> None:
        """Sum their gradients, and leave none where no rank has one: an optimizer would act on
        zeros."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        have = torch.tensor(
            [p.grad is not None for p in params], dtype=grads[0].dtype, device=grads[0].device
        )
        flat = torch.cat([*(grad.flatten() for grad in grads), have])
        dist.all_reduce(flat, group=self._mesh.group(*axes))
        *sums, have = flat.split([*(p.numel() for p in params), len(params)])
        for p, total, count in zip(params, sums, have.tolist(), strict=True):
            p.grad = total.view(p.shape) if count else None

    def _keep(self, stage: int) -> None:
        key = stage, self._current[stage]
        if self._left[key]:
            self._kept[key] = {
                name: rounded(self._params[name], self._plan) for name in self._names[stage]
            }

    def _put(self, leaves: Leaves) -> None:
        for name, tensor in leaves.items():
            for module, leaf in self._places[name]:
                module._parameters[leaf] = tensor
