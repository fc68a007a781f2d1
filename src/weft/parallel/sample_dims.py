"""Which dim counts samples in what a forward drops out: [samples, positions, features], or
[positions, samples, features], or none, as in positions alone. A shape alone may not tell: there
may be as many positions as samples, or samples and positions in one dim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import fake_mode
from weft._torch.trees import tree_leaves
from weft.core import DroppedShapes
from weft.nn import DRAWS, DROPOUTS, may_drop

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def dropped_shapes(request: PlanRequest) -> DroppedShapes:
    """Two runs on tensors without elements, one of them with twice the samples, tell, and a third
    one with the first sample in the place of all. Without a sample, or where the forward does not
    run so, torch's own modules do."""
    model = request.model
    unknown = DroppedShapes(_takes_positions_first(model))
    if not (request.sample and may_drop(model)):
        return unknown
    mode, few = fake_mode(), request.sample
    seen, written = [], []
    alike: list[tuple[int, ...]] = []
    try:
        bare = copy_without_elements(model, mode).train()

        def run(asked: PlanRequest) -> _ShapeWatch:
            shapes = _ShapeWatch()
            with without_elements(mode, masks_take_all=True), shapes:
                bare(**asked.arguments())
            return shapes

        for asked in (request, request.with_twice_the_samples()):
            shapes = run(asked)
            seen.append(shapes.found)
            written.append(shapes.written)
        with suppress(Exception):  # it may not take a sample twice
            alike = run(request.with_samples(1).with_samples(request.samples)).found
        both = list(zip(*seen, strict=True))
        wrote = list(zip(*written, strict=True))
    except Exception:  # the trial before the first step says what does not run
        return unknown
    samples = len(next(iter(few.values())))
    rows = {*_rows((pair for pair in both if len(pair[0]) == 3), samples)}
    first = any(shape[1] < 0 for shape in rows)
    shared = {one for one, two in both if one == two}
    unclear = {
        shape
        for shape in shared
        if any(_counts_samples(shape, pair, samples) for pair in both if pair[0] != pair[1])
    }
    return DroppedShapes(
        first,
        frozenset(shared - unclear),
        frozenset(unclear),
        frozenset(rows) if first else frozenset(),
        frozenset((*_rows(wrote, samples), *(one for one, two in wrote if one == two))),
        frozenset({*_parts_of_rows(both, samples), *_uneven(seen[0], alike, samples)}),
    )


def _rows(
    pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], samples: int
) -> Iterator[tuple[int, ...]]:
    """Of shapes for `samples` and for twice as many those in which one dim counts them, with -n in
    its place if it counts n rows of each."""
    for one, two in pairs:
        apart = [dim for dim, (n, m) in enumerate(zip(one, two, strict=False)) if n != m]
        if len(one) == len(two) and len(apart) == 1:
            (dim,) = apart
            if two[dim] == 2 * one[dim] and one[dim] % samples == 0:
                yield (*one[:dim], -(one[dim] // samples), *one[dim + 1 :])


def _uneven(
    shapes: Sequence[tuple[int, ...]], alike: Sequence[tuple[int, ...]], samples: int
) -> Iterator[tuple[int, ...]]:
    """Of shapes for `samples`, and for as many that are all the first one: those that differ, with
    0 in the place of the dim that does, and -n for n rows of each sample in the first."""
    if len(shapes) == len(alike):
        for one, other in zip(shapes, alike, strict=True):
            if len(one) == len(other) and one != other:
                first, *rest = (n if n == m else 0 for n, m in zip(one, other, strict=True))
                yield (first if first % samples else -(first // samples), *rest)


def _parts_of_rows(
    pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], samples: int
) -> Iterator[tuple[int, ...]]:
    """Of shapes for `samples` and for twice as many those in which a dim counts rows of samples
    that cannot have the same number of them each, with 0 in its place."""
    for one, two in pairs:
        apart = [dim for dim, (n, m) in enumerate(zip(one, two, strict=False)) if n != m]
        if len(one) == len(two) and len(apart) == 1 and one[apart[0]] % samples:
            yield (*one[: apart[0]], 0, *one[apart[0] + 1 :])


def _counts_samples(
    shape: tuple[int, ...], pair: tuple[tuple[int, ...], tuple[int, ...]], samples: int
) -> bool:
    """Whether what has the shapes of `pair`, for `samples` and twice as many, has this one for
    another number of them."""
    few, many = pair
    if not len(shape) == len(few) == len(many):
        return False
    return all(
        n == one if one == two else n % max(1, one // samples) == 0
        for n, one, two in zip(shape, few, many, strict=True)
    )


def _takes_positions_first(model: nn.Module) -> bool:
    return any(
        isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first
        for module in model.modules()
    )


class _ShapeWatch(TorchFunctionMode):
    """The shapes of tensors that are dropped out, or that random numbers are drawn after, and of
    random numbers whose shape is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []
        self.written: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs or {}), Tensor)[:1]
        made = func(*args, **(kwargs or {}))
        if func in DROPOUTS or (func in DRAWS and given):
            self.found += [tuple(t.shape) for t in given]
            if made.ndim == 2 and func in (torch.multinomial, Tensor.multinomial):
                self.found.append(tuple(made.shape))
        if func in DRAWS and (not given or (made.ndim == 1 and given[0].ndim == 1)):
            self.written.append(tuple(made.shape))
        return made
