"""When FSDP2's units gather and reduce, for each action of a schedule, and how far ahead.

One stage: autograd's own hooks do it, as FSDP2 means them to. In a pipeline a stage's forward is
left before the root module ends and its backward may come in two parts, so there the root unit
(what no block holds: embedding, norm, head) is gathered once a step and reduced at its end, and a
unit whose weight gradients come with W is reduced after W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from weft._torch.fsdp import (
    ForwardGradients,
    end_backward,
    forget_forwards,
    forget_gathered_ahead,
    mark_idle,
    reduced_like,
)
from weft.core import Action, FSDPUnit, Plan


@dataclass(frozen=True)
class ScheduledUnit:
    name: str
    module: FSDPModule
    gather: FSDPUnit
    stage: int | None  # None: the root of a pipeline's model
    trained: tuple[str, ...]  # its parameters that are trainable

    def reduced(self) -> Tensor | None:
        """A tensor like that of all its gradients, as FSDP2 reduces them; None: no parameters."""
        return reduced_like(self.module)


class FSDPUnits:
    """The units of one rank's part of a plan. `plan` is that part."""

    def __init__(self, model: nn.Module, plan: Plan):
        self.units = list(_units(model, plan))
        self._root = next((u.module for u in self.units if u.module is model), None)
        self._staged = plan.staging is not None
        self._in_forward = ForwardGradients(u.module for u in self.units)
        self._depth, self._order = plan.fsdp_prefetch, _UnitOrder(self.units)
        self._to_learn: set[int | None] = set()  # stages whose order of units is not known
        if self._depth is not None:
            self._to_learn = {unit.stage for unit in self.units if unit.stage is not None}
            self._order.watch()
        if self._staged:
            self._prefetch_within_stages()
            self._keep()

    def __iter__(self) -> Iterator[ScheduledUnit]:
        return iter(self.units)

    @property
    def names(self) -> list[str]:
        """The modules that are gathered when they are called."""
        return [name for unit in self.units for name in (unit.name, *unit.gather.beside)]

    def before_forward(self) -> None:
        self._in_forward.in_forward = True

    def before(self, action: Action, last: bool, split: bool) -> None:
        """Before B or W. `last`: of this stage's actions that leave gradients of weights. `split`:
        B comes without these."""
        if not self.units:
            return
        self._in_forward.in_forward = False
        if action.kind == "B":
            self._prefetch_ahead(action.stage)
            for unit in self._of(action.stage):
                self._flags(unit, last, (last or unit.gather.reduced == "microbatch") and not split)
        elif action.kind == "W":
            for unit in self._of(action.stage):
                # where a unit's input is the weights' alone, autograd tells FSDP2 of its end in the
                # midst of W
                unit.module.set_requires_gradient_sync(False, recurse=False)
                unit.module.set_reshard_after_backward(False, recurse=False)
                if unit.gather.gathered == "use" and unit.trained:
                    unit.module.unshard()

    def after(self, action: Action, last: bool) -> None:
        if not self._staged and self._in_forward.release():
            end_backward(self.units[0].module)
        if action.kind == "W":
            due = [u for u in self._of(action.stage) if last or u.gather.reduced == "microbatch"]
            self._reduce(due, last)

    def finish(self) -> None:
        """All backwards of the step are done."""
        kept = self._in_forward.release()
        self._reduce([u for u in self.units if kept or u.stage is None], True)
        self._keep()

    def reshard(self) -> None:
        """No backward follows a forward: let go of what it gathered. Weights may be loaded before
        the next one."""
        kept = self._in_forward.release()
        for unit in self.units:
            mark_idle(unit.module)  # a stage's forward is left before the root's ends
            unit.module.reshard()
            if kept:
                forget_gathered_ahead(unit.module)

    def forget_forwards(self) -> None:
        """No backward follows the forwards so far, before others that one follows."""
        self._in_forward.release()
        for unit in self.units:
            forget_forwards(unit.module)

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

    def _prefetch_ahead(self, stage: int) -> None:
        """Before the first backward of a stage: its forward has shown in which order units run."""
        if self._depth is None or stage not in self._to_learn:
            return
        self._to_learn.discard(stage)
        for each, ahead in _ahead(self._order.forward(stage), self._depth):
            each.module.set_modules_to_forward_prefetch(ahead)
        for each, ahead in _ahead(self._order.backward(stage), self._depth):
            # none would mean FSDP2's own choice, which may be another stage's
            each.module.set_modules_to_backward_prefetch(ahead or [each.module])
        if not self._to_learn:
            self._order.forget()

    def _prefetch_within_stages(self) -> None:
        """FSDP2 gathers ahead what ran before: that may be another stage's, whose turn is not
        next."""
        before: dict[int | None, FSDPModule] = {}
        for unit in self.units:
            unit.module.set_modules_to_backward_prefetch([before.get(unit.stage, unit.module)])
            before[unit.stage] = unit.module


class _UnitOrder:
    """In which order units run. A model may call its blocks in another order than it holds them
    in, and one more than once."""

    def __init__(self, units: Sequence[ScheduledUnit]):
        self._units = units
        self._began: list[ScheduledUnit] = []
        self._ended: list[ScheduledUnit] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        for unit in self._units:

            def begin(*_: object, unit: ScheduledUnit = unit) -> None:
                self._began.append(unit)

            def end(*_: object, unit: ScheduledUnit = unit) -> None:
                self._ended.append(unit)

            self._hooks.append(unit.module.register_forward_pre_hook(begin))
            self._hooks.append(unit.module.register_forward_hook(end))

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._began.clear()
        self._ended.clear()

    def forward(self, stage: int) -> list[ScheduledUnit]:
        """Units of a stage as their first calls begin."""
        return list({unit.name: unit for unit in self._began if unit.stage == stage}.values())

    def backward(self, stage: int) -> list[ScheduledUnit]:
        """Units of a stage as backward comes to them: what ended last, first; a unit that holds
        others before these."""
        ended = reversed(self._ended)
        return list({unit.name: unit for unit in ended if unit.stage == stage}.values())


def _ahead(
    order: Sequence[ScheduledUnit], depth: int
) -> Iterator[tuple[ScheduledUnit, list[FSDPModule]]]:
    for place, unit in enumerate(order, 1):
        yield unit, [other.module for other in order[place : place + depth]]


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
                tuple(param.name for param in step.params if param.name in trainable),
            )
