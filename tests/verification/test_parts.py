"""Parts of a model with axes of their own equal one device, with the predicted collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import weft
from tests.cases import BATCH, LENGTH, VOCAB, FusedBlock, Subject, laid, reference, seeded, tokens
from tests.verification.test_parity import transformer
from weft.core.errors import Refusal
from weft.nn.losses import mse, next_token
from weft.nn.models import decoder
from weft.sync import make_sync
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult


class Tower(nn.Module):
    """Patches of an image through blocks: [b, patches, features] -> [b, patches, dim]."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.patches = nn.Linear(10, dim)
        self.blocks = nn.ModuleList(FusedBlock(dim, 4, 0.0) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TextTower(nn.Module):
    """Token ids through blocks: [b, s] -> [b, s, dim]."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(FusedBlock(dim, 4, 0.0) for _ in range(2))

    def forward(self, input_ids: Tensor, image: Tensor) -> Tensor:
        x = self.embedding(input_ids) + image
        for block in self.blocks:
            x = block(x)
        return x


class TwoTowers(nn.Module):
    """An image and a text, and a head on both: -> [b, 3]."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.vision, self.text = Tower(), TextTower()
        self.head = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        if frozen:
            self.vision.requires_grad_(False)

    def forward(self, image: Tensor, input_ids: Tensor) -> Tensor:
        seen = self.vision(image).mean(1, keepdim=True)
        return self.head(self.text(input_ids, seen).mean(1)) * self.scale


def pairs() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    ids[::2, 0] = VOCAB - 1
    return {
        "image": torch.randn(BATCH, 4, 10),
        "input_ids": ids,
        "target": torch.randn(BATCH, 3),
    }


BUILDS = {frozen: partial(TwoTowers, frozen) for frozen in (False, True)}  # one reference each
LLAMA = partial(transformer, "llama")


def towers(parts: dict[str, str], frozen: bool = False) -> Subject:
    """The two towers, the one for images `frozen` or not."""
    return Subject(BUILDS[frozen], pairs, mse, plan=(("accumulate", 2), ("parts", parts)), clip=0.5)


def run(pool: Any, subject: Subject, layout: str) -> LayoutResult:
    bare = replace(subject, plan=(("accumulate", 2),))
    world = weft.Layout.parse(layout).world
    expected = reference(bare, 2)
    result = pool.run(check_layout, subject.case(), layout, expected, world=world)[0]
    assert isinstance(result, LayoutResult)
    return result


def llama(parts: dict[str, str]) -> Subject:
    """A Hugging Face model built from its configuration."""
    return Subject(LLAMA, tokens, next_token, plan=(("accumulate", 2), ("parts", parts)), clip=0.5)


CASES: list[tuple[str, Subject]] = [
    ("fsdp2.tp2", towers({"vision": "fsdp"})),
    ("fsdp2.tp2", towers({"vision": "fsdp", "*": "tp"})),
    ("fsdp2.tp2", towers({"head": "tp", "text.embedding": "whole"})),
    ("fsdp2", towers({"head": "whole"})),
    ("fsdp2.tp2+sequence", towers({"vision": "fsdp+tp", "text.embedding": "fsdp+tp"})),
    ("fsdp2+zero1.tp2", towers({"text.embedding": "fsdp+tp", "vision.norm": "tp"})),
    ("tp2.fsdp2", towers({"text": "fsdp.tp", "*": "fsdp"})),
    ("pp2.fsdp2", towers({"vision": "whole", "head": "whole"})),
    ("fsdp2.tp2", towers({"vision": "fsdp", "text.embedding": "fsdp+tp"}, frozen=True)),
    ("pp2.fsdp2", towers({"vision": "whole"}, frozen=True)),
    ("fsdp2.tp2", llama({"model.embed_tokens": "fsdp+tp", "lm_head": "fsdp"})),
    ("fsdp2.tp2", llama({"model.layers.0": "whole", "*.mlp": "tp"})),
    ("fsdp2.vp2", llama({"model.embed_tokens": "fsdp+vp"})),
]


@pytest.mark.grid(6, ci=6)
@pytest.mark.parametrize(("layout", "subject"), CASES)
def test_parts_equal_one_device(pool: Any, layout: str, subject: Subject) -> None:
    result = run(pool, subject, layout)
    assert result.passed, result


def test_experts_lie_as_the_axes_say(pool: Any) -> None:
    mixture = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, experts=4, active=2)
    parts = {"embedding": "fsdp+tp", "head": "fsdp"}
    subject = Subject(mixture, plan=(("accumulate", 2), ("parts", parts)))
    result = run(pool, subject, "fsdp2+ep.tp2")
    assert result.passed, result


def test_the_plan_says_where_parts_lie() -> None:
    subject = towers({"vision": "fsdp", "text.embedding": "fsdp+tp", "*": "tp"})
    text = str(laid(subject, seeded(subject.build), "fsdp2.tp2"))
    assert "part vision: 32 weights, 4,672 elements, divided over fsdp, not over tp" in text
    assert "weight fsdp.tp:S(0)->R grad P gathered per use" in text and "divided by 2" in text
    assert "vision.blocks.*.mlp" not in text


def test_a_part_lies_over_the_axes_that_it_names() -> None:
    subject = towers({"vision": "fsdp", "text.embedding": "fsdp+tp", "head.0": "whole", "*": "tp"})
    table = laid(subject, seeded(subject.build), "fsdp2.tp2").params()
    for name, placed in table.items():
        stored = {axis for axis, param in placed.items() if param.stored != Replicate()}
        if name.startswith("vision."):
            assert stored == {"fsdp"}, name
        elif name == "text.embedding.weight":
            assert stored == {"fsdp.tp"}
        else:  # a norm has nothing that tp divides
            assert stored <= ({"tp"} if not name.startswith("head.0.") else set()), name
    assert table["text.blocks.0.mlp.0.weight"]["tp"].stored == Shard(0)


REFUSED: list[tuple[str, dict[str, str], str]] = [
    (
        "dp2.tp2",
        {"vision": "fsdp"},
        'layout dp2.tp2 has no axis fsdp.*in place of dp, with "\\*" = "tp"',
    ),
    ("fsdp2", {"vision": "tp"}, "has no axis tp. Leave tp out"),
    (
        "fsdp2.tp2",
        {"vision": "dp"},
        'dp is not an axis that a part can name. Write those of fsdp, tp, vp that.*"whole"',
    ),
    ("fsdp2.tp2", {"vision": "tp+fsdp"}, "not sharded over the ranks of tp and fsdp together"),
    ("fsdp2.tp2", {"vision": "fsdp2"}, "does not name axes"),
    ("fsdp2.tp2", {"vision": "fsdp.fsdp"}, "names an axis twice"),
    ("fsdp2.tp2", {"visoin": "fsdp"}, 'Did you mean "vision"'),
    ("fsdp2.tp2", {"*": "fsdp", "vision": "tp"}, "lines above it hold all its weights"),
    ("fsdp2.tp2", {"*": "fsdp+tp"}, "no part is left for tp to divide. Name tp in one"),
    ("fsdp2.tp2", {"*": "tp"}, "no part is left for fsdp to divide.*write dp"),
    ("fsdp2.tp2", {"*.k_norm": "fsdp+tp"}, "a different gradient on each rank of tp"),
    ("fsdp1.tp2", {"vision": "fsdp+tp"}, "fsdp has one rank"),
    ("pp2.fsdp2", {"vision": "pp"}, "pp is not an axis that a part can name"),
]


@pytest.mark.parametrize(("layout", "parts", "said"), REFUSED)
def test_what_a_part_cannot_be_is_refused(layout: str, parts: dict[str, str], said: str) -> None:
    subject = towers(parts)
    with pytest.raises(Refusal, match=said):
        laid(subject, seeded(subject.build), layout)


def test_a_weight_of_two_parts_is_refused() -> None:
    tied = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, tied=True)
    subject = Subject(tied, plan=(("parts", {"head": "fsdp"}),))
    with pytest.raises(Refusal, match="are one tied weight"):
        laid(subject, seeded(tied), "fsdp2.tp2")


def test_a_role_inside_of_a_whole_part_is_refused() -> None:
    roles = {"vision.*.qkv": "column", "vision.*.proj": "row"}
    subject = towers({"vision": "fsdp"})
    subject = replace(subject, plan=(*subject.plan, ("roles", roles)))
    with pytest.raises(Refusal, match=r'it is kept whole by layout\.parts\."vision"'):
        laid(subject, seeded(subject.build), "fsdp2.tp2")


def test_a_codec_is_refused_beside_parts() -> None:
    subject = towers({"head": "whole"})
    sync = make_sync("allreduce", codec="bf16")
    subject = replace(subject, plan=(*subject.plan, ("sync", sync)))
    with pytest.raises(Refusal, match="and without a codec"):
        laid(subject, seeded(subject.build), "fsdp2")


class Scored(TextTower):
    """Scores words by the table of the embedding, which its own forward reads."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(super().forward(input_ids, torch.zeros(())), self.embedding.weight)


def test_a_weight_that_is_read_outside_of_its_unit_is_refused() -> None:
    subject = Subject(Scored, plan=(("parts", {"embedding": "fsdp+tp"}),))
    with pytest.raises(Refusal, match=r"embedding\.weight is read by Scored"):
        laid(subject, seeded(Scored), "fsdp2.tp2")
