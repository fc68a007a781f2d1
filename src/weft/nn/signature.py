"""Which arguments a model's forward takes, and which entries of a batch it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.core import ConfigError, nearest


def named_inputs(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the model's forward, without labels that it runs without."""
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and (p.default is p.empty or not p.name.startswith("label"))
    )


def check_entries(batch: Any) -> None:
    """Refuse a batch that is no dict of tensors, as a DataLoader over tuples gives. Raises
    ConfigError."""
    fix = 'give a dict, such as {"x": x, "target": target}: names of forward\'s arguments, and what'
    fix += " the loss reads"
    if not isinstance(batch, Mapping):
        problem = "weft calls a model with entries of the batch, by name"
        raise ConfigError("batch", type(batch).__name__, problem, fix)
    for key, value in batch.items():
        if not isinstance(value, Tensor) or not value.ndim:
            problem = "is not a tensor whose first dim is the samples"
            raise ConfigError(f"batch[{key!r}]", type(value).__name__, problem, fix)


def check_inputs(model: nn.Module, inputs: Sequence[str] | None, sample: Mapping[str, Any]) -> None:
    """Check that a sample has the entries that the model is called with.

    Args:
        model: the model.
        inputs: their names. Default: the arguments of its forward that have no default.
        sample: the entries of a sample or batch.

    Raises:
        ConfigError: an entry is missing.
    """
    if inputs is None:
        parameters = inspect.signature(model.forward).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        inputs = [p.name for p in named if p.default is p.empty]
    for name in inputs:
        if name not in sample:
            raise ConfigError(
                "model.inputs",
                list(inputs),
                f"{type(model).__name__} is called with {name}, and a sample holds"
                f" {', '.join(sample)}",
                "rename that entry of the dataset or parameter of forward;"
                f" {nearest(name, sample)}",
            )


def model_arguments(inputs: Sequence[str], batch: dict[str, Any]) -> dict[str, Any]:
    """The entries of `batch` that the model is called with; and `use_cache=False` if it takes that,
    as a model of transformers else keeps keys and values for generation.

    Args:
        inputs: The names of the model's arguments. If empty, every entry but the labels is passed.
        batch: The whole batch, labels included.
    """
    if inputs:
        found = {key: batch[key] for key in inputs if key in batch}
        return {"use_cache": False, **found} if "use_cache" in inputs else found
    return {key: value for key, value in batch.items() if not key.startswith("label")}
