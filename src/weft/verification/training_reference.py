"""What `weft train` does beside gradients, on one device and by its definition: learning rates,
clipping, steps that are skipped or taken back, validation, and which samples a step has then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from weft.core import TrainConfig
from weft.engine import Loss

from .case import Batch, Case
from .coded_gradients import CodedGradients, GradientExchange
from .delayed_steps import DelayedSteps
from .difference import Bounds
from .noise import NoiseElements
from .plain.averages import PlainAverages
from .plain.experts import numbers_of_experts
from .plain.outliers import times_usual
from .plain.replicas import PlainReplicas
from .plain_run import PlainRun
from .reference import final_state, norms_of

MOST_BACK = 3  # to one checkpoint, after which a run gives up

Line = dict[str, float]  # of metrics.jsonl
T = TypeVar("T")


class GivesUp(Exception):
    """The run would end with an error."""


@dataclass
class Trajectory:
    """A whole run.

    `lines`: of each step, `validations` of those that have one; both as metrics.jsonl has them.
    `norms`: of all gradients of each step. `times`: how many times the usual norm and loss were,
    in the order in which steps were taken. `final`: weights, buffers, optimizer state. `noise`:
    which elements of weights have gradients that are rounding alone. `broken`: laws that what was
    drawn breaks, or the division of samples or of weights among replicas. `bounds`: within which a
    run is equal to it. `best`: the step of the best checkpoint, and its validation loss;
    `saved`: of which steps there are checkpoints.
    """

    lines: dict[int, Line] = field(default_factory=dict)
    validations: dict[int, Line] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    norm_times: list[float] = field(default_factory=list)
    loss_times: list[float] = field(default_factory=list)
    clipped: set[int] = field(default_factory=set)
    taken_back: int = 0  # times
    back_at: int = 0  # the step that the first of these went on from
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()  # names of parameters
    noise: dict[str, Tensor] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    bounds: Bounds = field(default_factory=Bounds)
    best: tuple[int, float] | None = None
    saved: tuple[int, ...] = ()

    def go_back(self, step: int) -> None:
        """Forget the steps after this one."""
        self.back_at = self.back_at or step
        self.taken_back += 1
        self.lines = {n: line for n, line in self.lines.items() if n <= step}
        self.validations = {n: value for n, value in self.validations.items() if n <= step}
        self.clipped = {n for n in self.clipped if n <= step}

    def add(self, step: int, taken: Taken, rules: TrainConfig, rate: float) -> None:
        """What a run writes of this step."""
        self.clipped |= {step} if taken.clips else set()
        line = {"lr": rate, **taken.experts, **({"skipped": 1} if taken.skipped else {})}
        if not taken.skipped:
            line["loss"] = taken.loss
            if rules.clip is not None or rules.skip is not None:
                line["grad_norm"] = taken.norm
        self.lines[step] = line

    def improves(self, step: int) -> bool:
        """Whether the validation after this step, if there is one, is the best so far."""
        loss = self.validations.get(step, {}).get("val_loss", inf)
        if self.best is not None and loss >= self.best[1]:
            return False
        self.best = (step, loss) if loss < inf else None
        return self.best is not None

    @property
    def skipped(self) -> int:
        """How many steps were not taken."""
        return sum("skipped" in line for line in self.lines.values())

    @property
    def happened(self) -> frozenset[str]:
        """What of clip, skip and rollback did something, and not always."""
        found = {"clip"} if 0 < len(self.clipped) < len(self.lines) else set()
        found |= {"skip"} if self.skipped else set()
        return frozenset(found | ({"rollback"} if self.taken_back else set()))


@dataclass
class _State:
    """What a step depends on beside its samples."""

    tensors: dict[str, Any]
    optimizer: dict[str, Any]
    averages: dict[str, Tensor]
    norms: list[float]
    losses: list[float]
    coded: list[tuple[GradientExchange, float | None]]  # what codecs keep
    best: tuple[int, float] | None = None


class Taken(NamedTuple):
    """A step: its loss, the norm of all gradients, whether it was left out, and whether it was
    clipped. `experts`: what is told of them."""

    loss: float
    norm: float
    skipped: bool
    clips: bool
    experts: Line


class Trainee:
    """One who steps: all of a run, or one of its replicas.

    Args:
        case: model, samples, loss, optimizer.
        validation: the batches of each validation.
        in_microbatches: as of PlainRun.
        metrics: that a validation measures beside the loss.

    Attributes:
        coded: from which step on which gradients go through a codec; None: as they are.
        delayed: from which step on which weights are delayed; None: none.
    """

    def __init__(
        self,
        case: Case,
        validation: Sequence[Batch],
        in_microbatches: bool,
        metrics: Mapping[str, Loss],
    ):
        self.case, self.validation = case, validation
        self.metrics = metrics
        self.run = PlainRun(case, in_microbatches)
        self.trained = {n: p for n, p in self.run.params.items() if p.requires_grad}
        self.norms = list[float]()  # of the steps that were accepted
        self.times = 0.0  # how many times the usual norm the last one was
        self.noise = NoiseElements()
        self.coded: dict[int, CodedGradients | None] = {}
        self.delayed: dict[int, DelayedSteps | None] = {}
        self._rates = [group["lr"] for group in self.run.optimizer.param_groups]

    def take(self, step: int, batch: int, factor: float, rules: TrainConfig) -> Taken:
        """A step of the samples of a `batch`. `factor`: of the learning rate."""
        for group, rate in zip(self.run.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        delayed = _of_step(self.delayed, step)
        if delayed is not None:  # such a pipeline neither clips nor leaves steps out
            loss, _ = delayed(step, self.case.whole_batch_of(batch))
            return Taken(loss, 0.0, False, False, numbers_of_experts(self.run.experts.tokens))
        taken = self.compute(step, batch, rules)
        self.run.update(rules.clip if taken.clips else None, taken=not taken.skipped)
        return taken

    def compute(self, step: int, batch: int, rules: TrainConfig) -> Taken:
        """The gradients of a step, before they are clipped."""
        run = self.run
        compute = _of_step(self.coded, step) or run.gradients
        loss, weight = compute(step, self.case.whole_batch_of(batch))
        experts = numbers_of_experts(run.experts.tokens)
        if experts and run.gate_loss:
            experts["gate_loss"] = run.gate_loss / weight
        gradients = {n: p.grad for n, p in run.params.items() if p.grad is not None}
        norm = norms_of(gradients)[0]
        self.noise.add(gradients, norm)
        self.times = times_usual(norm, self.norms)
        skipped = self.times > (rules.skip or inf)
        self.norms += [] if skipped else [norm]
        clips = not skipped and rules.clip is not None and norm > rules.clip
        return Taken(loss, norm, skipped, clips, experts)

    def updates(self, gradients: dict[str, Tensor]) -> None:
        """What is known of an update that comes within a step."""
        self.noise.add(gradients, norms_of(gradients)[0])

    @property
    def codecs(self) -> list[CodedGradients]:
        """Those that it has."""
        return [each for each in self.coded.values() if each is not None]


def train_plainly(
    trainees: Sequence[Trainee],
    rules: TrainConfig,
    rates: Callable[[int], float],
    save_every: int,
    exchange: PlainReplicas | None = None,
    keep_best: bool = False,
) -> Trajectory:
    """Train on this process alone. What is returned is of the first trainee.

    Args:
        trainees: one, or replicas that step by themselves, which are neither averaged nor taken
            back.
        rules: the [train] of the run.
        rates: the factor of the learning rate of each step.
        save_every: steps between checkpoints, to which a run goes back.
        exchange: of weights between replicas.
        keep_best: it saves the checkpoint of the lowest validation loss, too.

    Raises:
        GivesUp: The run goes back to one checkpoint too often.
    """
    first, found = trainees[0], Trajectory()
    run = first.run
    averages = PlainAverages(first.trained, rules.ema or 0.0, rules.ema_warmup)
    losses = list[float]()  # that were accepted
    kept: tuple[int, _State] | None = None
    step = passed = times_back = 0
    last_loss: float | None = None
    while step < rules.steps:
        factor = rates(step)
        taken, *_ = [each.take(step, step + passed, factor, rules) for each in trainees]
        loss, skipped = taken.loss, taken.skipped
        found.grad_norms.append(taken.norm)
        found.norm_times.append(first.times)
        step += 1
        if exchange is not None:
            exchange.after(step, [each.trained for each in trainees])
        if not skipped:
            averages.add(step)
            found.loss_times.append(times_usual(loss, losses))
            if found.loss_times[-1] > (rules.rollback or inf):
                times_back += 1
                if kept is None or times_back > MOST_BACK:
                    raise GivesUp
                back, state = kept
                passed += step - back
                step, first.norms, losses = back, [*state.norms], [*state.losses]
                _restore(first, state)
                averages.values = {**state.averages}
                found.best = state.best
                found.go_back(back)
                continue
            losses.append(loss)
        last_loss = last_loss if skipped else loss
        found.add(step, taken, rules, float(run.optimizer.defaults["lr"]) * factor)
        found.lines[step] |= {"batches_left_out": passed} if passed else {}
        if skipped and last_loss is not None:
            found.lines[step]["loss"] = last_loss
        last = step == rules.steps
        if validates(rules, step):
            with averages.in_place() if rules.ema is not None else nullcontext():
                found.validations[step] = validation_of(trainees)
        better = keep_best and found.improves(step)
        if better or last or step % save_every == 0:
            found.saved = (*found.saved, step)
            kept, times_back = (step, _state_of(first, averages, losses, found.best)), 0
    found.final = final_state(run.model, [run.optimizer], run.params)
    found.final |= averages.state() if rules.ema is not None else {}
    if exchange is not None:
        found.final |= {f"outer/{name}": t for name, t in exchange.state(0).items()}
    found.norms = first.norms if rules.skip is not None else []
    found.losses = losses if rules.rollback is not None else []
    found.weights, found.noise = frozenset(run.params), first.noise.masks()
    return found


def _of_step(each: Mapping[int, T | None], step: int) -> T | None:
    """What holds in a step. `each`: by the step from which on it does."""
    begun = [one for begins, one in each.items() if begins <= step]
    return begun[-1] if begun else None


def validates(rules: TrainConfig, step: int) -> bool:
    """Whether a run validates after this step."""
    return bool(rules.eval_every) and (step == rules.steps or step % rules.eval_every == 0)


def validation_of(trainees: Sequence[Trainee]) -> Line:
    """What a run writes of a validation: means over what each of these has of it."""
    sums = [each.run.evaluate(each.validation, each.metrics) for each in trainees]
    found = {}
    for name in sums[0]:
        total, weight = (sum(one[name][part] for one in sums) for part in (0, 1))
        if weight:  # what never counts has no mean
            found[f"val_{name}"] = total / weight
    return found


def _state_of(
    trainee: Trainee,
    averages: PlainAverages,
    losses: list[float],
    best: tuple[int, float] | None,
) -> _State:
    run = trainee.run
    tensors, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    kept = copy.deepcopy(tensors), copy.deepcopy(optimizer), {**averages.values}
    coded = [each.kept() for each in trainee.codecs]
    return _State(*kept, [*trainee.norms], [*losses], coded, best)


def _restore(trainee: Trainee, state: _State) -> None:
    trainee.run.model.load_state_dict(state.tensors)
    trainee.run.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    for each, kept in zip(trainee.codecs, state.coded, strict=True):
        each.restore(kept)


# ---- limits that a short run reaches -------------------------------------------------------------


def reachable_limits(
    rules: TrainConfig, train: Callable[[TrainConfig], Trajectory]
) -> list[tuple[TrainConfig, Trajectory]]:
    """Rules of one or two runs, and how they train: with a norm to clip at that some steps reach
    and others do not, and with limits of skip, and apart from it of rollback, that one step
    exceeds, if the run sets them."""
    chosen = rules.model_copy(update={"clip": None, "skip": None, "rollback": None})
    found = train(chosen)
    if rules.clip is not None:
        chosen = chosen.model_copy(update={"clip": median(found.grad_norms)})
        found = train(chosen)
    runs = []
    for name, times in (("skip", found.norm_times), ("rollback", found.loss_times)):
        _, *others, most = sorted({0.0, *times}) if any(times) else (0.0, 0.0)
        below = others[-1] if others else 0.0
        # until that step the run is the one that was just seen
        for part in (0.5, 0.9, 0.99) if getattr(rules, name) is not None and most else ():
            limited = chosen.model_copy(update={name: below + part * (most - below)})
            try:
                runs.append((limited, train(limited)))
                break
            except GivesUp:  # the samples after it exceed the limit, too
                continue
    return runs or [(chosen, found)]
