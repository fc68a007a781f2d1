"""From summed gradients to new weights: global norm, mean, loss scale, clipping, the
optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    STAGE_AXIS,
    OutlierFilter,
    Plan,
)
from weft.parallel import (
    DATA_AXES,
    TOKEN_AXES,
    Mesh,
)

from .chosen_gradients import ChosenGradients
from .compute_copies import ComputeCopies
from .grad_buckets import GradReducer, local_tensor
from .module_trail import ModuleTrail, diverged_error, zero_if_equal
from .optimizers import scale_grads
from .param_update import ParamUpdate
from .pipeline.stage_compute import TrainingCompute
from .protocol import StepResult
from .replica_sync.replicas import ReplicaSync

GROWS_AFTER = 2000  # good steps, after which the loss scale doubles


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018); constant 1 outside fp16."""

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.dynamic:
            self.value = 2.0**16

    def take(self, finite: bool) -> bool:
        """Adjust the scale; whether the step may be taken."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0
        return finite


@dataclass
class GradUpdate:
    """The end of an optimizer step on one rank.

    `copies`: how many ranks hold each element of a parameter, which the global norm counts once.
    `updates`: whether this rank updates a parameter, and does not get it from another replica.
    """

    plan: Plan
    mesh: Mesh
    low: ComputeCopies  # of this rank's parameters
    update: ParamUpdate
    training: TrainingCompute
    reducer: GradReducer
    trail: ModuleTrail
    chosen: ChosenGradients | None  # of FSDP2's units, which gather and reduce; None: it has none
    replicas: ReplicaSync
    copies: Mapping[str, int]
    updates: Callable[[str], bool]
    owned: bool  # owners alone update, and send weights back
    clip: float | None
    norm_filter: OutlierFilter
    loss_scale: LossScale = field(init=False)
    _own: dict[str, nn.Parameter] = field(init=False)  # this rank updates them
    _others: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.loss_scale = LossScale(self.plan.precision == "fp16")
        self._own = {name: p for name, p in self.params.items() if self.updates(name)}
        self._others = [p for name, p in self.params.items() if name not in self._own]

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates."""
        return self.low.masters

    @property
    def wants_norm(self) -> bool:
        return (
            self.clip is not None or self.norm_filter.limit is not None or self.loss_scale.dynamic
        )

    @property
    def known_late(self) -> bool:
        """Whether what ranks agree upon is complete only after all backwards."""
        return bool(self.wants_norm or self.reducer.buckets or self.training.state.watches)

    def __call__(self, missing: list, step: int) -> StepResult:
        """Take the step. `missing`: parameters that no gradient reached on this rank."""
        self.low.hand_over()
        total, grads = self.training.total, self.gradients()
        if self.wants_norm and grads:
            self._add_squares(total, grads)
        self._sum_over_ranks(total, missing, step)
        if total[3] > 0 or self.plan.chosen:
            self.reducer.drop_unused(missing, self.mesh)
            if self.chosen is not None:
                self.chosen.drop_unused()
            self.low.hand_over()
            grads = self.gradients()
        if total[4] != 0:
            raise diverged_error(self.plan.layout, step)
        if total[5] != 0:
            raise self.training.state.error()
        loss_sum, weight = total[1], total[2]
        factor = self.plan.batch / (weight * self.loss_scale.value)
        if self.reducer.exchange is not None:
            self.reducer.exchange.scale = factor
        norm = total[0].sqrt() * factor if self.wants_norm else None
        result = StepResult(loss_sum / weight, weight, norm)
        if self.training.versions is not None:
            return result  # every stage has taken its steps
        finite = not self.loss_scale.dynamic or self.loss_scale.take(bool(torch.isfinite(total[0])))
        if not finite or self._is_outlier(norm):
            return StepResult(result.loss, weight, norm, skipped=True)
        if self.clip is not None and norm is not None:
            factor = factor * torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        scale_grads(grads.values(), factor)
        self._apply()
        return result

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that this rank has the sum of."""
        found = {name: p.grad for name, p in self._own.items() if p.grad is not None}
        if self.chosen is not None:
            return {name: local_tensor(grad) for name, grad in found.items()}
        return found

    def _add_squares(self, total: Tensor, grads: Mapping[str, Tensor]) -> None:
        low = {torch.bfloat16, torch.float16} & {grad.dtype for grad in grads.values()}
        norms = torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32 if low else None)
        by_copies: dict[int, list[Tensor]] = {}
        for name, norm in zip(grads, norms, strict=True):
            by_copies.setdefault(self.copies[name], []).append(norm)
        for copies, some in by_copies.items():
            squares = torch.stack(some).double().square().sum()
            total[0] += squares.to(total.device) / copies

    def _sum_over_ranks(self, total: Tensor, missing: list, step: int) -> None:
        """Squared norm, loss, weight, missing gradients, the modules that ran and what they
        changed: one all-reduce."""
        plan, state = self.plan, self.training.state
        changed = state.digest()
        if plan.staging is not None and self.chosen is not None:
            error = diverged_error(plan.layout, step)
            self.trail.check_over(self.mesh, DATA_AXES, plan.data_size, error)
        if self.training.agreed is not None:
            self.training.agreed.wait()
        else:
            trail = self.trail.hash if plan.staging is None else 0
            alike = [
                zero_if_equal(trail, self.mesh.rank, plan.layout.world),
                zero_if_equal(changed, state.index, state.size),
            ]
            total[3:] = torch.tensor([len(missing), *alike], dtype=torch.float64)
            if plan.layout.world > 1:
                dist.all_reduce(total, group=self.mesh.group(*plan.layout.active_axes()))
        total[1:3] /= plan.layout.world // plan.layout.size(*TOKEN_AXES, STAGE_AXIS)

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint holds of this beside tensors."""
        scale = self.loss_scale
        found = {"loss_scale": scale.value, "good_steps": scale.good_steps}
        exchange = self.reducer.exchange
        if exchange is not None and exchange.scale is not None:
            found["exchange_scale"] = float(exchange.scale)
        return found | {"norms": [*self.norm_filter.recent]}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Go on from what `scalars` returned."""
        scale = self.loss_scale
        scale.value, scale.good_steps = float(scalars["loss_scale"]), int(scalars["good_steps"])
        self.norm_filter.restore(scalars.get("norms", ()))
        if self.reducer.exchange is not None:
            kept = scalars.get("exchange_scale")
            as_kept = None if kept is None else torch.tensor(kept, dtype=torch.float64)
            self.reducer.exchange.scale = as_kept

    def _is_outlier(self, norm: Tensor | None) -> bool:
        return norm is not None and self.norm_filter.reject(float(norm)) is not None

    def _apply(self) -> None:
        for p in self._others:
            p.grad = None
        if self.replicas.servers_update:
            groups = self.update.optimizer.param_groups
            rates = [(float(group["lr"]), {id(p) for p in group["params"]}) for group in groups]
            rate_of = {
                name: next((lr for lr, ids in rates if id(p) in ids), 0.0)
                for name, p in self.update.held.items()
            }
            self.replicas.push(self.gradients(), rate_of)
            return
        self.update.step()
        if self.owned:
            self.reducer.spread(self.params)
