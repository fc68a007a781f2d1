"""Losses over the whole batch are one loss on every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import weft
from tests.cases import Subject, reference
from tests.verification.contrastive import (
    Embedder,
    TwoTowers,
    TwoViews,
    clip,
    nt_xent,
    pairs,
    triplets,
)
from weft.verification.compare import check_layout

LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "dp2.tp2", "dp2.fsdp2", "dp2.pp2", "fsdp2+zero2", "dp4")


def subject(name: str, accumulate: int) -> Subject:
    build, loss = {
        "clip": (TwoTowers, clip),
        "dropout": (partial(TwoTowers, dropout=0.3), clip),
        "simclr": (TwoViews, nt_xent),
        "batchnorm": (partial(TwoViews, norm=True), nt_xent),
        "triplets": (Embedder, triplets),
    }[name]
    return Subject(build, pairs, loss, plan=(("accumulate", accumulate),))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize("name", ("clip", "dropout", "simclr", "batchnorm", "triplets"))
def test_one_loss(pool: Any, name: str, accumulate: int, layout: str) -> None:
    here = subject(name, accumulate)
    if "pp" in layout and accumulate > 1:
        layout = layout.replace("pp2", "pp2+gpipe")
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, here.case(), layout, reference(here), world=world, timeout=60)[0]
    assert found.passed, found
