"""What is said of a token without a row (src/weft/train/token_rows.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core import DataError
from weft.train.token_rows import refuse_unknown_tokens


def fail(**batch: Tensor) -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(32, 4)})
    weights = [SimpleNamespace(name="tokens.weight", shape=(32, 4))]
    engine: Any = SimpleNamespace(
        model=model,
        global_plan=SimpleNamespace(weights=weights),
        sequence=SimpleNamespace(inputs=("input_ids", "time")),
    )
    with refuse_unknown_tokens(engine, batch):
        raise IndexError("index out of range in self")


def test_only_tokens_that_the_model_is_given_are_blamed() -> None:
    known, odd = torch.zeros(2, 3).long(), torch.full((2, 3), 40)
    with pytest.raises(DataError, match=r"batch\['input_ids'\] = 40: tokens has 32 rows"):
        fail(labels=-torch.ones(2, 3).long(), time=torch.full((2,), 9999), input_ids=odd)
    with pytest.raises(IndexError):
        fail(labels=-torch.ones(2, 3).long(), time=torch.full((2,), 9999), input_ids=known)
