"""When FSDP2's units gather and reduce, for each action of a schedule.

One stage: autograd's own hooks do it, as FSDP2 means them to. In a pipeline a stage's forward is
left before the root module ends and its backward may come in two parts, so there the root unit
(what no block holds: embedding, norm, head) is gathered once a step and reduced at its end, and a
unit whose weight gradients come with W is reduced after W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft._torch.fsdp import end_backward, mark_idle, reduced_like
from weft.core import Action, FSDPUnit, Plan


@dataclass(frozen=True)
class ScheduledUnit:
    name: str
    module: FSDPModule
    gather: FSDPUnit
    stage: int | None  # None: the root of a pipeline's model
    learns: bool  # one of its parameters is trainable

    def reduced(self) -> Tensor | None:
        """A tensor like that of all its gradients, as FSDP2 reduces them; None: no parameters."""
        return reduced_like(self.module)


class FSDPUnits:
    """The units of one rank's part of a plan. `plan` is that part."""

    def __init__(self, model: nn.Module, plan: Plan):
        self.units = list(_units(model, plan))
        self._root = next((u.module for u in self.units if u.module is model), None)
        self._staged = plan.staging is not None
        if self._staged:
            self._prefetch_within_stages()
            self._keep()

    def __iter__(self) -> Iterator[ScheduledUnit]:
        return iter(self.units)

    def before(self, action: Action, last: bool, split: bool) -> None:
        """`last`: of this stage's actions that leave gradients of weights. `split`: B comes without
        these."""
        if not self.units:
            return
        if action.kind == "B":
            for unit in self._of(action.stage):
                self._flags(unit, last, (last or unit.gather.reduced == "microbatch") and not split)
        elif action.kind == "W":
            for unit in self._of(action.stage):
                # where a unit's input is the weights' alone, autograd tells FSDP2 of its end in the
                # midst of W
                unit.module.set_requires_gradient_sync(False, recurse=False)
                unit.module.set_reshard_after_backward(False, recurse=False)
                if unit.gather.gathered == "use" and unit.learns:
                    unit.module.unshard()

    def after(self, action: Action, last: bool) -> None:
        if action.kind == "W":
            due = [u for u in self._of(action.stage) if last or u.gather.reduced == "microbatch"]
            self._reduce(due, last)

    def finish(self) -> None:
        """All backwards of the step are done."""
        self._reduce([u for u in self.units if u.stage is None], True)
        self._keep()

    def reshard(self) -> None:
        """No backward follows a forward: let go of what it gathered. Weights may be loaded before
        the next one."""
        for unit in self.units:
            mark_idle(unit.module)  # a stage's forward is left before the root's ends
            unit.module.reshard()

    def _keep(self) -> None:
        """No backward of another stage is to reduce a unit, or to let go of one that is gathered
        once a step."""
        for unit in self.units if self._staged else ():
            if unit.gather.gathered == "step":
                unit.module.set_requires_gradient_sync(False, recurse=False)
                unit.module.set_reshard_after_backward(False, recurse=False)

    def _of(self, stage: int) -> list[ScheduledUnit]:
        return [unit for unit in self.units if unit.stage == stage]

    def _flags(self, unit: ScheduledUnit, last: bool, reduce: bool) -> None:
        unit.module.set_requires_gradient_sync(reduce, recurse=False)
        unit.module.set_requires_all_reduce(last, recurse=False)  # across replicas once a step
        unit.module.set_reshard_after_backward(
            last or unit.gather.gathered != "step", recurse=False
        )

    def _reduce(self, units: list[ScheduledUnit], last: bool) -> None:
        """Reduce outside of a backward, as FSDP2 does at its end."""
        if not units or self._root is None:
            return
        for unit in units:
            self._flags(unit, last, True)
            mark_idle(unit.module)  # its end is now
        end_backward(self._root)
        for unit in units:
            unit.module.set_requires_gradient_sync(False, recurse=False)

    def _prefetch_within_stages(self) -> None:
        """FSDP2 gathers ahead what ran before: that may be another stage's, whose turn is not
        next."""
        before: dict[int | None, FSDPModule] = {}
        for unit in self.units:
            unit.module.set_modules_to_backward_prefetch([before.get(unit.stage, unit.module)])
            before[unit.stage] = unit.module


def _units(model: nn.Module, plan: Plan) -> Iterator[ScheduledUnit]:
    trainable = {w.name for w in plan.weights if w.trainable}
    for step in plan.steps:
        module = model.get_submodule(step.module)
        if step.gather is not None and isinstance(module, FSDPModule):
            root = plan.staging is not None and not step.module
            stage = None if root else plan.users(step.params[0].name)[0] if step.params else 0
            yield ScheduledUnit(
                step.module,
                module,
                step.gather,
                stage,
                any(param.name in trainable for param in step.params),
            )
