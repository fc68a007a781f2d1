"""How far parameters, gradients, weights and optimizer state are from those of one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from weft.core import Chunk, chunks_of, coverage_flaw, gather_json, whole_shard
from weft.engine import TrainingEngine, local_tensor

from .case import Case
from .difference import Bounds, Difference
from .moments import Moments
from .noise import ALONE, FOLLOWS, OF_NOISE, noise_of, whole_of_noise
from .reference import Reference, norms_of


def gradient_differences(
    engine: TrainingEngine,
    reference: Reference,
    step: int,
    case: Case,
    norm: Tensor | None,
    errors: dict[str, float],
) -> list[Difference]:
    """Compare the gradients of a step as they were before clipping, and the norm by which they were
    clipped.

    Clipping mixes all gradients: after it, one wrong gradient is an error of every other.
    """
    clip, bounds = case.clip, case.bounds
    clipped = 1.0 if clip is None or norm is None else min(1.0, clip / (float(norm) + 1e-6))
    wants = reference.gradients[step]
    found = _gradient_errors(engine, wants, 1.0 / clipped, bounds)
    errors |= {
        f"gradient of {name} at step {step}{note}": error for (name, note), error in found.items()
    }
    wrong = [
        (i, name)
        for i, ((name, _), error) in enumerate(found.items())
        if not error < bounds.gradient
    ]
    if wrong:
        place, name = wrong[0]
        factor = common_factor(engine, wants, 1.0 / clipped, bounds) if len(wrong) > 1 else None
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
    errors[what] = error = error_ratio(
        abs(float(norm) - reference.norms[step]), reference.norms[step]
    )
    differs = (
        f"{what}: {float(norm):.9g}, one device has {reference.norms[step]:.9g}; the gradients"
        " agree"
    )
    return [((step, "norm", 0), differs)] if not error < bounds.gradient else []


def _gradient_errors(
    engine: TrainingEngine, wants: dict[str, Tensor], factor: float, bounds: Bounds
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
        errors[name, ""] = tensor_error(
            local_tensor(p.grad) * factor,
            chunks_of(engine.segments(name)),
            want,
            bounds.small * norm,
        )
    return errors


def common_factor(
    engine: TrainingEngine, wants: dict[str, Tensor], factor: float, bounds: Bounds
) -> float | None:
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
                product + float((want.conj() * got).real.sum()),
                squares + float(want.abs().square().sum()),
            )
    r = product / squares if squares else 0.0
    same = r != 0.0 and all(
        e < bounds.gradient for e in _gradient_errors(engine, wants, factor / r, bounds).values()
    )
    return r if same else None


def weight_errors(
    engine: TrainingEngine,
    wants: dict[str, Tensor],
    when: str,
    reference: Reference,
    bounds: Bounds,
) -> dict[str, float]:
    """Errors of weights, by name and `when`. Those of elements whose gradient is rounding alone are
    named apart, and count for less."""
    _, typical = norms_of(wants)
    errors, noise = dict[str, float](), noise_of(reference, bounds)
    for name, p in engine.params.items():
        if name in wants:
            # elements far below the typical size are measured against that
            floor = bounds.typical * typical * sqrt(wants[name].numel())
            here = local_tensor(p.detach()), chunks_of(engine.segments(name))
            found = _errors_apart(name, *here, wants[name], floor, noise.get(name))
            errors |= {f"{label} {when}": error for label, error in found.items()}
    return errors


def buffer_errors(engine: TrainingEngine, reference: Reference, bounds: Bounds) -> dict[str, float]:
    """Errors of buffers after step 0, where replicas have the same."""
    wants = {} if engine.replicas.independent else reference.buffers
    follows, errors = whole_of_noise(noise_of(reference, bounds)), dict[str, float]()
    moments = Moments({})
    for piece in engine.tensors() if wants else ():
        if piece.name in wants:
            floor = Bounds.small * _norm_like(piece.name, wants)
            here = piece.name, piece.tensor, piece.chunks, wants[piece.name]
            found = _errors_beside(*here, floor, follows, moments)
            errors |= {f"{label} after step 0": error for label, error in found.items()}
    return errors


def _errors_apart(
    name: str,
    tensor: Tensor,
    parts: tuple[Chunk, ...],
    want: Tensor,
    floor: float,
    noise: Tensor | None,
    times: Tensor | None = None,
) -> dict[str, float]:
    """Errors of a tensor that has elements as a weight has, those that are `noise` by themselves:
    named and measured as one where there are none. `times`: as of `tensor_error`."""
    if noise is None or noise.shape != want.shape:
        return {name: tensor_error(tensor, parts, want, floor, times)}
    found, weighed = {}, torch.ones_like(noise) if times is None else times
    if not noise.all():
        found[name] = tensor_error(tensor, parts, want, floor, ~noise * weighed)
    alone = f"{name} ({int(noise.sum())} elements {ALONE})"
    found[alone] = OF_NOISE * tensor_error(tensor, parts, want, floor, noise * weighed)
    return found


def state_errors(
    engine: TrainingEngine, reference: Reference, bounds: Bounds
) -> tuple[dict[str, float], str | None]:
    """Weights, buffers and optimizer state after the last step, and whether each lies, once, where
    the plan says."""
    weights = {k: v for k, v in reference.final.items() if k in engine.params}
    errors = weight_errors(engine, weights, "after the last step", reference, bounds)
    noise = noise_of(reference, bounds)
    follows, moments = whole_of_noise(noise), Moments(reference.final)
    sizes = {**reference.final, **moments.sizes}
    held: dict[str, list] = {}
    problem = None
    try:
        for piece in engine.tensors():
            want = reference.final.get(piece.name)
            if want is None:
                if piece.name.startswith("sync/"):  # of a codec: the next step shows it
                    continue
                errors[f"{piece.name} (not on one device)"] = inf
                continue
            held[piece.name] = [p for _, p in piece.chunks] if piece.writer else []
            if piece.name in weights:
                continue
            owner = piece.name.partition("/")[2].rpartition("/")[0]
            of_elements = owner in weights and want.ndim and want.shape == weights[owner].shape
            of_elements = of_elements and owner not in engine.updated_whole
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
            floor = Bounds.small * _norm_like(piece.name, sizes)
            here = piece.name, piece.tensor, piece.chunks, want
            if piece.name.startswith("outer/"):  # a difference of weights is measured as they are
                found = _errors_apart(*here, norms_of({owner: weights[owner]})[0], noise.get(owner))
            else:
                found = _errors_beside(*here, floor, follows, moments, noise.get(owner))
            errors |= {f"{label} after the last step": error for label, error in found.items()}
    except ValueError as error:
        problem = f"not where the plan says: {error}"
    coverage = coverage_gap(held, reference)
    return errors, problem or coverage


def _errors_beside(
    name: str,
    tensor: Tensor,
    parts: tuple[Chunk, ...],
    want: Tensor,
    floor: float,
    follows: bool,
    moments: Moments,
    noise: Tensor | None = None,
) -> dict[str, float]:
    """Errors of optimizer state, `noise` being that of its weight, and of buffers. Those of buffers
    count for less where rounding moves weights that they may follow."""
    got, want = (moments.shares(name, each) for each in (tensor, want))
    if name.startswith("optimizer/"):
        return _errors_apart(name, got, parts, want, floor, noise, moments.times(name))
    error = tensor_error(got, parts, want, floor)
    return {f"{name} {FOLLOWS}": OF_NOISE * error} if follows else {name: error}


def _norm_like(name: str, final: Mapping[str, Tensor]) -> float:
    """The norm of all state of the same kind: of all second moments; of a buffer its own. A running
    mean is as large as what it is subtracted from: behind another norm it is rounding alone."""
    if not name.startswith("optimizer/"):
        norm, scope = norms_of({name: final[name]})[0], name.rpartition(".")[0]
        variance = final.get(f"{scope}.running_var") if name == f"{scope}.running_mean" else None
        return norm if variance is None else max(norm, float(variance.double().sum().sqrt()))
    kind = name.rsplit("/", 1)[-1]
    return norms_of(
        {k: v for k, v in final.items() if k.startswith("optimizer/") and k.endswith("/" + kind)}
    )[0]


def saved_state_errors(
    saved: Mapping[str, Tensor],
    final: Mapping[str, Tensor],
    weights: Collection[str],
    noise: Mapping[str, Tensor],
    bounds: Bounds,
) -> dict[str, float]:
    """Errors of what a checkpoint holds, by name, those of weights first.

    Args:
        saved: whole weights, buffers, optimizer state.
        final: the same of one device.
        weights: the names of parameters.
        noise: by weight, which elements have gradients that are rounding alone.
        bounds: within which both are equal.
    """
    _, typical = norms_of({name: final[name] for name in weights})
    errors, follows = dict[str, float](), whole_of_noise(noise)
    moments = Moments(final)
    sizes = {**final, **moments.sizes}
    for name in sorted(final.keys() | saved.keys(), key=lambda n: (n not in weights, n)):
        if name not in final or name not in saved:
            errors[f"{name} (on one side only)"] = inf
            continue
        here = name, saved[name], whole_shard(name, saved[name]).chunks, final[name]
        owner = _owner_of(name)
        if name in weights:
            floor = bounds.typical * typical * sqrt(final[name].numel())
            errors |= _errors_apart(*here, floor, noise.get(name))
        elif owner in weights:  # averages, and differences of weights: measured as they are
            floor = norms_of({owner: final[owner]})[0] if name.startswith("outer/") else 0.0
            floor = floor or bounds.small * _norm_like(name, sizes)
            errors |= _errors_apart(*here, floor, noise.get(owner))
        else:
            floor = bounds.small * _norm_like(name, sizes)
            weight = name.partition("/")[2].rpartition("/")[0]
            errors |= _errors_beside(*here, floor, follows, moments, noise.get(weight))
    return errors


def _owner_of(name: str) -> str:
    """The weight whose elements this tells something of, if it does."""
    kind, _, rest = name.partition("/")
    return rest if kind == "ema" else rest.rpartition("/")[0] if kind == "outer" else ""


def coverage_gap(held: dict[str, list], reference: Reference) -> str | None:
    everyone = gather_json(
        {name: [[(s.start, s.stop) for s in box] for box in boxes] for name, boxes in held.items()}
    )
    found = {name: None for ranks in everyone for name in ranks}
    absent = [name for name in reference.final if name not in found]
    if absent:
        more = f" and {len(absent) - 1} others" if len(absent) > 1 else ""
        return f"no rank has {absent[0]}{more}, which one device has"
    for name in found:
        boxes = [
            tuple(slice(*ends) for ends in box) for ranks in everyone for box in ranks.get(name, ())
        ]
        problem = coverage_flaw(boxes, tuple(reference.final[name].shape))
        if problem is not None:
            return f"{name}: {problem}"
    return None


def tensor_error(
    tensor: Tensor,
    parts: tuple[Chunk, ...],
    want: Tensor,
    floor: float,
    times: Tensor | None = None,
) -> float:
    """Error of this rank's chunks relative to the norm of the whole tensor, or to `floor`, if that
    is more; of both sides `times` this, if it is given."""
    squares = 0.0
    for mine, there in parts:
        try:
            off = wide(tensor[mine]) - wide(want[there])
            off = off if times is None else off * times[there]
            squares += float(off.abs().square().sum())
        except (RuntimeError, IndexError):
            return inf
    whole = wide(want) if times is None else wide(want) * times
    return error_ratio(sqrt(squares) if isfinite(squares) else inf, max(float(whole.norm()), floor))


def wide(t: Tensor) -> Tensor:
    """In float64; of complex numbers both parts."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def error_ratio(error: float, size: float) -> float:
    if not isfinite(error):
        return inf
    return error / size if size > 0 else (0.0 if error == 0 else inf)
