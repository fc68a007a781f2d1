"""Labels that are shifted, and labels that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.core.errors import DataError
from weft.nn.batch_labels import IGNORED, check_labels, shift_labels
from weft.nn.losses import causal_lm, classification, next_token, split_loss

IDS = torch.arange(24).view(2, 12)


def some(labels: Tensor) -> Tensor:
    """Without those of a prompt."""
    labels = labels.clone()
    labels[:, :4] = IGNORED
    return labels


@pytest.mark.parametrize("masked", [False, True])
def test_the_other_kind_of_labels_is_refused(masked: bool) -> None:
    aligned, shifted = (some(t) if masked else t for t in (IDS, shift_labels(IDS)))
    check_labels(next_token, {"input_ids": IDS, "labels": shifted})
    check_labels(causal_lm, {"input_ids": IDS, "labels": aligned})
    with pytest.raises(DataError, match=r"labels equal the input.*causal_lm"):
        check_labels(next_token, {"input_ids": IDS, "labels": aligned})
    with pytest.raises(DataError, match=r"shifted already.*next_token"):
        check_labels(causal_lm, {"input_ids": IDS, "labels": shifted})


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS},
        {"input_ids": torch.ones_like(IDS), "labels": torch.ones_like(IDS)},
        {"input_ids": IDS, "labels": torch.full_like(IDS, IGNORED)},
        {"input_ids": IDS, "labels": IDS.flip(1)},
        {"input_ids": IDS, "labels": IDS, "decoder_input_ids": IDS.flip(1)},
        {"input_ids": IDS, "labels": torch.zeros(2)},
        {"input_ids": IDS, "labels": torch.ones(2, 12)},
    ],
)
def test_labels_that_tell_nothing_are_taken(batch: dict[str, Tensor]) -> None:
    for loss in (next_token, causal_lm):
        check_labels(loss, batch)


def test_a_loss_of_ones_own_takes_any_labels() -> None:
    check_labels(classification, {"input_ids": IDS, "labels": IDS})


def test_causal_lm_is_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    batch = {"input_ids": IDS, "labels": some(IDS)}
    output = model(**batch)
    total, weight = causal_lm(output, batch)
    # transformers computes its own in float32
    assert float(total / weight) == pytest.approx(float(output.loss), rel=1e-6)
    prepare, loss = split_loss(causal_lm)
    assert torch.equal(loss(output, prepare(batch))[0], total)
