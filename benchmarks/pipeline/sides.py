"""One optimizer step of a pipeline, by torch's runtime and by weft's, both in the order of the same
Schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

import weft
from weft.core.schedule import Action, Schedule

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]

sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


class Side(Protocol):
    """A trainer under measurement. `step`: the loss where the last stage is or everywhere, else
    None."""

    def step(self, batch: Batch, /) -> Tensor | None: ...


class Torch:
    """torch.distributed.pipelining's runtime, with a PipelineStage per stage of this rank.

    `parts`: all stages; this rank keeps its own. `inputs`, `target`: keys of the batch, of which
    stage 0 gets the first and the loss the other.
    """

    def __init__(
        self, parts: Sequence[nn.Module], schedule: Schedule, inputs: str, target: str, loss: Loss
    ):
        rank, self.inputs, self.target, self.loss = dist.get_rank(), inputs, target, loss
        mine = [stage for stage, where in enumerate(schedule.placement) if where == rank]
        self.first, self.last = 0 in mine, schedule.stages - 1 in mine
        self.runtime = _PipelineScheduleRuntime(
            [
                PipelineStage(parts[stage], stage, schedule.stages, torch.device("cpu"))
                for stage in mine
            ],
            schedule.microbatches,
            loss_fn=self._mean,
            scale_grads=False,
        )
        self.runtime._prepare_schedule_with_comms(torch_actions(schedule))
        self.optimizer = sgd([p for stage in mine for p in parts[stage].parameters()])
        self.weight = torch.zeros(())

    def step(self, batch: Batch) -> Tensor | None:
        self.optimizer.zero_grad()
        target = batch[self.target]
        losses: list[Tensor] = []
        # of the whole batch, which every rank knows: so the mean is taken in backward and needs no
        # collective
        self.weight = torch.tensor(float(target.numel()))
        self.runtime.step(
            *([batch[self.inputs]] if self.first else []),
            target=target if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        return torch.stack(losses).sum() if self.last else None

    def _mean(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, {self.target: target})[0] / self.weight


def torch_actions(schedule: Schedule) -> dict[int, list[_Action]]:
    """The same actions in torch's words: B of a split backward is I."""
    split = {a[1:] for actions in schedule.order for a in actions if a.kind == "W"}
    words = {True: {"F": "F", "B": "I", "W": "W"}, False: {"F": "F", "B": "B"}}
    return {
        rank: [
            _Action.from_str(f"{a.stage}{words[a[1:] in split][a.kind]}{a.microbatch}")
            for a in actions
        ]
        for rank, actions in enumerate(schedule.order)
    }


class Bare:
    """No runtime, no autograd: the same sleeps and messages, sent and received by hand. What is
    lost here, the machine takes. `took`: seconds of an action."""

    def __init__(self, schedule: Schedule, took: Callable[[Action], float], elements: int):
        self.rank, self.schedule, self.took, self.elements = (
            dist.get_rank(),
            schedule,
            took,
            elements,
        )
        place = schedule.placement
        self.groups = {
            (kind, stage): dist.new_group(sorted({place[stage], place[stage + 1]}))
            for stage in range(schedule.stages - 1)
            for kind in "FB"
            if place[stage] != place[stage + 1]
        }
        self.message = torch.zeros(elements)

    def step(self, batch: Batch) -> None:
        place, sent = self.schedule.placement, []
        for action in self.schedule.order[self.rank]:
            kind, stage, _ = action
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            boundary = {before: min(stage, before), after: min(stage, after)}
            if group := kind != "W" and self.groups.get((kind, boundary[before])):
                dist.recv(torch.empty(self.elements), place[before], group=group)
            time.sleep(self.took(action))
            if group := kind != "W" and self.groups.get((kind, boundary[after])):
                sent.append(dist.isend(self.message, place[after], group=group))
        for work in sent:
            work.wait()


class Weft:
    """weft's Engine. `cut`: the modules with which the second and later stages begin."""

    def __init__(
        self,
        model: nn.Module,
        cut: Sequence[str],
        schedule: Schedule,
        batch: int,
        sample: Batch,
        loss: Loss,
    ):
        plan = weft.plan(
            model,
            f"pp{schedule.ranks}",
            batch=batch,
            accumulate=schedule.microbatches,
            schedule=schedule,
            cut=cut,
            sample=sample,
            loss=loss,
        )
        self.engine = weft.Engine(model, plan, optimizer=sgd, loss=loss)

    def step(self, batch: Batch) -> Tensor | None:
        return self.engine.step(batch).loss
