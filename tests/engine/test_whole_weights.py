"""The whole weights that trials before the first step compute with, on each layout."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.cases import BATCH, LENGTH
from weft.engine.whole_weights import WholeWeights
from weft.launch import Pool
from weft.losses import next_token
from weft.models import decoder


def gather_all(layout: str) -> int:
    """How many all-reduces it takes to make the weights whole on this rank, where they are those of
    one device."""
    torch.manual_seed(0)
    want = {name: p.detach().clone() for name, p in decoder().named_parameters()}
    torch.manual_seed(0)
    model = decoder()
    sample = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
    plan = weft.plan(model, layout, batch=BATCH, loss=next_token, sample=sample)
    engine = weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=next_token)
    shards = list(engine.state.weights())
    weights = WholeWeights(engine.plan, engine.mesh, shards)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        for name, value in want.items():
            made = weights(name)
            assert torch.equal(made, value), name
            made.zero_()
            assert torch.equal(weights(name), value), f"{name}: a trial may write into it"
    assert weights.local == (not summed.called)
    return summed.call_count


@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2", "fsdp2+zero1", "tp2", "pp2"])
def test_weights_are_gathered_where_ranks_hold_parts(pool: Pool, layout: str) -> None:
    counts = pool.run(gather_all, layout, world=weft.Layout.parse(layout).world)
    assert all(bool(count) == (layout not in ("dp1", "dp2")) for count in counts), counts
