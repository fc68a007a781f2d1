"""A sequence that ranks share: every method, with every other axis, against one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Fused, Subject, reference
from torch import Tensor, nn

import weft
from weft.launch.processes import Pool
from weft.losses import next_token
from weft.models import decoder
from weft.verification.parity import check

LENGTH, VOCAB = 16, 67


def tokens(padded: bool = False, packed: bool = False, labels: bool = True) -> dict[str, Tensor]:
    batch = {"input_ids": torch.randint(0, VOCAB, (8, LENGTH))}
    if labels:
        batch["labels"] = torch.randint(0, VOCAB, (8, LENGTH))
        for row in range(8):
            batch["labels"][row, LENGTH - row % 5 :] = -100
    if padded:
        batch["attention_mask"] = torch.ones(8, LENGTH, dtype=torch.long)
        for row in range(8):
            batch["attention_mask"][row, : row % 4] = 0  # on the left, where causal attention would see it
    if packed:
        ends = torch.tensor([[(5 + row) % 7 + 2, (3 + row) % 5 + 9] for row in range(8)])
        at = torch.arange(LENGTH).expand(8, LENGTH)
        first, second = ends[:, :1], ends[:, 1:]
        batch["position_ids"] = torch.where(at < first, at, torch.where(at < second, at - first, at - second))
    return batch


def hugging_face(kind: str, **more: Any) -> nn.Module:
    t = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        config: Any = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **common)
    else:
        configs = {"llama": t.LlamaConfig, "qwen3": t.Qwen3Config, "mistral": t.MistralConfig}
        config = configs[kind](**small, **common, num_key_value_heads=2, head_dim=8, **more)
    model: nn.Module = t.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


class Counts(Fused):
    """Learned positions, which it counts by itself, and attention dropout."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 32, 4, 0.2)
        self.position = nn.Embedding(LENGTH, 32)


class Both(nn.Module):
    """An encoder: attention in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, 32), nn.Embedding(LENGTH, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subject(build: Callable[[], nn.Module], accumulate: int = 1, recompute: Any = "none", **data: bool) -> Subject:
    return Subject(
        build, partial(tokens, **data), next_token, (("accumulate", accumulate), ("recompute", recompute)), 0.1
    )


plain = partial(decoder, VOCAB, 32, 2, 8, 2, seq_len=LENGTH)
SUBJECTS = {
    "decoder": subject(plain),
    "micro": subject(plain, 2),
    "shifted": subject(plain, labels=False),
    "packed": subject(plain, packed=True),
    "full": subject(plain, 2, "full"),
    "selective": subject(plain, 2, "selective"),
    "counts": subject(Counts, 2),
    "both": subject(Both, 2),
    "gpt2": subject(partial(hugging_face, "gpt2"), 2),
    "llama": subject(partial(hugging_face, "llama")),
    "padded": subject(partial(hugging_face, "llama"), padded=True),
    "packed llama": subject(partial(hugging_face, "llama"), packed=True),
    "qwen3": subject(partial(hugging_face, "qwen3")),
    "window": subject(partial(hugging_face, "mistral", sliding_window=5), 2),
    "padded window": subject(partial(hugging_face, "mistral", sliding_window=5), padded=True),
}
METHODS = ["cp2", "cp4", "cp2+gather", "cp4+gather", "cp2+ulysses", "cp4+ulysses", "up2", "cp2.up2", "cp2+gather.up2"]
BESIDE = [
    "dp2.cp2", "fsdp2.cp2", "fsdp2+zero1.cp2", "cp2.tp2", "cp2.tp2+sequence", "cp2+ulysses.tp2", "pp2.cp2",
    "pp2.cp2+ulysses",
]  # fmt: skip


def holds(pool: Pool, subject: Subject, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    result = pool.run(check, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)
    assert any(axis in ("cp", "up") for _, axis in result.comms_seen)


@pytest.mark.parametrize("layout", [*METHODS, *BESIDE])
def test_as_one_device(pool: Pool, layout: str) -> None:
    holds(pool, SUBJECTS["micro"], layout)


@pytest.mark.parametrize("layout", ["cp2", "cp2+ulysses", "cp4+gather", "cp2.up2", "cp2.tp2"])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "micro"])
def test_every_model(pool: Pool, name: str, layout: str) -> None:
    holds(pool, SUBJECTS[name], layout)
