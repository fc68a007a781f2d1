"""Asynchronous parameter servers against one device: the run notes in which order its servers
applied gradients and gave weights, and one device does the same, one update after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from weft.core import (
    REPLICA_AXIS,
    AsyncServers,
    ConfigError,
    Plan,
    bucket_owners,
    chunks_of,
    gather_json,
)
from weft.engine import AsyncServerReplicas, TrainingEngine, UpdateOrder
from weft.launch import Watchdog
from weft.nn import Randomness, is_whole_batch

from .case import Case
from .codec_definitions import DefinedCodec, codec_bounds, describe_codec
from .compare import build, hang_s, make_engine, merge_ranks, order_of, set_trial_aside
from .difference import Difference
from .layout_result import LayoutResult
from .parcels import samples_of
from .plain.draw_laws import DrawLaws, seed_faults
from .plain.functions import PlainFunctions
from .plain.inputs import plain_arguments, plain_inputs
from .plain.samples import division_faults
from .plain.servers import PlainServer, order_faults
from .plain_run import known_positions, loss_of, prepare_plain
from .reference import Reference, final_state, norms_of
from .replica_reference import cases_of_replicas
from .tensor_errors import error_ratio, state_errors, tensor_error

Grads = dict[str, Tensor]
STEPS = 8  # at least: in which workers come to overtake one another
SLOW_S = 1.0  # at most, for a step of a worker that is slow


def replayed_reference(case: Case, layout: str, steps: int) -> Reference:
    """What is known before the run: its case, and how many steps there are. Raises ConfigError."""
    plan = case.lay(case.model(), layout)
    sync = plan.sync
    assert isinstance(sync, AsyncServers)
    if plan.layout.world > plan.layout.replica_count:
        problem = f"in {layout} each rank of a replica has a server, with an order of its own"
        fix = f'verify dp{plan.layout.replica_count}, or with sync.name = "allreduce"'
        raise ConfigError("sync.name", sync.name, problem, fix)
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
    took: list[tuple[float, Grads, Grads]] = []  # loss, gradients, and weights afterwards
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
        [(bool(gave), who) for gave, who in one] for one in gather_json(replicas.order)
    ]
    with torch.random.fork_rng([]):
        own, after = _replay(case, plan, orders, steps)[replicas.index]
    result = _compared(engine, own, after, case, took, layout)
    engine.leave()
    return replace(result, definition=reference.definition)


def _compared(
    engine: TrainingEngine,
    own: Reference,
    after: Sequence[Grads],
    case: Case,
    took: Sequence[tuple[float, Grads, Grads]],
    layout: str,
) -> LayoutResult:
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    differences: list[Difference] = []
    bounds = case.bounds
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
                    parts = chunks_of(engine.segments(name))
                    error = tensor_error(have[name], parts, wanted[name], least)
                errors[kind][what] = error
                if not error < getattr(bounds, kind):
                    differences.append(((step, kind, place), what))
    last, problem = state_errors(engine, own, bounds)
    errors["weight"] |= last
    problem = "; ".join(own.broken) or problem
    first = min(differences, key=order_of, default=None)
    together = merge_ranks(layout, (errors, first, problem, {}, {}))
    return replace(together, steps=len(took), bounds=bounds, apart=True)


# ---- the same on one device ----------------------------------------------------------------------


class _Worker:
    """One replica: the gradient of its samples with the weights that it was given."""

    def __init__(self, case: Case):
        self.case, self.model = case, case.plain_model()
        self.plan = case.lay(self.model, "dp1")
        self.randomness, self.laws = Randomness(case.seed), DrawLaws()
        self.experts = prepare_plain(case, self.model, self.plan, self.randomness)
        self.params = dict(self.model.named_parameters())
        self.inputs = plain_inputs(self.model, case.inputs)
        self.pushed: list[Grads] = []
        self.taken, self.after = 0, list[Grads]()  # weights after each step
        self.found = Reference(tuple(self.params))

    @torch.no_grad()
    def take(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on with the weights that each server gave."""
        for name, value in (item for part in parts for item in part.items()):
            self.params[name].copy_(value)
        if self.taken:
            self.after.append({n: p.detach().clone() for n, p in self.params.items()})
        self.taken += 1

    def push(self) -> None:
        case, plan, step = self.case, self.plan, len(self.pushed)
        batch, sums = case.whole_batch_of(step), torch.zeros(2, dtype=torch.float64)
        self.model.zero_grad(set_to_none=True)
        for m in range(plan.accumulate):
            rows = range(m * plan.microbatch, (m + 1) * plan.microbatch)
            micro = {key: value[rows.start : rows.stop] for key, value in batch.items()}
            self.randomness.begin(step, rows)
            positions = known_positions(self.inputs, micro)
            functions = PlainFunctions(self.randomness, self.laws, None, None, positions)
            with case.mode(), functions.active():
                output = self.model(**plain_arguments(self.inputs, micro))
                part, count, _ = loss_of(case.loss, output, micro)
                sum(functions.added, part).backward()
            sums += torch.stack([part.detach(), torch.as_tensor(count).double()])
        self.experts.move()
        trained = [p for p in self.params.values() if p.grad is not None]
        for p in trained:
            p.grad = p.grad / sums[1] if p.grad is not None else None
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, case.clip)
        grads = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        self.pushed.append(grads)
        self.found.gradients.append(grads)
        self.found.norms.append(norms_of(grads)[0])
        self.found.losses.append(float(sums[0] / sums[1]))


class _Links:
    """What arrives at a server of each worker's gradients: through a codec, if there is one."""

    def __init__(
        self, part: Mapping[str, Tensor], sync: AsyncServers, workers: int, laws: DrawLaws
    ):
        self._shapes = {name: tuple(p.shape) for name, p in part.items()}
        shapes, name = list(self._shapes.values()), next(iter(part))
        coded = range(workers if sync.codec.name != "identity" else 0)
        self.codecs = [
            DefinedCodec(sync.codec, shapes, sync.worker_view(name, worker), laws, of)
            for worker, of in enumerate(f"{name} of worker {n}" for n in coded)
        ]

    def __call__(self, worker: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self.codecs:
            return gradients
        zeros = {n: torch.zeros(s, dtype=torch.float64) for n, s in self._shapes.items()}
        flat = torch.cat([gradients.get(n, zero).flatten() for n, zero in zeros.items()])
        total = self.codecs[worker].plain.total([torch.zeros_like(flat), flat], None)
        parts = total.split([zero.numel() for zero in zeros.values()])
        return {n: part.view(s) for part, (n, s) in zip(parts, self._shapes.items(), strict=True)}


def _replay(
    case: Case, plan: Plan, orders: Sequence[UpdateOrder], steps: int
) -> list[tuple[Reference, list[Grads]]]:
    """The run of each replica, and its weights after each step, by the orders of the servers."""
    sync, count = plan.sync, plan.layout.replica_count
    assert isinstance(sync, AsyncServers)
    cases = cases_of_replicas(case, plan)
    workers = [_Worker(each) for each in cases]
    trained = {n: p.detach() for n, p in workers[0].params.items() if p.requires_grad}
    whose = bucket_owners([p.numel() for p in trained.values()], sync.servers)
    servers, broken, laws = list[PlainServer](), [*case.faults()], DrawLaws()
    broken += division_faults(samples_of(plan, REPLICA_AXIS), plan.batch)
    broken += seed_faults([each.seed for each in cases])
    for number in sorted(set(whose)):
        part = {n: p for (n, p), s in zip(trained.items(), whose, strict=True) if s == number}
        links, order = _Links(part, sync, count, laws), orders[number]
        servers.append(PlainServer(part, case.optimizer, order, count, links))
        faults = order_faults(order, count, steps, sync.staleness)
        broken += [f"server {number}: {fault}" for fault in faults]
    moved = True
    while moved:
        moved = False
        for server in servers:
            moved |= server.go_on([worker.pushed for worker in workers])
        for number, worker in enumerate(workers):
            if all(len(server.given[number]) > worker.taken for server in servers):
                worker.take([server.given[number][worker.taken] for server in servers])
                if len(worker.pushed) < steps:
                    worker.push()
                moved = True
    for number, worker in enumerate(workers):
        final = final_state(worker.model, [], {})
        for server in servers:
            if number == 0:  # it gets what servers have in the end
                final |= {name: p.detach().clone() for name, p in server.params.items()}
            final |= {f"optimizer/{name}/{key}": t for name, key, t in server.state()}
        worker.found.final = final
        worker.found.broken = (*broken, *laws.broken, *worker.laws.broken)
    return [(worker.found, worker.after) for worker in workers]
