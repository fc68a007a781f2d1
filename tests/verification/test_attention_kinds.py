"""Attentions of many kinds under tp: cut, and equal to one device; or left whole, and said so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases import VOCAB, Subject, reference, tokens
from weft.core.errors import UnsupportedModel
from weft.nn.losses import next_token
from weft.verification.compare import check_layout

DIM, HEADS, HEAD = 32, 4, 8


class Attention(nn.Module):
    """Causal attention with biases; subclasses make queries, keys and values [b, h, s, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.o_proj = nn.Linear(DIM, DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        return out

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.parts(x), is_causal=True)
        return self.o_proj(self.after(x, out).transpose(1, 2).flatten(2))


def by_head(t: Tensor, width: int = HEAD) -> Tensor:
    return t.unflatten(-1, (-1, width)).transpose(1, 2)


class Latent(Attention):
    """As DeepSeek-V3: queries, keys and values are made of compressed ones; one key part is that
    of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm = nn.Linear(DIM, 12), nn.RMSNorm(12)
        self.q_b_proj = nn.Linear(12, HEADS * (HEAD + 4))
        self.kv_a_proj, self.kv_a_norm = nn.Linear(DIM, 10 + 4), nn.RMSNorm(10)
        self.kv_b_proj = nn.Linear(10, HEADS * 2 * HEAD)
        self.o_proj = self._modules.pop("o_proj")  # after what is compressed, as it runs

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = by_head(self.q_b_proj(self.q_a_norm(self.q_a_proj(x))), HEAD + 4)
        latent, place = self.kv_a_proj(x).split((10, 4), -1)
        key, value = by_head(self.kv_b_proj(self.kv_a_norm(latent)), 2 * HEAD).chunk(2, -1)
        place = place.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        return query, torch.cat((key, place), -1), value


class Sinks(Attention):
    """A number for each head scales it, and a gate of the input follows; both stand behind the
    row."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj = nn.Linear(DIM, DIM)
        self.k_proj, self.v_proj = nn.Linear(DIM, 2 * HEAD), nn.Linear(DIM, 2 * HEAD)
        self.gate_proj = nn.Linear(DIM, DIM)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (by_head(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        groups = query.shape[1] // key.shape[1]
        return query, *(t.repeat_interleave(groups, 1) for t in (key, value))

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        return out * self.sinks.view(-1, 1, 1) * by_head(self.gate_proj(x)).sigmoid()


class Interleaved(Attention):
    """As GPT-NeoX: of each head its query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(DIM, 3 * DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = by_head(self.query_key_value(x), 3 * HEAD).chunk(3, -1)
        return query, key, value


class WideQuery(Attention):
    """As Qwen3-Next: of each head its query and its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj = nn.Linear(DIM, 2 * DIM)
        self.k_proj, self.v_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, self.gate = by_head(self.q_proj(x), 2 * HEAD).chunk(2, -1)
        return query, by_head(self.k_proj(x)), by_head(self.v_proj(x))

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        return out * self.gate.sigmoid()


class FromConfig(Attention):
    """As Phi-3: the row comes first, and the forward reads heads off a shared configuration."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=2)
        self.qkv_proj = nn.Linear(DIM, DIM + 4 * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        heads, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        query, key, value = self.qkv_proj(x).split((heads * HEAD, keys * HEAD, keys * HEAD), -1)
        out = F.scaled_dot_product_attention(
            by_head(query), by_head(key), by_head(value), is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Fixed(Attention):
    """Its forward knows the number of heads, whatever its weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj = nn.Linear(DIM, DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, s, _ = x.shape
        parts = (p(x).view(b, s, HEADS, HEAD) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.self_attn = attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CUT = (Latent, Sinks, Interleaved, WideQuery, FromConfig)


def holds(pool: Any, subject: Subject, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)


@pytest.mark.grid(6, ci=4)
@pytest.mark.parametrize("layout", ["tp2", "tp2+sequence", "fsdp2.tp2"])
@pytest.mark.parametrize("kind", CUT)
def test_cut_and_equal_to_one_device(pool: Any, kind: type[Attention], layout: str) -> None:
    table = plan(Decoder(kind)).params()
    assert all("tp" in table[f"blocks.{n}.self_attn.o_proj.weight"] for n in range(2))
    holds(pool, Subject(partial(Decoder, kind), tokens, next_token), layout)


def plan(model: nn.Module, **options: Any) -> weft.Plan:
    sample = {key: value[:2] for key, value in tokens().items()}
    return weft.plan(model, "tp2", batch=8, loss=next_token, sample=sample, **options)


def test_what_does_not_run_on_its_part_is_left_whole(pool: Any) -> None:
    made = plan(Decoder(Fixed))
    table = made.params()
    assert not any("tp" in axes for name, axes in table.items() if "self_attn" in name)
    assert any("tp" in axes for name, axes in table.items() if "mlp" in name)
    assert any(note.startswith("Fixed does not run on its part (") for note in made.notes)
    holds(pool, Subject(partial(Decoder, Fixed), tokens, next_token), "tp2")


def test_what_is_declared_of_other_modules_refuses_none() -> None:
    made = plan(Decoder(Fixed), roles={"head": "whole"})
    assert any(note.startswith("Fixed does not run on its part (") for note in made.notes)


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.5) @ self.weight.T + self.bias


class OwnLinears(Interleaved):
    """Its row has a bias, and a forward that computes something else than nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = OwnForward(DIM, DIM)


def test_each_kind_that_is_left_whole_is_said_once(pool: Any) -> None:
    notes = [note for note in plan(Decoder(OwnLinears)).notes if "left whole" in note]
    assert len(notes) == 1 and notes[0].startswith("OwnLinears does not run on its part (")
    holds(pool, Subject(partial(Decoder, OwnLinears), tokens, next_token), "tp2")


def test_a_declared_role_that_does_not_run_is_refused_with_advice_that_works() -> None:
    roles = {f"blocks.*.self_attn.{name}_proj": "column" for name in "qkv"}
    roles |= {"blocks.*.self_attn.o_proj": "row"}
    with pytest.raises(UnsupportedModel, match=r"blocks\.0\.self_attn.*fails on a rank's shard"):
        plan(Decoder(Fixed), roles=roles)
    assert plan(Decoder(Fixed), roles=dict.fromkeys(roles, "whole")).notes


# ---- families of transformers --------------------------------------------------------------------

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "families"))

FAMILIES = {  # family -> whether its attention is cut
    "deepseek_v3": True,
    "gpt_oss": True,
    "phi3": True,
    "gpt_neox": True,
    "afmoe": True,
    "qwen3_next": True,
    "deepseek_v32": True,
    "falcon": True,
    "gpt_bigcode": True,
    "bloom": True,  # its biases of positions come from outside, for all heads
    "mpt": True,
}


def family(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from families import Family, small_config

    model: nn.Module = transformers.AutoModelForCausalLM.from_config(small_config(Family(name)))
    return model


@pytest.mark.grid(4, ci=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_one_device(pool: Any, name: str) -> None:
    table = plan(family(name)).params()
    ends = (
        "attn.o_proj.weight",
        "attn.out_proj.weight",
        "attn.c_proj.weight",
        "attention.dense.weight",
    )
    rows = [n for n in table if n.endswith(ends)]
    assert rows and all(("tp" in table[row]) is FAMILIES[name] for row in rows)
    holds(pool, Subject(partial(family, name), tokens, next_token), "tp2")
