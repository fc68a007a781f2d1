"""Contrastive pretraining of images and texts (CLIP, Radford et al. 2021, arXiv:2103.00020).

    python examples/clip.py --layout dp2  # two processes on this machine

The loss compares each picture with all texts of the whole batch, also those of other ranks and
microbatches. Here pictures of circles, squares, triangles and crosses meet sentences about them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice
from math import log

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.data import Loader, collate, shapes

SENTENCES = ("a picture of a {}", "one {} in the noise", "there is a {}", "somebody drew a {}")
WORDS = 32  # bytes of a sentence


class Captions:
    """Pictures, each with a sentence about it, as bytes [WORDS]."""

    def __init__(self, size: int, split: str = "train"):
        self.pictures = shapes(size=size, image=12, split=split)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        name = self.pictures.names[int(self.pictures.labels[index])]
        sentence = SENTENCES[index % len(SENTENCES)].format(name).encode()
        words = torch.tensor(list(sentence.ljust(WORDS)[:WORDS]))
        return {"image": self.pictures.images[index], "words": words}


class ImageEncoder(nn.Sequential):
    """Pictures [b, 1, side, side] -> features [b, dim]. Its norms are of one picture each: batch
    norms would see the batch of a microbatch."""

    def __init__(self, dim: int):
        super().__init__()
        for before, after in ((1, 16), (16, 32)):
            self.append(nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1))
            self.append(nn.GroupNorm(4, after))
            self.append(nn.ReLU())
        self.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, dim)])


class TextEncoder(nn.Module):
    """Bytes [b, WORDS] -> features [b, dim]."""

    def __init__(self, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.places = nn.Parameter(torch.randn(WORDS, dim) * 0.1)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.embedding(words) + self.places).mean(dim=1)


class Clip(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.image_encoder, self.text_encoder = ImageEncoder(dim), TextEncoder(dim)
        self.logit_scale = nn.Parameter(torch.tensor(log(1 / 0.07)))

    def forward(self, image: Tensor, words: Tensor) -> dict[str, Tensor]:
        """What the loss compares, and every weight that it reads."""
        return {
            "image": F.normalize(self.image_encoder(image), dim=-1),
            "text": F.normalize(self.text_encoder(words), dim=-1),
            "scale": self.logit_scale.exp(),
        }


@weft.losses.whole_batch
def clip(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Of the whole batch: weft gathers the features, and takes back their gradients."""
    logits = output["scale"] * output["image"] @ output["text"].T
    own = torch.arange(len(logits), device=logits.device)
    there = F.cross_entropy(logits, own, reduction="sum")
    back = F.cross_entropy(logits.T, own, reduction="sum")
    return (there + back) / 2, len(logits)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Clip()


def train(options: argparse.Namespace) -> tuple[list[float], float]:
    """What each rank does: the losses, and the loss of pictures that were held out."""
    model, data = make_model(), Captions(options.samples)
    asked = {"batch": options.batch, "accumulate": options.accumulate, "loss": clip}
    sample = collate([data[0], data[1]])
    plan = weft.plan(model, options.layout, sample=sample, **asked)
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    engine = weft.Engine(model, plan, optimizer=adamw, loss=clip)
    part = {
        "accumulate": options.accumulate,
        "data_rank": engine.data_rank,
        "data_size": engine.data_size,
    }
    losses = []
    for batch in islice(Loader(data, options.batch, seed=0, **part), options.steps):
        losses.append(float(engine.step(batch).loss))
        if dist.get_rank() == 0 and engine.steps_done % 20 == 0:
            print(f"step {engine.steps_done}: loss {losses[-1]:.3f}", flush=True)
    held_out = Loader(Captions(options.batch, "val"), options.batch, seed=0, shuffle=False, **part)
    result = engine.evaluate(next(held_out))
    engine.close()
    return losses, float(result.loss)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="dp2", help='as in "fsdp2", "pp2+gpipe"')
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--samples", type=int, default=2000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    _, held_out = weft.launch(train, options, layout=options.layout)
    print(f"held out: loss {held_out:.3f}, of {log(options.batch):.3f} by chance")
