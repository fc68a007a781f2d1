"""One layout against the one-device run: loss, every gradient, every weight, and which module
differs first.

Runs in every rank of the layout. A rank compares what it holds with its part of the reference, so
nothing is gathered but errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.core import (
    DRIVER,
    STAGE_AXIS,
    Layout,
    Plan,
    Refusal,
    data_rank_indices,
    gather_json,
)
from weft.engine import (
    Audit,
    CompiledBlocks,
    Engine,
    Remote,
    TrainingEngine,
    refuse_what_does_not_run,
    refuse_without_attention,
)
from weft.launch import LEAST_S, RARE_S, TIMES, Watchdog, rpc_session
from weft.parallel import (
    DATA_AXES,
    HEADER_BYTES,
    Collective,
    collective_totals,
)

from .activation_errors import first_activation
from .activation_recorder import ActivationRecorder, record_activations
from .case import Case
from .difference import Difference
from .kept_gradients import keep_gradients
from .layout_result import LayoutResult
from .predict_step import predict_step
from .reference import OVERFLOWS, Reference
from .rounding import MOST, errors_beyond
from .tensor_errors import (
    buffer_errors,
    error_ratio,
    gradient_differences,
    state_errors,
    weight_errors,
)

# of the reference's own, which has no audit, no trial, and each rank's core to itself
TIMES_FIRST = 5


def check_layout(case: Case, layout: str, reference: Reference) -> LayoutResult:
    """Run the case under `layout` in this process group; the result, the same on every rank."""
    with rpc_session((DRIVER, *case.workers)) if case.workers else nullcontext():
        return _check(case, layout, reference)


def hang_s(case: Case, layout: str, reference: Reference) -> float:
    """Seconds without a step that are a hang. All ranks may share the cores of the reference, whose
    first step imports and allocates what later ones have."""
    if case.hang_s is not None:
        return case.hang_s
    if case.compile != "off":
        return RARE_S
    later = max(reference.took_s[1:], default=0.0)
    return max(LEAST_S, Layout.parse(layout).world * TIMES * later, _first_s(layout, reference))


def start_s(case: Case, layout: str, reference: Reference) -> float | None:
    """Seconds before the first step, without progress, that are a hang; None: they follow from the
    limit that is set."""
    return max(2 * LEAST_S, _first_s(layout, reference)) if case.hang_s is None else None


def _first_s(layout: str, reference: Reference) -> float:
    """What building the model and the first step may take on ranks that share the cores."""
    took_s = reference.built_s + sum(reference.took_s[:1])
    return Layout.parse(layout).world * TIMES_FIRST * took_s


def build(case: Case, layout: str, plan: Plan | None) -> tuple[nn.Module, Plan]:
    """The model, without weights where that is possible, as ranks train it; and its plan if there
    is none."""
    if not case.workers:
        with suppress(Refusal):
            model = case.without_weights()
            return model, plan or case.lay(model, layout)
    model = case.model()
    return model, plan or case.lay(model, layout)


def make_engine(case: Case, plan: Plan, model: nn.Module) -> TrainingEngine:
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
    keep_gradients(engine.optimizer)
    return engine


def set_trial_aside(engine: TrainingEngine) -> Callable[[dict[str, Tensor]], None] | None:
    """An engine's trial on a batch, which it then does not run before its first step: what differs
    is to be named."""
    if not isinstance(engine, Engine) or engine.trial is None:
        return None
    trial, engine.trial = engine.trial, None
    return lambda batch: trial.check(batch, engine.state.weights, last=False)


def _check(case: Case, layout: str, reference: Reference) -> LayoutResult:
    case = reference.case or case
    limit_s = start_s(case, layout, reference)
    with Watchdog(hang_s(case, layout, reference)) as start, start.starting(limit_s):
        with start.alone("building the model"):
            model, plan = build(case, layout, reference.plan)
        engine = make_engine(case, plan, model)
    trial = set_trial_aside(engine)
    if reference.replicas:
        reference = reference.replicas[engine.replicas.index]
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    found = _other_parameters(engine, reference)
    seen: list[Collective] = []
    compiled_seen: list[Collective] = []
    other_step: str | None = None
    compiled = engine.compiled if isinstance(engine, Engine) and engine.compiled else None
    if case.precision == "fp16":  # each sample's loss is divided by their number
        _set_loss_scale(engine, reference.loss_scale * plan.batch)
    with Watchdog(hang_s(case, layout, reference)) as watchdog:
        for step, loss in enumerate(reference.losses):
            batch = case.batch_of(step, engine.data_rank, engine.data_size)
            found += _wrong_batch(engine, batch, reference.batches[step], step)
            if step == 0:
                with (
                    case.mode(),
                    Audit(engine.mesh, engine.now) as audit,
                    record_activations(engine.model, plan.microbatch, engine.now) as trace,
                    compiled.paused() if compiled is not None else nullcontext(),
                    refuse_what_does_not_run(engine, trial, batch),
                    _attention_recorded(engine, trace),
                ):
                    result = engine.step(batch)
                refuse_without_attention(engine, trial, batch)
                seen = audit.seen if isinstance(engine, Engine) else []
                found += first_activation(
                    engine, trace, reference.traces, case.bounds.activation, reference.loss_scale
                )
            else:
                with case.mode(), Audit(engine.mesh, engine.now) as audit:
                    result = engine.step(batch)
                compiled_seen = audit.seen
                same = step < len(reference.calls) and not engine.replicas.independent
                same = same and reference.calls[step] == reference.calls[0]
                if isinstance(engine, Engine) and compiled is None and same:
                    both, headers = (seen, audit.seen), plan.dynamic_shapes
                    other_step = other_step or _other_than_first(*both, step, headers)
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
                updated |= buffer_errors(engine, reference, case.bounds)
                found += _first_of(updated, (step, "weight"), case.bounds.weight)
            elif reference.after:  # names the exchange; roundings are judged at the end
                now = weight_errors(
                    engine, reference.after[step], f"after step {step}", reference, case.bounds
                )
                found += _first_of(now, (step, "weight"), max(case.bounds.weight, MOST))
    overflow = _overflow_problem(case, engine) if case.precision == "fp16" else None
    last, problem = state_errors(engine, reference, case.bounds)
    if engine.replicas.independent:
        engine.close()
    problem = "; ".join(reference.broken) or overflow or problem or other_step
    found += _first_of(last, (len(reference.losses), "weight"), case.bounds.weight)
    errors["weight"] |= last
    predicted = predict_step(case, engine, reference, trace) if isinstance(engine, Engine) else []
    totals, ran = collective_totals(predicted), collective_totals(seen)
    if plan.dynamic_shapes:  # how much crosses stages, the data say
        totals |= {
            key: ran[key]
            for key, (count, _) in totals.items()
            if key[1] == STAGE_AXIS and key in ran and ran[key][0] == count
        }
    first = min(found, key=order_of, default=None)
    if compiled is not None:
        problem = problem or _compiled_problem(compiled, predicted, compiled_seen)
    together = merge_ranks(layout, (errors, first, problem, totals, ran))
    counts = None if compiled is None or len(reference.losses) < 2 else compiled.counts
    together = replace(together, compiled=counts)
    together = replace(together, apart=engine.replicas.independent)
    together = replace(together, beyond=errors_beyond(errors, found, case.bounds))
    delayed, workers = reference.plan is not None, tuple(case.workers)
    together = replace(together, definition=reference.definition, steps=len(reference.losses))
    return replace(together, delayed=delayed, workers=workers, bounds=case.bounds)


def _set_loss_scale(engine: TrainingEngine, scale: float) -> None:
    engine.load_scalars({**engine.scalars(), "loss_scale": scale})


def _overflow_problem(case: Case, engine: TrainingEngine) -> str | None:
    """What is wrong with a step whose gradients overflow. That it changes no weight is seen
    later."""
    _set_loss_scale(engine, OVERFLOWS)
    step = engine.steps_done
    rank = engine.mesh.index(*DATA_AXES)
    result = engine.step(case.batch_of(step, rank, engine.plan.data_size))
    if not result.skipped:
        return f"step {step}, whose gradients overflow, was taken"
    if engine.loss_scale != OVERFLOWS / 2:
        return f"the loss scale is {engine.loss_scale:g} after an overflow at {OVERFLOWS:g}"
    return None


@contextmanager
def _attention_recorded(engine: TrainingEngine, trace: ActivationRecorder) -> Iterator[None]:
    if not isinstance(engine, Engine):
        yield
        return
    before, engine.sequence.on_attention = engine.sequence.on_attention, trace.attention
    try:
        yield
    finally:
        engine.sequence.on_attention = before


def _other_than_first(
    first: list[Collective], now: list[Collective], step: int, headers: bool
) -> str | None:
    """What a step sends otherwise than the first, which is compared with the prediction. How many
    bytes experts exchange, the data say. The first one alone has the headers of messages, unless
    each step has `headers`."""
    before, after = (
        Counter(
            (c.kind, c.axis)
            for c in seen
            if headers or not (c.axis == STAGE_AXIS and c.nbytes == HEADER_BYTES)
        )
        for seen in (first, now)
    )
    for kind, axis in sorted(before | after):
        if before[kind, axis] != after[kind, axis]:
            return (
                f"{kind} over {axis}: {after[kind, axis]} ran in step {step},"
                f" {before[kind, axis]} in step 0"
            )
    return None


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


# ---- the order of a run: what differs first explains the rest ------------------------------------

ORDER = ("parameter", "batch", "output", "loss", "output gradient", "gradient", "norm", "weight")


def order_of(difference: Difference) -> tuple[int, int, int]:
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


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal, or NaN in both, as where a measurement is missing."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


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
        if key not in batch or not _same(batch[key], value[index])
    ]
    return [((step, "batch", 0), f"batch entry {key!r} of step {step}") for key in wrong[:1]]


# ---- which module differs first ------------------------------------------------------------------


# ---- all ranks together --------------------------------------------------------------------------


def merge_ranks(layout: str, mine: tuple) -> LayoutResult:
    errors, mine_first, problem, *comms = mine
    rows = [[[*key, *counts] for key, counts in table.items()] for table in comms]
    everyone = [
        (*told[:3], *({(row[0], row[1]): (row[2], row[3]) for row in table} for table in told[3]))
        for told in gather_json([errors, mine_first, problem, rows])
    ]
    worst: dict[str, tuple[float, str]] = {}
    for kind in ("loss", "gradient", "weight"):
        found = [
            (e, what, r)
            for r, (errors, *_) in enumerate(everyone)
            for what, e in errors[kind].items()
        ]
        error, what, rank = max(found, key=lambda f: f[0], default=(0.0, "", 0))
        worst[kind] = (error, f"{what} (rank {rank})")
    firsts = [(order_of(f), f[1], r) for r, (_, f, *_) in enumerate(everyone) if f is not None]
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
