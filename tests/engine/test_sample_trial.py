"""The trial of samples: what mixes them is named before the first step, and nothing else is
refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, images
from tests.verification.contrastive import TwoTowers, both_ways, clip, pairs
from weft.core.errors import ConfigError, UnsupportedModel
from weft.engine.sample_trial import SampleTrial
from weft.launch import Pool
from weft.losses import classification, cross_entropy, mse, next_token, whole_batch
from weft.models import convnet, decoder

DIM = 16


class Recurrent(nn.Module):
    """Of [batch, seq]; the recurrence runs along the batch unless it knows what comes first."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=batch_first)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0])


class Attending(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=batch_first) for _ in range(2)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Turned(nn.Module):
    """As torch's own layout has it, [seq, batch, ...] inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attending(batch_first=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids.T).transpose(0, 1)


class Centred(nn.Module):
    """Subtracts what the batch has in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x - x.mean(0))


class CentredInTraining(Centred):
    """Autoformer chooses its delays by the mean of the batch, and in evaluation for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x - x.mean(0) if self.training else x)


class Iterating(nn.Module):
    """A forward in training moves a buffer a step on, from which its weights follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(12, DIM))
        self.last = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Shared(Centred):
    """Adds very little of what the batch has in common."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + 1e-7 * x.mean(0))


class Rounded(Centred):
    """One row is rounded otherwise than two, as by another kernel of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * (1 + 1e-7 / len(x))


class Converging(nn.Module):
    """Iterates until the batch has converged, as deep equilibrium models do: a sample changes by
    1e-4 with what stands beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(12, DIM), nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = torch.zeros_like(x)
        for _ in range(50):
            before, z = z, torch.tanh(0.5 * self.step(z) + x)
            if float((z - before).detach().norm()) < 3e-3:
                break
        return self.last(z)


@dataclass
class Record:
    logits: Tensor


class CentredRecord(Centred):
    def forward(self, x: Tensor) -> Record:  # type: ignore[override]
        return Record(super().forward(x))


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Noisy(nn.Module):
    """Draws in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + torch.randn_like(x))


class Unwatched(nn.Module):
    """Its branch is drawn by what torch's generators do not tell, as `os.urandom` is: here, of one
    sample, three times the one and then the other."""

    singles = 0

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        Unwatched.singles += len(x) == 1
        return self.last(x) * (2.0 if len(x) == 1 and Unwatched.singles <= 3 else 1.0)


class BatchStatistics(nn.Module):
    """Batch norm without running statistics, whose statistics weft makes those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).unflatten(1, (4, 4))).flatten(1))


class Remembering(nn.Module):
    """Each forward moves a mean of what came, which the next one subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out = self.last(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return out


class WithUnused(nn.Module):
    """Returns scores between samples, as transformers' CLIP does, that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.last(self.first(x))
        apart = found - found.mean(0)
        return {"scores": found @ found.T, "apart": apart, "logits": found, "mean": found.mean()}


class Views(nn.Module):
    """Both views of all samples in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, DIM)

    def forward(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.first(torch.cat([pixels, pixels.flip(1)])), dim=-1)


class Averaged(nn.Module):
    """Its own mean loss, of unevenly many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Fused(dim=DIM)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner(input_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def words() -> dict[str, Tensor]:
    labels = torch.randint(VOCAB, (BATCH, LENGTH))
    for row in range(BATCH):
        labels[row, LENGTH - 8 * (row % 2) :] = -100
    return {"input_ids": torch.randint(VOCAB, (BATCH, LENGTH)), "labels": labels}


def features() -> dict[str, Tensor]:
    x, label = torch.randn(BATCH, 12), torch.randint(5, (BATCH,))
    return {"x": x, "target": torch.randn(BATCH, 5), "label": label}


def local_clip(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return both_ways(output, batch)


def of_logits(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return cross_entropy(output["logits"], batch["label"])


def mean_and_one(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return F.cross_entropy(output, batch["label"]), 1


def mean_of_tokens(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()), 1


def as_returned(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return output, 1


def times_count(output: Any, batch: Any) -> tuple[Tensor, Any]:
    count = (batch["labels"] != -100).sum()
    return output * count, count


def spread(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """A penalty of what the batch has in common, beside a loss of each sample."""
    total, count = mse(output, batch)
    return total + output.mean(0).square().sum(), count


@whole_batch
def views_compared(output: Any, batch: Any) -> tuple[Tensor, Any]:
    scores = output @ output.T
    return scores.square().sum(), len(scores)


MIXING: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict], Any, type, str]] = {
    "lstm": (
        partial(Recurrent, False),
        words,
        next_token,
        UnsupportedModel,
        r"the output of lstm .* depends on the other samples .* Give lstm batch_first=True",
    ),
    "attention": (
        partial(Attending, False),
        words,
        next_token,
        UnsupportedModel,
        r"the output of blocks\.0\.self_attn .* Give blocks\.0\.self_attn batch_first=True",
    ),
    "centred": (Centred, features, mse, UnsupportedModel, "the output of last .* compute each|C"),
    "in-training": (
        CentredInTraining,
        features,
        mse,
        UnsupportedModel,
        "the output of last .* Compute each",
    ),
    "a-little": (Shared, features, mse, UnsupportedModel, "the output of last .* Compute"),
    "converging": (Converging, features, mse, UnsupportedModel, "the output of last .* Compute"),
    "record": (
        CentredRecord,
        features,
        mse,
        UnsupportedModel,
        "the output of last .* Compute each",
    ),
    "clip": (
        TwoTowers,
        pairs,
        local_clip,
        ConfigError,
        r"loss = 'local_clip': depends on how .* divides .* Mark it @weft\.losses\.whole_batch",
    ),
    "penalty": (Straight, features, spread, ConfigError, "'spread': depends on"),
    "uneven-mean": (
        partial(Recurrent, True),
        words,
        mean_of_tokens,
        ConfigError,
        "one by one.* return a sum over what",
    ),
    "own-mean": (Averaged, words, as_returned, ConfigError, "one by one.* return a sum over what"),
    "views": (Views, pairs, views_compared, ConfigError, "tensor 0 of the output, .* no row for"),
}
SOUND: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict], Any]] = {
    "lstm": (partial(Recurrent, True), words, next_token),
    "attention": (partial(Attending, True), words, next_token),
    "turned": (Turned, words, next_token),
    "clip": (TwoTowers, pairs, clip),
    "batchnorm": (partial(convnet, 8, 5), images, classification),
    "batch-statistics": (BatchStatistics, features, mse),
    "noisy": (Noisy, features, mse),
    "spectral-norm": (Iterating, features, mse),
    "rounded": (Rounded, features, mse),
    "unused": (WithUnused, features, of_logits),
    "mean-and-one": (Straight, features, mean_and_one),
    "own-mean": (Averaged, words, times_count),
    "experts": (partial(decoder, VOCAB, 16, 2, 4, 2, seq_len=LENGTH, experts=4), words, next_token),
    "capacity": (
        partial(decoder, VOCAB, 16, 2, 4, 2, seq_len=LENGTH, experts=4, capacity=1.0, balance=0.1),
        words,
        next_token,
    ),
    "tied-dropout": (partial(Fused, dropout=0.2), words, next_token),
}


def begin(
    build: Callable[[], nn.Module],
    data: Callable[[], dict[str, Tensor]],
    loss: Any,
    layout: str,
    precision: str = "fp32",
    sampled: bool = False,
    accumulate: int = 1,
) -> float:
    """The loss of the first step."""
    torch.manual_seed(0)
    model, batch = build(), data()
    inputs = ("input_ids", "labels") if isinstance(model, Averaged) else None
    plan = weft.plan(
        model,
        layout,
        batch=BATCH,
        loss=loss,
        precision=precision,
        inputs=inputs,
        accumulate=accumulate,
    )
    engine = weft.Engine(
        model,
        plan,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=loss,
        inputs=inputs,
        device="cpu",
        sample={key: value[:2] for key, value in batch.items()} if sampled else None,
    )
    return float(engine.step(engine.local(batch)).loss)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_is_named(pool: Pool, name: str, layout: str) -> None:
    build, data, loss, kind, message = MIXING[name]
    with pytest.raises(kind, match=message):
        pool.run(partial(begin, build, data, loss, layout, sampled=layout == "dp2"), world=2)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
@pytest.mark.parametrize("name", SOUND)
def test_what_does_not_is_trained(pool: Pool, name: str, layout: str) -> None:
    build, data, loss = SOUND[name]
    first, second = pool.run(
        partial(begin, build, data, loss, layout, sampled=layout == "dp2"), world=2
    )
    assert first == second


def test_microbatches_of_what_keeps_state_are_trained() -> None:
    """As on one device, they come one after the other."""
    assert begin(Remembering, features, mse, "dp1", accumulate=2) > 0.0


def test_a_branch_that_is_drawn_is_not_said_to_mix_samples() -> None:
    Unwatched.singles = 0
    assert begin(Unwatched, features, mse, "dp1", accumulate=2) > 0.0
    assert Unwatched.singles > 3


def test_microbatches_are_parts_of_the_batch_too() -> None:
    with pytest.raises(ConfigError, match="depends on how accumulate = 2 divides the batch"):
        begin(TwoTowers, pairs, local_clip, "dp1", accumulate=2)


def test_what_divides_no_batch_trains_what_mixes() -> None:
    assert begin(TwoTowers, pairs, local_clip, "dp1") > 0.0


def modes_tried(layout: str) -> list[bool]:
    """In which modes this rank tries samples: in training, or not."""
    torch.manual_seed(0)
    model, sample = decoder(), {key: value[:2] for key, value in words().items()}
    plan = weft.plan(model, layout, batch=BATCH, loss=next_token, sample=sample)
    tried, find = list[bool](), SampleTrial._find

    def count(self: SampleTrial, way: Any, weights: Any, training: bool) -> Any:
        tried.append(training)
        return find(self, way, weights, training)

    with mock.patch.object(SampleTrial, "_find", count):
        weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=next_token, sample=sample)
    return tried


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_ranks_that_hold_all_weights_share_the_modes(pool: Pool, layout: str) -> None:
    alone = [[False], [True]] if layout == "dp2" else [[False, True]] * 2
    assert pool.run(modes_tried, layout, world=2) == alone
