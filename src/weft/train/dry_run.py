"""A forward and a loss of the model without weights, before any process starts: rows that no table
of the model has, and a loss that does not return what weft needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.trees import tree_map
from weft.core import DataError, Refusal
from weft.nn import Loss, model_arguments, named_inputs, weighed_loss

from .token_rows import unknown_token


def dry_run(
    model: nn.Module, loss: Loss, inputs: Sequence[str] | None, sample: Mapping[str, Tensor]
) -> None:
    """Run a model and its loss on a sample, as far as shapes and the sample's values take them:
    other errors than refusals end it, and are left to the ranks. It takes no memory: a model with
    weights is not run.

    Args:
        model: the model, on the meta device.
        loss: its loss.
        inputs: the entries that the model is called with. Default: those that its forward names.
        sample: a batch with values.

    Raises:
        DataError: the model looks up a row that a table does not have, or raises a ValueError
            before it computes with a weight.
        ConfigError: the loss does not return (sum, weight).
    """
    if not all(p.is_meta for p in model.parameters()):
        return
    names = named_inputs(model) if inputs is None else inputs
    values = KeptValues(model, sample)
    with suppress(_Unknown), torch.random.fork_rng([]), torch.no_grad(), values:
        try:
            output = model(**model_arguments(names, dict(sample)))
            weighed_loss(loss, output, dict(sample))
        except Refusal:
            raise
        except ValueError as error:
            if values.lost:
                raise _Unknown from error
            fix = "give other samples, or another model"
            raise DataError("data", "a sample", f"the model refuses it: {error}", fix) from error
        except Exception as error:  # without values a model may fail in any way
            raise _Unknown from error


class _Unknown(Exception):
    """What the dry run cannot say."""


class KeptValues(TorchFunctionMode):
    """Tensors of the batch, and positions that a forward counts, keep their values on the CPU, so
    that what is looked up in a table is known. Where they meet a tensor without values, such as a
    weight, the result has none."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]):
        super().__init__()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.lost = False  # whether what comes may come of missing values
        self._entries = {t.untyped_storage().data_ptr(): key for key, t in batch.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            kwargs["device"] = "cpu"
        found: list[Tensor] = []
        tree_map(lambda t: found.append(t) if isinstance(t, Tensor) else None, (args, kwargs))
        bare = [t for t in found if t.is_meta]
        self.lost |= bool(bare)
        if bare and len(bare) < len(found):
            if func is F.embedding:
                self._check_rows(*found[:2])
            args, kwargs = tree_map(_without_values, (args, kwargs))
        made = func(*args, **kwargs)
        self.lost |= isinstance(made, Tensor) and made.is_meta
        return made

    def _check_rows(self, index: Tensor, table: Tensor) -> None:
        """Raises DataError."""
        if index.is_meta or not index.numel():
            return
        name = self._names.get(id(table), "a table").removesuffix(".weight")
        rows, low, high = table.shape[0], int(index.min()), int(index.max())
        if low >= 0 and high < rows:
            return
        entry = self._entries.get(index.untyped_storage().data_ptr())
        if entry is not None:
            raise unknown_token(entry, low if low < 0 else high, name, rows)
        raise DataError(
            "data",
            f"samples of shape {list(index.shape)}",
            f"the model looks up position {high} in {name}, which has {rows} rows",
            f"give the data a shorter seq_len, or the model {high + 1} positions",
        )


def _without_values(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
