"""What a model is called with, read off its forward: entries of the batch by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

LABELS = "label"  # names that begin so are the loss's
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def plain_inputs(model: nn.Module, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the arguments that a model is called with, if the batch has them: those of its
    forward, but for labels that have a default. `chosen`: other ones."""
    if chosen is not None:
        return tuple(chosen)
    named = inspect.signature(model.forward).parameters
    return tuple(
        n
        for n, p in named.items()
        if p.kind in BY_NAME and not (n.startswith(LABELS) and p.default is not p.empty)
    )


def plain_arguments(inputs: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of these names that a batch has; all that it has but labels, where a forward
    names none. A model that could keep keys and values for generation is told not to."""
    if not inputs:
        return {name: value for name, value in batch.items() if not name.startswith(LABELS)}
    found: dict[str, Any] = {name: batch[name] for name in inputs if name in batch}
    if "use_cache" in inputs:
        found.setdefault("use_cache", False)
    return found
