"""The run of a model without weights, before any process starts (src/weft/train/dry_run.py)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from weft.core import DataError
from weft.nn.losses import next_token
from weft.train.dry_run import CALLS, POSITIONS, DryRun, dry_run


class Net(nn.Module):
    """Tokens and positions; `first` is what it does before it computes with a weight."""

    def __init__(self, first: Any = None, rows: int = 64, places: int = 16, offset: int = 0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(rows, 8), nn.Embedding(places, 8)
        self.head, self.first, self.offset = nn.Linear(8, rows), first, offset

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if self.first is not None:
            self.first(input_ids, position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        at = position_ids + self.offset
        return self.head(self.tokens(input_ids) + self.places(at))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class Configured(Net):
    """As a model of transformers, whose masks may have values."""

    config = "one"


def run(kind: type[Net], length: int, *, odd: int = 0, counted: bool = False, **net: Any) -> DryRun:
    with torch.device("meta"):
        model = kind(**net)
    ids = torch.zeros(2, length, dtype=torch.int64)
    ids[0, -1] = odd
    return dry_run(model, next_token, None, {"input_ids": ids}, counted=counted)


@pytest.mark.parametrize("kind", [Net, Configured])
def test_rows_that_no_table_has_are_refused_at_any_length(kind: type[Net]) -> None:
    for length in (16, 300, 40_000):
        run(kind, length, places=length)
        run(kind, length, places=length + 2, offset=2)
        with pytest.raises(DataError, match=f"position {length - 1} in places, which has"):
            run(kind, length, places=length - 1)
        with pytest.raises(DataError, match=f"looks up position {length + 1} in places"):
            run(kind, length, places=length, offset=2)
        with pytest.raises(DataError, match=r"batch\['input_ids'\] = 70: tokens has 64 rows"):
            run(kind, length, places=length, odd=70)


def test_the_row_that_is_at_fault_is_named() -> None:
    with pytest.raises(DataError, match=r"looks up row -1 in places, which has 64 rows. Correct"):
        run(Net, 16, places=64, offset=-1)


def test_positions_with_a_bound_are_not_counted_on() -> None:
    class Clamped(Configured):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            at = torch.arange(input_ids.size(1)).clamp(max=POSITIONS - 1)
            return super().forward(input_ids, at)

    run(Clamped, 4096, places=POSITIONS)


def test_a_run_is_short() -> None:
    def mask(ids: Tensor, at: Any) -> None:
        places = torch.arange(ids.size(1))
        assert (places[:, None] < places).numel() <= POSITIONS**2

    def loop(ids: Tensor, at: Any) -> None:
        for _ in range(100 * CALLS):
            ids = ids + 1

    start = time.monotonic()
    run(Configured, 32_768, first=mask, places=32_768)
    run(Net, 2048, first=loop)
    assert time.monotonic() - start < 10


def test_an_error_that_is_not_of_the_data_is_left_to_the_ranks() -> None:
    def positions(ids: Tensor, at: Any) -> None:
        if at is None:
            raise ValueError("position_ids is None")

    def short(ids: Tensor, at: Any) -> None:
        if ids.size(1) < 300:
            raise ValueError("give more")

    run(Net, 16, first=lambda *_: dist.get_rank())
    run(Net, 16, first=positions, counted=True)
    run(Configured, 300, first=short, places=300)
    with pytest.raises(DataError, match="the model refuses it: position_ids is None"):
        run(Net, 16, first=positions)


def test_a_padding_mask_keeps_its_values_where_it_is_moved_to_the_weights() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert dry_run(model, next_token, None, batch) == DryRun(None, own_gradients=False)


def test_gradients_of_a_models_own_are_seen() -> None:
    class Hooked(Net):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            logits = super().forward(input_ids, position_ids)
            logits.register_hook(lambda grad: grad.clamp(-1, 1))
            return logits

    assert run(Net, 16) == DryRun(None, own_gradients=False)
    assert run(Net, 16, first=lambda ids, at: Scaled.apply(torch.ones(1))).own_gradients
    assert run(Hooked, 16).own_gradients
    with torch.device("meta"):
        net = Net()
    net.head.register_full_backward_hook(lambda *_: None)
    assert dry_run(net, next_token, None, {"input_ids": torch.zeros(2, 16).long()}).own_gradients
    assert run(Configured, 300, places=300).own_gradients  # the rest of it has not run
    assert run(Net, 16, first=lambda *_: dist.get_rank()).own_gradients
