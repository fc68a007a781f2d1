"""Under cp every rank has a whole image, and the features that it puts in place of its own tokens
are those of one device. The first batch, which the trial runs, has no image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.core.errors import UnsupportedModel
from weft.launch.local_workers import Pool
from weft.nn.losses import next_token

VOCAB, LENGTH, WIDTH, SAMPLES, IMAGE, STEPS = 67, 16, 32, 8, 7, 3


class Attention(nn.Module):
    """`causal`: of text; else of an image, or of text to one."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.causal = causal

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (4, 8)).transpose(1, 2)
            for y in (self.q(x), *self.kv(to).chunk(2, dim=-1))
        )
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Net(nn.Module):
    """Sees `patches` of an image in place of as many tokens, and again in its own attention."""

    def __init__(
        self, put: Callable[[Net, Tensor, Tensor, Tensor], Tensor], patches: int, dropout: float
    ):
        super().__init__()
        self.put, self.tokens = put, nn.Embedding(VOCAB, WIDTH)
        self.patch, self.numbers = nn.Linear(12, WIDTH), nn.Embedding(patches, WIDTH)
        self.tower, self.crossing = Attention(False, dropout), Attention(False, dropout)
        self.blocks = nn.ModuleList(Attention(True, dropout) for _ in range(2))
        self.places, self.learned = nn.Embedding(LENGTH, WIDTH), nn.Parameter(torch.randn(9, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("number", torch.arange(patches))

    def forward(self, input_ids: Tensor, picture: Tensor) -> Tensor:
        image = self.patch(picture) + self.numbers(self.number)
        image = self.tower(image, image)
        x, where = self.tokens(input_ids), input_ids == IMAGE
        if where.any():
            x = self.put(self, x, where, image)
        x = x + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x, x)
        return self.head(self.crossing(x, image))


def by_masked_scatter(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    wide = where.unsqueeze(-1).expand_as(x)
    if x[wide].numel() != image.numel():
        raise ValueError(f"{int(where.sum())} tokens stand for {image.shape} features")
    return x.masked_scatter(wide, image)


def in_place(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    return x.clone().masked_scatter_(where.unsqueeze(-1), image)


def by_index(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    x = x.clone()
    x[where] = image.flatten(0, 1)
    return x


def added(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """As features of a deeper layer (Qwen3-VL)."""
    x = x.clone()
    x[where, :] = x[where, :].clone() + image.flatten(0, 1)
    return x


def counted(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """Each token looks its feature up (Idefics 3)."""
    found, order = torch.zeros_like(x), where.cumsum(-1) - 1
    sample = torch.arange(len(x)).unsqueeze(1).expand_as(order)
    found[where] = image[sample[where], order[where], :]
    return torch.where(where.unsqueeze(-1), found, x)


def batch_of(step: int, patches: int) -> dict[str, Tensor]:
    """Of the first batch no token stands for an image; of others, at another place in each
    sample."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(IMAGE + 1, VOCAB, (SAMPLES, LENGTH), generator=draw)
    labels = torch.randint(0, VOCAB, ids.shape, generator=draw)
    for row, sample in enumerate(ids if step else ()):
        first = (3 * row) % (LENGTH - patches + 1)
        sample[first : first + patches] = IMAGE
    picture = torch.randn(SAMPLES, patches, 12, generator=draw, dtype=torch.float64)
    return {"input_ids": ids, "picture": picture, "labels": labels}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


class CrossAttention(nn.Module):
    """Attention that its code writes out: it is taken for one over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.to_q(x), *self.to_kv(to).chunk(2, dim=-1))
        )
        weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return x + self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Resampled(nn.Module):
    """Learned latents look at an image by attention that is written out (Flamingo), and text looks
    at them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.patch = nn.Embedding(VOCAB, WIDTH), nn.Linear(12, WIDTH)
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.resampler = nn.ModuleList(nn.ModuleDict({"attn": CrossAttention()}) for _ in range(2))
        self.crossing, self.block = Attention(False, 0.0), Attention(True, 0.0)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, picture: Tensor) -> Tensor:
        latents, image = self.latents.expand(len(picture), -1, -1), self.patch(picture)
        for layer in self.resampler:
            latents = layer["attn"](latents, torch.cat((image, latents), 1))
        x = self.crossing(self.tokens(input_ids), latents)
        return self.head(self.block(x, x))


def losses(put: str, patches: int, dropout: float, layout: str) -> list[float]:
    torch.manual_seed(0)
    model = Net(PUTS[put], patches, dropout).double()
    plan = weft.plan(
        model,
        layout,
        batch=SAMPLES,
        accumulate=2 if layout == "cp2" else 1,
        loss=next_token,
        precision="fp64",
        inputs=("input_ids", "picture"),
    )
    engine = weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    batches = (batch_of(step, patches) for step in range(STEPS))
    return [float(engine.step(engine.local(batch)).loss) for batch in batches]


def flattened(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """Samples and positions in one dim (InternVL)."""
    rows, flat = x.flatten(0, 1).clone(), where.flatten()
    rows[flat] = rows[flat] * 0.5 + image.flatten(0, 1)
    return rows.unflatten(0, x.shape[:2])


def as_many_as_there_are(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    x = x.clone()
    x[where] = image.flatten(0, 1)[: x[where].shape[0]]
    return x


def by_two_masks(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """Of which as many elements are set, at other positions."""
    x = x.clone()
    x[where] = image.flatten(0, 1)
    x[where.flip(1)] = 2 * image.flatten(0, 1)
    return x


def by_learned_queries(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """More than a rank has positions (Q-Former)."""
    seen = net.tower(net.learned.expand(len(x), -1, -1), image)
    return x.masked_scatter(where.unsqueeze(-1), seen[:, : image.shape[1]])


def nothing(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    """As where a batch has no image."""
    return x.masked_scatter(torch.zeros_like(where).unsqueeze(-1), image[:0])


PUTS = {
    each.__name__: each
    for each in (
        *(by_masked_scatter, in_place, by_index, added, counted, flattened),
        *(as_many_as_there_are, by_two_masks, by_learned_queries, nothing),
    )
}


def to_the_first(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    return net.crossing(x, x[:, :3])


def to_the_mean(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    return net.crossing(x, x.mean(1, keepdim=True))


def of_one_position(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    return x + net.crossing(x[:, :1], image)


def at_numbers(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1 : 1 + image.shape[1]] = image
    return x


def by_two_masks_added(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    one, two = x[where], x[where.flip(1)]
    x = x.clone()
    x[where] = one + image.flatten(0, 1)
    x[where.flip(1)] = two + image.flatten(0, 1)
    return x


def dropped_rows(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    x = x.masked_scatter(where.unsqueeze(-1), image)
    x[where] = net.tower.dropout(x[where])
    return x


def by_activations(net: Net, x: Tensor, where: Tensor, image: Tensor) -> Tensor:
    return x.masked_scatter((x.sum(-1) > 0).unsqueeze(-1), image)


REFUSED = {
    to_the_first: "attention of 3 keys for 8 queries",
    to_the_mean: "attention of 1 keys for 8 queries",
    of_one_position: r"attention of \[.*, 4, 1, 8\]",
    at_numbers: "sets a value at positions that it numbers in Python",
    by_two_masks_added: "two masks are set at equally many positions",
    dropped_rows: "its dim 0 counts positions",
    by_activations: "masked_scatter takes a mask or values",
}
PUTS |= {each.__name__: each for each in REFUSED}
EQUAL = [name for name in PUTS if PUTS[name] not in REFUSED]


@pytest.mark.parametrize("put", [each.__name__ for each in REFUSED])
def test_what_a_rank_cannot_know_is_refused(pool: Pool, put: str) -> None:
    """In the step in which it comes."""
    with pytest.raises(UnsupportedModel, match=REFUSED[PUTS[put]]):
        pool.run(losses, put, 5, 0.2, "cp2", world=2)


@pytest.mark.grid(6, ci=3)
@pytest.mark.parametrize("layout", ["cp2", "cp2+gather", "fsdp2.cp2"])
@pytest.mark.parametrize(("patches", "dropout"), [(5, 0.2), (LENGTH // 2, 0.2)])
@pytest.mark.parametrize("put", EQUAL)
def test_it_equals_one_device(
    pool: Pool, put: str, patches: int, dropout: float, layout: str
) -> None:
    """Also where an image has as many patches as a rank has positions."""
    alone = pool.run(losses, put, patches, dropout, "dp1", world=1)[0]
    world = weft.Layout.parse(layout).world
    found = pool.run(losses, put, patches, dropout, layout, world=world)[0]
    assert found == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("layout", ["cp2", "fsdp2.cp2"])
def test_an_attention_that_is_written_out_over_an_image(layout: str) -> None:
    """It needs no whole sequence where no position enters it."""
    report = weft.verify(Resampled, layout, batch_of(0, 4), loss=next_token)
    assert report.passed, report.text()
