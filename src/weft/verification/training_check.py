"""`weft verify --deep`: runs as `weft train` makes them, beside one device's definition of them.

Each layout trains a short run of its own by `weft.train.train`, with its checkpoints, then once
more from one of them, and so do other layouts. What such a run writes is compared: its metrics and
its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.checkpoint import CHECKPOINTS, checkpoint_path
from weft.core import ConfigError, Layout, Plan, PrecisionConfig, RunConfig
from weft.engine import Loss
from weft.launch import ScratchFolder
from weft.train import build_lr_factor, build_sync, on_own_layout, tried_steps

from .case import Batch, Case
from .coded_gradients import codes_gradients
from .delayed_steps import is_delayed
from .run_proofs import Proof, defined_proof, same_proof
from .server_definition import check_servers, is_served
from .trained_run import KEYS, OF_EXPERTS, TrainedRun, train_in
from .training_definition import (
    BACK,
    ONWARD,
    WHOLE,
    TrainingDefinition,
    apart,
    define_training,
    defined_rates,
)
from .training_reference import MOST_BACK, Trajectory

MOST_RATES = 10_000  # steps whose learning rates are computed
HAPPENS = ("clip", "skip", "rollback")
IN_ORDER = "in its order of updates: "


@dataclass(frozen=True)
class TrainingResult:
    """What was proven of training under a layout."""

    layout: str
    proofs: tuple[Proof, ...]
    happened: tuple[str, ...] = ()  # of clip, skip, rollback
    uncoded: str = ""  # why the run's codec was left out
    workers: tuple[str, ...] = ()  # called by RPC

    @property
    def passed(self) -> bool:
        return all(proof.equal for proof in self.proofs)

    def text(self) -> str:
        """A table."""
        mark = "equal" if self.passed else "DIFFERENT"
        rows = [f"  {proof.what:<18}{proof.shown}" for proof in self.proofs]
        workers = f", workers {', '.join(self.workers)}" if self.workers else ""
        return "\n".join([f"{self.layout}{workers}, as weft train runs it: {mark}", *rows])


def check_deep(layout: str, plan: Plan) -> None:
    """Refuse servers whose order no run notes. Raises ConfigError."""
    if is_served(plan):
        check_servers(plan)


def verify_training(
    run: RunConfig,
    case: Case,
    validation: Callable[[int], Sequence[Batch]],
    metrics: Mapping[str, Loss],
    layouts: Sequence[str],
    done: Callable[[TrainingResult], None],
    precision: PrecisionConfig | None = None,
) -> list[TrainingResult]:
    """Hold training under each layout to one device's.

    Args:
        run: the run, in float64.
        case: its model, samples, loss, optimizer.
        validation: the whole batches of a validation of at most so many.
        metrics: that it measures beside the loss, by name.
        layouts: the layouts.
        done: gets each result when it is there.
        precision: in which a run is held to its own resuming, too; None: in none.
    """
    given, results = (run, case, validation, metrics), list[TrainingResult]()
    plain = define_training(*given)
    with ScratchFolder() as scratch:
        alone = Path(scratch.path, "alone")
        on_one = train_in(on_one_device(plain[0].run), alone)
        for number, layout in enumerate(layouts):
            defined = define_training(*given, layout) if _differs(run, case, layout) else plain
            here = Path(scratch.path, str(number))
            try:
                proofs = training_proofs(defined[0], layout, here)
            except ConfigError as error:  # of a codec in the order of updates that the run took
                if error.field != "sync.codec" or defined[0].in_order is None:
                    raise
                defined, here = define_training(*given, layout, error.problem), here / "exact"
                proofs = training_proofs(defined[0], layout, here)
            for another in defined[1:]:
                proofs += training_proofs(another, layout, here / "rollback")
            proofs += other_layout_proofs(defined[0], layout, here, alone)
            if precision is not None and defined[0].in_order is None:
                proofs.append(precision_proof(defined[0], layout, here / "own", precision))
            steps = f"{plain[0].run.train.steps} steps"
            proofs.insert(1, defined_proof(steps, on_one, plain[0].trajectory, note="on dp1: "))
            happened = {proof.happened for proof in proofs} - {""}
            told = tuple(proofs), tuple(sorted(happened)), defined[0].uncoded, tuple(run.workers)
            results.append(TrainingResult(layout, *told))
            done(results[-1])
    return results


def _differs(run: RunConfig, case: Case, layout: str) -> bool:
    """Whether a synchroniser, or delayed weights, make a layout train otherwise than one device."""
    if build_sync(run).plain and Layout.parse(layout).stage_ranks == 1:
        return False
    with torch.random.fork_rng([]):
        plan = case.lay(case.model(), layout)
    return plan.replicas_step_independently or codes_gradients(plan) or is_delayed(plan)


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


# ---- what is compared ----------------------------------------------------------------------------


def training_proofs(defined: TrainingDefinition, layout: str, folder: Path) -> list[Proof]:
    """That a run on a layout does what one device does, and so does one that goes on from its
    checkpoint. The runs are in `folder`."""
    run = on_own_layout(defined.run, layout)
    whole, wanted = train_in(run, folder / "whole"), _written(run, defined.trajectory)
    saved, note, away = None, "", defined.runs_nearby(WHOLE)
    coded = bool(defined.codec)
    if defined.in_order is not None and isinstance(whole, TrainedRun):
        wanted, saved = defined.in_order(whole.orders, None)
        note = IN_ORDER
        away = defined.runs_in_order(whole.orders, None)
    proofs = [defined_proof(f"{run.train.steps} steps", whole, wanted, 0, note, away, coded)]
    proofs += _exercised(run, wanted, defined.full)
    if defined.replicas > 1:
        options = ", ".join(f"{key} {value}" for key, value in run.sync.arguments.items())
        what = f"{defined.replicas}, by {run.sync.name}{f', {options}' if options else ''}"
        proofs.append(Proof("replicas", what))
    if defined.delays:
        proofs.append(Proof("delayed weights", f"{defined.delays}, by their own definition"))
    if defined.codec:
        shown = f"{defined.codec}, by its own definition, with what it keeps from step to step"
        shown += "" if defined.in_order is None else ", which no checkpoint has"
        proofs.append(Proof("codec", shown))
    if defined.uncoded:
        proofs.append(Proof("codec", f"identity instead: {defined.uncoded}"))
    if isinstance(whole, TrainedRun):
        again = train_in(run, folder / "again", folder / "whole")
        resumed = f"resumed at {defined.step}"
        if defined.in_order is None:
            proofs.append(same_proof(resumed, again, whole, defined.step))
            proofs += _resumed_after_going_back(defined, run, whole, folder)
        else:  # another order
            away = None
            if isinstance(again, TrainedRun):
                wanted, _ = defined.in_order(again.orders, saved)
                away = defined.runs_in_order(again.orders, saved)
            given = again, wanted, defined.step, IN_ORDER, away, coded
            proofs.append(defined_proof(resumed, *given))
    return proofs


def _resumed_after_going_back(
    defined: TrainingDefinition, run: RunConfig, whole: TrainedRun, folder: Path
) -> list[Proof]:
    """That a run goes on from the first checkpoint after it has gone back, if it has one."""
    step = (defined.trajectory.back_at // defined.step + 1) * defined.step
    if not defined.trajectory.taken_back or step >= run.train.steps:
        return []
    again = train_in(run, folder / "after", folder / "whole", step)
    return [same_proof(f"resumed at {step}", again, whole, step)]


def other_layout_proofs(
    defined: TrainingDefinition, layout: str, folder: Path, alone: Path
) -> list[Proof]:
    """That a checkpoint of this layout, below `folder`, goes on on one device; and one device's,
    below `alone`, on this layout. Replicas that step by themselves go on on one device each.
    `alone`: of a run with the same limits, unless there is a codec."""
    here = on_own_layout(defined.run, layout)
    if defined.replicas == 1 and not defined.codec:
        there = on_one_device(defined.run)
        return _resumed(defined, here, there, folder / "whole", alone)
    there = on_own_layout(defined.run, apart(defined.replicas))
    if here.layout == there.layout:
        return []
    begun = train_in(there, folder / "apart")
    found = _resumed(defined, here, there, folder / "whole", folder / "apart")
    if isinstance(begun, str):
        shown = f"from {there.layout.axes}: {begun}"
        found.append(Proof(f"resumed at {defined.step}", shown, equal=False))
    return found


def precision_proof(
    defined: TrainingDefinition, layout: str, folder: Path, precision: PrecisionConfig
) -> Proof:
    """That a run in this precision goes on from its checkpoint as if it had not ended. What it
    computes is held to no definition, and whether it would take steps back is not known."""
    train = defined.run.train.model_copy(update={"rollback": None})
    update = {"precision": precision, "train": train}
    run = on_own_layout(defined.run.model_copy(update=update), layout)
    what = f"in {precision.compute}"
    whole = train_in(run, folder / "whole")
    if isinstance(whole, str):
        return Proof(what, whole, equal=False)
    again = train_in(run, folder / "again", folder / "whole")
    found = same_proof(what, again, whole, defined.step)
    return replace(found, shown=f"resumed at {defined.step}: {found.shown}")


def _written(run: RunConfig, wanted: Trajectory) -> Trajectory:
    """What of it a run writes: with [workers] nothing of experts."""
    if not run.workers:
        return wanted
    lines = {n: {k: v for k, v in line.items() if k in KEYS} for n, line in wanted.lines.items()}
    return replace(wanted, lines=lines)


def on_one_device(run: RunConfig) -> RunConfig:
    """The run where one process has all modules."""
    return on_own_layout(run.model_copy(update={"workers": {}}), "dp1")


def _resumed(
    defined: TrainingDefinition, here: RunConfig, there: RunConfig, whole: Path, theirs: Path
) -> list[Proof]:
    """That the run `here`, which is in `whole`, goes on `there`, and that one, which is in
    `theirs`, goes on here."""
    step, found = defined.step, list[Proof]()
    for note, on, begin, wanted, part in (
        ("on", there, whole, defined.onward, ONWARD),
        ("from", here, theirs, defined.back, BACK),
    ):
        what, of = f"resumed at {step}", f"{note} {there.layout.axes}: "
        if wanted is None:
            why = f"left out, as this run goes back to one checkpoint more than {MOST_BACK} times"
            found.append(Proof(what, of + why))
        elif checkpoint_path(begin / CHECKPOINTS, step).exists():
            again = train_in(on, whole.parent / note, begin)
            away = defined.runs_nearby(part)
            given = again, _written(on, wanted), step, of, away, bool(defined.codec)
            found.append(defined_proof(what, *given))
    return found


def _exercised(run: RunConfig, wanted: Trajectory, full: RunConfig) -> list[Proof]:
    """What happened in the steps. `full`: whose learning rates are to be those of its schedule."""
    t, found = run.train, list[Proof]()
    happened = {name: name if name in wanted.happened else "" for name in HAPPENS}
    faults = rate_faults(full)
    shown = "; ".join(faults) or rate_text(full)
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
    if wanted.best is not None:
        found.append(Proof("best", f"the checkpoint of step {wanted.best[0]}, which is saved"))
    return found
