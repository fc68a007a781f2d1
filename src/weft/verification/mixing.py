"""Whether a case's model or loss mixes samples, which layouts part."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from weft.core import Refusal
from weft.engine import SamplePair, mixing_error
from weft.nn import find_experts, model_arguments, module_calls, named_inputs

from .case import Batch, Case

BOUND, FINE = 1e-3, 1e-9  # relative errors that are none, in float64


def mixed_samples(case: Case, parts: str) -> Refusal | None:
    """The refusal of what `parts` the batch, in words, on the first two samples of the first batch;
    None if nothing mixes them, or if that cannot be said: in lower precision an expert is chosen by
    a rounding."""
    model = case.model().eval()
    if case.precision != "fp64" and find_experts(model):
        return None
    inputs = case.inputs if case.inputs is not None else named_inputs(model)
    batch = case.batch_of(0, 0, 1)
    pair = {key: value[:2] for key, value in batch.items()}

    def forward(batch: Batch, seen: Any = None) -> Any:
        with module_calls(model, seen or (lambda name, output: None)):
            return model(**model_arguments(inputs, batch))

    with suppress(Exception), case.mode():  # a loss may take no single sample
        found = SamplePair(model, forward, case.loss, pair, BOUND, FINE).find()
        return None if found is None else mixing_error(found, model, case.loss, parts)
    return None
