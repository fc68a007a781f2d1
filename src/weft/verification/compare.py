"""One layout against the one-device run: loss, every gradient, every weight, and which module
differs first.

Runs in every rank of the layout. A rank compares what it holds with its part of the reference, so
nothing is gathered but errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    DRIVER,
    STAGE_AXIS,
    Layout,
    Plan,
    Refusal,
    data_rank_indices,
    is_inside,
)
from weft.engine import (
    Audit,
    CompileCounts,
    CompiledBlocks,
    Engine,
    Remote,
    TrainingEngine,
    refuse_what_does_not_run,
)
from weft.launch import rpc_session
from weft.parallel import (
    DATA_AXES,
    BoundaryShape,
    CallSizes,
    Collective,
    RoutingCall,
    SequenceInput,
    collective_totals,
    dim_of_positions,
    predict_collectives,
    whole_batch_comms,
)
from weft.train import LEAST_S, RARE_S, TIMES, Watchdog

from .activation_errors import first_activation
from .activation_recorder import ActivationRecorder, record_activations
from .case import Case
from .difference import Bounds, Difference
from .reference import Reference
from .stage_values import stage_value_bytes
from .tensor_errors import error_ratio, gradient_differences, state_errors, weight_errors


@dataclass(frozen=True)
class LayoutResult:
    """What one layout's run showed. Errors are relative.

    `first` is what differs first in the order of the run: a batch entry, a module, the loss, a
    parameter. `problem` is state that does not lie where the plan says, or not once. `workers`:
    called by RPC, which nothing audits.
    """

    layout: str
    loss_rel_err: float
    grad_rel_err: float
    param_rel_err: float
    worst: str
    first: str | None
    comms_predicted: dict[tuple[str, str], tuple[int, int]]
    comms_seen: dict[tuple[str, str], tuple[int, int]]
    problem: str | None = None
    delayed: bool = False  # held to one device with the same delays, not to the plain run
    workers: tuple[str, ...] = ()
    compiled: CompileCounts | None = None  # in the steps after the first
    bounds: Bounds = field(default_factory=Bounds)
    refused: str | None = None  # why it cannot run

    @property
    def passed(self) -> bool:
        errors = (self.loss_rel_err, self.grad_rel_err, self.param_rel_err)
        named = (self.first, self.problem, self.stray)
        within = (self.bounds.loss, self.bounds.gradient, self.bounds.weight)
        equal = all(e < bound for e, bound in zip(errors, within, strict=True))
        return equal and all(name is None for name in named)

    @property
    def stray(self) -> str | None:
        """The first collective that ran otherwise than the plan predicts."""
        for key in sorted({**self.comms_predicted, **self.comms_seen}):
            want, ran = self.comms_predicted.get(key, (0, 0)), self.comms_seen.get(key, (0, 0))
            if want != ran:
                kind, axis = key
                return (
                    f"{kind} over {axis}: {ran[0]} ran ({ran[1]:,} B), predicted were {want[0]}"
                    f" ({want[1]:,} B)"
                )
        return None


def failed_result(layout: str, problem: str) -> LayoutResult:
    """A layout that gives no numbers."""
    return LayoutResult(layout, inf, inf, inf, "nothing was computed", None, {}, {}, problem)


def refused_result(layout: str, reason: Exception) -> LayoutResult:
    """A layout that cannot run, while others can."""
    return replace(failed_result(layout, f"is refused: {reason}"), refused=str(reason))


def check_layout(case: Case, layout: str, reference: Reference) -> LayoutResult:
    """Run the case under `layout` in this process group; the result, the same on every rank."""
    with rpc_session((DRIVER, *case.workers)) if case.workers else nullcontext():
        return _check(case, layout, reference)


def _hang_s(case: Case, layout: str, reference: Reference) -> float:
    """Seconds without a step that are a hang. All ranks may share the cores of the reference."""
    if case.hang_s is not None:
        return case.hang_s
    if case.compile != "off":
        return RARE_S
    return max(LEAST_S, TIMES * Layout.parse(layout).world * reference.slowest_s)


def _build(case: Case, layout: str, plan: Plan | None) -> tuple[nn.Module, Plan]:
    """The model, without weights where that is possible, as ranks train it; and its plan if there
    is none."""
    if not case.workers:
        with suppress(Refusal):
            model = case.without_weights()
            return model, plan or case.lay(model, layout)
    model = case.model()
    return model, plan or case.lay(model, layout)


def _engine(case: Case, plan: Plan, model: nn.Module) -> TrainingEngine:
    if case.workers:
        remote = Remote(
            model,
            plan,
            case.workers,
            optimizer=case.optimizer,
            loss=case.loss,
            inputs=case.inputs,
            clip=case.clip,
            seed=case.seed,
        )
        remote.around = (case.mode,)
        return remote
    engine = Engine(
        model,
        plan,
        optimizer=case.optimizer,
        loss=case.loss,
        inputs=case.inputs,
        clip=case.clip,
        seed=case.seed,
        device="cpu",
        compile=case.compile,
    )
    engine.trial = None  # what differs is to be named
    return engine


def _check(case: Case, layout: str, reference: Reference) -> LayoutResult:
    model, plan = _build(case, layout, reference.plan)
    engine = _engine(case, plan, model)
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    found = _other_parameters(engine, reference)
    seen: list[Collective] = []
    compiled_seen: list[Collective] = []
    compiled = engine.compiled if isinstance(engine, Engine) and engine.compiled else None
    with Watchdog(_hang_s(case, layout, reference)) as watchdog:
        for step, loss in enumerate(reference.losses):
            batch = case.batch_of(step, engine.mesh.index(*DATA_AXES), plan.data_size)
            found += _wrong_batch(engine, batch, reference.batches[step], step)
            if step == 0:
                with (
                    case.mode(),
                    Audit(engine.mesh, engine.now) as audit,
                    record_activations(engine.model, plan.microbatch, engine.now) as trace,
                    compiled.paused() if compiled is not None else nullcontext(),
                    refuse_what_does_not_run(engine.model, plan),
                ):
                    result = engine.step(batch)
                seen = audit.seen if isinstance(engine, Engine) else []
                found += first_activation(engine, trace, reference.traces, case.bounds.activation)
            else:
                with case.mode(), Audit(engine.mesh, engine.now) as audit:
                    result = engine.step(batch)
                compiled_seen = audit.seen
            watchdog.beat(f"step {step}")
            errors["loss"][f"loss of step {step}"] = error = error_ratio(
                abs(float(result.loss) - loss), abs(loss)
            )
            if not error < case.bounds.loss:
                differs = (
                    f"loss of step {step}: {float(result.loss):.9g}, one device has {loss:.9g}"
                )
                found.append(((step, "loss", 0), differs))
            found += gradient_differences(
                engine, reference, step, case, result.grad_norm, errors["gradient"]
            )
            if step == 0:
                errors["weight"] = updated = weight_errors(
                    engine, reference.updated, "after step 0", reference, case.bounds
                )
                found += _first_of(updated, (step, "weight"), case.bounds.weight)
    last, problem = state_errors(engine, reference, case.bounds)
    problem = "; ".join(reference.broken) or problem
    found += _first_of(last, (len(reference.losses), "weight"), case.bounds.weight)
    errors["weight"] |= last
    predicted = (
        _predict_collectives_of(case, engine, reference, trace)
        if isinstance(engine, Engine)
        else []
    )
    totals, ran = collective_totals(predicted), collective_totals(seen)
    if plan.dynamic_shapes:  # how much crosses stages, the data say
        totals |= {
            key: ran[key]
            for key, (count, _) in totals.items()
            if key[1] == STAGE_AXIS and key in ran and ran[key][0] == count
        }
    first = min(found, key=_order_of, default=None)
    if compiled is not None:
        problem = problem or _compiled_problem(compiled, predicted, compiled_seen)
    together = _merge_ranks(layout, (errors, first, problem, totals, ran))
    counts = None if compiled is None or len(reference.losses) < 2 else compiled.counts
    together = replace(together, compiled=counts)
    delayed, workers = reference.plan is not None, tuple(case.workers)
    return replace(together, delayed=delayed, workers=workers, bounds=case.bounds)


def _compiled_problem(
    compiled: CompiledBlocks, predicted: list[Collective], seen: list[Collective]
) -> str | None:
    """What is wrong with the compiled steps beside numbers. A compiler may drop a collective whose
    result it has already; it may not add one."""
    if seen and not compiled.counts.graphs:
        return "nothing was compiled"
    wanted = collective_totals(predicted)
    for (kind, axis), (count, _) in collective_totals(seen).items():
        most = wanted.get((kind, axis), (0, 0))[0]
        if count > most:
            return f"compiled: {kind} over {axis}: {count} ran, predicted were {most}"
    return None


def _predict_collectives_of(
    case: Case, engine: Engine, reference: Reference, trace: ActivationRecorder
) -> list[Collective]:
    """The collectives of a step on this rank."""
    values = stage_value_bytes(case, engine.plan, reference.batches[0])
    gathered = (n for place, n in reference.loss_bytes if place not in engine.plan.pairs)
    loss = whole_batch_comms(engine.plan, engine.mesh.rank, gathered)
    comms = predict_collectives(
        engine.plan,
        _crossings_with_labels(engine.plan, reference),
        engine.plan.dtypes.computed(case.dtype).itemsize,
        reference.unreached,
        engine.buffers.nbytes,
        engine.mesh.rank,
        values,
        [*reference.traces[0].cores, *_sequence_inputs(engine, reference.batches[0], trace)],
        _routings(reference.traces),
        reference.traces[0].asked,
        engine.updated_whole,
        _module_calls(engine.plan, reference.traces[0], trace),
    )
    return [*comms, *loss]


def _crossings_with_labels(plan: Plan, reference: Reference) -> dict[str, BoundaryShape]:
    """What crosses the boundaries of modules. Of several heads, the first has all labels."""
    crossings = dict(reference.traces[0].crossings)
    heads = [s.module for s in plan.steps if s.output is not None and s.output.typed]
    labels = reference.labels
    for head in heads if labels else ():
        if head in crossings:
            crossings[head], labels = replace(crossings[head], labels=labels), ()
    return crossings


def _sequence_inputs(
    engine: Engine, batch: dict[str, Tensor], trace: ActivationRecorder
) -> Iterator[SequenceInput]:
    """What enters the modules that compute on whole sequences, in one microbatch on this rank."""
    names = [step.module for step in engine.rank_plan.steps if step.whole_sequence]
    whole = {engine.model.get_submodule(name) for name in names}
    if not whole or not engine.sequence:
        return
    here = engine.sequence.length(batch) // engine.plan.sequence_size
    for name, module in engine.model.named_modules():
        entered = trace.entered.get(name, []) if module in whole else []
        for each in entered[: len(entered) // engine.plan.accumulate]:
            if dim_of_positions(each.shape, here) is not None:
                yield each


def _module_calls(
    plan: Plan, whole: ActivationRecorder, trace: ActivationRecorder
) -> dict[str, CallSizes]:
    """How often each module is called; and with how much, on this rank, where that differs from
    call to call, or one device's shapes do not tell: a Python loop over experts calls each with the
    tokens that chose it."""
    gathered = {step.module for step in plan.steps if step.gather is not None}
    order = [
        (n, i in whole.reached, i in whole.needing)
        for i, n in enumerate(whole.forward)
        if n in gathered
    ]
    again = _regathered(order)
    repeated = {n: (whole.called_again[n], whole.left_again[n]) for n in whole.calls}
    found = {n: CallSizes(count, (), again[n], repeated[n]) for n, count in whole.calls.items()}
    for name, shapes in whole.shapes.items():
        crossing, mine = whole.crossings[name], trace.shapes.get(name, [])
        chosen = any(name == each or is_inside(name, each) for each in plan.chosen)
        flat = len(shapes[0][0]) == 2 and not crossing.batched
        if len(set(shapes)) > 1 and not chosen and crossing.batched and plan.sequence_size == 1:
            here, all_ = plan.microbatch, crossing.samples
            sizes = tuple((prod(a) * here // all_, prod(b) * here // all_) for a, b in shapes)
            found[name] = replace(found[name], sizes=sizes * plan.accumulate)
        if crossing.entered is None or not (chosen or flat):
            continue
        rows = shapes[0][0][0]
        usual = {rows, rows * plan.microbatch // crossing.samples}
        chosen = chosen or any(entered and entered[0] not in usual for entered, _ in mine)
        if chosen and plan.sequence_size == 1 and not plan.sliced(name):
            sizes = tuple((prod(entered), prod(left)) for entered, left in mine)
            count = len(shapes) if sizes else 0
            found[name] = replace(found[name], count=count, sizes=sizes)
    return found


def _regathered(order: list[tuple[str, bool, bool]]) -> Counter[str]:
    """How often backward gathers each unit. When FSDP2 comes to a unit, it gathers that of the call
    before, too, also if backward does not come there (`FSDPParamGroup._backward_prefetch`). A
    unit is freed where the gradient of what entered the call is made, else when backward ends.

    Args:
        order: (unit, whether backward comes to it, whether what enters needs a gradient) of the
            calls of a forward.
    """
    count: Counter[str] = Counter()
    gathered: set[str] = set()
    open_units: set[str] = set()  # a call of theirs is not done
    for place in reversed(range(len(order))):
        name, reached, needs = order[place]
        if reached and name not in open_units:
            for unit in (name, *(before for before, _, _ in order[max(0, place - 1) : place])):
                count[unit] += unit not in gathered
                gathered.add(unit)
            open_units.add(name)
        if reached and needs:
            gathered.discard(name)
            open_units.discard(name)
    return count


# ---- the order of a run: what differs first explains the rest ------------------------------------

ORDER = ("parameter", "batch", "output", "loss", "output gradient", "gradient", "norm", "weight")


def _order_of(difference: Difference) -> tuple[int, int, int]:
    (step, what, place), _ = difference
    return step, ORDER.index(what), place


def _first_of(errors: dict[str, float], when: tuple[int, str], bound: float) -> list[Difference]:
    """The first of these errors that is too large, if any is."""
    return [
        ((*when, i), what) for i, (what, error) in enumerate(errors.items()) if not error < bound
    ][:1]


# ---- what is compared ----------------------------------------------------------------------------


def _other_parameters(engine: TrainingEngine, reference: Reference) -> list[Difference]:
    """Parameters that only one of the two runs has: tied weights that came apart, or were
    joined."""
    found = []
    wanted = {n for n in reference.parameters if engine.holds(n)}
    for name in sorted(engine.params.keys() ^ wanted):
        other = (
            "which one device does not have"
            if name in engine.params
            else "which only one device has"
        )
        found.append(
            (
                (0, "parameter", 0),
                f"parameter {name}, {other}: weights that are tied on one side only?",
            )
        )
    return found


def _wrong_batch(
    engine: TrainingEngine, batch: dict[str, Tensor], whole: dict[str, Tensor], step: int
) -> list[Difference]:
    plan = engine.plan
    index = torch.tensor(
        data_rank_indices(
            plan.batch, plan.accumulate, engine.mesh.index(*DATA_AXES), plan.data_size
        )
    )
    wrong = [
        key
        for key, value in whole.items()
        if key not in batch or not torch.equal(batch[key], value[index])
    ]
    return [((step, "batch", 0), f"batch entry {key!r} of step {step}") for key in wrong[:1]]


# ---- which module differs first ------------------------------------------------------------------


def _routings(traces: list[ActivationRecorder]) -> list[RoutingCall]:
    """Of the whole batch."""
    together = zip(*(trace.routings for trace in traces), strict=True)
    return [replace(each[0], index=torch.cat([one.index for one in each])) for each in together]


# ---- all ranks together --------------------------------------------------------------------------


def _merge_ranks(layout: str, mine: tuple) -> LayoutResult:
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    worst: dict[str, tuple[float, str]] = {}
    for kind in ("loss", "gradient", "weight"):
        found = [
            (e, what, r)
            for r, (errors, *_) in enumerate(everyone)
            for what, e in errors[kind].items()
        ]
        error, what, rank = max(found, key=lambda f: f[0], default=(0.0, "", 0))
        worst[kind] = (error, f"{what} (rank {rank})")
    firsts = [(_order_of(f), f[1], r) for r, (_, f, *_) in enumerate(everyone) if f is not None]
    first = min(firsts, default=None)
    problems = [p for _, _, p, _, _ in everyone if p is not None]
    predicted, seen = everyone[0][3], everyone[0][4]
    for _, _, _, wanted, found_comms in everyone:  # a rank that strays is the one to show
        if wanted != found_comms:
            predicted, seen = wanted, found_comms
    overall = max(worst.values(), key=lambda w: w[0])
    return LayoutResult(
        layout,
        worst["loss"][0],
        worst["gradient"][0],
        worst["weight"][0],
        overall[1],
        None if first is None else f"{first[1]} (rank {first[2]})",
        predicted,
        seen,
        problems[0] if problems else None,
    )
