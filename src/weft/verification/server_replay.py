"""Asynchronous parameter servers against one device: the run notes in which order its servers
applied gradients and gave weights, and one device does the same, one update after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from weft.core import (
    AsyncServers,
    Chunk,
    ConfigError,
    Plan,
    chunks_of,
    gather_json,
    whole_shard,
)
from weft.engine import AsyncServerReplicas, TrainingEngine, UpdateOrder
from weft.launch import Watchdog
from weft.nn import is_whole_batch

from .case import Case
from .codec_definitions import codec_bounds, describe_codec
from .compare import build, hang_s, make_engine, merge_ranks, order_of, set_trial_aside
from .difference import Bounds, Difference
from .layout_result import LayoutResult
from .plain.draw_laws import DrawLaws, seed_faults
from .plain.servers import ServedState
from .plain_run import PlainRun
from .reference import Reference, final_state, norms_of
from .replica_reference import cases_of_replicas
from .rounding import (
    RUNS,
    errors_beyond,
    final_errors,
    largest_errors,
    nearby,
    within_rounding,
)
from .server_definition import (
    PlainWorker,
    begin_servers,
    check_servers,
    replay,
    replay_faults,
)
from .tensor_errors import error_ratio, state_errors, tensor_error

Grads = dict[str, Tensor]
Step = tuple[float, Grads, Grads]  # loss, gradients, and weights afterwards
Replayed = tuple[Reference, list[Grads]]  # what a replica did, and its weights after each step
STEPS = 8  # at least: in which workers come to overtake one another
SLOW_S = 1.0  # at most, for a step of a worker that is slow


def replayed_reference(case: Case, layout: str, steps: int) -> Reference:
    """What is known before the run: its case, and how many steps there are. Raises ConfigError."""
    plan = case.lay(case.model(), layout)
    sync = plan.sync
    assert isinstance(sync, AsyncServers)
    check_servers(plan)
    if is_whole_batch(case.loss):
        problem = "a replica's gradient is not that of its samples: the loss takes a whole batch"
        raise ConfigError("sync.name", sync.name, problem, 'verify with name = "allreduce"')
    bound = "any staleness" if sync.staleness is None else f"staleness {sync.staleness}"
    definition = f"{sync.name}, asynchronous, servers {sync.servers}, {bound}, updates in the"
    definition += f" order of the run, gradients in {describe_codec(sync.codec)}"
    case = replace(case, within=codec_bounds(sync.codec, 2))
    losses = [0.0] * max(steps, STEPS)
    return Reference((), losses=losses, case=case, definition=definition, replayed=True)


def check_replayed(case: Case, layout: str, reference: Reference) -> LayoutResult:
    """Run the case under `layout` in this process group, then replay it on each."""
    case, steps = reference.case or case, len(reference.losses)
    model, plan = build(case, layout, None)
    engine = make_engine(case, plan, model)
    set_trial_aside(engine)
    replicas = engine.replicas
    assert isinstance(replicas, AsyncServerReplicas)
    replicas.order = []
    took: list[Step] = []
    with Watchdog(hang_s(case, layout, reference)) as watchdog:
        for step in range(steps):
            batch = case.batch_of(step, engine.data_rank, engine.data_size)
            begun = time.monotonic()
            with case.mode():
                taken = engine.step(batch)
            # each replica is slow in turn, so that others overtake it
            turn = (replicas.index + step // 2) % plan.layout.replica_count
            time.sleep(min(SLOW_S, turn * (time.monotonic() - begun)))
            grads = {n: p.grad.clone() for n, p in engine.params.items() if p.grad is not None}
            weights = {n: p.detach().clone() for n, p in engine.params.items()}
            took.append((float(taken.loss), grads, weights))
            watchdog.beat(f"step {step}")
        engine.gather(last=True)
    orders: list[UpdateOrder] = [
        [(str(what), int(who)) for what, who in one] for one in gather_json(replicas.order)
    ]
    with torch.random.fork_rng([]):
        replayed = _replay(case, plan, orders, steps)
        own, after = replayed[replicas.index]
        result = _compared(engine, own, after, case, took, layout)
        if result.beyond and case.bounds == Bounds():
            result = within_rounding(result, _rounding(case, plan, orders, replayed))
    engine.leave()
    return replace(result, definition=reference.definition)


def _compared(
    engine: TrainingEngine,
    own: Reference,
    after: Sequence[Grads],
    case: Case,
    took: Sequence[Step],
    layout: str,
) -> LayoutResult:
    bounds = case.bounds
    parts = {name: chunks_of(engine.segments(name)) for name in engine.params}
    errors, differences = _step_errors(own, after, took, parts, bounds)
    last, problem = state_errors(engine, own, bounds)
    errors["weight"] |= last
    problem = "; ".join(own.broken) or problem
    first = min(differences, key=order_of, default=None)
    together = merge_ranks(layout, (errors, first, problem, {}, {}))
    together = replace(together, beyond=errors_beyond(errors, differences, bounds))
    return replace(together, steps=len(took), bounds=bounds, apart=True)


def _step_errors(
    own: Reference,
    after: Sequence[Grads],
    took: Sequence[Step],
    parts: Mapping[str, tuple[Chunk, ...]],
    bounds: Bounds,
) -> tuple[dict[str, dict[str, float]], list[Difference]]:
    """Errors by kind and name, and those that are too large, of what a replica did in each step.

    Args:
        own: what it does by the definition.
        after: its weights after each step by the definition.
        took: what it did.
        parts: of each weight that it holds.
        bounds: within which both are equal.
    """
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    differences: list[Difference] = []
    for step, (loss, grads, weights) in enumerate(took):
        if step >= min(len(own.losses), len(after)):
            break  # the servers' order ends here, which a law has named
        want, what = own.losses[step], f"loss of step {step}"
        errors["loss"][what] = error = error_ratio(abs(loss - want), abs(want))
        if not error < bounds.loss:
            what = f"{what}: {loss:.9g}, one device has {want:.9g}"
            differences.append(((step, "loss", 0), what))
        norm, (_, typical) = norms_of(own.gradients[step])[0], norms_of(after[step])
        for place, (name, weight) in enumerate(weights.items()):
            floor = bounds.typical * typical * weight.numel() ** 0.5
            for kind, have, wanted, least in (
                ("gradient", grads, own.gradients[step], bounds.small * norm),
                ("weight", weights, after[step], floor),
            ):
                if name not in have and name not in wanted:
                    continue
                what, error = f"{kind} of {name} in step {step}", inf
                if name in have and name in wanted:
                    error = tensor_error(have[name], parts[name], wanted[name], least)
                errors[kind][what] = error
                if not error < getattr(bounds, kind):
                    differences.append(((step, kind, place), what))
    return errors, differences


def _rounding(
    case: Case, plan: Plan, orders: Sequence[UpdateOrder], replayed: Sequence[Replayed]
) -> dict[str, float]:
    """How far replays whose weights begin a few roundings away come from this one, at most."""
    found, steps = [], len(replayed[0][1])
    for seed in range(RUNS):
        again = _replay(nearby(case, seed), plan, orders, steps)
        for (own, after), (other, others) in zip(replayed, again, strict=True):
            took = [*zip(other.losses, other.gradients, others, strict=True)]
            parts = {n: whole_shard(n, w).chunks for n, w in others[0].items()}
            errors, _ = _step_errors(own, after, took, parts, case.bounds)
            found += [*errors.values(), final_errors(own, other, own.parameters, case.bounds)]
    return largest_errors(found)


# ---- the same on one device ----------------------------------------------------------------------


@dataclass
class _Worker:
    """One replica, and what it did."""

    case: Case
    run: PlainRun
    found: Reference
    after: list[Grads] = field(default_factory=list)  # weights after each step

    def gradients(self, step: int) -> Grads:
        loss, _ = self.run.gradients(step, self.case.whole_batch_of(step))
        self.run.experts.move()
        trained = {n: p for n, p in self.run.params.items() if p.grad is not None}
        if self.case.clip is not None:
            torch.nn.utils.clip_grad_norm_(trained.values(), self.case.clip)
        grads = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        self.found.gradients.append(grads)
        self.found.norms.append(norms_of(grads)[0])
        self.found.losses.append(loss)
        return grads

    def ended(self, step: int) -> None:
        self.after.append({n: p.detach().clone() for n, p in self.run.params.items()})


def _replay(case: Case, plan: Plan, orders: Sequence[UpdateOrder], steps: int) -> list[Replayed]:
    """The run of each replica, and its weights after each step, by the orders of the servers."""
    cases, laws = cases_of_replicas(case, plan), DrawLaws()
    runs = [PlainRun(each, in_microbatches=True) for each in cases]
    workers = [
        _Worker(own, run, Reference(tuple(run.params)))
        for own, run in zip(cases, runs, strict=True)
    ]
    trained = {n: p.detach() for n, p in runs[0].params.items() if p.requires_grad}
    servers = begin_servers(plan, case.optimizer, ServedState(trained, {}), orders, laws)
    broken = [*case.faults(), *seed_faults([each.seed for each in cases])]
    broken += replay_faults(plan, {number: orders[number] for number in servers}, steps, shown=1)
    ways = [(worker.gradients, worker.ended) for worker in workers]
    replay(
        list(servers.values()),
        [PlainWorker(run, steps, *way, saves=_never) for run, way in zip(runs, ways, strict=True)],
    )
    for number, worker in enumerate(workers):
        final = final_state(worker.run.model, [], {})
        for server in servers.values():
            now = server.now()
            final |= now.weights if number == 0 else {}  # it gets what servers have in the end
            final |= now.named_state()
        worker.found.final = final
        worker.found.broken = (*broken, *laws.broken, *worker.run.laws.broken)
    return [(worker.found, worker.after) for worker in workers]


def _never(step: int) -> bool:
    return False
