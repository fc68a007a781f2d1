"""Forward without backward, in evaluation mode: the loss of a batch, or the model's output."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import STAGE_AXIS, broadcast_value
from weft.nn import model_arguments, weighed_loss
from weft.parallel import TOKEN_AXES, Mesh

from .compile_blocks import CompiledBlocks
from .context_parallel.sequence import ContextParallel
from .eval_metrics import Metrics, measure, whole_output
from .fsdp_units import FSDPUnits
from .function_overrides import FunctionOverrides
from .microbatch import Batch, MicroBatch
from .pipeline.runner import PipelineRunner
from .pipeline.stage_compute import (
    InferenceCompute,
    Loss,
    StageModel,
)
from .whole_batch import WholeBatchLoss


@dataclass
class Inference:
    """One rank's part. `runner` runs the plan's schedule, `single` one microbatch. `parts`: what
    lets ranks share a sequence, where they do. `compiled`: what runs in `evaluate` alone: outputs
    are asked for by sequences of every length."""

    stages: StageModel
    mesh: Mesh
    sequence: ContextParallel
    runner: PipelineRunner
    single: PipelineRunner
    units: FSDPUnits
    parts: FunctionOverrides | None
    compiled: CompiledBlocks

    def _begin(self) -> None:
        self.stages.model.eval()
        self.units.before_forward()
        if self.stages.low is not None:
            self.stages.low.refresh()

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss, metrics: Metrics) -> Tensor:
        """[1 + metrics, 2] float64: sum and weight of the loss and of each metric, of this rank's
        part of a batch, summed over the ranks of its replica."""
        self._begin()
        plan = self.stages.plan
        total = torch.zeros(1 + len(metrics), 2, dtype=torch.float64, device=self.mesh.device)
        whole = WholeBatchLoss(loss, plan, self.mesh) if plan.whole_batch else None
        number = count()  # outputs come in the order of microbatches

        def add(output: Any, micro: Batch) -> None:
            if whole is not None:
                value, weight = whole(next(number), output, micro)
            else:
                value, weight = weighed_loss(loss, output, micro)
            found = torch.stack([value, torch.as_tensor(weight, device=value.device)]).double()
            total.add_(torch.stack([found, *measure(metrics, output, micro)]))

        micros = self.sequence.cut(batch).split(plan.microbatch, plan.accumulate)
        work = InferenceCompute(self.stages, micros, add, self.parts)
        self.runner.run(work, [micros[0].signature] * len(micros), forward_only=True)
        self.units.reshard()
        group = self.mesh.group(*TOKEN_AXES, STAGE_AXIS)
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @torch.no_grad()
    def output(self, batch: Batch) -> Any:
        """The model's output, whole on every rank, each of which runs whole sequences."""
        self._begin()
        batch = {key: value.to(self.mesh.device) for key, value in batch.items()}
        outputs: list[Any] = []
        self.sequence.end()
        micro = MicroBatch(batch, model_arguments(self.sequence.inputs, batch))
        work = InferenceCompute(
            self.stages,
            [micro],
            lambda output, _: outputs.append(whole_output(output)),
        )
        with self.compiled.paused():
            self.single.run(work, [micro.signature], forward_only=True)
        self.units.reshard()
        group = self.mesh.group(STAGE_AXIS)
        if group is not None:
            source = self.stages.plan.schedule.placement[-1]
            mine = outputs[0] if outputs else None
            return broadcast_value(mine, source, group, self.mesh.device)
        return outputs[0]
