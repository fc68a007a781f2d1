"""One layout against the one-device run: loss, every gradient, every weight, and which module
differs first.

Runs in every rank of the layout. A rank compares what it holds with its part of the reference, so
nothing is gathered but errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    COPY,
    DRIVER,
    EXPERTS,
    Chunk,
    Plan,
    chunks_of,
    coverage_flaw,
    data_rank_indices,
)
from weft.engine import Audit, Engine, Remote, TrainingEngine, local_tensor
from weft.launch import rpc_session
from weft.parallel import (
    DATA_AXES,
    FEATURE_AXES,
    Collective,
    RoutingCall,
    collective_totals,
    predict_collectives,
)

from .activation_recorder import ActivationRecorder, record_activations
from .case import Case, to_float64
from .float64_mode import Float64Mode
from .reference import Reference, norms_of
from .stage_values import stage_value_bytes

TOLERANCE = 1e-9
SMALL = (
    1e-6  # a gradient this much smaller than all gradients together is measured against that size
)


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

    @property
    def passed(self) -> bool:
        errors = (self.loss_rel_err, self.grad_rel_err, self.param_rel_err)
        named = (self.first, self.problem, self.stray)
        return all(name is None for name in named) and all(e < TOLERANCE for e in errors)

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


def check_layout(case: Case, layout: str, reference: Reference) -> LayoutResult:
    """Run the case under `layout` in this process group; the result, the same on every rank."""
    with rpc_session((DRIVER, *case.workers)) if case.workers else nullcontext():
        return _check(case, layout, reference)


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
        remote.around = (Float64Mode,)
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
    )
    engine.tried = True  # what differs is to be named
    return engine


def _check(case: Case, layout: str, reference: Reference) -> LayoutResult:
    model = case.build().double()
    plan = case.laid(model, layout) if reference.plan is None else reference.plan
    engine = _engine(case, plan, model)
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    found = _other_parameters(engine, reference)
    seen: list[Collective] = []
    for step, loss in enumerate(reference.losses):
        batch = to_float64(case.batch(step, engine.mesh.index(*DATA_AXES), plan.data_size))
        found += _wrong_batch(engine, batch, reference.batches[step], step)
        if step == 0:
            with (
                Float64Mode(),
                Audit(engine.mesh) as audit,
                record_activations(engine.model, plan.microbatch, engine.now) as trace,
            ):
                result = engine.step(batch)
            seen = audit.seen if isinstance(engine, Engine) else []
            found += _first_activation(engine, trace, reference.traces)
        else:
            with Float64Mode():
                result = engine.step(batch)
        errors["loss"][f"loss of step {step}"] = error = _ratio(
            abs(float(result.loss) - loss), abs(loss)
        )
        if not error < TOLERANCE:
            differs = f"loss of step {step}: {float(result.loss):.9g}, one device has {loss:.9g}"
            found.append(((step, "loss", 0), differs))
        found += _gradients(
            engine, reference, step, case.clip, result.grad_norm, errors["gradient"]
        )
        if step == 0:
            errors["weight"] = updated = _weight_errors(engine, reference.updated, "after step 0")
            found += _first_of(updated, (step, "weight"))
    last, problem = _state_errors(engine, reference)
    found += _first_of(last, (len(reference.losses), "weight"))
    errors["weight"] |= last
    predicted = _predicted(case, engine, reference) if isinstance(engine, Engine) else []
    first = min(found, key=_when, default=None)
    together = _together(
        layout, (errors, first, problem, collective_totals(predicted), collective_totals(seen))
    )
    return replace(together, delayed=reference.plan is not None, workers=tuple(case.workers))


def _predicted(case: Case, engine: Engine, reference: Reference) -> list[Collective]:
    """The collectives of a step on this rank."""
    values = stage_value_bytes(case, engine.plan, reference.batches[0])
    return predict_collectives(
        engine.plan,
        reference.traces[0].crossings,
        8,
        reference.unreached,
        engine.buffers.nbytes,
        engine.mesh.rank,
        values,
        reference.traces[0].cores,
        _routings(reference.traces),
        reference.traces[0].asked,
    )


# ---- the order of a run: what differs first explains the rest ------------------------------------

# (step, what, place among its kind), and what to say of it
Difference = tuple[tuple[int, str, int], str]
ORDER = ("parameter", "batch", "output", "loss", "output gradient", "gradient", "norm", "weight")


def _when(difference: Difference) -> tuple[int, int, int]:
    (step, what, place), _ = difference
    return step, ORDER.index(what), place


def _first_of(errors: dict[str, float], when: tuple[int, str]) -> list[Difference]:
    """The first of these errors that is too large, if any is."""
    return [
        ((*when, i), what)
        for i, (what, error) in enumerate(errors.items())
        if not error < TOLERANCE
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


def _gradients(
    engine: TrainingEngine,
    reference: Reference,
    step: int,
    clip: float | None,
    norm: Tensor | None,
    errors: dict[str, float],
) -> list[Difference]:
    """Compare the gradients of a step as they were before clipping, and the norm by which they were
    clipped.

    Clipping mixes all gradients: after it, one wrong gradient is an error of every other.
    """
    clipped = 1.0 if clip is None or norm is None else min(1.0, clip / (float(norm) + 1e-6))
    wants = reference.gradients[step]
    found = _gradient_errors(engine, wants, 1.0 / clipped)
    errors |= {
        f"gradient of {name} at step {step}{note}": error for (name, note), error in found.items()
    }
    wrong = [
        (i, name) for i, ((name, _), error) in enumerate(found.items()) if not error < TOLERANCE
    ]
    if wrong:
        place, name = wrong[0]
        factor = _common_factor(engine, wants, 1.0 / clipped) if len(wrong) > 1 else None
        module = name.rpartition(".")[0] or "the model"
        what = (
            f"gradient of {name} (module {module}) at step {step}; {len(wrong)} of {len(found)}"
            " gradients differ"
        )
        if factor is not None:
            what = (
                f"every gradient of step {step} is {factor:.6g} times that of one device: a wrong"
                " divisor, or clipping"
            )
        return [((step, "gradient", place), what)]
    if norm is None:
        return []
    what = f"norm of all gradients at step {step}"
    errors[what] = error = _ratio(abs(float(norm) - reference.norms[step]), reference.norms[step])
    differs = (
        f"{what}: {float(norm):.9g}, one device has {reference.norms[step]:.9g}; the gradients"
        " agree"
    )
    return [((step, "norm", 0), differs)] if not error < TOLERANCE else []


def _gradient_errors(
    engine: TrainingEngine, wants: dict[str, Tensor], factor: float
) -> dict[tuple[str, str], float]:
    """(parameter, remark) -> error of `factor` times its gradient."""
    norm, _ = norms_of(wants)
    errors = {}
    for name, p in engine.params.items():
        want = wants.get(name)
        if not engine.updates(name):
            continue  # the replica that owns it has the sum
        if want is None or p.grad is None:
            if (want is None) != (p.grad is None):
                errors[name, " (missing)" if p.grad is None else " (not on one device)"] = inf
            continue
        errors[name, ""] = _error(
            local_tensor(p.grad) * factor, chunks_of(engine.segments(name)), want, SMALL * norm
        )
    return errors


def _common_factor(engine: TrainingEngine, wants: dict[str, Tensor], factor: float) -> float | None:
    """r, if all that this rank holds of the gradients is r times what it should be."""
    product = squares = 0.0
    for name, p in engine.params.items():
        for mine, there in (
            chunks_of(engine.segments(name)) if name in wants and p.grad is not None else ()
        ):
            want, got = wants[name][there], local_tensor(p.grad)[mine] * factor
            if want.shape != got.shape:
                return None
            product, squares = (
                product + float((want * got).sum()),
                squares + float(want.square().sum()),
            )
    r = product / squares if squares else 0.0
    same = r != 0.0 and all(
        e < TOLERANCE for e in _gradient_errors(engine, wants, factor / r).values()
    )
    return r if same else None


def _weight_errors(engine: TrainingEngine, wants: dict[str, Tensor], when: str) -> dict[str, float]:
    _, typical = norms_of(wants)
    errors = {}
    for name, p in engine.params.items():
        if name in wants:
            # an element below a hundredth of the typical size is measured against that
            floor = 1e-2 * typical * sqrt(wants[name].numel())
            errors[f"{name} {when}"] = _error(
                local_tensor(p.detach()), chunks_of(engine.segments(name)), wants[name], floor
            )
    return errors


def _state_errors(
    engine: TrainingEngine, reference: Reference
) -> tuple[dict[str, float], str | None]:
    """Weights, buffers and optimizer state after the last step, and whether each lies, once, where
    the plan says."""
    weights = {k: v for k, v in reference.final.items() if k in engine.params}
    errors = _weight_errors(engine, weights, "after the last step")
    held: dict[str, list] = {}
    problem = None
    try:
        for piece in engine.tensors():
            want = reference.final.get(piece.name)
            if want is None:
                if piece.name.startswith("optimizer/"):
                    continue  # state that one device has not made: the gradient never came
                errors[f"{piece.name} (not on one device)"] = inf
                continue
            held[piece.name] = [p for _, p in piece.chunks] if piece.writer else []
            if piece.name in weights:
                continue
            owner = piece.name.removeprefix("optimizer/").rpartition("/")[0]
            of_elements = owner in weights and want.ndim and want.shape == weights[owner].shape
            if (
                of_elements
                and piece.chunks != chunks_of(engine.segments(owner))
                and problem is None
            ):
                here = tuple(piece.tensor.shape)
                problem = (
                    f"{piece.name} does not lie as its parameter: a rank holds {here} of"
                    f" {piece.shape}"
                )
            floor = SMALL * _norm_like(piece.name, reference)
            errors[f"{piece.name} after the last step"] = _error(
                piece.tensor, piece.chunks, want, floor
            )
    except ValueError as error:
        problem = f"not where the plan says: {error}"
    coverage = _coverage(held, reference)
    return errors, problem or coverage


def _norm_like(name: str, reference: Reference) -> float:
    """The norm of all state of the same kind: of all second moments, of all buffers."""
    kind = name.rsplit("/", 1)[-1] if name.startswith("optimizer/") else ""
    like = {
        k: v
        for k, v in reference.final.items()
        if (k.startswith("optimizer/") and k.endswith("/" + kind) if kind else k == name)
    }
    return norms_of(like)[0]


def _coverage(held: dict[str, list], reference: Reference) -> str | None:
    everyone: list[Any] = [held]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, held)
    for name in {name: None for ranks in everyone for name in ranks}:
        boxes = [box for ranks in everyone for box in ranks.get(name, ())]
        problem = coverage_flaw(boxes, tuple(reference.final[name].shape))
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _error(tensor: Tensor, parts: tuple[Chunk, ...], want: Tensor, floor: float) -> float:
    """Error of this rank's chunks relative to the norm of the whole tensor."""
    squares = 0.0
    for mine, there in parts:
        try:
            squares += float((tensor[mine].double() - want[there].double()).square().sum())
        except (RuntimeError, IndexError):
            return inf
    return _ratio(
        sqrt(squares) if isfinite(squares) else inf, max(float(want.double().norm()), floor)
    )


def _ratio(error: float, size: float) -> float:
    if not isfinite(error):
        return inf
    return error / size if size > 0 else (0.0 if error == 0 else inf)


# ---- which module differs first ------------------------------------------------------------------


Calls = dict[str, list[Tensor]]  # module -> a tensor per call


def _first_activation(
    engine: TrainingEngine, trace: ActivationRecorder, references: list[ActivationRecorder]
) -> list[Difference]:
    """The first output that differs, in order of execution, and the first gradient of an output, in
    backward order."""
    found: list[Difference] = []
    for place, (name, call) in enumerate(_calls(references[0].forward)):
        if _differs(engine, name, call, trace.outputs, [r.outputs for r in references], 1.0):
            found.append(((0, "output", place), f"output of {name or 'the model'}"))
            break
    agreed = ""
    factor = 1.0 if engine.plan.schedule.versions else engine.plan.batch / engine.loss_scale
    for place, (name, call) in enumerate(_calls(references[0].backward)):
        if _partial(engine.plan, name):
            continue
        differs = _differs(
            engine, name, call, trace.gradients, [r.gradients for r in references], factor
        )
        if differs:
            after = f", after that of {agreed} agreed" if agreed else ", where backward begins"
            found.append(
                (
                    (0, "output gradient", place),
                    f"gradient of the output of {name or 'the model'}{after}",
                )
            )
            break
        agreed = (name or agreed or "the model") if differs is False else agreed
    return found


def _calls(names: list[str]) -> Iterator[tuple[str, int]]:
    """Each name with how often it came before."""
    count: Counter[str] = Counter()
    for name in names:
        yield name, count[name]
        count[name] += 1


def _partial(plan: Plan, name: str) -> bool:
    """Modules whose output several ranks compute, each on the way to other heads: their gradients
    are partial sums."""
    params = [p for step in plan.steps if step.module == name for p in step.params]
    return any(
        (p.cut is not None and p.stored == COPY)
        or (p.cut is None and p.grad != COPY and p.axis in FEATURE_AXES and not plan.sliced(name))
        for p in params
    )


def _differs(
    engine: TrainingEngine,
    name: str,
    call: int,
    mine: Calls,
    references: list[Calls],
    factor: float,
) -> bool | None:
    """Whether a call's tensor differs, in any microbatch, from the reference's; None if it cannot
    be compared."""
    plan = engine.plan
    wholes = [r.get(name, []) for r in references]
    got = mine.get(name, [])
    calls = len(got) // plan.accumulate
    if any(name.startswith(module + ".") for module in engine.loads.modules):
        return None  # of the tokens of an expert, on some ranks of a part of it
    if call >= calls or len(got) % plan.accumulate or any(len(whole) != calls for whole in wholes):
        return None
    whole = torch.cat([w[call] for w in wholes]) if len(wholes) > 1 else wholes[0][call]
    positions = (
        plan.sequence_size > 1 and whole.shape[0] == engine.sequence.now.length
    )  # no samples in it
    batched = whole.shape[0] % plan.batch == 0 and not positions
    if not batched and factor != 1.0:
        return None  # made once for all samples: each microbatch's gradient is a part of the sum
    data = engine.mesh.index(*DATA_AXES)
    compared = None
    for micro in range(plan.accumulate):
        value = got[micro * calls + call].double() * factor
        want = whole
        if batched:
            rows = whole.shape[0] // plan.batch
            first = (micro * plan.data_size + data) * plan.microbatch * rows
            want = whole[first : first + plan.microbatch * rows]
        if plan.sequence_size > 1 and factor != 1.0 and value.shape == want.shape:
            continue  # of no position: each rank that shares the sequence has a part of the sum
        want_local = _local_part(engine, name, value, want)
        if want_local is None:
            continue
        compared = False
        size = float(whole.double().norm()) / sqrt(
            max(1, plan.accumulate * plan.data_size if batched else 1)
        )
        error = float((value - want_local.double()).norm())
        if not _ratio(error, max(size, 1e-300)) <= TOLERANCE and not error <= 1e-14:
            return True
    return compared


def _routings(traces: list[ActivationRecorder]) -> list[RoutingCall]:
    """Of the whole batch."""
    together = zip(*(trace.routings for trace in traces), strict=True)
    return [replace(each[0], index=torch.cat([one.index for one in each])) for each in together]


def _own_positions(engine: TrainingEngine, value: Tensor, want: Tensor) -> Tensor:
    """Of a whole activation, the positions that this rank has, where ranks share the sequence."""
    length, size = engine.sequence.now.length, engine.plan.sequence_size
    if size == 1 or value.ndim != want.ndim or not want.ndim:
        return want
    mine = engine.sequence.positions(length, want.device)
    for dim in range(1, want.ndim):
        if want.shape[dim] == length and value.shape[dim] * size <= length:
            return want.index_select(dim, mine)
    if (
        want.shape[0] % length == 0 and value.shape[0] * size == want.shape[0]
    ):  # samples and positions in one dim
        return want.unflatten(0, (-1, length)).index_select(1, mine).flatten(0, 1)
    return want


def _local_part(engine: TrainingEngine, name: str, value: Tensor, want: Tensor) -> Tensor | None:
    """The part of a whole activation that this rank holds; None where it cannot be told from the
    plan."""
    want = _own_positions(engine, value, want)
    if value.shape == want.shape:
        return want
    if value.ndim != want.ndim:
        return None
    dims = [d for d in range(want.ndim) if value.shape[d] != want.shape[d]]
    if len(dims) != 1:
        return None
    dim = dims[0]
    index, size = engine.mesh.index(*FEATURE_AXES), engine.mesh.size(*FEATURE_AXES)
    samples = engine.plan.microbatch
    if dim == 0 and engine.plan.sliced(name) and value.shape[0] * size == want.shape[0]:
        rows = want.unflatten(0, (samples, -1))  # samples and positions in one dim, positions cut
        return rows.narrow(1, index * (rows.shape[1] // size), rows.shape[1] // size).flatten(0, 1)
    # samples and positions in one dim, which ranks have gathered in an order of their own
    flat = value.ndim == 2 and engine.plan.sliced(name)
    for step in engine.plan.steps if not flat else ():
        for p in step.params:
            if (
                step.module == name
                and p.cut is not None
                and p.axis != EXPERTS
                and p.name.endswith("weight")
                and dim == want.ndim - 1
            ):
                here = engine.mesh.index(p.axis), engine.mesh.size(p.axis)
                pieces = [want.narrow(dim, a, b - a) for a, b in p.cut.intervals(*here)]
                part = torch.cat(pieces, dim)
                return part if part.shape == value.shape else None
    if value.shape[dim] * size == want.shape[dim] and not flat:
        return want.narrow(dim, index * value.shape[dim], value.shape[dim])
    return None


# ---- all ranks together --------------------------------------------------------------------------


def _together(layout: str, mine: tuple) -> LayoutResult:
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
    firsts = [(_when(f), f[1], r) for r, (_, f, *_) in enumerate(everyone) if f is not None]
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
