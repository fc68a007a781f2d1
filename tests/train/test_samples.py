"""Samples that are no dicts of tensors."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from weft.core.errors import DataError
from weft.train.data import collate
from weft.train.samples import as_entries, named_samples

Pair = namedtuple("Pair", "x label")


@pytest.mark.parametrize(
    "sample, entries",
    [
        ((torch.ones(2), 3), ["x", "label"]),
        ([torch.ones(2), torch.tensor(3)], ["x", "label"]),
        (Pair(torch.ones(2), 3), None),
        ({"x": [1.0, 1.0], "label": np.int64(3)}, None),
        ({"x": np.ones(2, np.float32), "label": 3}, None),
    ],
)
def test_a_sample_becomes_a_dict_of_tensors(sample: Any, entries: list[str] | None) -> None:
    found = as_entries(sample, entries)
    assert found["x"].dtype == torch.float32 and found["x"].tolist() == [1.0, 1.0]
    assert found["label"].dtype == torch.int64 and found["label"].item() == 3


def test_floats_are_of_the_default_dtype() -> None:
    assert as_entries({"target": 0.5}, None)["target"].dtype == torch.float32


@pytest.mark.parametrize(
    "sample, entries, reason",
    [
        ((torch.ones(2), 3), None, 'tuple of 2 items.*entries = ."x", "label".'),
        ((torch.ones(2), 3), ["x"], "Write 2 names"),
        (torch.ones(2), None, 'a sample is Tensor.*Write 1 names in .data., as in entries = ."x".'),
        ({"x": 1.0}, ["x"], "Leave data.entries out"),
        ({"text": "a word"}, None, "'text': an entry of a sample is of type str"),
        ({"x": [[1.0], [1.0, 2.0]]}, None, "'x': an entry of a sample is of type list"),
    ],
)
def test_what_no_tensor_follows_from_is_refused(
    sample: Any, entries: list[str] | None, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        as_entries(sample, entries)


def test_a_dataset_of_tuples_is_batched() -> None:
    held = named_samples(TensorDataset(torch.ones(4, 2), torch.arange(4)), ["x", "label"])
    assert len(held) == 4
    assert held.tensors[1].tolist() == [0, 1, 2, 3]  # the dataset's own
    assert collate([held[0], held[3]])["label"].tolist() == [0, 3]


def test_a_dataset_of_dicts_of_tensors_stays_itself() -> None:
    held = [{"x": torch.ones(2)}]
    assert named_samples(held, None) is held
