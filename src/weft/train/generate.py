"""Generates a sample of text from the model that a run has trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.core import ConfigError, RunConfig
from weft.engine import TrainingEngine
from weft.nn import logits_of
from weft.parallel import (
    FEATURE_AXES,
)

from .sample_stream import first_samples

TEMPERATURE = 0.8  # less sure than greedy, which soon repeats itself; surer than the model


@runtime_checkable
class TextCoder(Protocol):
    """What a dataset of text offers beside its samples: text <-> ids below `vocab`."""

    vocab: int

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: Iterable[int], /) -> str: ...


def text_coder(run: RunConfig, dataset: Any) -> TextCoder:
    """The dataset, if text can be generated with it. Raises ConfigError."""
    if "input_ids" in first_samples(dataset, 1)[0] and isinstance(dataset, TextCoder):
        return dataset
    problem = (
        f"{type(dataset).__name__} lacks vocab, encode and decode, or input_ids in its samples"
    )
    raise ConfigError(
        "train.sample_tokens",
        run.train.sample_tokens,
        problem,
        "set it to 0, or use a dataset of text",
    )


def sample_text(run: RunConfig, engine: TrainingEngine, coder: TextCoder, context: int) -> str:
    """[train] prompt and what the model goes on with, `sample_tokens` tokens long. Called by all
    ranks together."""
    prompt = run.train.prompt
    ids = coder.encode(prompt or "\n")  # a model needs a token to start from
    made = generate(engine, ids, run.train.sample_tokens, context, coder.vocab, run.train.seed)
    return prompt + coder.decode(made)


def generate(
    engine: TrainingEngine, ids: list[int], tokens: int, context: int, vocab: int, seed: int
) -> list[int]:
    """The next `tokens` tokens, each drawn with TEMPERATURE from the model's logits after the last
    `context` ones.

    The model must be causal: what stands to the right of a position, as padding does, leaves its
    logits alone. Ranks that compute the same logits may differ in the last bit, so rank 0 draws for
    all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    multiple = engine.mesh.size(*FEATURE_AXES) if engine.plan.layout.has_option("sequence") else 1
    made: list[int] = []
    for _ in range(tokens):
        seen = (ids + made)[-context:]
        padded = F.pad(torch.tensor([seen]), (0, -len(seen) % multiple))
        logits = logits_of(engine.forward({"input_ids": padded}))[0, len(seen) - 1, :vocab]
        drawn = torch.multinomial(
            (logits.double().cpu() / TEMPERATURE).softmax(-1), 1, generator=generator
        )
        if engine.global_plan.layout.active_axes():
            dist.broadcast(drawn, src=0)
        made.append(int(drawn))
    return made
