"""A run of `weft train` under asynchronous parameter servers, on one device: the same updates in
the order that its servers have noted, with the rates, clipping and validation of its run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.core import Plan, TrainConfig
from weft.engine import Loss, UpdateOrder

from .case import Batch, Case
from .plain.draw_laws import DrawLaws, seed_faults
from .plain.servers import PlainServer, ServedState, order_in_turns
from .reference import final_state
from .replica_reference import cases_of_replicas
from .rounding import nearby, rounded
from .server_definition import PlainWorker, begin_servers, replay, replay_faults
from .trainees import bounds_of, near_by
from .training_reference import Trainee, Trajectory, validates, validation_of


@dataclass
class _TrainingWorker:
    """A replica that trains from the step after `begun`, and what it does. `validates`: it is the
    one that does, of all replicas."""

    trainee: Trainee
    rules: TrainConfig
    rates: Callable[[int], float]
    begun: int
    validates: bool
    found: Trajectory = field(default_factory=Trajectory)

    def gradients(self, n: int) -> dict[str, Tensor]:
        step, run = self.begun + n, self.trainee.run
        taken = self.trainee.compute(step, step, self.rules)
        if taken.clips and self.rules.clip is not None:
            torch.nn.utils.clip_grad_norm_(run.params.values(), self.rules.clip)
        run.experts.move()
        self.found.grad_norms.append(taken.norm)
        rate = float(run.optimizer.defaults["lr"]) * self.rates(step)
        self.found.add(step + 1, taken, self.rules, rate)
        return {name: p.grad.clone() for name, p in run.params.items() if p.grad is not None}

    def ended(self, n: int) -> None:
        step = self.begun + n
        if self.validates and validates(self.rules, step):
            self.found.validations[step] = validation_of([self.trainee])


def train_in_order(
    case: Case,
    plan: Plan,
    validation: Sequence[Batch],
    metrics: Mapping[str, Loss],
    rules: TrainConfig,
    rates: Callable[[int], float],
    save_every: int,
    orders: Sequence[UpdateOrder] | None = None,
    begun: ServedState | None = None,
    seed: int | None = None,
) -> tuple[Trajectory, ServedState]:
    """Train the replicas of a plan. Returns what the first one does, and what is saved at the
    first checkpoint.

    Args:
        case: model, samples, loss, optimizer.
        plan: of all replicas.
        validation: the batches of each validation.
        metrics: that a validation measures beside the loss.
        rules: the [train] of the run.
        rates: the factor of the learning rate of each step.
        save_every: steps between checkpoints.
        orders: what each server did; None: all take one step after the other.
        begun: the checkpoint from which they go on, without what codecs had kept; None: they begin.
        seed: of changes by a few roundings, of the weights at the beginning and of what codecs
            encode.
    """
    if seed is not None:
        case, begun = nearby(case, seed), begun and _rounded(begun, seed)
    cases, laws, count = cases_of_replicas(case, plan), DrawLaws(), plan.layout.replica_count
    # the first replica validates for all, one part of a batch after the other
    parts = [part for batch in validation for part in _divided(batch, count)]
    trainees = [Trainee(own, parts, True, metrics) for own in cases]
    begun = begun or ServedState({n: p.detach() for n, p in trainees[0].trained.items()}, {})
    for trainee in trainees:
        trainee.run.model.load_state_dict({**begun.weights, **begun.buffers}, strict=False)
    first, steps = begun.step, rules.steps - begun.step
    saves = {n for n in range(1, steps + 1) if n == steps or (first + n) % save_every == 0}
    orders = orders or [order_in_turns(count, steps, saves.__contains__)] * count
    factor = _later(rates, first)
    near = near_by(plan, seed)
    servers = begin_servers(plan, case.optimizer, begun, orders, laws, factor, near)
    saved = [begun]

    def keep(n: int) -> None:
        if n == min(saves):
            saved.append(_saved([*servers.values()], first + n, trainees[0]))

    workers = [
        _TrainingWorker(trainee, rules, rates, first, validates=number == 0)
        for number, trainee in enumerate(trainees)
    ]
    replay(
        list(servers.values()),
        [
            PlainWorker(
                each.trainee.run,
                steps,
                each.gradients,
                each.ended,
                saves.__contains__ if each.validates else _never,
                keep,
            )
            for each in workers
        ],
    )
    found = workers[0].found
    found.final = final_state(trainees[0].run.model, [], {})
    for server in servers.values():
        now = server.now()
        found.final |= now.weights | now.named_state()
    found.weights, found.noise = frozenset(trainees[0].run.params), trainees[0].noise.masks()
    noted = {number: orders[number] for number in servers}
    broken = [*seed_faults([each.seed for each in cases]), *laws.broken]
    broken += replay_faults(plan, noted, steps, shown=len(saves))
    broken += [law for each in trainees for law in each.run.laws.broken]
    found.broken, found.bounds = tuple(dict.fromkeys(broken)), bounds_of(plan)
    return found, saved[-1]


def _saved(servers: Sequence[PlainServer], step: int, first: Trainee) -> ServedState:
    """What the servers showed last, and buffers of the first replica."""
    model, found = first.run.model, ServedState({}, {}, step)
    kept = model.state_dict()
    found.buffers = {n: b.clone() for n, b in model.named_buffers() if n in kept}
    weights = {n: w for server in servers for n, w in server.shown[-1].weights.items()}
    found.weights = {name: weights[name] for name in first.trained}  # in the model's order
    for server in servers:
        found.state |= server.shown[-1].state
    return found


def _rounded(begun: ServedState, seed: int) -> ServedState:
    """The same with weights that are a few roundings away."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: rounded(value, generator) for name, value in begun.weights.items()}
    return replace(begun, weights=weights)


def _divided(batch: Batch, count: int) -> list[Batch]:
    each = [value.chunk(count) for value in batch.values()]
    return [dict(zip(batch, values, strict=True)) for values in zip(*each, strict=True)]


def _later(rates: Callable[[int], float], first: int) -> Callable[[int], float]:
    return lambda n: rates(first + n)


def _never(step: int) -> bool:
    return False
