"""What is frozen has no gradient, no part in a reduction and no optimizer state, on any layout."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch

import weft
from tests.cases import BATCH, global_batch
from tests.verification.test_parts import towers
from weft.engine import Audit
from weft.engine.grad_buckets import local_tensor
from weft.nn.losses import mse

LAYOUTS: list[tuple[str, dict[str, str]]] = [
    ("dp2", {}),
    ("fsdp2", {}),
    ("fsdp2+zero1", {}),
    ("fsdp2+zero2", {}),
    ("tp2", {}),
    ("dp2.tp2", {}),
    ("pp2", {}),
    ("pp2.dp2", {}),
    ("pp2+zb-h1.fsdp2", {}),
    ("fsdp2.tp2", {"vision": "fsdp", "*": "tp"}),
    ("fsdp2.tp2", {"vision": "fsdp+tp"}),
]


def held_by_frozen(layout: str, parts: dict[str, str], frozen: bool) -> dict[str, float]:
    """After a step on this rank: elements of gradients and optimizer state of the vision tower, and
    elements that gradients' reductions carried."""
    subject = towers(parts, frozen)
    torch.manual_seed(0)
    model = subject.build()
    batch = global_batch(subject, 0)
    plan = weft.plan(
        model,
        layout,
        batch=BATCH,
        accumulate=2,
        loss=mse,
        parts=parts,
        sample={name: value[:2] for name, value in batch.items()},
    )
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    engine = weft.Engine(model, plan, optimizer=adamw, loss=mse, device="cpu")
    with Audit(engine.mesh) as audit:
        engine.step(engine.local(batch))
    tower = {name: p for name, p in engine.params.items() if name.startswith("vision.")}
    state = [engine.optimizer.state.get(engine.held[n], {}) for n in tower if n in engine.held]
    sums = [c for c in audit.seen if c.kind in ("all_reduce", "reduce_scatter")]
    reduced = [c.nbytes for c in sums if {"dp", "fsdp"} & {*c.axis.split(".")}]
    buckets = [
        view.numel()
        for bucket in engine.reducer.buckets
        for p, view in zip(bucket.params, bucket.views, strict=True)
        if any(p is q for q in tower.values())
    ]
    return {
        "tower": sum(local_tensor(p.detach()).numel() for p in tower.values()),
        "gradients": sum(p.grad is not None for p in tower.values()) + sum(buckets),
        "state": sum(prod(t.shape) for each in state for t in each.values()),
        "given to the optimizer": len(set(engine.held) & set(tower)),
        "reduced": sum(reduced) / 4,
    }


@pytest.mark.grid(4, ci=3)
@pytest.mark.parametrize(("layout", "parts"), LAYOUTS)
def test_a_frozen_tower_costs_no_gradient_and_no_state(
    pool: Any, layout: str, parts: dict[str, str]
) -> None:
    world = weft.Layout.parse(layout).world
    frozen = pool.run(held_by_frozen, layout, parts, True, world=world)
    trained = pool.run(held_by_frozen, layout, parts, False, world=world)
    holding = [rank for rank, each in enumerate(trained) if each["tower"]]
    assert holding
    for rank in holding:
        assert frozen[rank]["tower"] == trained[rank]["tower"]
        assert trained[rank]["gradients"] and trained[rank]["state"] >= 2 * trained[rank]["tower"]
        assert not frozen[rank]["gradients"] and not frozen[rank]["state"]
        assert not frozen[rank]["given to the optimizer"]
        less = trained[rank]["reduced"] - frozen[rank]["reduced"]
        if weft.Layout.parse(layout).size("dp") > 1:
            assert less == trained[rank]["tower"]
        elif weft.Layout.parse(layout).size("fsdp") > 1:  # whole gradients go in, rows come out
            assert less >= 2 * trained[rank]["tower"]
