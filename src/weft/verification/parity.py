"""One layout against the one-device run: loss, every gradient, every weight, and which module differs first.

Runs in every rank of the layout. A rank compares what it holds with its part of the reference, so nothing is gathered
but errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comms import Comm, predict, totals
from ..engine import Engine
from ..engine.reducer import local
from ..layout import DATA_AXES
from ..order import part
from ..plans import COPY, Plan
from ..shards import Chunk, chunks, flaw
from .audit import Audit
from .case import Case, in_double
from .reference import Reference, scale
from .trace import Trace, traced

TOLERANCE = 1e-9
SMALL = 1e-6  # a gradient this much smaller than all gradients together is measured against that size


@dataclass(frozen=True)
class LayoutResult:
    """What one layout's run showed. Errors are relative; `first` names the first module that differs, if any does."""

    layout: str
    loss_rel_err: float
    grad_rel_err: float
    param_rel_err: float
    worst: str
    first: str | None
    comms_predicted: dict[tuple[str, str], tuple[int, int]]
    comms_seen: dict[tuple[str, str], tuple[int, int]]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        errors = (self.loss_rel_err, self.grad_rel_err, self.param_rel_err)
        same = self.comms_predicted == self.comms_seen
        return same and self.problem is None and self.first is None and all(e < TOLERANCE for e in errors)


def check(case: Case, layout: str, reference: Reference) -> LayoutResult:
    """Run the case under `layout` in this process group; the result, the same on every rank."""
    model = case.build().double()
    plan = case.plan(model, layout)
    engine = Engine(
        model, plan, optimizer=case.optimizer, loss=case.loss, inputs=case.inputs, clip=case.clip, seed=case.seed, device="cpu"
    )  # fmt: skip
    errors: dict[str, dict[str, float]] = {"loss": {}, "gradient": {}, "weight": {}}
    rank = engine.mesh.rank
    first: tuple[float, str] | None = None
    seen: list[Comm] = []
    for step in range(len(reference.losses)):
        batch = in_double(case.batch(step, engine.mesh.index(*DATA_AXES), plan.data_size))
        wrong = _wrong_batch(engine, batch, reference.batches[step])
        if wrong is not None and first is None:
            first = (0.0, f"batch entry {wrong!r} of step {step}")
        if step == 0:
            samples = plan.microbatch
            with Audit(engine.mesh) as audit, traced(engine.model, samples) as trace:
                result = engine.step(batch)
            seen = audit.seen
            first = first or _first_difference(engine, trace, reference.traces)
        else:
            result = engine.step(batch)
        errors["loss"][f"loss of step {step}"] = _ratio(abs(float(result.loss) - reference.losses[step]), abs(reference.losses[step]))
        errors["gradient"].update(_gradient_errors(engine, reference.gradients[step], step))
    errors["weight"], problem = _state_errors(engine, reference)
    if first is None:
        first = _first_parameter(errors["gradient"])
    crossings = reference.traces[0].crossings
    predicted = predict(plan, crossings, 8, reference.unreached, engine.stale_buffer_bytes, rank)
    mine = (errors, first, problem, totals(predicted), totals(seen))
    return _together(layout, mine)


# ---- what is compared --------------------------------------------------------------------------------------------


def _wrong_batch(engine: Engine, batch: dict[str, Tensor], whole: dict[str, Tensor]) -> str | None:
    plan = engine.plan
    index = torch.tensor(part(plan.batch, plan.accumulate, engine.mesh.index(*DATA_AXES), plan.data_size))
    for key, value in whole.items():
        if key not in batch or not torch.equal(batch[key], value[index]):
            return key
    return None


def _gradient_errors(engine: Engine, reference: dict[str, Tensor], step: int) -> dict[str, float]:
    norm, _ = scale(reference)
    errors = {}
    for name, p in engine.params.items():
        want = reference.get(name)
        if want is None or p.grad is None:
            if (want is None) != (p.grad is None):
                errors[f"gradient of {name} at step {step} ({'missing' if p.grad is None else 'not on one device'})"] = inf
            continue
        parts = chunks(engine.segments(name))
        errors[f"gradient of {name} at step {step}"] = _error(local(p.grad), parts, want, SMALL * norm)
    return errors


def _state_errors(engine: Engine, reference: Reference) -> tuple[dict[str, float], str | None]:
    weights = {k: v for k, v in reference.final.items() if k in engine.params}
    _, typical = scale(weights)
    errors: dict[str, float] = {}
    held: dict[str, list] = {}
    try:
        for piece in engine.tensors():
            want = reference.final.get(piece.name)
            if want is None:
                if piece.name.startswith("optimizer/"):
                    continue  # state that one device has not made: the gradient never came
                errors[f"{piece.name} (not on one device)"] = inf
                continue
            # an element of a weight below a hundredth of the typical size is measured against that
            floor = 1e-2 * typical * sqrt(want.numel()) if piece.name in weights else SMALL * _norm_like(piece.name, reference)
            errors[f"{piece.name} after the last step"] = _error(piece.tensor, piece.chunks, want, floor)
            held[piece.name] = [p for _, p in piece.chunks] if piece.writer else []
    except ValueError as error:
        return errors, f"optimizer state does not lie as its parameter: {error}"
    return errors, _coverage(held, reference)


def _norm_like(name: str, reference: Reference) -> float:
    """The norm of all state of the same kind: of all second moments, of all buffers."""
    kind = name.rsplit("/", 1)[-1] if name.startswith("optimizer/") else ""
    like = {
        k: v for k, v in reference.final.items()
        if (k.startswith("optimizer/") and k.endswith("/" + kind) if kind else k == name)
    }  # fmt: skip
    return scale(like)[0]


def _coverage(held: dict[str, list], reference: Reference) -> str | None:
    everyone: list[Any] = [held]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, held)
    for name in held:
        boxes = [box for ranks in everyone for box in ranks.get(name, [])]
        problem = flaw(boxes, tuple(reference.final[name].shape))
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
    return _ratio(sqrt(squares) if isfinite(squares) else inf, max(float(want.double().norm()), floor))


def _ratio(error: float, size: float) -> float:
    if not isfinite(error):
        return inf
    return error / size if size > 0 else (0.0 if error == 0 else inf)


# ---- which module differs first ----------------------------------------------------------------------------------


def _first_difference(engine: Engine, trace: Trace, references: list[Trace]) -> tuple[float, str] | None:
    """The first module, in order of execution, whose output differs; else the first, in backward order, whose gradient does."""
    order = {name: i for i, name in enumerate(references[0].outputs)}
    for name in order:
        if name in trace.outputs and _differs(engine, name, trace.outputs[name], [r.outputs[name] for r in references], 1.0):
            return 1.0 + order[name] / len(order), f"output of {name or 'the model'}"
    factor = engine.plan.batch / engine.loss_scale
    backward = list(references[0].gradients)
    for i, name in enumerate(backward):
        grads = [r.gradients.get(name, []) for r in references]
        if name in trace.gradients and not _partial(engine.plan, name):
            if _differs(engine, name, trace.gradients[name], grads, factor):
                return 3.0 + i / len(backward), f"gradient of the output of {name or 'the model'}"
    return None


def _partial(plan: Plan, name: str) -> bool:
    """Modules whose output several ranks compute, each on the way to other heads: their gradients are partial sums."""
    params = [p for step in plan.steps if step.module == name for p in step.params]
    return any((p.cut is not None and p.stored == COPY) or (p.cut is None and p.grad != COPY and p.axis == "tp" and not _in_sequence(plan, name)) for p in params)


def _in_sequence(plan: Plan, name: str) -> bool:
    return any(s.interior == "sequence" and name.startswith(s.module + ".") for s in plan.steps)


def _differs(engine: Engine, name: str, mine: list[Tensor], wholes: list[list[Tensor]], factor: float) -> bool:
    plan = engine.plan
    if len(mine) % plan.accumulate or any(not whole for whole in wholes):
        return False
    calls = len(mine) // plan.accumulate
    data = engine.mesh.index(*DATA_AXES)
    for call in range(calls):
        if any(len(whole) != calls for whole in wholes):
            return False
        whole = torch.cat([w[call] for w in wholes]) if len(wholes) > 1 else wholes[0][call]
        batched = whole.shape[0] % plan.batch == 0
        if not batched and factor != 1.0:
            continue  # made once for all samples: each microbatch's gradient is a part of the sum
        for micro in range(plan.accumulate):
            value = mine[micro * calls + call].double() * factor
            want = whole
            if batched:
                rows = whole.shape[0] // plan.batch
                first = (micro * plan.data_size + data) * plan.microbatch * rows
                want = whole[first : first + plan.microbatch * rows]
            want_local = _local_part(engine, name, value, want)
            if want_local is None:
                continue
            size = float(whole.double().norm()) / sqrt(max(1, plan.accumulate * plan.data_size if batched else 1))
            error = float((value - want_local.double()).norm())
            if _ratio(error, max(size, 1e-300)) > TOLERANCE and error > 1e-14:
                return True
    return False


def _local_part(engine: Engine, name: str, value: Tensor, want: Tensor) -> Tensor | None:
    """The part of a whole activation that this rank holds; None where it cannot be told from the plan."""
    if value.shape == want.shape:
        return want
    if value.ndim != want.ndim:
        return None
    dims = [d for d in range(want.ndim) if value.shape[d] != want.shape[d]]
    if len(dims) != 1:
        return None
    dim = dims[0]
    index, size = engine.mesh.index("tp"), engine.mesh.size("tp")
    for step in engine.plan.steps:
        for p in step.params:
            if step.module == name and p.cut is not None and p.name.endswith("weight") and dim == want.ndim - 1:
                pieces = [want.narrow(dim, a, b - a) for a, b in p.cut.intervals(index, size)]
                part = torch.cat(pieces, dim)
                return part if part.shape == value.shape else None
    if value.shape[dim] * size == want.shape[dim]:
        return want.narrow(dim, index * value.shape[dim], value.shape[dim])
    return None


def _first_parameter(errors: dict[str, float]) -> tuple[float, str] | None:
    for what, error in errors.items():
        if error >= TOLERANCE:
            name = what.removeprefix("gradient of ").split(" at step ")[0]
            return 10.0, f"gradient of {name} (module {name.rpartition('.')[0] or 'the model'})"
    return None


# ---- all ranks together ------------------------------------------------------------------------------------------


def _together(layout: str, mine: tuple) -> LayoutResult:
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    worst: dict[str, tuple[float, str]] = {}
    for kind in ("loss", "gradient", "weight"):
        found = [(e, what, r) for r, (errors, *_) in enumerate(everyone) for what, e in errors[kind].items()]
        error, what, rank = max(found, key=lambda f: f[0], default=(0.0, "", 0))
        worst[kind] = (error, f"{what} (rank {rank})")
    firsts = [(f[0], f[1], r) for r, (_, f, *_) in enumerate(everyone) if f is not None]
    first = min(firsts) if firsts else None
    problems = [p for _, _, p, _, _ in everyone if p is not None]
    predicted, seen = everyone[0][3], everyone[0][4]
    for _, _, _, wanted, found_comms in everyone:  # a rank that strays is the one to show
        if wanted != found_comms:
            predicted, seen = wanted, found_comms
    overall = max(worst.values(), key=lambda w: w[0])
    return LayoutResult(
        layout, worst["loss"][0], worst["gradient"][0], worst["weight"][0], overall[1],
        None if first is None else f"{first[1]} (rank {first[2]})", predicted, seen, problems[0] if problems else None,
    )  # fmt: skip
