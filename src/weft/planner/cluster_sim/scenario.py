"""What is simulated: the stages of a pipeline at any speed of their devices, and what follows the
pipeline in a step.

The pace of a device is what its own work takes over what it should take: 1.5 is half as long again.
A device of pace f is one whose sheet has 1/f of the FLOP/s and of the memory's bandwidth, and whose
host launches as much slower. A link with 1/f of its bandwidth takes as long as one that carries f
times the bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.core import (
    STAGE_AXIS,
    ActionCosts,
    ConfigError,
    Divides,
    Schedule,
    Sync,
)
from weft.parallel import (
    DATA_AXES,
    axis_table,
)
from weft.pipeline import schedules

from ..cost.belief import Belief, Move
from ..cost.breakdown import CostPart, TimePart, waits_for
from ..cost.estimate import Estimate, estimate, stage_costs
from ..cost.hardware import GIB, Cluster, Era
from ..cost.layout_batch import AXES, Array, LayoutBatch
from ..cost.model_work import ModelWork
from ..cost.precision_policy import PrecisionPolicy

# what of a block travels over an axis, by what the axis divides: fields of BlockWork
CARRIED = {
    Divides.FEATURES: ("reduced_bytes",),
    Divides.VOCABULARY: ("reduced_bytes",),
    Divides.POSITIONS: ("key_bytes",),
    Divides.ATTENTION_HEADS: ("key_bytes", "query_bytes"),
    Divides.EXPERTS: ("routed_bytes",),
    Divides.STAGES: ("output_bytes",),
}
AFTER = (
    TimePart.GRADIENTS,
    TimePart.FSDP_REDUCE,
    TimePart.FSDP_GATHER,
    TimePart.OPTIMIZER,
    TimePart.FIXED,
    TimePart.STRAGGLERS,
)
# parts that each microbatch waits for, where they come with each -> the action that waits
BESIDE: dict[str, str] = {
    TimePart.FSDP_FORWARD_GATHER: "forward_s",
    TimePart.FSDP_BACKWARD_GATHER: "backward_s",
    TimePart.FSDP_REDUCE: "backward_s",
    TimePart.ACCUMULATION: "backward_s",
    TimePart.HOST: "backward_s",
}


def follows_pipeline(part: CostPart) -> bool:
    """Whether a part of a step comes once, after the pipeline."""
    each = part.name in BESIDE and np.max(part.symbols.get("times", 1)) > 1
    return part.name in AFTER and not each


@dataclass(frozen=True)
class StepParts:
    """What a step is made of at one pace: `costs` of the stages; `after` the pipeline, part ->
    seconds; `exchange_s`, of one exchange of all gradients or weights over dp, nothing hidden, and
    `summed_s` of what a replica which steps by itself sums within; as the estimate has it:
    `estimated_s` of the step, `memory_bytes` of a device, of which `over_bytes` are more than it
    has."""

    costs: ActionCosts
    after: Mapping[str, float]
    exchange_s: float
    summed_s: float
    estimated_s: float
    memory_bytes: float
    over_bytes: float

    @property
    def after_s(self) -> float:
        return sum(self.after.values())


@dataclass(frozen=True)
class Scenario:
    """`choices` holds one choice, `name` says it. `steps` of the run."""

    name: str
    work: ModelWork
    choices: LayoutBatch
    cluster: Cluster
    era: Era
    practice: PrecisionPolicy
    steps: int
    sync: Sync | None = None

    def __post_init__(self) -> None:
        if self.devices != self.cluster.devices:
            problem = (
                f"is a layout of {self.devices}, and {self.cluster} has {self.cluster.devices}"
                " devices"
            )
            fix = (
                f"give --layout with {self.cluster.devices} ranks, or --cluster with {self.devices}"
                " devices"
            )
            raise ConfigError("--layout", self.name, problem, fix)
        samples, parts = float(self.choices.batch[0]), int(self.choices.accumulate[0])
        ranks = int(self.choices.size(*DATA_AXES)[0])
        if samples % (parts * ranks):
            problem = f"it does not divide into {parts} microbatches over {ranks} data ranks"
            fix = f"use a multiple of {parts * ranks}, or another train.accumulate"
            raise ConfigError("train.batch", round(samples), problem, fix)
        stages = self.size(STAGE_AXIS) * int(self.choices.chunks[0])
        if stages > max(1, self.work.parts):
            problem = f"the model has {self.work.parts} parts, and {self.name} has {stages} stages"
            raise ConfigError("--layout", self.name, problem, "use fewer")

    def size(self, axis: str) -> int:
        return int(self.choices.sizes[axis][0])

    @property
    def devices(self) -> int:
        return int(self.choices.world[0])

    @property
    def tokens(self) -> float:
        """Of a step."""
        return float(self.work.tokens * self.choices.batch[0])

    @cached_property
    def schedule(self) -> Schedule:
        one = self.choices
        name, chunks = one.schedules[int(one.schedule[0])], int(one.chunks[0])
        takes = (
            inspect.signature(schedules.builtin_schedules()[name]).parameters
            if name in schedules.builtin_schedules()
            else {}
        )
        options = {"chunks": chunks} if "chunks" in takes else {}
        return schedules.make_schedule(
            name, self.size(STAGE_AXIS), int(one.accumulate[0]), **options
        )

    def on_stages(self, what: str, rank: int) -> str:
        """What is on one rank of a pipeline, with the names of the stages that it holds."""
        if self.size(STAGE_AXIS) == 1:
            return what
        held = [stage for stage, on in enumerate(self.schedule.placement) if on == rank]
        which = " and ".join(map(str, held))
        return f"{what}, stages {which}" if len(held) > 1 else f"{what}, stage {which}"

    def estimate(self, pace: float = 1.0) -> Estimate:
        """Of the one choice."""
        slow = self.at(pace)
        return estimate(slow.work, slow.choices, slow.cluster, slow.era, slow.practice, slow.sync)

    def interval_factor(self, belief: Belief) -> float:
        """So many times shorter or longer than simulated a measured step is at most in 80 of 100
        cases. `belief` is about the constants of `era`."""

        def predict(move: Move) -> Array:
            return replace(self, era=move(self.era)).estimate().step_s

        return float(belief.factor(predict)[0])

    def at(self, pace: float) -> Scenario:
        """With all devices at this pace."""
        if pace == 1:
            return self
        hardware, device = self.cluster.hardware, self.cluster.hardware.device
        slower = device.model_copy(
            update={
                "memory_bps": device.memory_bps / pace,
                "host_bps": device.host_bps / pace,
                "flops": {dtype: flops / pace for dtype, flops in device.flops.items()},
            }
        )
        cluster = self.cluster.model_copy(
            update={"hardware": hardware.model_copy(update={"device": slower})}
        )
        return replace(
            self,
            cluster=cluster,
            era=self.era.model_copy(update={"launch_s": self.era.launch_s * pace}),
        )

    def behind(self, axis: str, factor: float) -> Scenario:
        """With links of 1/factor of the bandwidth for all that travels over this axis. Raises
        ConfigError."""
        if axis not in AXES or self.size(axis) < 2:
            there = [each for each in AXES if self.size(each) > 1]
            raise ConfigError(
                "--slow-link",
                axis,
                f"is not an axis of {self.name} that ranks communicate over",
                f"write one of {', '.join(there)}" if there else "leave it out",
            )
        divides = axis_table().traits[axis].divides
        carried = {field for what in divides for field in CARRIED.get(what, ())}
        if carried:
            blocks = tuple(
                replace(block, **{field: factor * getattr(block, field) for field in carried})
                for block in self.work.blocks
            )
            return replace(self, work=replace(self.work, blocks=blocks))
        practice = self.practice
        more = {
            field: factor * getattr(practice, field) for field in ("reduce_bytes", "gather_bytes")
        }
        return replace(self, practice=replace(practice, **more))

    def step(self, pace: float = 1.0, links: Mapping[str, float] | None = None) -> StepParts:
        """Raises Refusal. `links`: axis -> by how much slower every link of it is."""
        planned = slow = self.at(pace)
        found = planned.estimate()
        parts = {part.name: part for part in found.time}
        for axis, factor in (links or {}).items():
            slow = slow.behind(axis, factor)
            for part in planned.behind(axis, factor).estimate().time:
                # others send the same bytes, and not over the same links
                if waits_for(part.name) == axis:
                    parts[part.name] = part
        costs = stage_costs(slow.work, slow.choices, 0, slow.cluster, slow.era, slow.practice)
        stages, m = self.schedule.stages, int(self.choices.accumulate[0])
        chunks, waits = stages // self.schedule.ranks, {"forward_s": 0.0, "backward_s": 0.0}
        after: dict[str, float] = {}
        for name, part in parts.items():
            if follows_pipeline(part) and part.value[0]:
                after[name] = float(part.value[0])
            elif name in BESIDE and not follows_pipeline(part):
                waits[BESIDE[name]] += float(part.value[0]) / m / chunks
        more: dict[str, Any] = {
            field: tuple(s + wait for s in costs.each(field, stages))
            for field, wait in waits.items()
        }
        period = self.sync.period if self.sync is not None else 1
        dp = parts[TimePart.GRADIENTS].symbols
        exchange = float(np.max(dp["exchange_s"] if "exchange_s" in dp else dp["comm_s"])) * period
        return StepParts(
            replace(costs, **more),
            after,
            exchange,
            float(np.max(dp.get("summed_s", 0.0))),
            float(found.step_s[0]),
            float(found.peak_bytes[0]) + slow.era.context_gib * GIB,
            float(found.over_bytes[0]),
        )
