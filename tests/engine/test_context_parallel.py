"""A sequence that ranks share: every method, with every other axis, against one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases import Fused, FusedAttention, Subject, in_turn, reference
from weft.core import CompileOptions
from weft.core.data_order import zigzag_spans
from weft.core.errors import Refusal, WorkerDied
from weft.engine.context_parallel import ring_attention
from weft.engine.context_parallel.ring_attention import KeyBlocks, attend_blocks
from weft.engine.context_parallel.transformers_interfaces import eager_attention_by, mask_rules
from weft.launch.local_workers import Pool
from weft.nn.attention_masks import AttentionPattern, causal_mask, documents_of, window_rule
from weft.nn.losses import causal_lm, cross_entropy, next_token, positionwise, whole_batch
from weft.nn.models import decoder
from weft.nn.models.decoder import rotary_table
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.reference import run_reference

pytestmark = pytest.mark.grid

LENGTH, VOCAB = 16, 67


def tokens(
    padded: bool = False,
    packed: bool = False,
    labels: bool = True,
    full: bool = False,
    named: bool = False,
    features: bool = False,
) -> dict[str, Tensor]:
    batch = {"input_ids": torch.randint(0, VOCAB, (8, LENGTH))}
    if labels:
        batch["labels"] = torch.randint(0, VOCAB, (8, LENGTH))
        for row in range(8):
            batch["labels"][row, LENGTH - row % 5 :] = -100
    if padded:
        batch["attention_mask"] = torch.ones(8, LENGTH, dtype=torch.long)
        for row in range(8):
            batch["attention_mask"][row, : row % 4] = (
                0  # on the left, where causal attention would see it
            )
    if full:
        batch["attention_mask"] = torch.ones(8, LENGTH, dtype=torch.long)
    if features:
        batch = {"features": torch.randn(8, 5), "label_weight": torch.ones(8), **batch}
    if packed:
        ends = torch.tensor([[(5 + row) % 7 + 2, (3 + row) % 5 + 9] for row in range(8)])
        at = torch.arange(LENGTH).expand(8, LENGTH)
        first, second = ends[:, :1], ends[:, 1:]
        batch["position_ids"] = torch.where(
            at < first, at, torch.where(at < second, at - first, at - second)
        )
    if named:
        batch["places"] = batch.pop("position_ids")
    return batch


def hugging_face(kind: str, **more: Any) -> nn.Module:
    t = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": VOCAB}
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "gpt2":
        config: Any = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **common)
    else:
        configs = {
            "llama": t.LlamaConfig,
            "qwen3": t.Qwen3Config,
            "mistral": t.MistralConfig,
            "gemma2": t.Gemma2Config,  # capped scores
            "gpt_oss": t.GptOssConfig,  # sinks
        }
        config = configs[kind](**small, **common, num_key_value_heads=2, head_dim=8, **more)
    kernel = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    model: nn.Module = t.AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    for name, p in model.named_parameters():
        if "sinks" in name:  # transformers leaves them as they lie in memory
            nn.init.normal_(p)
    return model


def bart() -> nn.Module:
    """A decoder whose attention could attend to an encoder, and does not."""
    t = pytest.importorskip("transformers")
    config = t.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=LENGTH,
    )
    model: nn.Module = t.BartForCausalLM(config)
    return model


def roberta() -> nn.Module:
    """Numbers its positions from the tokens that are not padding."""
    t = pytest.importorskip("transformers")
    config = t.RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH + 2,
        type_vocab_size=1,
    )
    model: nn.Module = t.RobertaForMaskedLM(config)
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


class Named(nn.Module):
    """Documents by an entry of another name, as many frequencies as positions here, features of
    each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 2, 2, 2, seq_len=LENGTH)
        self.mix = nn.Linear(5, 32)

    def forward(self, input_ids: Tensor, places: Tensor, features: Tensor) -> Tensor:
        x = self.inner.embedding(input_ids) + self.mix(
            features.to(self.mix.weight.dtype)
        ).unsqueeze(1)
        mask = causal_mask(places)
        frequencies = torch.arange(8, dtype=torch.float32) / 100
        x = x + F.pad(torch.sin(places.unsqueeze(-1) * frequencies), (0, 24)).to(x.dtype)
        rotary = rotary_table(places.size(1), 16, self.inner.rope_base, x, places)
        for block in self.inner.blocks:
            x = block(x, rotary, mask)
        return self.inner.head(x)


@positionwise
def unpadded(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that reads the padding."""
    labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return cross_entropy(output.logits, labels)


def frozen() -> nn.Module:
    model: Any = decoder(VOCAB, 32, 2, 8, 2, seq_len=LENGTH)
    for p in [*model.embedding.parameters(), *model.blocks[0].parameters()]:
        p.requires_grad_(False)
    return model


def subject(
    build: Callable[[], nn.Module], accumulate: int = 1, recompute: Any = "none", **data: bool
) -> Subject:
    return Subject(
        build,
        partial(tokens, **data),
        next_token,
        (("accumulate", accumulate), ("recompute", recompute)),
        0.1,
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
SUBJECTS |= {
    "all ones": subject(partial(hugging_face, "llama"), full=True),
    "packed, all ones": subject(plain, packed=True, full=True),
    "loss of padding": replace(subject(partial(hugging_face, "llama"), padded=True), loss=unpadded),
    "wide window": subject(partial(hugging_face, "mistral", sliding_window=LENGTH + 1), 2),
    "padded gpt2": subject(partial(hugging_face, "gpt2"), padded=True),
    "named": subject(Named, packed=True, named=True, features=True, labels=False),
    "frozen": subject(frozen, 2),
    "bart": subject(bart, 2),
    "roberta": subject(roberta, 2),
}


class Biased(nn.Module):
    """A learned bias for each distance, made in the first block and handed on as T5 does, or in
    each; rows of a table of positions, tokens shifted by the model, and a mask of its own."""

    def __init__(self, masked: bool, each: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.masked, self.embedding = masked, nn.Embedding(VOCAB, 32)
        self.table = nn.Parameter(torch.randn(LENGTH + 3, 32))
        self.blocks = nn.ModuleList(BiasedBlock(each or i == 0) for i in range(2))
        if tied:
            self.blocks[1].bias.weight = self.blocks[0].bias.weight
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        before = input_ids.new_zeros(input_ids.shape)
        before[:, 1:] = input_ids[:, :-1]
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.embedding(before).tanh()
        x = x + self.table[torch.arange(length)]
        mask, bias = None, None
        if self.masked:
            causal = torch.ones(length, length).tril()[None, None]
            mask = (1 - causal * (input_ids != 3)[:, None, None]) * -1e9
        for block in self.blocks:
            x, bias = block(x, bias, mask)
        return self.head(x)


class BiasedBlock(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.bias = nn.Embedding(9, 4) if first else None

    def forward(
        self, x: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.bias is not None:
            counted = torch.arange(x.shape[1])
            distance = (counted[None, :] - counted[:, None]).clamp(-4, 4) + 4
            bias = self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        added = bias if mask is None or bias is None else bias + mask.to(bias.dtype)
        q, k, v = (
            y(x).unflatten(-1, (4, 8)).transpose(1, 2) for y in (self.query, self.key, self.value)
        )
        drop = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=drop)
        return x + self.out(y.transpose(1, 2).flatten(2)), bias


class Outside(Biased):
    """The model makes the bias, and blocks are given it."""

    def __init__(self) -> None:
        super().__init__(False)
        self.bias, self.blocks[0].bias = self.blocks[0].bias, None

    def forward(self, input_ids: Tensor) -> Tensor:
        x, counted = self.embedding(input_ids), torch.arange(input_ids.shape[1])
        distance = (counted[None, :] - counted[:, None]).clamp(-4, 4) + 4
        bias = self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        for block in self.blocks:
            x, bias = block(x, bias, None)
        return self.head(x)


class Coinciding(nn.Module):
    """As many heads, buckets of distances and rows of tables as there are positions on a rank, or
    in all: nothing but what is computed tells which is which."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.heads, self.embedding = size, nn.Embedding(VOCAB, 4 * size)
        self.qkv, self.head = nn.Linear(4 * size, 12 * size), nn.Linear(4 * size, VOCAB)
        self.bias = nn.Embedding(size, size)
        self.gates = nn.Parameter(torch.randn(size))
        self.register_buffer("numbers", torch.arange(size))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, heads = self.embedding(input_ids), self.heads
        counted = torch.arange(x.shape[1])
        distance = (counted[None, :] - counted[:, None]).clamp(-(heads // 2), heads // 2 - 1)
        bias = self.bias(distance + heads // 2).permute(2, 0, 1)
        slopes = 0.5 ** torch.arange(1, heads + 1) + self.gates[self.numbers[:heads]]
        other = torch.ones(heads, heads).tril().sum(-1) * self.gates[torch.arange(heads)]
        bias = bias * slopes[:, None, None] + other.flip(0).cumsum(0)[:, None, None]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        bias = bias.masked_fill(~seen, -1e9)
        q, k, v = (y.unflatten(-1, (heads, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.head(x + y.transpose(1, 2).flatten(2))


def t5(heads: int = 2, buckets: int = 32) -> nn.Module:
    t = pytest.importorskip("transformers")
    small = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": heads}
    small |= {"relative_attention_num_buckets": buckets, "vocab_size": VOCAB}
    model: nn.Module = t.T5ForConditionalGeneration(t.T5Config(**small))
    return model


def translated() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "decoder_input_ids": batch["input_ids"].flip(1)}


KNOWN = {
    "biased": subject(partial(Biased, False), 2),
    "masked": subject(partial(Biased, True)),
    "recomputed": subject(partial(Biased, True), 2, "full"),
    "selective": subject(partial(Biased, True), 2, "selective"),
    "t5": replace(subject(t5), data=translated),
}
# of 16 positions a rank of cp2 has 8, as many as samples, and a rank of cp4 has 4
COINCIDING = {
    "heads and buckets as positions here": (subject(partial(Coinciding, 8)), "cp2"),
    "heads and buckets as positions": (subject(partial(Coinciding, 16)), "cp2"),
    "heads and buckets on cp4": (subject(partial(Coinciding, 4)), "cp4"),
    "t5, heads and buckets as positions here": (
        replace(subject(partial(t5, 8, 8)), data=translated),
        "cp2",
    ),
    "t5, heads and buckets as positions": (
        replace(subject(partial(t5, 16, 16)), data=translated),
        "cp2",
    ),
}


class Recurrent(nn.Module):
    """Blocks of attention and, by turns, an LSTM or a convolution, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.blocks = nn.ModuleList(RecurrentBlock(i % 2 == 0) for i in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RecurrentBlock(nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.attention = FusedAttention(32, 4)
        self.mixer = nn.LSTM(32, 32, batch_first=True) if recurrent else Convolution()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        mixed = self.mixer(x)
        return x + F.dropout(mixed[0] if isinstance(mixed, tuple) else mixed, 0.2, self.training)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(F.dropout(x, 0.1).transpose(1, 2), (2, 0))).transpose(1, 2)


class NormedConvolution(Convolution):
    """Statistics of a batch norm inside count each token once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


def normed() -> nn.Module:
    model: Any = Recurrent()
    model.blocks[1].mixer = NormedConvolution()
    return model


class Shifted(nn.Module):
    """Mixes neighbours in a way that no structure tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def shifted() -> nn.Module:
    model: Any = Recurrent()
    model.blocks = nn.ModuleList(nn.Sequential(FusedAttention(32, 4), Shifted()) for _ in range(2))
    return model


class ByHand(nn.Module):
    """Attention of one's own, without torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, 32 // 4)
        q, k, v = (
            y(x).unflatten(-1, (-1, heads[1])).transpose(1, 2)
            for y in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / 8**0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = F.dropout(scores.masked_fill(~seen, -1e9).softmax(-1), 0.1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def by_hand() -> nn.Module:
    model: Any = Recurrent()
    model.blocks = nn.ModuleList(ByHand() for _ in range(2))
    return model


def mixing(kind: str) -> nn.Module:
    t = pytest.importorskip("transformers")
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    if kind == "mamba":
        config = t.MambaConfig(**small, state_size=4)
    elif kind == "gpt_neo":  # attention that goes through no interface
        config = t.GPTNeoConfig(
            **small,
            attention_types=[[["global", "local"], 1]],
            window_size=5,
            max_position_embeddings=LENGTH,
            attention_dropout=0.2,
        )
    else:
        config = t.Lfm2Config(
            **small,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    model: nn.Module = t.AutoModelForCausalLM.from_config(config)
    return model


MIXERS = {
    "recurrent": subject(Recurrent, 2),
    "recomputed": subject(Recurrent, 2, "full"),
    "by hand": subject(by_hand, 2),
    "normed": subject(normed),
    "mamba": subject(partial(mixing, "mamba")),
    "gpt_neo": subject(partial(mixing, "gpt_neo"), 2),
    "padded gpt_neo": subject(partial(mixing, "gpt_neo"), padded=True),
    "lfm2": subject(partial(mixing, "lfm2")),
}
_dropped = partial(hugging_face, attention_dropout=0.2)
EAGER = {
    "capped": subject(partial(_dropped, "gemma2", sliding_window=5, attn_logit_softcapping=2.0), 2),
    "padded capped": subject(partial(_dropped, "gemma2", sliding_window=5), padded=True),
    "packed capped": subject(partial(_dropped, "gemma2"), 2, "full", packed=True),
    "sinks": subject(partial(_dropped, "gpt_oss", num_local_experts=4, sliding_window=5), 2),
}
METHODS = [
    "cp2",
    "cp4",
    "cp2+gather",
    "cp4+gather",
    "cp2+ulysses",
    "cp4+ulysses",
    "ulysses2",
    "cp2.ulysses2",
    "cp2+gather.ulysses2",
]
BESIDE = [
    "dp2.cp2",
    "fsdp2.cp2",
    "fsdp2+zero1.cp2",
    "cp2.tp2",
    "cp2.tp2+sequence",
    "cp2+ulysses.tp2",
    "pp2.cp2",
    "pp2.cp2+ulysses",
]


def holds(pool: Pool, subject: Subject, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)
    assert result.comms_seen


@pytest.mark.parametrize("layout", [*METHODS, *BESIDE])
def test_as_one_device(pool: Pool, layout: str) -> None:
    holds(pool, SUBJECTS["micro"], layout)


@pytest.mark.parametrize("layout", ["cp2", "cp4+gather", "pp2.cp2"])
def test_labels_are_shifted_before_the_sequence_is_cut(pool: Pool, layout: str) -> None:
    holds(pool, replace(SUBJECTS["micro"], loss=causal_lm), layout)


@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp2+gather", "dp2.cp2", "cp2.tp2"])
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_computed_of_positions_is_that_of_all(pool: Pool, name: str, layout: str) -> None:
    holds(pool, KNOWN[name], layout)


@pytest.mark.parametrize("name", COINCIDING)
def test_sizes_that_coincide_with_positions_are_told_apart(pool: Pool, name: str) -> None:
    holds(pool, *COINCIDING[name])


@pytest.mark.parametrize("layout", ["fsdp2.cp2", "fsdp2+zero1.cp2"])
@pytest.mark.parametrize("tied", [False, True])
def test_learned_biases_of_blocks(pool: Pool, layout: str, tied: bool) -> None:
    holds(pool, subject(partial(Biased, True, True, tied), 2), layout)


@pytest.mark.parametrize("layout", ["dp2.cp2", "cp2.tp2"])
def test_a_learned_bias_of_two_blocks(pool: Pool, layout: str) -> None:
    holds(pool, subject(partial(Biased, True, True, True), 2, "full"), layout)


def test_a_learned_bias_that_fsdp_hands_to_another_block_is_refused(pool: Pool) -> None:
    with pytest.raises(Refusal, match="make a learned bias in the block"):
        pool.run(engine_of, partial(Biased, False), "fsdp2.cp2", False, world=4)


def test_a_learned_bias_that_fsdp_hands_to_blocks_is_refused(pool: Pool) -> None:
    with pytest.raises(Refusal, match="make a learned bias in the block"):
        pool.run(engine_of, Outside, "fsdp2.cp2", False, world=4)


def test_a_learned_bias_that_the_model_hands_to_blocks(pool: Pool) -> None:
    holds(pool, subject(Outside, 2), "dp2.cp2")


class CountingBlock(nn.Module):
    """What follows from counts and tokens is computed in the block itself, or comes to it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.table = what, nn.Parameter(torch.randn(LENGTH + 3, 32))
        self.qkv, self.mlp = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("numbers", torch.arange(LENGTH + 3))

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        if self.what == "table":
            x = x + self.table[self.numbers[: x.shape[1]]]
        elif self.what == "sum":
            x = x + (ids != 3).cumsum(1).unsqueeze(-1).to(x.dtype) / LENGTH * self.table[0]
        elif self.what == "shift":
            before = ids.new_zeros(ids.shape)
            before[:, 1:] = ids[:, :-1]
            x = x + before.unsqueeze(-1).to(x.dtype) / VOCAB * self.table[0]
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return x + self.mlp(y)


class Counting(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.embedding = what, nn.Embedding(VOCAB, 32)
        self.bias = nn.Embedding(9, 4) if what == "bias" else None
        self.blocks = nn.ModuleList(CountingBlock(what) for _ in range(2))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, bias = self.embedding(input_ids), None
        if self.bias is not None:
            counted = torch.arange(x.shape[1])
            distance = (counted[None, :] - counted[:, None]).clamp(-4, 4) + 4
            bias = self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        for block in self.blocks:
            x = block(x, input_ids, bias)
        return self.head(x)


def compiled_layout(case: Any, layout: str, held_to: Any) -> Any:
    torch.compiler.reset()  # other tests of this process have compiled the same code
    return check_layout(case, layout, held_to)


COMPILED = CompileOptions(backend="aot_eager")


@pytest.mark.parametrize("what", ["table", "sum", "shift"])
def test_counts_in_blocks_hold_and_are_refused_in_graphs(pool: Pool, what: str) -> None:
    """A graph is traced from a part of the positions."""
    holds(pool, subject(partial(Counting, what)), "cp2")
    with pytest.raises(Refusal, match="changes the model's output"):
        pool.run(engine_of, partial(Counting, what), "cp2", True, None, COMPILED, world=2)


def test_a_learned_bias_enters_graphs(pool: Pool) -> None:
    made = subject(partial(Counting, "bias"), 2)
    case = replace(made.case(), compile=COMPILED)
    result = pool.run(compiled_layout, case, "cp2", reference(made), world=2)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)
    pool.run(engine_of, partial(Counting, "bias"), "cp2", True, None, COMPILED, world=2)


def test_a_bias_for_all_heads_is_refused_where_ranks_have_some(pool: Pool) -> None:
    with pytest.raises(Refusal, match=r"a mask \[1, 4, 8, 16\] of its own, for all heads"):
        pool.run(engine_of, partial(Biased, False), "cp2+ulysses", False, world=2)


OTHERS = [name for name in SUBJECTS if name != "micro"]
GRID = [(name, "cp2") for name in OTHERS] + in_turn(
    OTHERS, ["cp2+ulysses", "cp4+gather", "cp2.ulysses2", "cp2.tp2"], 2
)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), GRID)
def test_every_model(pool: Pool, name: str, layout: str) -> None:
    holds(pool, SUBJECTS[name], layout)


def test_flash_attention_is_called_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on CUDA in bf16, on tensors without data: the right operators, arguments and
    shapes."""
    monkeypatch.setattr(ring_attention, "_kernel", lambda *_: "flash")
    query = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 4, 6, 16, dtype=torch.bfloat16, device="meta")
    blocks = KeyBlocks(AttentionPattern(causal=True), [[(0, 8)]], 0, None, 0.25)
    rest = query, key, key, blocks, (0, 8), (0, 6), None
    out, logs = ring_attention._forward(*rest)
    assert out.shape == query.shape and logs.shape == (2, 4, 8) and logs.dtype == torch.float32
    found = ring_attention._backward(out, out, logs, *rest)
    assert [x.shape for x in found[:3]] == [query.shape, key.shape, key.shape]
    assert found[3] is None  # the kernel takes nothing that is added to scores


class Windows(nn.Module):
    """A mask that every block makes for itself, of positions that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 2, 2, 2, seq_len=LENGTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        inner: Any = self.inner
        x = inner.embedding(input_ids)
        for block in inner.blocks:
            positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            rotary = rotary_table(input_ids.size(1), 16, inner.rope_base, x, positions)
            x = block(x, rotary, causal_mask(positions, window=5))
        y: Tensor = inner.head(inner.norm(x))
        return y


def test_documents_of_a_pipeline_without_a_flush(pool: Pool) -> None:
    """Their positions are the batch's, which each rank knows whole: nothing is gathered, and
    nothing predicted."""
    case = replace(SUBJECTS["packed"].case(), clip=None)
    result = pool.run(
        check_layout, case, "pp2+pipedream.cp2", run_delayed(case, "pp2+pipedream.cp2", 2), world=4
    )[0]
    assert result.passed, (result.first, result.stray, result.problem)


@pytest.mark.parametrize("layout", ["cp2", "cp2+gather", "cp2.ulysses2"])
def test_masks_of_positions_that_the_model_counts(pool: Pool, layout: str) -> None:
    holds(pool, subject(Windows), layout)


def test_recomputed_cores_of_a_split_backward(pool: Pool) -> None:
    holds(pool, SUBJECTS["selective"], "pp2+zb-h1.cp2")


def test_only_named_inputs_reach_the_model(pool: Pool) -> None:
    """Entries for the loss alone are not what the model is called with."""
    made = subject(partial(hugging_face, "llama"), packed=True, padded=True)
    case = replace(made.case(), inputs=("input_ids",))
    result = pool.run(check_layout, case, "cp2", run_reference(case, 2), world=2)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)


# ---- the core ------------------------------------------------------------------------------------


def mask_of(pattern: AttentionPattern, length: int) -> Tensor:
    return pattern.rows(torch.arange(length), length)


PATTERNS = {
    "causal": AttentionPattern(True),
    "both": AttentionPattern(False),
    "window": AttentionPattern(True, window_rule(5)),
    "documents": AttentionPattern(
        True,
        None,
        documents_of(torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]] * 2)),
    ),
    "padding": AttentionPattern(True, None, None, (torch.arange(16) > torch.tensor([[3], [9]]))),
    "both, padding": AttentionPattern(
        False, None, None, (torch.arange(16) != torch.tensor([[3], [9]]))
    ),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_give_what_the_whole_gives(
    name: str, fused: bool, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank's queries with all keys, in pieces; gradients as well. Queries that see nothing
    give zeros."""
    if not fused:
        monkeypatch.setattr("weft.engine.context_parallel.ring_attention._kernel", lambda *_: None)
        monkeypatch.setattr("weft.engine.context_parallel.ring_attention.ROWS", 3)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 16, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    pattern, spans = PATTERNS[name], zigzag_spans(16, size)
    every = [span for each in spans for span in each]
    order = torch.cat([torch.arange(*span) for span in every])
    parts = []
    for rank in range(size):
        mine = torch.cat([torch.arange(*span) for span in spans[rank]])
        blocks = KeyBlocks(pattern, [every], 0, None, 0.3, None, spans[rank])
        with torch.autocast("cpu", enabled=dtype == torch.bfloat16):
            parts.append(
                attend_blocks(query[:, :, mine], key[:, :, order], value[:, :, order], blocks)
            )
    out = torch.cat(parts, 2)[:, :, torch.argsort(order)]
    mask = mask_of(pattern, 16)
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    whole = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.3, enable_gqa=True)
    whole = whole.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    weights = torch.randn_like(whole)
    (out.double() * weights).sum().backward()
    (whole * weights).sum().backward()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for mine, theirs in zip(
        (out, query.grad, key.grad, value.grad), (whole, *(x.grad for x in wide)), strict=True
    ):
        assert mine is not None and theirs is not None
        assert float((mine.double() - theirs).norm() / theirs.norm()) < bound


@pytest.mark.parametrize(("length", "size"), [(16, 2), (32, 4), (48, 3)])
def test_causal_work_is_equal(length: int, size: int) -> None:
    spans = zigzag_spans(length, size)
    assert sorted(i for own in spans for span in own for i in range(*span)) == [*range(length)]
    work = [sum(i + 1 for span in own for i in range(*span)) for own in spans]
    assert len(set(work)) == 1


def test_a_mask_is_for_packed_documents() -> None:
    at = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    mask = causal_mask(at)
    assert mask is not None
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0, 4].tolist() == [False, False, False, True, True]
    assert mask[1, 0, 4].all()
    assert causal_mask(at[1:]) is None
    windowed = causal_mask(at[1:], window=2)
    assert windowed is not None
    assert windowed[0, 0, 3].tolist() == [False, False, True, True, False]


# ---- what is refused -----------------------------------------------------------------------------


def summed(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output.sum(), torch.ones(())


@whole_batch
def compared(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return summed(output, batch)


@pytest.mark.parametrize(
    ("layout", "says", "change"),
    [
        ("cp2", "not known to be a sum over positions", {"loss": summed}),
        ("cp2", "compares whole samples, .* Use dp or fsdp", {"loss": compared}),
        ("cp4+ring+gather", "Choose one", {}),
        ("cp2+ulysses.ulysses2", "the axis ulysses does the same", {}),
        ("cp3", "do not divide into 6 pieces", {}),
        ("cp8+ulysses", "4 heads and 4 key heads on a rank, and Ulysses has 8", {}),
        ("cp2+rings", "Did you mean", {}),
    ],
)
def test_refused_before_a_process_starts(layout: str, says: str, change: dict[str, Any]) -> None:
    batch = {key: value[:2] for key, value in tokens().items()}
    with pytest.raises(Refusal, match=says):
        weft.plan(
            decoder(VOCAB, 32, 2, 4, 4),
            layout,
            batch=8,
            **{"loss": next_token, "sample": batch, **change},
        )


@pytest.mark.parametrize("shape", [(4, 8), (4, 6, 8)])
def test_rows_of_features_are_told_from_a_sequence(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(Refusal) as found:
        sample = {"input": torch.randn(shape)}
        weft.plan(net, "cp2", batch=4, loss=summed, sample=sample, inputs=["input"])
    rows = (
        "input is [4, 8]: features of a sample, as far as is known, and cp parts positions. Use dp"
    )
    assert (rows in str(found.value)) is (len(shape) == 2), str(found.value)
    assert ("not known to be a sum over positions" in str(found.value)) is (len(shape) == 3)


@pytest.mark.parametrize("layout", ["cp2", "cp4+gather", "dp2.cp2", "cp2.tp2", "pp2.cp2"])
@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_as_one_device(pool: Pool, name: str, layout: str) -> None:
    """Its keys are gathered, and it runs as it is."""
    holds(pool, EAGER[name], layout)


@pytest.mark.parametrize(
    "layout", ["cp2", "ulysses2", "cp2.ulysses2", "dp2.cp2+gather", "cp2.tp2", "pp2.cp2"]
)
@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_positions_has_whole_sequences(pool: Pool, name: str, layout: str) -> None:
    holds(pool, MIXERS[name], layout)


def test_a_module_is_declared_to_need_whole_sequences(pool: Pool) -> None:
    with pytest.raises(Refusal, match="splitting the sequence changes") as found:
        pool.run(engine_of, shifted, "cp2", True, world=2)
    lines = dict(re.findall(r'"([^"]+)" = "(whole_sequence)"', str(found.value)))
    assert lines == {"blocks.*.1": "whole_sequence"}
    want = pool.run(engine_of, shifted, "dp1", False, world=1)[0]
    got = pool.run(engine_of, shifted, "cp2", True, lines, world=2)[0]
    assert got == pytest.approx(want, rel=1e-5)


def test_padding_that_a_module_of_whole_sequences_is_told_of_is_refused(pool: Pool) -> None:
    padded = subject(partial(mixing, "lfm2"), padded=True)
    with pytest.raises((Refusal, WorkerDied), match="told of the padding in a part"):
        holds(pool, padded, "cp2")


class Styled(nn.Module):
    """A mixer that also gets a vector of each sample, as wide as a rank's part of the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.style = nn.Parameter(torch.randn(1, width))
        self.blocks = nn.ModuleList(StyledMixer() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x, self.style.expand(len(x), -1))
        return self.head(x)


class StyledMixer(Convolution):
    def forward(self, x: Tensor, style: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * style.norm(dim=1)[:, None, None]


def test_a_vector_as_wide_as_a_part_of_the_sequence_is_refused(pool: Pool) -> None:
    with pytest.raises(Refusal, match=r"enters as \[2, 8\] may be of positions or not"):
        pool.run(engine_of, partial(Styled, 8), "cp2", False, world=2)
    holds(pool, subject(partial(Styled, 5)), "cp2")


def test_what_enters_without_positions_is_refused(pool: Pool) -> None:
    with pytest.raises(Refusal, match=r"no tensor \[samples, positions, features\] enters it"):
        pool.run(engine_of, unbatched, "cp2", False, world=2)


def unbatched() -> nn.Module:
    model: Any = Recurrent()
    model.blocks = nn.ModuleList(Flat() for _ in range(2))
    return model


class Flat(nn.Module):
    """A recurrence over all tokens of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x.flatten(0, 1))[0].view_as(x)


class ConvolvingBlock(nn.Module):
    """A block that is whole itself, with attention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.conv = FusedAttention(32, 4), nn.Conv1d(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + F.dropout(self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), 0.1)


def convolving() -> nn.Module:
    model: Any = Recurrent()
    model.blocks = nn.ModuleList(ConvolvingBlock() for _ in range(2))
    return model


def shared() -> nn.Module:
    """The blocks of both stages hold the same mixer."""
    model: Any = Recurrent()
    model.blocks[1].mixer = model.blocks[0].mixer
    return model


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_block_that_has_whole_sequences_runs_again_in_backward(
    pool: Pool, recompute: str
) -> None:
    holds(pool, subject(convolving, 2, recompute), "cp2")


@pytest.mark.parametrize("build", [convolving, Recurrent])
def test_the_trial_passes_what_has_whole_sequences(pool: Pool, build: Any) -> None:
    """Dropout that is drawn in evaluation too is no difference."""
    want = pool.run(engine_of, build, "dp1", False, world=1)[0]
    assert pool.run(engine_of, build, "cp2", True, world=2)[0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layout", ["pp2.cp2", "cp2"])
def test_a_shared_mixer(pool: Pool, layout: str) -> None:
    holds(pool, subject(shared, 2), layout)


def test_roles_along_the_sequence_are_honoured() -> None:
    plan = partial(weft.plan, Recurrent(), "cp2", batch=8, loss=next_token)
    found = plan(roles={"blocks.*.mixer": "positionwise"})
    assert not [step for step in found.steps if step.whole_sequence]
    with pytest.raises(Refusal, match="it holds the blocks"):
        plan(roles={"blocks": "whole_sequence"})


def test_whole_sequences_beside_tp_sequence_are_refused() -> None:
    with pytest.raises(Refusal, match=r"blocks\.0\.mixer needs whole sequences"):
        weft.plan(Recurrent(), "cp2.tp2+sequence", batch=8, loss=next_token)


@pytest.mark.parametrize(("layout", "method"), [("cp2", "gather"), ("cp2+gather", "gather")])
def test_eager_attention_gathers_keys(layout: str, method: str) -> None:
    plan = weft.plan(hugging_face("gemma2"), layout, batch=8, loss=next_token)
    assert [step.sequence.method for step in plan.steps if step.sequence] == [method]


@pytest.mark.parametrize("layout", ["cp2+ring", "cp2+ulysses", "cp2.ulysses2"])
def test_eager_attention_by_another_method_is_refused(layout: str) -> None:
    with pytest.raises(Refusal, match=r"needs all keys at once.*\+gather"):
        weft.plan(hugging_face("gemma2"), layout, batch=8, loss=next_token)


def test_attention_outside_the_interface_is_refused() -> None:
    t = pytest.importorskip("transformers")
    config = t.xLSTMConfig(vocab_size=VOCAB, hidden_size=32, num_heads=4, num_hidden_layers=2)
    model = t.xLSTMForCausalLM(config)
    with pytest.raises(Refusal, match="neither scaled_dot_product_attention nor transformers'"):
        weft.plan(model, "cp2", batch=8, loss=next_token)
    declared = {"backbone.blocks.*.mlstm_layer": "whole_sequence"}
    plan = weft.plan(model, "cp2", batch=8, loss=next_token, roles=declared)
    assert [step.module for step in plan.steps if step.whole_sequence] == [
        f"backbone.blocks.{i}.mlstm_layer" for i in range(2)
    ]


class Masked(nn.Module):
    """What `what` says, in place of causal attention."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.embedding, self.head = what, nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q = x.unsqueeze(1)
        if self.what == "mask":
            like = (x @ x.transpose(1, 2) > -1).unsqueeze(1)  # of each other, as activations say
            x = F.scaled_dot_product_attention(q, q, q, like).squeeze(1)
        elif self.what == "other":
            x = F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2]).squeeze(1)
        elif self.what == "sum":
            x = x.cumsum(1)
        return self.head(x)


def engine_of(
    what: str | Callable[[], nn.Module],
    layout: str,
    tried: bool,
    roles: dict | None = None,
    compiled: Any = "auto",
) -> float:
    """The second loss."""
    torch.manual_seed(0)
    batch = tokens()
    model = Masked(what) if isinstance(what, str) else what()
    plan = weft.plan(model, layout, batch=8, loss=next_token, roles=roles)
    sample = {key: value[:2] for key, value in batch.items()} if tried else None
    engine = weft.Engine(
        *(model, plan),
        optimizer=sgd,
        loss=next_token,
        device="cpu",
        sample=sample,
        compile=compiled,
    )
    engine.step(engine.local(batch))
    return float(engine.step(engine.local(batch)).loss)


def followed(make: Callable[[], nn.Module], batches: list[dict[str, Tensor]]) -> list[bool]:
    """Whether the forward of each step is."""
    torch.manual_seed(0)
    model = make()
    plan = weft.plan(model, "cp2", batch=8, loss=next_token)
    engine = weft.Engine(
        *(model, plan), optimizer=sgd, loss=next_token, device="cpu", compile="off"
    )
    begin, steps = engine.sequence.begin, list[list[bool]]()

    def noted(micro: Any, model: nn.Module) -> None:
        begin(micro, model)
        steps[-1].append(engine.sequence.known is not None)

    engine.sequence.begin = noted  # type: ignore[method-assign]
    for batch in batches:
        steps.append([])
        engine.step(engine.local(batch))
    return [forward for forward, *_ in steps]


def sgd(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("what", ["llama", "decoder", "biased"])
def test_a_forward_is_followed_where_that_changes_what_it_computes(pool: Pool, what: str) -> None:
    """In the first one of the same shapes it is found out; those with padding are others."""
    make = {
        "llama": partial(hugging_face, "llama"),
        "decoder": partial(decoder, VOCAB, 32, 2, 4, 4),
        "biased": partial(Biased, False),
    }[what]
    batches = [tokens(full=what == "llama") for _ in range(3)]
    if what == "llama":
        batches += [tokens(padded=True) for _ in range(2)]
    found = pool.run(followed, make, batches, world=2)[0]
    if what == "biased":
        assert found == [True, True, True]
    else:
        assert found == [True, False, False, True, False][: len(batches)]


@pytest.mark.parametrize(
    ("what", "tried", "says"),
    [
        ("mask", False, "says nothing of other ranks' keys"),
        ("other", False, "keys for .* queries on a rank: to another sequence, or"),
        ("sum", True, "changes the model's output"),
        ("sum", False, "changes the model's output"),
    ],
)
def test_refused_where_it_runs(pool: Pool, what: str, tried: bool, says: str) -> None:
    with pytest.raises((Refusal, WorkerDied), match=says):
        pool.run(engine_of, what, "cp2", tried, world=2)


def test_a_model_without_attention_runs_on_parts(pool: Pool) -> None:
    assert pool.run(engine_of, "none", "cp2", True, world=2)[0] == pytest.approx(
        pool.run(engine_of, "none", "dp1", True, world=1)[0]
    )


def test_masks_of_transformers_are_its_own_again_after_a_forward() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    interface = masks.ALL_MASK_ATTENTION_FUNCTIONS
    own, asked = interface["sdpa"], []
    sequence = SimpleNamespace(
        rule=lambda samples, here, **_: asked.append((samples, here)),
        masks_a_part=lambda queries: True,
    )
    with mask_rules(sequence):  # type: ignore[arg-type]
        with mask_rules(sequence):  # type: ignore[arg-type]
            interface["sdpa"](batch_size=2, q_length=4, kv_length=4, mask_function=None)
        assert interface["sdpa"] is not own
    assert asked == [(2, 4)] and interface["sdpa"] is own
    interface.register("sdpa", replacement := lambda *_, **__: None)
    assert interface["sdpa"] is replacement  # nothing of weft stands before the library's registry
    interface.register("sdpa", own)
    with pytest.raises(ZeroDivisionError), mask_rules(sequence):  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert interface["sdpa"] is own


def test_attention_of_transformers_is_its_own_again_after_a_forward() -> None:
    interface = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    default, sdpa = len, interface.get_interface("sdpa", None)
    with eager_attention_by(lambda attend, *rest: (attend, *rest)):
        assert interface.get_interface("eager", default)(1, 2) == (default, 1, 2)
        assert interface.get_interface("sdpa", None) is sdpa
    assert interface.get_interface("eager", default) is default
    assert "get_interface" not in vars(interface)
