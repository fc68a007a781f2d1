"""Samples as datasets have them: dicts, tuples or single values, of tensors, arrays and numbers;
and the dicts of tensors that weft trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import DataError, Refusal, told_fault


class NamedSamples:
    """A dataset's samples as dicts of tensors. All else is asked of the dataset itself.

    Args:
        dataset: a map-style dataset.
        entries: the names of the items of a sample that is no dict.
    """

    def __init__(self, dataset: Any, entries: Sequence[str] | None):
        self._dataset, self._entries = dataset, entries

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return as_entries(self._dataset[index], self._entries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy, or a process that unpickles this, has no dataset yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


def named_samples(dataset: Any, entries: Sequence[str] | None) -> Any:
    """A dataset of tuples, as torchvision's are, with samples as weft has them: dicts
    of tensors. One that has them already comes back as it is.

    Args:
        dataset: a map-style dataset.
        entries: the names of a sample's items: arguments of the model's forward, and what the loss
            reads. None: samples have names.

    Raises:
        DataError: a sample has more or fewer items, or one that no tensor follows from.

    Example:
        >>> pairs = [(torch.zeros(1, 28, 28), 7)]
        >>> named_samples(pairs, ("image", "label"))[0]["label"]
        tensor(7)
    """
    if length_of(dataset) == 0:
        return dataset
    first = read_sample(dataset, 0)
    if isinstance(first, dict):
        _refuse_sparse(first)
    plain = isinstance(first, dict) and all(isinstance(v, Tensor) for v in first.values())
    if plain and entries is None:
        return dataset
    as_entries(first, entries)
    return NamedSamples(dataset, entries)


def as_entries(sample: Any, entries: Sequence[str] | None) -> dict[str, Tensor]:
    """A sample as a dict of tensors. Raises DataError."""
    if isinstance(sample, Mapping):
        if entries is not None:
            problem = f"a sample is a dict of {', '.join(map(str, sample))}: it has names already"
            raise DataError("data.entries", list(entries), problem, "leave data.entries out")
        return {key: _tensor(key, value) for key, value in sample.items()}
    items: Sequence[Any] = sample if isinstance(sample, (tuple, list)) else (sample,)
    names = getattr(sample, "_fields", None) if entries is None else entries  # a namedtuple's
    if names is None or len(names) != len(items):
        kind = type(sample).__name__
        kind = f"a {kind} of {len(items)} items" if isinstance(sample, (tuple, list)) else kind
        raise DataError(
            "data.entries",
            None if entries is None else list(entries),
            f"a sample is {kind}, and weft passes entries to a model by name",
            f"write {len(items)} names in [data], as in entries ="
            f" {_example(len(items))}: those of the arguments of the model's forward, and those"
            " that the loss reads from the batch",
        )
    return {name: _tensor(name, item) for name, item in zip(names, items, strict=True)}


def _refuse_sparse(sample: Mapping[str, Any]) -> None:
    for key, value in sample.items():
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            problem = "an entry of a sample is a sparse tensor, and batches are dense"
            raise DataError("data", key, problem, "call to_dense() in the dataset")


def length_of(dataset: Any) -> int:
    """The number of samples of the user's dataset. Raises DataError."""
    try:
        return len(dataset)
    except Exception as error:  # a user's code may fail in any way
        problem = f"its __len__ fails: {told_fault(error)}"
        raise DataError("data", type(dataset).__name__, problem, "correct that code") from error


def read_sample(dataset: Any, index: int) -> Any:
    """A sample of the user's dataset. Raises DataError before any process starts; a rank may find
    it when it begins anew."""
    if dist.is_initialized():
        return noted_sample(dataset, index)
    try:
        return dataset[index]
    except Refusal:
        raise
    except Exception as error:  # a user's code may fail in any way
        problem = f"sample {index} cannot be read: {told_fault(error)}"
        fix = "correct that code, or the data"
        raise DataError("data", type(dataset).__name__, problem, fix) from error


def noted_sample(dataset: Any, index: int) -> Any:
    """A sample of the dataset; what it raises says which sample that was."""
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"sample {index} of the data was being read")
        raise


def _example(count: int) -> str:
    names = ["x", *(["label"] if count == 2 else [f"x{i}" for i in range(2, count + 1)])][:count]
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _tensor(key: object, value: Any) -> Tensor:
    """What torch's own collate makes a tensor of, but floats in the default dtype."""
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            return torch.as_tensor(value)
        if not isinstance(value, (str, bytes)):
            return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):  # no number, or rows of several lengths
        pass
    raise DataError(
        "data",
        key,
        f"an entry of a sample is of type {type(value).__name__}, which cannot become a tensor",
        "give tensors, arrays or numbers, the same shape in every sample",
    )
