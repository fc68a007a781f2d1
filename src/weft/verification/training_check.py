"""`weft verify --deep`: runs as `weft train` makes them, beside one device's definition of them.

Each layout trains a short run of its own by `weft.train.train`, with its checkpoints, then once
more from one of them, and so do other layouts. What such a run writes is compared: its metrics and
its last checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint import CHECKPOINTS, checkpoint_path
from weft.core import REPLICA_AXIS, AsyncServers, ConfigError, Plan, RunConfig, TrainConfig
from weft.engine import Float64Mode, Loss, UpdateOrder
from weft.launch import ScratchFolder, run_workers
from weft.train import (
    build_lr_factor,
    on_own_layout,
    replica_ranks,
    tried_steps,
)

from .case import Batch, Case, to_float64
from .difference import Bounds
from .noise import ALONE, from_rounding
from .plain.outliers import SEEN
from .plain.rates import rate_factor
from .plain.servers import ServedState
from .plain_run import needs_microbatches
from .server_definition import check_servers
from .server_training import train_in_order
from .tensor_errors import error_ratio, saved_state_errors
from .trained_run import KEYS, OF_EXPERTS, TrainedRun, train_in
from .trainees import trainees_of
from .training_reference import Trajectory, reachable_limits, train_plainly

STEPS = 20
MORE_STEPS = 8  # for outliers, which are told from step 17 on
MOST_RATES = 10_000  # steps whose learning rates are computed
MOST_BATCHES = 8  # of a validation
HAPPENS = ("clip", "skip", "rollback")
IN_ORDER = "in its order of updates: "


@dataclass(frozen=True)
class Proof:
    """One thing that a run did, and whether it was right."""

    what: str
    shown: str
    equal: bool = True
    happened: str = ""  # clip, skip or rollback, if it did something, and not always


@dataclass(frozen=True)
class TrainingResult:
    """What was proven of training under a layout."""

    layout: str
    proofs: tuple[Proof, ...]
    happened: tuple[str, ...] = ()  # of clip, skip, rollback

    @property
    def passed(self) -> bool:
        return all(proof.equal for proof in self.proofs)

    def text(self) -> str:
        """A table."""
        mark = "equal" if self.passed else "DIFFERENT"
        rows = [f"  {proof.what:<18}{proof.shown}" for proof in self.proofs]
        return "\n".join([f"{self.layout}, as weft train runs it: {mark}", *rows])


@dataclass(frozen=True)
class TrainingDefinition:
    """A short run, and what one device does in it."""

    run: RunConfig
    trajectory: Trajectory
    replicas: int = 1  # that step by themselves
    # what one device does in the order of asynchronous servers, from a checkpoint or the beginning
    in_order: (
        Callable[[list[UpdateOrder], ServedState | None], tuple[Trajectory, ServedState]] | None
    ) = None

    @property
    def step(self) -> int:
        """Of the first checkpoint."""
        return self.run.checkpoint.every


def check_deep(layout: str, plan: Plan) -> None:
    """Refuse a layout that updates weights late, which is not how one device trains, and servers
    whose order no run notes. Raises ConfigError."""
    if _served(plan):
        check_servers(plan)
    if plan.schedule.versions:
        problem = f"compares with one device, and {layout} updates weights with a delay"
        raise ConfigError("--deep", True, problem, "leave --deep or this layout out")


def verify_training(
    run: RunConfig,
    case: Case,
    validation: Callable[[int], Batch],
    metrics: Mapping[str, Loss],
    layouts: Sequence[str],
    done: Callable[[TrainingResult], None],
) -> list[TrainingResult]:
    """Hold training under each layout to one device's.

    Args:
        run: the run, in float64.
        case: its model, samples, loss, optimizer.
        validation: the whole batch of this number of a validation.
        metrics: that it measures beside the loss, by name.
        layouts: the layouts.
        done: gets each result when it is there.
    """
    given, results = (run, case, validation, metrics), list[TrainingResult]()
    plain = define_training(*given)
    with ScratchFolder() as scratch:
        alone = Path(scratch.path, "alone")
        on_one = train_in(on_own_layout(plain[0].run, "dp1"), alone)
        for number, layout in enumerate(layouts):
            apart = replica_ranks(on_own_layout(run, layout))
            defined = define_training(*given, layout) if apart else plain
            here = Path(scratch.path, str(number))
            proofs = training_proofs(defined[0], layout, here)
            for another in defined[1:]:
                proofs += training_proofs(another, layout, here / "rollback")
            proofs += other_layout_proofs(defined[0], layout, here, alone)
            steps = f"{plain[0].run.train.steps} steps"
            proofs.insert(1, _proof(steps, on_one, plain[0].trajectory, note="on dp1: "))
            happened = {proof.happened for proof in proofs} - {""}
            results.append(TrainingResult(layout, tuple(proofs), tuple(sorted(happened))))
            done(results[-1])
    return results


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
    found: list[TrainingDefinition] = run_workers(_train_by_definition, 1, *given)[0]
    with torch.random.fork_rng([]):
        plan = case.lay(case.model(), layout)
    if not _served(plan):
        return found
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


def rate_text(run: RunConfig) -> str:
    """What the learning rate does, in words."""
    t = run.train
    if run.lr_schedule.build is not None:
        return f"{run.lr_schedule.build}, which one device calls too"
    falls = t.decay if t.decay_share is None else f"{t.decay} in the last {t.decay_share:.4g}"
    wave = "" if t.warmup_shape == "linear" else f" as a {t.warmup_shape}"
    return f"{f'{t.warmup} steps of warm-up{wave}, ' if t.warmup else ''}{falls}"


def rate_faults(run: RunConfig) -> list[str]:
    """What is wrong with the learning rates of the whole run."""
    t, factor, defined = run.train, build_lr_factor(run), defined_rates(run)
    for step in tried_steps(t.steps, MOST_RATES):
        want = defined(step)
        if abs(factor(step) - want) > 1e-12:
            return [f"learning rate of step {step}: factor {factor(step):.9g}, not {want:.9g}"]
    return []


def _drawn_in_float64(build: Callable[[], nn.Module]) -> nn.Module:
    """A run builds its model where all is float64."""
    with Float64Mode():
        return build()


def _train_by_definition(
    case: Case,
    run: RunConfig,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    layout: str,
) -> list[TrainingDefinition]:
    plan, every = case.lay(case.model(), layout), run.checkpoint.every
    in_microbatches, rates = needs_microbatches(case), defined_rates(run)
    count = plan.layout.replica_count if plan.replicas_step_independently else 1

    def train_with(rules: Any) -> Trajectory:
        if _served(plan):  # in some order: that of a run is known after it
            return train_in_order(case, plan, validation, metrics, rules, rates, every)[0]
        trainees = trainees_of(case, plan, validation, in_microbatches, metrics)
        found = train_plainly(trainees.each, rules, rates, every, trainees.exchange)
        return replace(found, broken=(*trainees.broken, *case.faults()))

    runs = reachable_limits(run.train, train_with)
    return [
        TrainingDefinition(run.model_copy(update={"train": t}), found, count) for t, found in runs
    ]


def _served(plan: Plan) -> bool:
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


# ---- what is compared ----------------------------------------------------------------------------


def training_proofs(defined: TrainingDefinition, layout: str, folder: Path) -> list[Proof]:
    """That a run on a layout does what one device does, and so does one that goes on from its
    checkpoint. The runs are in `folder`."""
    run = on_own_layout(defined.run, layout)
    whole, wanted = train_in(run, folder / "whole"), defined.trajectory
    saved, note = None, ""
    if defined.in_order is not None and isinstance(whole, TrainedRun):
        wanted, saved = defined.in_order(whole.orders, None)
        note = IN_ORDER
    proofs = [_proof(f"{run.train.steps} steps", whole, wanted, note=note)]
    proofs += _exercised(run, wanted)
    if defined.replicas > 1:
        options = ", ".join(f"{key} {value}" for key, value in run.sync.arguments.items())
        what = f"{defined.replicas}, by {run.sync.name}{f', {options}' if options else ''}"
        proofs.append(Proof("replicas", what))
    if isinstance(whole, TrainedRun):
        again = train_in(run, folder / "again", folder / "whole")
        resumed = f"resumed at {defined.step}"
        if defined.in_order is None:
            proofs.append(_same_proof(resumed, again, whole, defined.step))
        else:  # another order
            if isinstance(again, TrainedRun):
                wanted, _ = defined.in_order(again.orders, saved)
            proofs.append(_proof(resumed, again, wanted, defined.step, IN_ORDER))
    return proofs


def other_layout_proofs(
    defined: TrainingDefinition, layout: str, folder: Path, alone: Path
) -> list[Proof]:
    """That a checkpoint of this layout, below `folder`, goes on on one device; and one device's,
    below `alone`, on this layout. Replicas that step by themselves go on on one device each."""
    if defined.replicas == 1:
        return _resumed(defined, layout, "dp1", folder / "whole", alone)
    each_alone = f"{REPLICA_AXIS}{defined.replicas}"
    here, there = (on_own_layout(defined.run, each) for each in (layout, each_alone))
    if here.layout == there.layout:
        return []
    train_in(there, folder / "apart")
    return _resumed(defined, layout, each_alone, folder / "whole", folder / "apart")


def _resumed(
    defined: TrainingDefinition, layout: str, other: str, whole: Path, theirs: Path
) -> list[Proof]:
    """That a run of a layout in `whole` goes on on the `other`, and that one's in `theirs` on
    the layout."""
    step, found = defined.step, list[Proof]()
    for note, on, begin in (("on", other, whole), ("from", layout, theirs)):
        if checkpoint_path(begin / CHECKPOINTS, step).exists():
            run = on_own_layout(defined.run, on)
            again = train_in(run, whole.parent / note, begin)
            of = f"{note} {other}: "
            found.append(_proof(f"resumed at {step}", again, defined.trajectory, step, of))
    return found


def _exercised(run: RunConfig, wanted: Trajectory) -> list[Proof]:
    """What happened in the steps."""
    t, found = run.train, list[Proof]()
    happened = {name: name if name in wanted.happened else "" for name in HAPPENS}
    faults = rate_faults(run)
    shown = "; ".join(faults) or rate_text(run)
    found.append(Proof("learning rate", shown, not faults))
    shown = "; ".join(wanted.broken) or "of masks, random numbers and who takes which samples"
    found.append(Proof("laws", shown, not wanted.broken))
    if t.clip is not None:
        shown = f"{len(wanted.clipped)} of {t.steps} steps, at norm {t.clip:.4g}"
        found.append(Proof("clipped", shown, happened=happened["clip"]))
    if t.skip is not None:
        shown = f"{wanted.skipped} steps, at {t.skip:.4g} times the median"
        found.append(Proof("skipped", shown, happened=happened["skip"]))
    if t.rollback is not None:
        shown = f"{wanted.taken_back} times, at {t.rollback:.4g} times the median"
        found.append(Proof("rolled back", shown, happened=happened["rollback"]))
    if t.ema is not None:
        found.append(Proof("averaged", f"weights, {t.ema:.6g} of which stays in each step"))
    tokens = next(iter(wanted.lines.values()), {}).keys() - {*KEYS, *OF_EXPERTS}
    if tokens:
        shown = f"tokens of {len(tokens)} in each step, the share that is dropped, the gates' loss"
        found.append(Proof("experts", shown))
    if t.eval_every:
        shown = f"{len(wanted.validations)} times, {t.eval_batches} batches each"
        names = [key for line in wanted.validations.values() for key in line if key != "val_loss"]
        shown += "".join(f", {name}" for name in dict.fromkeys(names))
        found.append(Proof("validated", shown))
    return found


def _proof(
    what: str, found: TrainedRun | str, wanted: Trajectory, after: int = 0, note: str = ""
) -> Proof:
    """That a run did what one device does in the steps `after` one."""
    if isinstance(found, str):
        return Proof(what, note + found, equal=False)
    worst, first, bounds = 0.0, None, Bounds()
    for step, line in wanted.lines.items():
        want = {**line, **wanted.validations.get(step, {})}
        got = found.lines.get(step, {})
        validated = (key for key in got if key.startswith("val_"))
        for key in dict.fromkeys((*KEYS, *want, *validated)) if step > after else ():
            error = _error_of(got.get(key), want.get(key))
            worst = max(worst, error)
            if first is None and not error < bounds.loss:
                both = f"{_shown(got.get(key))}, one device has {_shown(want.get(key))}"
                first = f"{key} of step {step}: {both}"
    for scalar, values in (("norms", wanted.norms), ("losses", wanted.losses)):
        kept = found.scalars.get(scalar, [])
        same = len(kept) == len(values[-SEEN:])
        off = [_error_of(was, value) for was, value in zip(kept, values[-SEEN:], strict=same)]
        if first is None and not (same and all(error < bounds.loss for error in off)):
            first = f"the checkpoint's {scalar}"
    names = wanted.weights, wanted.noise
    errors = saved_state_errors(found.tensors, wanted.final, *names, bounds)
    moved = [name for name, error in errors.items() if ALONE in name and not error < bounds.weight]
    for name, error in errors.items():
        if moved and from_rounding(name):  # the optimizer makes full steps of it
            continue
        worst = max(worst, error)
        if first is None and not error < bounds.weight:
            first = f"{name} after the last step"
    told = f"  left out: {', '.join(moved)}" if moved else ""
    told += f"  first difference: {first}" if first else ""
    return Proof(what, f"{note}{worst:.2e}{told}", not first)


def _error_of(got: float | None, want: float | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else inf
    return error_ratio(abs(got - want), abs(want))


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _same_proof(what: str, again: TrainedRun | str, whole: TrainedRun, after: int) -> Proof:
    """That a resumed run wrote the same bits as the run that was not interrupted."""
    if isinstance(again, str):
        return Proof(what, again, equal=False)
    for step, line in whole.lines.items():
        other = again.lines.get(step, {})
        for key in dict.fromkeys((*line, *other)) if step > after else ():
            was, now = line.get(key), other.get(key)
            if was != now:
                shown = f"{key} of step {step}: {_shown(now)}, and had {_shown(was)}"
                return Proof(what, shown, equal=False)
    for name, tensor in whole.tensors.items():
        if name not in again.tensors or not _same_bits(tensor, again.tensors[name]):
            return Proof(what, f"{name} is another one after the last step", equal=False)
    for name in sorted(again.scalars.keys() ^ whole.scalars.keys()) or [
        n for n, value in whole.scalars.items() if again.scalars[n] != value
    ]:
        return Proof(what, f"the checkpoint's {name} is another one", equal=False)
    return Proof(what, "bit for bit")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
