"""Mixers made of nn.MultiheadAttention, and models of torch's own transformers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import LENGTH, VOCAB
from tests.verification.nets_to_trace import DIM, HEADS, Expected


def attention(**options: object) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(DIM, HEADS, **options)  # type: ignore[arg-type]


def later(x: Tensor) -> Tensor:
    """True where a key comes after its query."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)


class Causal(nn.Module):
    """Self attention that sees what came before, by a hint; no weights are asked for."""

    def __init__(self, **options: object):
        super().__init__()
        self.attn = attention(batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, attn_mask=later(x), is_causal=True, need_weights=False)[0]


class TimeMajor(nn.Module):
    """Positions come first; weights are asked for, and left unread. A float mask and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention(dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(later(x), dtype=x.dtype).masked_fill(later(x), -3.0)
        padding = torch.zeros(x.shape[:2], dtype=x.dtype)
        padding[:, -2:] = float("-inf")
        x = x.transpose(0, 1)
        y, _ = self.attn(x, x, x, attn_mask=mask, key_padding_mask=padding)
        return y.transpose(0, 1)


class PerHead(nn.Module):
    """A mask for each sample and head, which differ."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.arange(1, self.attn.num_heads + 1).to(x.dtype).repeat(len(x))
        place = torch.arange(x.shape[1]).to(x.dtype)
        mask = -slopes.view(-1, 1, 1) * (place[:, None] - place).abs() / 4
        return self.attn(x, x, x, attn_mask=mask)[0]


class Crossing(nn.Module):
    """Queries meet keys and values of other widths, both of which have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(DIM, 12), nn.Linear(DIM, 20)
        self.attn = attention(batch_first=True, kdim=12, vdim=20, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1)[:, 1:]
        return self.attn(x, self.keys(memory), self.values(memory), need_weights=False)[0]


class Memory(nn.Module):
    """Learned queries' keys: one tensor for keys and values, with a learned mask."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 5, DIM))
        self.nearness = nn.Parameter(torch.randn(LENGTH, 5))
        self.attn = attention(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        return self.attn(x, slots, slots, attn_mask=self.nearness, need_weights=False)[0]


class Pooled(Causal):
    """Beside its attention, learned queries attend to all positions, for a loss that does not read
    what they gather (SigLIP's head)."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.pool = nn.Parameter(torch.randn(1, 1, DIM)), attention(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.pooled = self.pool(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return super().forward(x)


class ReadsWeights(nn.Module):
    """Scales its output by how sharp the weights of attention are."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attn(x, x, x)
        return y * weights.amax(-1, keepdim=True)


class ReadsAndFeeds(nn.Module):
    """Such an attention beside a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = ReadsWeights()
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.reads(x)
        return self.down(F.gelu(self.up(x)))


class ReadsProjection(nn.Module):
    """Reads a weight of the attention beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attn(x, x, x, need_weights=False)
        return y + F.linear(x, self.attn.in_proj_weight[:DIM])


class Unbatched(nn.Module):
    """Attends within one sample after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.attn(each, each, each, need_weights=False)[0] for each in x])


class Own(nn.MultiheadAttention):
    """One of the user's own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


PACKED = ("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight")
APART = ("attn.q_proj_weight", "attn.k_proj_weight", "attn.v_proj_weight", *PACKED[1:])
MIXERS = {
    "causal": Expected(partial(Causal, dropout=0.2), PACKED),
    "without-bias": Expected(partial(Causal, bias=False), (PACKED[0], PACKED[2])),
    "time-major": Expected(TimeMajor, PACKED),
    "per-head": Expected(PerHead, PACKED),
    "crossing": Expected(Crossing, APART),
    "memory": Expected(Memory, PACKED),
    "pooled": Expected(Pooled, (*PACKED, *(name.replace("attn", "pool") for name in PACKED))),
    "reads-weights": Expected(ReadsWeights),
    "reads-and-feeds": Expected(ReadsAndFeeds, ("up.weight", "up.bias", "down.weight")),
    "reads-projection": Expected(ReadsProjection),
    "unbatched": Expected(Unbatched),
    "own": Expected(partial(Own, DIM, HEADS, batch_first=True)),
    "key-biases": Expected(partial(Causal, add_bias_kv=True)),
    "zero-keys": Expected(partial(Causal, add_zero_attn=True)),
}


class Encoder(nn.Module):
    """nn.TransformerEncoder with padding, as in torch's tutorial: token ids -> logits."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, VOCAB)
        with_biases(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        padding = torch.zeros_like(input_ids, dtype=torch.bool)
        padding[:, -2:] = True
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        return self.head(hidden)


class Translator(nn.Module):
    """nn.Transformer: an encoder, and a decoder that attends to it. Token ids -> logits."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.both = nn.Transformer(DIM, HEADS, 2, 2, 32, 0.2, batch_first=batch_first)
        self.head = nn.Linear(DIM, VOCAB)
        with_biases(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask, x = later(x), x if self.batch_first else x.transpose(0, 1)
        y = self.both(x.flip(0 if not self.batch_first else 1), x, tgt_mask=mask)
        return self.head(y if self.batch_first else y.transpose(0, 1))


def with_biases(model: nn.Module) -> None:
    """A bias of zero hides how often it is added."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
