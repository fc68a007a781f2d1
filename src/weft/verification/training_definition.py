"""The short runs in which `weft verify --deep` trains, and what one device does in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from weft.core import (
    REPLICA_AXIS,
    AsyncServers,
    Layout,
    Plan,
    Refusal,
    RunConfig,
    TrainConfig,
)
from weft.engine import Float64Mode, Loss, UpdateOrder
from weft.launch import run_workers
from weft.sync import make_sync
from weft.train import build_lr_factor

from .case import Batch, Case, to_float64
from .codec_definitions import describe_codec
from .plain.rates import rate_factor
from .plain.servers import ServedState
from .plain_run import needs_microbatches
from .rounding import RUNS, nearby
from .server_training import train_in_order
from .trainees import bounds_of, check_codec, lossy_ranks, trainees_of
from .training_reference import GivesUp, Trajectory, reachable_limits, train_plainly

STEPS = 20
MORE_STEPS = 8  # for outliers, which are told from step 17 on
MOST_BATCHES = 8  # of a validation
IDENTITY = "identity"
WHOLE, ONWARD, BACK = "whole", "onward", "back"


@dataclass(frozen=True)
class TrainingDefinition:
    """A short run, and what one device does in it."""

    run: RunConfig
    trajectory: Trajectory
    # what one device does where this layout's first checkpoint goes on on one device, or one for
    # each replica, and where this layout goes on from such a one: codecs begin anew there. None: it
    # goes back too often
    onward: Trajectory | None
    back: Trajectory | None
    replicas: int = 1  # that step by themselves
    codec: str = ""  # of gradients or weights, and its options
    uncoded: str = ""  # why the run's own codec is left out
    # what one device does of WHOLE, ONWARD or BACK from weights that are a few roundings away
    nearby: Callable[[str], list[Trajectory]] | None = None
    # what one device does in the order of asynchronous servers, from a checkpoint or the beginning
    in_order: (
        Callable[[list[UpdateOrder], ServedState | None], tuple[Trajectory, ServedState]] | None
    ) = None

    @property
    def step(self) -> int:
        """Of the first checkpoint."""
        return self.run.checkpoint.every

    def runs_nearby(self, part: str) -> Callable[[], list[Trajectory]] | None:
        """`nearby`, where a codec makes rounding grow."""
        if self.nearby is None or not self.codec:
            return None
        return partial(self.nearby, part)


def define_training(
    run: RunConfig,
    case: Case,
    validation: Callable[[int], Batch],
    metrics: Mapping[str, Loss],
    layout: str = "dp1",
) -> list[TrainingDefinition]:
    """What one device does in one or two short runs, or does in turn for each replica of the layout
    where these step by themselves; arguments as of `verify_training`."""
    short = short_run(run)
    builds = case.build, case.build_plain or case.build
    build, build_plain = (partial(_drawn_in_float64, each) for each in builds)
    case = replace(case, build=build, build_plain=build_plain)
    batches = [to_float64(validation(n)) for n in range(short.train.eval_batches)]
    given = case, short, batches, metrics, layout
    found: list[TrainingDefinition] | Refusal = run_workers(_train_by_definition, 1, *given)[0]
    if isinstance(found, Refusal):
        left_out = partial(_without_codec, case.plan)
        exact = run.model_copy(update={"sync": run.sync.model_copy(update={"codec": IDENTITY})})
        instead = exact, replace(case, plan=left_out), validation, metrics, layout
        return [replace(each, uncoded=found.problem) for each in define_training(*instead)]
    with torch.random.fork_rng([]):
        plan = case.lay(case.model(), layout)
    if not is_served(plan):
        away = [partial(_nearby, *given, each.run.train) for each in found]
        return [replace(each, nearby=runs) for each, runs in zip(found, away, strict=True)]
    return [replace(each, in_order=partial(_in_order, *given, each.run.train)) for each in found]


def short_run(run: RunConfig) -> RunConfig:
    """The run with few steps, in which all that it does happens. Its schedule is as long as it."""
    t = run.train
    steps = STEPS if t.skip is None and t.rollback is None else STEPS + MORE_STEPS
    warmup = min(steps // 2, max(2, round(t.warmup * steps / t.steps))) if t.warmup else 0
    train = {
        "steps": steps,
        "warmup": warmup,
        "eval_every": 5 if t.eval_every else 0,
        "eval_batches": min(t.eval_batches, MOST_BATCHES) if t.eval_every else 0,
        "log_every": 1,
        "sample_tokens": 0,
    }
    every = random.Random(t.seed).randint(3, 9)
    save = {"every": every, "keep": steps, "keep_every": 0, "restarts": 0}
    update = {"train": t.model_copy(update=train)}
    return run.model_copy(update={**update, "checkpoint": run.checkpoint.model_copy(update=save)})


def defined_rates(run: RunConfig) -> Callable[[int], float]:
    """The factor of the learning rate of each step, by its definition; a user's function defines
    itself."""
    t = run.train
    if run.lr_schedule.build is not None:
        return build_lr_factor(run)
    return lambda step: rate_factor(
        step,
        t.steps,
        t.warmup,
        t.decay,
        t.min_lr_ratio,
        rise=t.warmup_shape,
        first=t.start_lr_ratio,
        share=t.decay_share,
    )


def _drawn_in_float64(build: Callable[[], nn.Module]) -> nn.Module:
    """A run builds its model where all is float64."""
    with Float64Mode():
        return build()


def _without_codec(lay: Callable[[nn.Module, str], Plan], model: nn.Module, layout: str) -> Plan:
    plan = lay(model, layout)
    if plan.sync is None:
        return plan
    return replace(plan, sync=replace(plan.sync, codec=make_sync("allreduce", IDENTITY).codec))


class _OneDevice:
    """What it does in a run under a layout; arguments as of `_train_by_definition`. `seed`: of
    changes by a few roundings, of the weights at the beginning and of what codecs encode."""

    def __init__(
        self,
        case: Case,
        run: RunConfig,
        validation: Sequence[Batch],
        metrics: Mapping[str, Loss],
        layout: str,
        seed: int | None = None,
    ):
        if seed is not None:
            case = nearby(case, seed)
        self.seed = seed
        self.case, self.run, self.validation, self.metrics = case, run, validation, metrics
        self.plan = case.lay(case.model(), layout)
        self.coded = lossy_ranks(self.plan) > 0
        count = self.plan.layout.replica_count if self.plan.replicas_step_independently else 1
        alone = case.lay(case.model(), apart(count)) if self.coded else self.plan
        every = run.checkpoint.every
        self._plans = {
            WHOLE: {0: self.plan},
            ONWARD: {0: self.plan, every: alone},
            BACK: {0: alone, every: self.plan},
        }
        self._in_microbatches = needs_microbatches(case)

    def train(self, part: str, rules: TrainConfig) -> Trajectory:
        """In the whole run, or in one that goes ONWARD or BACK from a checkpoint."""
        case, rates, every = self.case, defined_rates(self.run), self.run.checkpoint.every
        if is_served(self.plan):  # in some order: that of a run is known after it
            validation, metrics = self.validation, self.metrics
            return train_in_order(case, self.plan, validation, metrics, rules, rates, every)[0]
        plans = self._plans[part]
        trainees = trainees_of(
            case, plans, self.validation, self._in_microbatches, self.metrics, self.seed
        )
        found = train_plainly(trainees.each, rules, rates, every, trainees.exchange)
        broken = (*trainees.broken, *case.faults())
        return replace(found, broken=broken, bounds=bounds_of(self.plan))

    def resumed(self, part: str, rules: TrainConfig, whole: Trajectory) -> Trajectory | None:
        """The same; None where it would go back to one checkpoint too often."""
        if not self.coded:
            return whole
        with suppress(GivesUp):
            return self.train(part, rules)
        return None


def _train_by_definition(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
) -> list[TrainingDefinition] | Refusal:
    """A refusal where the definition of the run's codec does not tell what is sent."""
    device, found = _OneDevice(case, run, validation, metrics, layout), []
    plan, codec = device.plan, ""
    if device.coded and plan.sync is not None:
        codec = describe_codec(plan.sync.codec)
    count = plan.layout.replica_count if plan.replicas_step_independently else 1
    try:
        check_codec(case, plan)
        for rules, whole in reachable_limits(run.train, partial(device.train, WHOLE)):
            its = run.model_copy(update={"train": rules})
            onward, back = (device.resumed(part, rules, whole) for part in (ONWARD, BACK))
            found.append(TrainingDefinition(its, whole, onward, back, count, codec))
    except Refusal as error:
        if not codec:
            raise
        return error
    return found


def _nearby(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
    rules: TrainConfig,
    part: str,
) -> list[Trajectory]:
    """What one device does from weights that are a few roundings away, in a process of its own."""
    given = case, run, validation, metrics, layout, rules, part
    found: list[Trajectory] = run_workers(_train_nearby, 1, *given)[0]
    return found


def _train_nearby(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
    rules: TrainConfig,
    part: str,
) -> list[Trajectory]:
    found = []
    for seed in range(RUNS):
        with suppress(GivesUp, Refusal):
            device = _OneDevice(case, run, validation, metrics, layout, seed)
            found.append(device.train(part, rules))
    return found


def apart(replicas: int) -> str:
    """The layout of one device for each replica."""
    return str(Layout(((REPLICA_AXIS, replicas),)))


def is_served(plan: Plan) -> bool:
    """Whether asynchronous servers take the steps."""
    return plan.replicas_step_independently and isinstance(plan.sync, AsyncServers)


def _in_order(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
    rules: TrainConfig,
    orders: list[UpdateOrder],
    begun: ServedState | None,
) -> tuple[Trajectory, ServedState]:
    """What one device does in the order of a run that has ended, in a process of its own."""
    given = case, run, validation, metrics, layout, rules, orders, begun
    found: tuple[Trajectory, ServedState] = run_workers(_train_in_order, 1, *given)[0]
    return found


def _train_in_order(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
    rules: TrainConfig,
    orders: list[UpdateOrder],
    begun: ServedState | None,
) -> tuple[Trajectory, ServedState]:
    plan, every = case.lay(case.model(), layout), run.checkpoint.every
    given = case, plan, validation, metrics, rules, defined_rates(run), every, orders, begun
    found, saved = train_in_order(*given)
    return replace(found, broken=(*found.broken, *case.faults())), saved
