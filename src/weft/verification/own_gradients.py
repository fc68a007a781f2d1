"""Whether a case's model has gradients of its own, which no layout trains as one device does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from weft.core import Refusal
from weft.engine import (
    RandomProjection,
    TrialFunctions,
    draws_seeded,
    find_own_gradient,
    first_tensor,
)
from weft.nn import model_arguments, named_inputs

from .case import Case

BOUND = 1e-8  # relative error that is none, in float64


def own_gradients(case: Case) -> Refusal | None:
    """The refusal, on the first two samples of the first batch; None if there are no such
    gradients, or if that cannot be said, as in lower precision."""
    if case.precision != "fp64":
        return None
    model = case.model()
    inputs = case.inputs if case.inputs is not None else named_inputs(model)
    pair = {key: value[:2] for key, value in case.batch_of(0, 0, 1).items()}

    def output(of: nn.Module) -> Tensor:
        found = first_tensor(of(**model_arguments(inputs, pair)))
        assert found is not None
        return found

    def backward(scale: float) -> Mapping[str, Tensor]:
        fresh, project = case.model(), RandomProjection(torch.device("cpu"))
        with draws_seeded(fresh, torch.device("cpu"), 0), case.mode(), TrialFunctions(True):
            made = output(fresh)
            generator = torch.Generator().manual_seed(0)
            cotangent = torch.randn(made.shape, dtype=made.dtype, generator=generator)
            made.backward(scale * cotangent)
        grads = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
        return {name: project(grad, [None] * grad.ndim) for name, grad in grads.items()}

    with suppress(Exception), case.mode(), TrialFunctions(True):  # it may run on no two samples
        return find_own_gradient(model, lambda: output(model), backward, BOUND)
    return None
