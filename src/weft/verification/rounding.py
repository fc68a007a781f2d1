"""What rounding alone makes of a run: how far one device comes from itself when its weights begin a
few roundings away. Where a run amplifies that, its numbers are held to it, not to one constant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.core import gather_json, whole_shard
from weft.train import in_dtype

from .case import Case
from .difference import Bounds, Difference
from .layout_result import LayoutResult
from .noise import ALONE, from_rounding, noise_of
from .reference import Reference, run_reference
from .replica_reference import run_replicas
from .tensor_errors import error_ratio, saved_state_errors, tensor_error

ROUNDINGS = 4.0  # by how many a weight is changed, up or down: a layout sums in another order
RUNS = 3  # with other changes
FACTOR = 4.0  # how much further from one device a layout may be than that is from itself
MOST = 1e-5  # a larger error is no rounding, whatever a run makes of it, where a gradient is more
SUMMED = ("loss", "gradient", "norm", "weight")  # kinds of differences that have an error

Errors = dict[str, float]


def errors_beyond(errors: Mapping[str, Errors], found: list[Difference], bounds: Bounds) -> Errors:
    """The errors of all ranks that are too large, by what they are of; none where something else
    differs, or one of them is too large for rounding. Called by every rank."""
    within = {"loss": bounds.loss, "gradient": bounds.gradient, "weight": bounds.weight}
    mine = {
        n: e for kind, bound in within.items() for n, e in errors[kind].items() if not e < bound
    }
    other = any(kind not in SUMMED for (_, kind, _), _ in found)
    everyone = gather_json([mine, other])
    if any(other for _, other in everyone):
        return {}
    largest = largest_errors(beyond for beyond, _ in everyone)
    may_be = all(error < MOST or from_rounding(name) for name, error in largest.items())
    return largest if may_be else {}


def may_be_rounding(result: LayoutResult, case: Case, reference: Reference) -> bool:
    """Whether it is worth measuring: all that is wrong are small errors in float64, beside a
    reference that can be made again."""
    again = reference.plan is None and not reference.replayed
    exact = (reference.case or case).bounds == Bounds()
    alone = result.problem is None and result.stray is None
    return bool(result.beyond) and again and exact and alone


def measure_rounding(case: Case, layout: str, reference: Reference) -> Errors:
    """By the names of errors: how far one device comes from itself, at most, in `RUNS` runs whose
    weights begin `ROUNDINGS` roundings away."""
    found = []
    for seed in range(RUNS):
        other, steps = nearby(case, seed), len(reference.losses)
        again = run_replicas(other, layout, steps) if reference.replicas else None
        ours = again.replicas if again is not None else (run_reference(other, steps),)
        pairs = zip(reference.replicas or (reference,), ours, strict=True)
        found += [_errors_between(one, another) for one, another in pairs]
    return largest_errors(found)


def within_rounding(result: LayoutResult, measured: Errors) -> LayoutResult:
    """The result with wider bounds where rounding grows; as it was, if they do not hold either."""
    # few elements may happen to move as before: all together tell what an optimizer makes of them
    alone = max((error for name, error in measured.items() if ALONE in name), default=0.0)
    bounds = {
        name: FACTOR * (alone if ALONE in name else measured.get(name, 0.0))
        for name in result.beyond
    }
    if not all(error < bounds[name] for name, error in result.beyond.items()):
        return result
    return replace(result, first=None, widened=bounds)


def nearby(case: Case, seed: int) -> Case:
    """The case, of which one device begins with weights that are `ROUNDINGS` roundings away."""
    build = partial(_nearby, case.build_plain or case.build, seed)
    return replace(case, build=build, build_plain=None, build_deferred=None)


def _nearby(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model with each weight changed by a few roundings, up or down."""
    model = in_dtype(build(), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(rounded(p, generator))
    return model


def rounded(x: Tensor, generator: torch.Generator, together: bool = False) -> Tensor:
    """Each element changed by a few roundings, up or down: of itself; with `together` of a typical
    element of x, as where a factorisation mixes elements."""
    up = torch.randint(2, x.shape, generator=generator, dtype=torch.float64)
    size = x.square().mean().sqrt() if together else x
    return x + ROUNDINGS * torch.finfo(torch.float64).eps * (2.0 * up - 1.0) * size


def _errors_between(one: Reference, other: Reference) -> Errors:
    """Named and measured as those of a layout are."""
    bounds, found = Bounds(), Errors()
    for step, (loss, norm) in enumerate(zip(one.losses, one.norms, strict=True)):
        found[f"loss of step {step}"] = error_ratio(abs(other.losses[step] - loss), abs(loss))
        off = abs(other.norms[step] - norm)
        found[f"norm of all gradients at step {step}"] = error_ratio(off, norm)
        for name, want in one.gradients[step].items():
            got = other.gradients[step][name]
            parts, floor = whole_shard(name, got).chunks, bounds.small * norm
            error = tensor_error(got, parts, want, floor)
            found[f"gradient of {name} at step {step}"] = error
    noise = noise_of(one, bounds)
    updated = other.updated | other.buffers, one.updated | one.buffers
    errors = saved_state_errors(*updated, one.updated.keys(), noise, bounds)
    found |= {f"{name} after step 0": error for name, error in errors.items()}
    return found | final_errors(one, other, one.updated.keys(), bounds)


def final_errors(
    one: Reference, other: Reference, weights: Collection[str], bounds: Bounds
) -> Errors:
    """How far what one device has in the end is from what it has in another run."""
    errors = saved_state_errors(other.final, one.final, weights, noise_of(one, bounds), bounds)
    return {f"{name} after the last step": error for name, error in errors.items()}


def largest_errors(found: Iterable[Errors]) -> Errors:
    """Of errors with the same name the largest."""
    largest = Errors()
    for errors in found:
        for name, error in errors.items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest
