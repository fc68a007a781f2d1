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
    Layout,
    LocalSteps,
    Plan,
    Refusal,
    RunConfig,
    TrainConfig,
)
from weft.engine import Float64Mode, Loss, UpdateOrder
from weft.launch import run_workers
from weft.sync import make_sync
from weft.train import build_lr_factor, build_sync

from .case import Batch, Case, to_float64
from .codec_definitions import describe_codec
from .delayed_steps import is_delayed
from .plain.rates import rate_factor
from .plain.servers import ServedState
from .plain_run import needs_microbatches
from .rounding import RUNS, nearby
from .server_definition import is_served
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
    """A short run, the run that it is short for, and what one device does in it."""

    run: RunConfig
    full: RunConfig
    trajectory: Trajectory
    # what one device does where this layout's first checkpoint goes on on one device, or one for
    # each replica, and where this layout goes on from such a one: codecs begin anew there, and
    # weights are delayed on this layout alone. None: it goes back too often
    onward: Trajectory | None
    back: Trajectory | None
    replicas: int = 1  # that step by themselves
    codec: str = ""  # of gradients or weights, and its options
    delays: str = ""  # of the weights of which schedule, and of how many stages
    uncoded: str = ""  # why the run's own codec is left out
    # what one device does of WHOLE, ONWARD or BACK from weights that are a few roundings away
    nearby: Callable[[str], list[Trajectory]] | None = None
    in_order: DefinitionInOrder | None = None  # of asynchronous servers

    @property
    def step(self) -> int:
        """Of the first checkpoint."""
        return self.run.checkpoint.every

    def runs_nearby(self, part: str) -> Callable[[], list[Trajectory]] | None:
        """`nearby` of this part."""
        return None if self.nearby is None else partial(self.nearby, part)

    def runs_in_order(
        self, orders: list[UpdateOrder], begun: ServedState | None
    ) -> Callable[[], list[Trajectory]] | None:
        """The same in the order of asynchronous servers."""
        return None if self.in_order is None else partial(self.in_order.nearby, orders, begun)


@dataclass(frozen=True)
class DefinitionInOrder:
    """What one device does in the order of asynchronous servers, in a process of its own."""

    case: Case
    run: RunConfig
    validation: Sequence[Batch]
    metrics: Mapping[str, Loss]
    layout: str

    def __call__(
        self, orders: list[UpdateOrder], begun: ServedState | None
    ) -> tuple[Trajectory, ServedState]:
        """All of it, and what it saves at the first checkpoint. `begun`: the checkpoint that it
        goes on from; None: it begins. Raises ConfigError where the definition of the run's codec
        does not tell what is sent."""
        found: tuple[Trajectory, ServedState] = run_workers(self.train, 1, orders, begun)[0]
        return found

    def nearby(self, orders: list[UpdateOrder], begun: ServedState | None) -> list[Trajectory]:
        """The same from weights that are a few roundings away."""
        found: list[Trajectory] = run_workers(self.train_nearby, 1, orders, begun)[0]
        return found

    def train(
        self, orders: list[UpdateOrder], begun: ServedState | None, seed: int | None = None
    ) -> tuple[Trajectory, ServedState]:
        """In this process. `seed`: of changes by a few roundings."""
        case, run = self.case, self.run
        plan, rates = case.lay(case.model(), self.layout), defined_rates(run)
        given = case, plan, self.validation, self.metrics, run.train, rates, run.checkpoint.every
        found, saved = train_in_order(*given, orders, begun, seed)
        return replace(found, broken=(*found.broken, *case.faults())), saved

    def train_nearby(
        self, orders: list[UpdateOrder], begun: ServedState | None
    ) -> list[Trajectory]:
        """In this process."""
        found = []
        for seed in range(RUNS):
            with suppress(Refusal):
                found.append(self.train(orders, begun, seed)[0])
        return found


def define_training(
    run: RunConfig,
    case: Case,
    validation: Callable[[int], Sequence[Batch]],
    metrics: Mapping[str, Loss],
    layout: str = "dp1",
    uncoded: str = "",
) -> list[TrainingDefinition]:
    """What one device does in one or two short runs, or does in turn for each replica of the layout
    where these step by themselves; arguments as of `verify_training`. `uncoded`: why the run's
    codec is left out; "": it is not, if its definition tells what is sent."""
    if uncoded:
        run = run.model_copy(update={"sync": run.sync.model_copy(update={"codec": IDENTITY})})
        case = replace(case, plan=partial(_without_codec, case.plan))
    run, case = _with_known_cut(run, case, layout)
    short = short_run(run)
    builds = case.build, case.build_plain or case.build
    build, build_plain = (partial(_drawn_in_float64, each) for each in builds)
    exact = replace(case, build=build, build_plain=build_plain)
    batches = [to_float64(batch) for batch in validation(short.train.eval_batches)]
    given = exact, short, batches, metrics, layout
    found: list[TrainingDefinition] | Refusal = run_workers(_train_by_definition, 1, *given)[0]
    if isinstance(found, Refusal):
        return define_training(run, case, validation, metrics, layout, found.problem)
    found = [replace(each, full=run, uncoded=uncoded) for each in found]
    with torch.random.fork_rng([]):
        plan = exact.lay(exact.model(), layout)
    if not is_served(plan):
        away = [partial(_nearby, *given, each.run.train) for each in found]
        return [replace(each, nearby=runs) for each, runs in zip(found, away, strict=True)]
    orders = [DefinitionInOrder(exact, each.run, batches, metrics, layout) for each in found]
    return [replace(each, in_order=order) for each, order in zip(found, orders, strict=True)]


def _with_known_cut(run: RunConfig, case: Case, layout: str) -> tuple[RunConfig, Case]:
    """Both with the stages that this process finds where weights are delayed: stages of equal time
    are others whenever they are measured, and which weights are delayed depends on them."""
    if run.pipeline.cut != "time" or Layout.parse(layout).stage_ranks == 1:
        return run, case
    with torch.random.fork_rng([]):
        plan = case.lay(case.model(), layout)
    if not is_delayed(plan) or plan.staging is None:
        return run, case
    cut = tuple(stage.first for stage in plan.staging.stages[1:])
    run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"cut": cut})})
    return run, replace(case, plan=partial(_known, case.plan, plan, layout))


def _known(
    lay: Callable[[nn.Module, str], Plan], plan: Plan, known: str, model: nn.Module, layout: str
) -> Plan:
    return plan if layout == known else lay(model, layout)


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
        # which tell others of the run, end it or change it
        "callbacks": (),
        "loggers": (),
        "profile": None,
    }
    save = {"every": _saved_every(run), "keep": steps, "keep_every": 0, "restarts": 0}
    update = {"train": t.model_copy(update=train)}
    return run.model_copy(update={**update, "checkpoint": run.checkpoint.model_copy(update=save)})


def _saved_every(run: RunConfig) -> int:
    """Steps between checkpoints. Where replicas exchange weights the first one comes after an
    exchange, and while another one is under way."""
    sync = build_sync(run)
    if not isinstance(sync, LocalSteps):
        return random.Random(run.train.seed).randint(3, 9)
    return 2 * sync.period + sync.delay // 2 if sync.delay > 1 else sync.period + sync.delay + 1


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
        # whether what it does differs from what it does on one device of each replica
        self.differs = self.coded or is_delayed(self.plan)
        alone = case.lay(case.model(), apart(count)) if self.differs else self.plan
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
        best = self.run.checkpoint.keep_best
        found = train_plainly(trainees.each, rules, rates, every, trainees.exchange, best)
        broken = (*trainees.broken, *case.faults())
        return replace(found, broken=broken, bounds=bounds_of(self.plan))

    def resumed(self, part: str, rules: TrainConfig, whole: Trajectory) -> Trajectory | None:
        """The same; None where it would go back to one checkpoint too often."""
        if not self.differs or is_served(self.plan):  # which take only their own order up again
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
            told = count, codec, _delays(plan)
            found.append(TrainingDefinition(its, run, whole, onward, back, *told))
    except Refusal as error:
        if not codec:
            raise
        return error
    return found


def _delays(plan: Plan) -> str:
    schedule = plan.schedule
    if not is_delayed(plan):
        return ""
    return f"{schedule.name}, versions {schedule.versions}, {schedule.stages} stages"


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
