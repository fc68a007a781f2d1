"""Runs a model on tensors without elements, where integers that no weight has made keep theirs: a
forward may look at tokens (`if pad in input_ids`). What it reads of others is taken to be one, or
false, and what holds for all elements to be true, as checks of numbers expect it, and what holds
for any to be false: it then shows one of its ways, which need not be the one that the elements
would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.modes import TorchDispatchMode, without_dispatch_modes
from weft._torch.tensors import (
    NEEDS_ELEMENTS,
    FakeTensor,
    FakeTensorMode,
    make_fake,
    quiet_fake_tensors,
)
from weft._torch.trees import tree_leaves
from weft.pipeline import copy_with_tensors, is_parameter


def copy_without_elements(
    model: nn.Module,
    mode: FakeTensorMode,
    shape: Callable[[Tensor], tuple[int, ...]] = lambda t: tuple(t.shape),
) -> nn.Module:
    """A copy whose parameters have no elements. Raises UnsupportedModel.

    Args:
        model: any module.
        mode: that of its tensors.
        shape: of a parameter, or of a buffer on the meta device -> what it has in the copy.
    """
    cpu = torch.device("cpu")

    def bare(t: Tensor) -> Tensor:
        if not (t.is_meta or is_parameter(t)):
            return t.clone()
        empty = torch.empty(shape(t), dtype=t.dtype, device="meta")
        return make_fake(mode, nn.Parameter(empty, False) if is_parameter(t) else empty, cpu)

    return copy_with_tensors(model, bare)


# their truth, by operator: of bytes they give bytes, which are no booleans
_TRUTHS = {
    torch.ops.aten.all: True,
    torch.ops.aten._is_all_true: True,
    torch.ops.aten.any: False,
    torch.ops.aten._is_any_true: False,
}


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    places: list[Tensor | None] = []
    for each in indices:
        masks = each is not None and each.dtype == torch.bool
        places += _nonzero(each).unbind(1) if masks else [each]  # type: ignore[arg-type]
    return torch.ops.aten.index.Tensor(x, places)


def _nonzero(x: Tensor) -> Tensor:
    if not (isinstance(x, FakeTensor) or x.is_meta):
        with without_dispatch_modes():
            return x.nonzero()
    return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(math.prod(torch.broadcast_shapes(x.shape, mask.shape)))


# what makes as many rows as a mask is true, of one that is true everywhere
_COUNTING: dict[Any, Callable] = {
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
}
READS = 1000  # of elements that are not there: more are of a loop that would not end


@contextmanager
def without_elements(mode: FakeTensorMode, masks_take_all: bool = False) -> Iterator[None]:
    """In this context operators on tensors of the mode compute shapes alone.

    Args:
        mode: that of the tensors.
        masks_take_all: whether `x[mask]` has all elements, rather than a number that is not known
            and ends the run.
    """
    known = _KnownElements(masks_take_all)
    with torch.random.fork_rng([]), quiet_fake_tensors(), mode, known, torch.no_grad():
        yield


class _KnownElements(TorchDispatchMode):
    """Runs what takes and makes integers alone on their elements, and gives elements that are read
    where there are none."""

    def __init__(self, masks_take_all: bool) -> None:
        super().__init__()
        self._masks_take_all = masks_take_all
        self._reads = 0
        self._truths: list[tuple[Tensor, bool]] = []  # what such an operator has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs), Tensor)
        reads = func is torch.ops.aten._local_scalar_dense.default
        if any(isinstance(t, FakeTensor) or t.is_meta or _has_fractions(t) for t in given):
            if reads and self._reads < READS:
                self._reads += 1
                known = (truth for made, truth in self._truths if made is given[0])
                return next(known, _one(given[0].dtype))
            if func is torch.ops.aten._grouped_mm.default:  # torch knows its shapes in bf16 alone
                halves = [t.bfloat16() if _has_fractions(t) else t for t in args[:2]]
                return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
            if self._masks_take_all and func in _COUNTING:
                return _COUNTING[func](*args)
            made = func(*args, **kwargs)
            if func.overloadpacket in _TRUTHS:
                self._truths.append((made, _TRUTHS[func.overloadpacket]))
            return made
        if not reads:
            with suppress(*NEEDS_ELEMENTS):  # as `x[mask]` of integers, which have them
                shaped = func(*args, **kwargs)
                if any(_has_fractions(t) or t.is_meta for t in tree_leaves(shaped, Tensor)):
                    return shaped
        with without_dispatch_modes():
            return func(*args, **kwargs)


def _one(dtype: torch.dtype) -> bool | int | float | complex:
    """1 of this dtype, by which one may divide, and False of booleans."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 1j
    return 1.0 if dtype.is_floating_point else 1


def _has_fractions(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
