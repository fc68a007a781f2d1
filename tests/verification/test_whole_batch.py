"""Losses over the whole batch are one loss on every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import Subject, reference
from tests.verification.contrastive import (
    Embedder,
    TwoTowers,
    TwoTowersWithLogits,
    TwoViews,
    both_ways,
    clip,
    nt_xent,
    pairs,
    reads_logits,
    triplets,
)
from weft.core.errors import ConfigError, UnsupportedModel
from weft.losses import whole_batch
from weft.models import decoder
from weft.verification.compare import check_layout

LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "dp2.tp2", "dp2.fsdp2", "dp2.pp2", "fsdp2+zero2", "dp4")


def subject(name: str, accumulate: int, **plan: Any) -> Subject:
    build, loss = {
        "clip": (TwoTowers, clip),
        "logits": (TwoTowersWithLogits, clip),
        "dropout": (partial(TwoTowers, dropout=0.3), clip),
        "simclr": (TwoViews, nt_xent),
        "batchnorm": (partial(TwoViews, norm=True), nt_xent),
        "triplets": (Embedder, triplets),
    }[name]
    further = (("accumulate", accumulate), *plan.items())
    return Subject(build, pairs, loss, plan=further, clip=0.5 if plan else None)


def check(pool: Any, here: Subject, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, here.case(), layout, reference(here), world=world, timeout=60)[0]
    assert found.passed, found


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize("name", ("clip", "logits", "dropout", "simclr", "batchnorm", "triplets"))
def test_one_loss(pool: Any, name: str, accumulate: int, layout: str) -> None:
    if accumulate > 1:
        layout = layout.replace("pp2", "pp2+gpipe")
    check(pool, subject(name, accumulate), layout)


@pytest.mark.parametrize("layout", ("dp2", "fsdp2"))
def test_with_recomputation_and_clipping(pool: Any, layout: str) -> None:
    check(pool, subject("dropout", 2, recompute="full"), layout)


@pytest.mark.parametrize("layout", ("dp2", "fsdp2"))
def test_three_microbatches(pool: Any, layout: str) -> None:
    """With sharded weights that are gathered in each forward."""
    report = weft.verify(TwoTowers, plan_of(layout, 3), twelve(), loss=clip, steps=2)
    assert report.passed, report.text()


def plan_of(layout: str, accumulate: int) -> weft.Plan:
    return weft.plan(TwoTowers(), layout, batch=12, accumulate=accumulate, loss=clip)


def twelve() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"pixels": torch.randn(12, 12), "words": torch.randn(12, 6)}


def test_in_bf16() -> None:
    sgd = partial(torch.optim.SGD, lr=0.01)
    plan = plan_of("dp2", 2)
    report = weft.verify(
        TwoTowers, plan, twelve(), loss=clip, optimizer=sgd, precision="bf16", steps=2
    )
    assert report.passed, report.text()


def test_the_plan_says_it() -> None:
    assert "clip is one loss of the whole batch: outputs are gathered over dp; each" in str(
        plan_of("dp2", 2)
    )
    assert "gathered over dp.fsdp" in str(plan_of("dp2.fsdp2", 1))
    assert "whole batch" not in str(weft.plan(TwoTowers(), "dp2", batch=8))


# ---- what mixes samples without a mark ---------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "accumulate", "by"), [("dp2", 1, "dp"), ("dp1", 2, "accumulate = 2")]
)
def test_verify_refuses_a_loss_that_mixes(layout: str, accumulate: int, by: str) -> None:
    plan = weft.plan(TwoTowers(), layout, batch=12, accumulate=accumulate, loss=both_ways)
    with pytest.raises(ConfigError, match=f"'both_ways': depends on how {by} divides"):
        weft.verify(TwoTowers, plan, twelve(), loss=both_ways)


def test_verify_passes_it_where_nothing_is_divided() -> None:
    report = weft.verify(TwoTowers, "tp2", twelve(), loss=both_ways, steps=1)
    assert report.passed, report.text()


# ---- what is refused ---------------------------------------------------------------------------


def own_weight(output: Any, batch: Any, scale: nn.Parameter) -> tuple[Tensor, Any]:
    return both_ways({**output, "scale": scale}, batch)


@pytest.mark.parametrize(("layout", "accumulate"), [("dp2", 1), ("dp1", 2), ("dp1", 1)])
def test_a_loss_that_reads_pairs_of_one_rank_is_refused(
    pool: Any, layout: str, accumulate: int
) -> None:
    here = Subject(TwoTowersWithLogits, pairs, reads_logits, plan=(("accumulate", accumulate),))
    if (layout, accumulate) == ("dp1", 1):  # all pairs are there
        check(pool, here, layout)
        return
    with pytest.raises(UnsupportedModel, match="'reads_logits': it reads tensor 0 of the output"):
        check(pool, here, layout)


def train(model: nn.Module, loss: Any, layout: str, accumulate: int = 1) -> float:
    plan = weft.plan(model, layout, batch=12, accumulate=accumulate, loss=loss)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=loss, device="cpu")
    return float(engine.step(twelve()).loss)


def test_a_loss_with_a_weight_of_its_own_is_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    loss = partial(whole_batch(own_weight), scale=scale)
    with pytest.raises(ConfigError, match=r"its own weight \[\], which gets no gradient"):
        train(TwoTowers(), loss, "dp1")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("pp2+1f1b", {"accumulate": 2}, "1f1b begins backward before all 2 microbatches .* pp.gpipe"),
    ("pp2+pipedream", {"accumulate": 2}, "pipedream updates weights before"),
    ("dp2", {"sync": "diloco"}, "with diloco each replica steps on its own samples"),
]


@pytest.mark.parametrize(("layout", "further", "message"), REFUSED)
def test_what_cannot_be_is_refused_at_planning(
    layout: str, further: dict[str, Any], message: str
) -> None:
    sample = {key: value[:2] for key, value in twelve().items()}
    with pytest.raises(ConfigError, match=message):
        weft.plan(TwoTowers(), layout, batch=12, loss=clip, sample=sample, **further)


def test_a_shared_sequence_is_refused() -> None:
    loss = whole_batch(weft.losses.positionwise(lambda output, batch: (output.sum(), 1)))
    with pytest.raises(ConfigError, match="is marked positionwise too"):
        weft.plan(decoder(), "cp2", batch=12, loss=loss)


def test_an_engine_refuses_what_its_plan_did_not_know() -> None:
    sample = {key: value[:2] for key, value in twelve().items()}
    plan = weft.plan(TwoTowers(), "pp2", batch=12, accumulate=2, sample=sample)
    with pytest.raises(ConfigError, match="begins backward before"):
        weft.Engine(TwoTowers(), plan, optimizer=torch.optim.SGD, loss=clip, device="cpu")


# ---- beside parity -----------------------------------------------------------------------------


def _evaluated(accumulate: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model, batch = TwoTowers(), twelve()
    plan = weft.plan(model, "dp2", batch=12, accumulate=accumulate, loss=clip)
    sgd = partial(torch.optim.SGD, lr=0.0)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=clip, device="cpu")
    own = engine.local(batch)
    return float(engine.step(own).loss), float(engine.evaluate(own).loss)


@pytest.mark.parametrize("accumulate", (1, 3))
def test_evaluation_is_of_the_whole_batch_too(pool: Any, accumulate: int) -> None:
    torch.manual_seed(0)
    total, count = clip(TwoTowers()(**twelve()), {})
    want = pytest.approx(float(total) / count, rel=1e-6)
    for trained, evaluated in pool.run(partial(_evaluated, accumulate), world=2):
        assert trained == want
        assert evaluated == want


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    model = TwoViews(norm=True)
    train(model, nt_xent, "dp1", accumulate=2)
    assert int(model.norm.num_batches_tracked) == 2
