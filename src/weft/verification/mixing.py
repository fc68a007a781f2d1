"""Whether a case's model or loss mixes samples, which layouts part."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from weft.core import Refusal
from weft.engine import (
    SamplePair,
    TrialFunctions,
    mixing_error,
    put_on_trial,
    training_modes,
)
from weft.nn import find_experts, model_arguments, module_calls, named_inputs

from .case import Batch, Case

BOUND, FINE = 1e-3, 1e-9  # relative errors that are none, in float64


def mixed_samples(case: Case, parts: str) -> Refusal | None:
    """The refusal of what `parts` the batch, in words, on the first two samples of the first batch,
    in evaluation and as in a step; None if nothing mixes them, or if that cannot be said: in lower
    precision an expert is chosen by a rounding."""
    model = case.model()
    modes = training_modes(model)
    if case.precision != "fp64" and find_experts(model):
        return None
    inputs = case.inputs if case.inputs is not None else named_inputs(model)
    batch = case.batch_of(0, 0, 1)
    pair = {key: value[:2] for key, value in batch.items()}

    def forward(batch: Batch, seen: Any = None) -> Any:
        with module_calls(model, seen or (lambda name, output: None)):
            return model(**model_arguments(inputs, batch))

    for training in (False, True):
        put_on_trial(model, modes, training)
        # a loss may take no single sample
        with suppress(Exception), case.mode(), TrialFunctions(training):
            found = SamplePair(model, forward, case.loss, pair, BOUND, FINE).find()
            if found is not None:
                return mixing_error(found, model, case.loss, parts)
    return None
