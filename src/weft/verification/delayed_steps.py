"""A step of an asynchronous pipeline on one device: the same delayed weights, one microbatch after
the other.

PipeDream (Harlap et al. 2018) by its definition: microbatch m's loss and gradient are computed with
the weight versions that the papers give for each stage (`plain.delayed_weights`), and every update
applies the mean gradient of its microbatches to the newest weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from weft.core import Plan
from weft.pipeline.schedules import builtin_schedules

from .activation_recorder import ActivationRecorder, record_activations
from .case import Batch
from .plain.delayed_weights import update_faults, update_of, version_of
from .plain.inputs import plain_arguments
from .plain_run import PlainRun, loss_of

Gradients = dict[str, Tensor]


def is_delayed(plan: Plan) -> bool:
    """Whether stages update their weights while microbatches are under way."""
    return bool(plan.schedule.versions)


class DelayedSteps:
    """Takes the place of a run's own `gradients` and `update`: a call of the schedule.

    Args:
        run: whose weights are trained, in float64.
        plan: of the pipeline.
        updates: gets the gradients of each update, before it is taken.
    """

    def __init__(
        self, run: PlainRun, plan: Plan, updates: Callable[[Gradients], None] = lambda found: None
    ):
        assert plan.staging is not None
        self._run, self._plan, self._updates = run, plan, updates
        self._stages = [
            [n for n in stage.weights if run.params[n].requires_grad]
            for stage in plan.staging.stages
        ]
        self._update_of = update_of(plan.schedule)

    @property
    def broken(self) -> list[str]:
        """What the schedule's table does otherwise than the papers; a user's own defines itself."""
        own = self._plan.schedule.name not in builtin_schedules()
        return [] if own else update_faults(self._plan.schedule)

    def __call__(
        self, step: int, batch: Batch, traces: list[ActivationRecorder] | None = None
    ) -> tuple[float, float]:
        """(mean loss, weight) of a step, after which all stages have the newest weights. `traces`:
        gets what modules compute of each microbatch."""
        run, plan = self._run, self._plan
        run.step_begins()
        versions = [[self._copies(names)] for names in self._stages]
        size, sums = plan.batch // plan.accumulate, torch.zeros(2, dtype=torch.float64)
        for m in range(plan.accumulate):
            weights = {
                name: p
                for stage, kept in enumerate(versions)
                for name, p in kept[version_of(plan.schedule, stage, m)].items()
            }
            samples = range(m * size, (m + 1) * size)
            micro = {key: value[samples.start : samples.stop] for key, value in batch.items()}
            sums += self._backward(step, samples, micro, weights, m, traces)
            for name, leaf in weights.items():
                if leaf.grad is not None:
                    p = run.params[name]
                    p.grad = leaf.grad if p.grad is None else p.grad + leaf.grad
                    leaf.grad = None
            if m == plan.accumulate - 1 or self._update_of[m + 1] > self._update_of[m]:
                self._update()
                for names, kept in zip(self._stages, versions, strict=True):
                    kept.append(self._copies(names))
        run.experts.move()
        return float(sums[0] / sums[1]), float(sums[1])

    def _backward(
        self,
        step: int,
        samples: Sequence[int],
        micro: Batch,
        weights: Gradients,
        number: int,
        traces: list[ActivationRecorder] | None,
    ) -> Tensor:
        """(loss, weight) of a microbatch of this `number`, whose gradients these weights have then,
        as a part of the mean of its update."""
        run, together = self._run, self._update_of.count(self._update_of[number])
        run.randomness.begin(step, list(samples))
        with run.case.mode(), ExitStack() as stack:
            trace = None
            if traces is not None:
                trace = stack.enter_context(record_activations(run.model, len(samples)))
                traces.append(trace)
            functions = stack.enter_context(run.functions(micro, trace).active())
            given = plain_arguments(run.inputs, micro)
            output = torch.func.functional_call(run.model, weights, (), given)
            part, count, _ = loss_of(run.case.loss, output, micro)
            minimised = sum(functions.added, part)
            (minimised * (1.0 / (torch.as_tensor(count).double() * together))).backward()
        return torch.stack([part.detach(), torch.as_tensor(count).double()])

    def _update(self) -> None:
        """All stages take the optimizer's step: in the end each has taken one for this update."""
        run = self._run
        self._updates({n: p.grad for n, p in run.params.items() if p.grad is not None})
        with run.case.mode():
            run.optimizer.step()
        run.optimizer.zero_grad()

    def _copies(self, names: Sequence[str]) -> Gradients:
        return {n: self._run.params[n].detach().clone().requires_grad_() for n in names}
