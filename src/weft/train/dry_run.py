"""A forward and a loss of the model without weights, before any process starts: rows that no table
of the model has, and a loss that does not return what weft needs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.autograd import watch_backward
from weft._torch.trees import tree_leaves, tree_map
from weft.core import ConfigError, DataError, Refusal
from weft.nn import Loss, check_learns, model_arguments, named_inputs, weighed_loss

from .token_rows import unknown_token

# The run takes about a second at most: masks that a model makes of positions have values, and their
# number of elements is the square of that of the positions.
POSITIONS, POSITIONS_WITHOUT_CONFIG = 256, 2048  # only a model of transformers has a config
CALLS = 15_000  # of torch's functions
NOT_SAID_OF_DATA = (os.path.dirname(torch.__file__) + os.sep, __file__)
# Positions that these have met may be others beyond the part of the sequence that is run.
BOUNDS = {"clamp", "clamp_", "clip", "minimum", "min", "remainder", "fmod", "where", "__mod__"}


@dataclass(frozen=True)
class DryRun:
    """What the run of a model without weights has shown.

    Args:
        error: what ended it.
        own_gradients: whether autograd functions or hooks of the model's own may change gradients.
    """

    error: Exception | None = None
    own_gradients: bool = True


def dry_run(
    model: nn.Module,
    loss: Loss,
    inputs: Sequence[str] | None,
    sample: Mapping[str, Tensor],
    *,
    counted: bool = False,
    metrics: Sequence[Loss] = (),
) -> DryRun:
    """Run a model and its loss on a sample, as far as shapes and the sample's values take them:
    another error than a refusal ends it, and is returned. It takes no memory: a model with weights
    is not run.

    Args:
        model: the model, on the meta device.
        loss: its loss.
        inputs: the entries that the model is called with. Default: those that its forward names.
        sample: a batch with values. Of a long one, the run takes the first `POSITIONS`.
        counted: whether the model is given `position_ids` where its forward names them and the
            sample has none, as under cp.
        metrics: of a validation.

    Raises:
        DataError: the model looks up a row that a table does not have, or raises a ValueError
            before it computes with a weight.
        ConfigError: the loss or a metric does not return (sum, weight), or reads an entry that no
            sample has, or the model's output has no gradient.
    """
    if not all(p.is_meta for p in model.parameters()):
        return DryRun()
    names = named_inputs(model) if inputs is None else inputs
    batch, length = _first_positions(model, names, sample)
    whole = all(batch[key] is entry for key, entry in sample.items())
    if counted and "position_ids" in names and "position_ids" not in batch:
        first = next((batch[key] for key in names if key in batch), None)
        if first is not None and first.ndim > 1:
            batch["position_ids"] = torch.arange(first.shape[1]).expand(*first.shape[:2])
    values = KeptValues(model, sample, length, length if whole else POSITIONS)
    own_gradients = not whole or any(module._backward_hooks for module in model.modules())
    with suppress(_Unknown), torch.random.fork_rng([]), torch.enable_grad(), values:
        try:
            with watch_backward() as own:
                output = model(**model_arguments(names, batch))
            own_gradients |= bool(own)
            for function in (loss, *metrics):
                field = "loss" if function is loss else "train.eval_metrics"
                with _refuse_missing_entry(field, function, batch):
                    total, weight = weighed_loss(function, output, batch, field)
                if function is loss and not (isinstance(weight, Tensor) and weight.is_meta):
                    try:
                        check_learns(function, total, weight)
                    except ConfigError as error:
                        if any(t.requires_grad for t in tree_leaves(output, Tensor)):
                            return DryRun(
                                error, own_gradients
                            )  # the loss may be 0 for these samples alone
                        raise
        except (Refusal, _Unknown):
            raise
        except ValueError as error:
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if values.lost or not whole or raised_in.startswith(NOT_SAID_OF_DATA):
                return DryRun(error)
            fix = "give other samples, or another model"
            raise DataError("data", "a sample", f"the model refuses it: {error}", fix) from error
        except Exception as error:  # without values a model may fail in any way
            return DryRun(error)
        return DryRun(own_gradients=own_gradients)
    return DryRun()


@contextmanager
def _refuse_missing_entry(
    field: str, function: Loss, batch: Mapping[str, Tensor]
) -> Iterator[None]:
    """A loss that looks for an entry under a name that no sample has."""
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or key in batch:
            raise
        name = getattr(function, "__name__", type(function).__name__)
        problem = f"reads the entry {key!r} of a sample, and the sample has only {', '.join(batch)}"
        fix = (
            f"rename the entry to {key!r} in the data, or name a function that reads the"
            " entries there are"
        )
        raise ConfigError(field, name, problem, fix) from error


class _Unknown(Exception):
    """What the dry run cannot say."""


def _first_positions(
    model: nn.Module, names: Sequence[str], sample: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """(the sample with as many positions as are run, the number of positions that it has)."""
    first = next((sample[key] for key in names or sample if key in sample), None)
    length = first.shape[1] if first is not None and first.ndim > 1 else 0
    most = POSITIONS if hasattr(model, "config") else POSITIONS_WITHOUT_CONFIG
    if length <= most:
        return dict(sample), length
    cut = {
        key: t[:, :POSITIONS] if t.ndim > 1 and t.shape[1] == length else t
        for key, t in sample.items()
    }
    return cut, length


class KeptValues(TorchFunctionMode):
    """Tensors of the batch, and positions that a forward counts, keep their values on the CPU, so
    that what is looked up in a table is known. Where they meet a tensor without values, such as a
    weight, the result has none.

    Args:
        batch: as the data has it.
        length: how many positions it has.
        run: how many of them the model is run on, the first ones.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], length: int, run: int):
        super().__init__()
        self._batch, self._length, self._run = batch, length, run
        self._calls, self._bounded = 0, False
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.lost = False  # whether what comes may come of missing values
        self._entries = {
            t.untyped_storage().data_ptr(): key
            for key, t in batch.items()
            if t.layout is torch.strided
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self._calls += 1
        if self._calls > CALLS:
            raise _Unknown
        if func is torch.arange:
            kwargs["device"] = "cpu"
        found = tree_leaves((args, kwargs), Tensor)
        bare = [t for t in found if t.is_meta]
        if func is Tensor.to and not bare:  # moved to where the weights are
            args, kwargs = tree_map(_kept_here, (args, kwargs))
        if not bare and getattr(func, "__name__", "") in BOUNDS:
            self._bounded |= any(t.dtype in (torch.int64, torch.int32) for t in found)
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
        entry = self._entries.get(index.untyped_storage().data_ptr())
        along = entry is None and index.ndim > 0 and index.shape[-1] == self._run
        counts = along and bool((index.diff(dim=-1) == 1).all()) and int(index.min()) >= 0
        if entry is not None and self._length > self._run and index.ndim > 1:
            given = self._batch[entry]
            if index.shape == given[:, : self._run].shape:
                index = given  # the rest of the sequence too
        rows, low, high = table.shape[0], int(index.min()), int(index.max())
        if counts and not self._bounded:
            high += self._length - self._run
        if low >= 0 and high < rows:
            return
        odd = low if low < 0 else high
        if entry is not None:
            raise unknown_token(entry, odd, name, rows)
        fix = f"give {name} at least {odd + 1} rows, or the model other data"
        if counts:
            fix = f"give the data a shorter seq_len, or the model {odd + 1} positions"
        raise DataError(
            "data",
            "a sample",
            f"the model looks up {'position' if counts else 'row'} {odd} in {name}, which has"
            f" {rows} rows",
            fix if odd >= 0 else "correct the data, or what the model makes of it",
        )


def _kept_here(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _without_values(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
