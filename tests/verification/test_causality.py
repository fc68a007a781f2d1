"""A model that reads the tokens which its loss predicts is named; a causal one is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.cases import LENGTH, VOCAB, Subject, tokens
from weft.losses import causal_lm, classification, next_token
from weft.models import decoder
from weft.verification.plain.causality import reads_later_tokens
from weft.verification.verify_model import verify_case


class Mixing(nn.Module):
    """Adds to each position the token that is `ahead` positions after it."""

    def __init__(self, ahead: int):
        super().__init__()
        self.ahead, self.embedding, self.head = ahead, nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + x.roll(-self.ahead, 1))


def ids(length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(VOCAB, (2, length), generator=generator)}


def forward_of(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    model = model.double().eval()
    return lambda batch: model(batch["input_ids"])


@pytest.mark.parametrize("loss", [next_token, causal_lm, partial(causal_lm)])
def test_one_token_ahead_is_seen(loss: Callable) -> None:
    assert reads_later_tokens(forward_of(Mixing(1)), loss, ids()) is True


def test_a_causal_model_reads_none() -> None:
    model = decoder(VOCAB, 16, 2, 4, seq_len=LENGTH)
    assert reads_later_tokens(forward_of(model), next_token, ids()) is False


def test_other_losses_and_outputs_say_nothing() -> None:
    forward = forward_of(Mixing(1))
    assert reads_later_tokens(forward, classification, ids()) is None
    assert reads_later_tokens(forward, next_token, ids(length=3)) is None
    assert reads_later_tokens(lambda batch: forward(batch).mean(1), next_token, ids()) is None
    assert reads_later_tokens(forward, next_token, {"x": torch.zeros(2, 8)}) is None


@pytest.mark.parametrize(("ahead", "noted"), [(1, True), (0, False)])
def test_the_report_has_a_note(ahead: int, noted: bool) -> None:
    report = verify_case(Subject(partial(Mixing, ahead), tokens, next_token).case(), ["dp2"])
    assert report.passed
    note = "the model's output at a position changes with the tokens after it, which are its labels"
    assert (note in report.text()) == noted
    assert json.loads(report.json()).get("reads_later_tokens", False) == noted
