"""Runs a model on tensors without elements, where integers that no weight has made keep theirs: a
forward may look at tokens (`if pad in input_ids`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft._torch.modes import TorchDispatchMode, without_dispatch_modes
from weft._torch.tensors import FakeTensor, FakeTensorMode, quiet_fake_tensors
from weft._torch.trees import tree_leaves


@contextmanager
def without_elements(mode: FakeTensorMode) -> Iterator[None]:
    """In this context operators on tensors of the mode compute shapes alone."""
    with torch.random.fork_rng([]), quiet_fake_tensors(), mode, _KnownIntegers(), torch.no_grad():
        yield


class _KnownIntegers(TorchDispatchMode):
    """Runs what takes and makes integers alone on their elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs), Tensor)
        if any(isinstance(t, FakeTensor) or t.is_meta or _has_fractions(t) for t in given):
            return func(*args, **kwargs)
        if func is not torch.ops.aten._local_scalar_dense.default:
            shaped = func(*args, **kwargs)
            made = tree_leaves(shaped, Tensor)
            if any(_has_fractions(t) or t.is_meta for t in made):
                return shaped
        with without_dispatch_modes():
            return func(*args, **kwargs)


def _has_fractions(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
