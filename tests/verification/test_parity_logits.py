"""Logits that the loss makes in chunks of tokens: every layout equals one device whose logits are
whole, with the same collectives as when ranks have theirs whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Subject, reference, tokens
from tests.verification.test_parity import SUBJECTS
from weft.nn import deferred_logits
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult

STEPS = 2
CHUNKS = ("logits", "chunks")


class Capped(nn.Module):
    """Logits that the model itself changes: they are computed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 2, 4, 2, seq_len=LENGTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return 30.0 * torch.tanh(self.inner(input_ids) / 30.0)


def in_small_chunks(subject: Subject, *plan: tuple[str, Any]) -> Subject:
    return replace(
        subject, build=partial(small, subject.build), plan=(*subject.plan, CHUNKS, *plan)
    )


def small(build: Any) -> nn.Module:
    deferred_logits.CPU_CHUNK = 4 * VOCAB  # in the process that builds it; four rows
    return build()


def checked(case: Any, layout: str, expected: Any) -> tuple[LayoutResult, int]:
    """The comparison, and how often this rank made the losses from deferred logits."""
    made: list[int] = []
    right = deferred_logits.DeferredLogits.losses

    def losses(self: Any, *rest: Any) -> Tensor:
        made.append(1)
        return right(self, *rest)

    deferred_logits.DeferredLogits.losses = losses  # type: ignore[method-assign]
    try:
        return check_layout(case, layout, expected), len(made)
    finally:
        deferred_logits.DeferredLogits.losses = right  # type: ignore[method-assign]


def run(pool: Any, subject: Subject, layout: str) -> int:
    """Compare, and return how often losses were made from deferred logits, over all ranks."""
    world = weft.Layout.parse(layout).world
    found = pool.run(checked, subject.case(), layout, reference(subject, STEPS), world=world)
    assert found[0][0].passed, found[0][0]
    return sum(made for _, made in found)


GRID = [
    ("decoder", "dp2"),
    ("decoder", "fsdp2"),
    ("tied", "fsdp2+zero1"),
    ("tied", "fsdp2+zero2"),
    ("decoder", "tp2"),
    ("tied", "tp2+sequence"),
    ("decoder", "dp2.vp2"),
    ("decoder", "cp2"),
    ("tied", "pp2"),
    ("decoder", "pp2+zb-h1"),
    ("llama", "fsdp2.tp2"),
    ("llama", "pp2.fsdp2"),
    ("gpt2", "tp2"),
    ("gpt2", "dp2.fsdp2"),
    ("mistral", "pp2.tp2"),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), GRID)
def test_layout_equals_one_device(pool: Any, name: str, layout: str) -> None:
    assert run(pool, in_small_chunks(SUBJECTS[name]), layout)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_recomputed(pool: Any, layout: str) -> None:
    assert run(pool, in_small_chunks(SUBJECTS["tied"], ("recompute", "full")), layout)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_logits_that_the_model_changes_are_whole(pool: Any, layout: str) -> None:
    assert not run(pool, in_small_chunks(Subject(Capped, tokens, next_token)), layout)
