"""What a run of `weft train` has written, beside what one device does in it, or beside what another
run has written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from .noise import ALONE, FOLLOWS
from .plain.outliers import SEEN
from .rounding import FACTOR, MOST, largest_errors
from .tensor_errors import error_ratio, saved_state_errors
from .trained_run import KEYS, TrainedRun
from .training_reference import Trajectory


@dataclass(frozen=True)
class Proof:
    """One thing that a run did, and whether it was right."""

    what: str
    shown: str
    equal: bool = True
    happened: str = ""  # clip, skip or rollback, if it did something, and not always


def defined_proof(
    what: str,
    found: TrainedRun | str,
    wanted: Trajectory,
    after: int = 0,
    note: str = "",
    nearby: Callable[[], Sequence[Trajectory]] | None = None,
    widens: bool = False,
) -> Proof:
    """That a run did what one device does in the steps `after` one. `nearby`: what that does from
    weights a few roundings away, to which buffers are held that follow rounding. `widens`: the
    whole run is where rounding grows."""
    if isinstance(found, str):
        return Proof(what, note + found, equal=False)
    numbers = _numbers(found, wanted, after)
    if nearby is not None and numbers.followed:
        numbers = _as_followed(
            numbers, [_numbers(_as_written(each), wanted, after) for each in nearby()]
        )
    if (
        widens
        and numbers.beyond
        and nearby is not None
        and all(e < MOST for e in numbers.beyond.values())
    ):
        runs = [_numbers(_as_written(each), wanted, after) for each in nearby()]
        measured = largest_errors(each.errors for each in runs)
        grown = _grown(numbers.errors, measured)
        widened = {name: FACTOR * grown[name] for name in numbers.beyond}
        if all(error < widened[name] for name, error in numbers.beyond.items()):
            name, bound = max(widened.items(), key=lambda each: each[1])
            told = f"  rounding grows: {len(widened)} bounds are {FACTOR:g} times the measured"
            told += f" difference of one device from itself, at most {bound:.2g} ({name})"
            return Proof(what, f"{note}{numbers.worst:.2e}{told}")
    left_out = [*numbers.moved, *numbers.followed]
    told = f"  left out: {', '.join(left_out)}" if left_out else ""
    told += f"  first difference: {numbers.first}" if numbers.first else ""
    return Proof(what, f"{note}{numbers.worst:.2e}{told}", not numbers.first)


def _grown(names: Iterable[str], measured: Mapping[str, float]) -> dict[str, float]:
    """By name, in the order of the run, the largest that was measured until then: few runs are
    near by, and a number may happen to move little in all of them."""
    found, most = dict[str, float](), 0.0
    for name in names:
        error = measured.get(name, 0.0)
        most = max(most, error) if error < MOST else most
        found[name] = max(most, error)
    return found


@dataclass(frozen=True)
class _Numbers:
    """Errors of all numbers of a run by their names, in the order of the run. `beyond`: those that
    are too large. `first`: of these, and what it is. `moved`: those left out, which an optimizer
    makes of rounding; `followed`: those of buffers that follow them. `last`: of all of the last
    checkpoint."""

    errors: dict[str, float]
    beyond: dict[str, float]
    first: str | None
    moved: dict[str, float]
    followed: dict[str, float]
    last: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


def _numbers(found: TrainedRun, wanted: Trajectory, after: int) -> _Numbers:
    errors, said, bounds = dict[str, float](), dict[str, str](), wanted.bounds
    within = dict[str, float]()
    for step, line in wanted.lines.items():
        want = {**line, **wanted.validations.get(step, {})}
        got = found.lines.get(step, {})
        validated = (key for key in got if key.startswith("val_"))
        for key in dict.fromkeys((*KEYS, *want, *validated)) if step > after else ():
            name = f"{key} of step {step}"
            errors[name], within[name] = _error_of(got.get(key), want.get(key)), bounds.loss
            said[name] = f"{_shown(got.get(key))}, one device has {_shown(want.get(key))}"
    for scalar, values in (("norms", wanted.norms), ("losses", wanted.losses)):
        kept, name = found.scalars.get(scalar, []), f"the checkpoint's {scalar}"
        same = len(kept) == len(values[-SEEN:])
        off = [_error_of(was, value) for was, value in zip(kept, values[-SEEN:], strict=same)]
        errors[name], within[name] = max(off, default=0.0) if same else inf, bounds.loss
    for name, was, value in _of_best(found, wanted, after):
        errors[name], within[name] = _error_of(was, value), bounds.loss
        said[name] = f"{_shown(was)}, one device has {_shown(value)}"
    # what codecs keep shows in the steps after it
    saved = {n: t for n, t in found.tensors.items() if not n.startswith("sync/")}
    last = saved_state_errors(saved, wanted.final, wanted.weights, wanted.noise, bounds)
    past = {name: error for name, error in last.items() if not error < bounds.weight}
    moved = {name: error for name, error in past.items() if ALONE in name}
    # of which the optimizer makes full steps
    followed = {name: error for name, error in past.items() if moved and FOLLOWS in name}
    for name, error in last.items():
        if name not in moved and name not in followed:
            errors[f"{name} after the last step"] = error
            within[f"{name} after the last step"] = bounds.weight
    beyond = {name: error for name, error in errors.items() if not error < within[name]}
    first = next(iter(beyond), None)
    if first in said:
        first = f"{first}: {said[first]}"
    return _Numbers(errors, beyond, first, moved, followed, last)


def _as_followed(numbers: _Numbers, nearby: Sequence[_Numbers]) -> _Numbers:
    """The same with those buffers compared that on one device, too, follow rounding: as far as they
    do so from weights `nearby`, if the weights that they follow are moved as far there."""
    measured = largest_errors(each.last for each in nearby)
    far = {
        name: error
        for name, error in (numbers.moved | numbers.followed).items()
        if not error < FACTOR * measured.get(name, 0.0)
    }
    if not nearby or far.keys() & numbers.moved.keys():
        return numbers
    wrong = {f"{name} after the last step": error for name, error in far.items()}
    followed = {n: error for n, error in numbers.followed.items() if n not in far}
    errors, beyond = numbers.errors | wrong, numbers.beyond | wrong
    first = numbers.first or next(iter(wrong), None)
    return replace(numbers, errors=errors, beyond=beyond, first=first, followed=followed)


def _of_best(
    found: TrainedRun, wanted: Trajectory, after: int
) -> Iterator[tuple[str, float | None, float | None]]:
    """What is compared of the best checkpoint, and of the steps that were saved `after` one: its
    name, what the run has, and one device."""
    got, want = found.scalars.get("best", (None, None)), wanted.best or (None, None)
    for of, was, value in zip(("step", "validation loss"), got, want, strict=True):
        yield f"{of} of the best checkpoint", was, value
    for step in sorted({*found.saved, *wanted.saved}) if wanted.saved else ():
        if step > after:
            there, defined = (step if step in each.saved else None for each in (found, wanted))
            yield f"checkpoint of step {step}", there, defined


def _as_written(run: Trajectory) -> TrainedRun:
    """What a run of `weft train` that does this writes."""
    lines = {n: {**line, **run.validations.get(n, {})} for n, line in run.lines.items()}
    kept = {"norms": run.norms[-SEEN:], "losses": run.losses[-SEEN:]}
    best = {} if run.best is None else {"best": [*run.best]}
    return TrainedRun(lines, run.final, {**kept, **best}, [], run.saved)


def _error_of(got: float | None, want: float | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else inf
    return error_ratio(abs(got - want), abs(want))


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def same_proof(what: str, again: TrainedRun | str, whole: TrainedRun, after: int) -> Proof:
    """That a resumed run wrote the same bits as the run that was not interrupted."""
    if isinstance(again, str):
        return Proof(what, again, equal=False)
    for step, line in whole.lines.items():
        other = again.lines.get(step, {})
        for key in dict.fromkeys((*line, *other)) if step > after else ():
            was, now = line.get(key), other.get(key)
            if was != now:
                shown = f"{key} of step {step}: {_shown(now)}, and had {_shown(was)}"
                return Proof(what, shown, equal=False)
    for name, tensor in whole.tensors.items():
        if name not in again.tensors or not _same_bits(tensor, again.tensors[name]):
            return Proof(what, f"{name} is another one after the last step", equal=False)
    for name in sorted(again.scalars.keys() ^ whole.scalars.keys()) or [
        n for n, value in whole.scalars.items() if again.scalars[n] != value
    ]:
        return Proof(what, f"the checkpoint's {name} is another one", equal=False)
    return Proof(what, "bit for bit")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
