"""What a small model is trained on: the samples and the loss of each task of a run file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import weft.losses

VOCABULARY, TOKENS, PIXELS, SAMPLES = 96, 16, 32, 64
FRAMES, BINS, WAVE, CODEBOOKS = 32, 20, 1600, 2
IMAGE_TOKEN = VOCABULARY - 1  # stands in a text for a part of an image
PICTURE = {"pixel_values": (3, PIXELS, PIXELS)}

# task of a run file -> the shapes of what a sample holds beside its text
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "image-classification": PICTURE,
    "zero-shot-image-classification": PICTURE,
    "image-text-to-text": PICTURE,
    "audio-classification": {"input_values": (WAVE,)},
    "speech-seq2seq": {"input_features": (BINS, FRAMES)},
}
# task, or family and task -> a loss other than next_token
LOSSES = {
    "git image-text-to-text": "tasks:last_tokens",
    "musicgen_melody text-to-waveform": "tasks:last_tokens",
    **dict.fromkeys(("image-classification", "audio-classification"), "weft.losses:classification"),
    "sequence-classification": "weft.losses:classification",
    "zero-shot-image-classification": "tasks:contrastive",
}


@weft.losses.whole_batch
def contrastive(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """CLIP's loss, of a fixed temperature: each image's own text among those of the batch, and each
    text's own image."""
    logits = 10.0 * output.image_embeds @ output.text_embeds.T
    own = torch.arange(len(logits), device=logits.device)
    there = F.cross_entropy(logits, own, reduction="sum")
    back = F.cross_entropy(logits.T, own, reduction="sum")
    return (there + back) / 2, logits.new_tensor(len(logits))


def last_tokens(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the tokens, which follow what the model put before them."""
    labels = batch["labels"]
    return weft.losses.cross_entropy(output.logits[:, -labels.shape[-1] :], labels)


class samples(Dataset):
    """Random samples of a task. Labels of tokens are shifted, and some are left out (-100).

    Args:
        task: a task of a run file.
        shapes: the shapes of what a sample holds beside its text, if not those of SHAPES.
        image_tokens: how many tokens of the text stand for the image.
        given: integers that every sample holds.
    """

    def __init__(
        self,
        task: str,
        shapes: dict[str, Sequence[int]] | None = None,
        image_tokens: int = 0,
        given: dict[str, Sequence[Any]] | None = None,
    ):
        self.task, self.image_tokens, self.given = task, image_tokens, given or {}
        self.shapes = SHAPES.get(task, {}) if shapes is None else shapes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        found = {name: torch.randn(*shape, generator=draw) for name, shape in self.shapes.items()}
        found |= {name: torch.tensor(value) for name, value in self.given.items()}
        if self.task in ("image-classification", "audio-classification"):
            return found | {"labels": torch.tensor(index % 2)}
        ids = torch.randint(3, IMAGE_TOKEN, (TOKENS + 1,), generator=draw)
        text, labels = ids[:-1], ids[1:].clone()
        labels[: index % 5] = -100
        if self.task == "image-text-to-text":
            image = torch.full((self.image_tokens,), IMAGE_TOKEN)
            labels = torch.cat((torch.full_like(image, -100), labels))
            return found | {"input_ids": torch.cat((image, text)), "labels": labels}
        if self.task == "text-to-waveform":
            codes = torch.randint(3, VOCABULARY, (CODEBOOKS, TOKENS + 1), generator=draw)
            heard = {"decoder_input_ids": codes[:, :-1], "labels": codes[:, 1:]}
            return found | {"input_ids": text} | heard
        if self.task == "speech-seq2seq":
            return found | {"decoder_input_ids": text, "labels": labels}
        if self.task == "seq2seq-lm":
            return found | {"input_ids": text, "decoder_input_ids": text, "labels": labels}
        if self.task == "sequence-classification":
            labels = torch.tensor(index % 2)
        elif self.task == "token-classification":
            labels = torch.where(labels < 0, labels, labels % 2)
        return found | {"input_ids": text, "labels": labels}
