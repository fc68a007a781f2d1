"""Experts spread over ranks, with every other axis, against one device."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import Subject, in_turn, reference
from tests.engine.test_context_parallel import holds, tokens
from weft.core import run_config
from weft.core.errors import Refusal
from weft.core.run_config import RunConfig
from weft.engine import Engine
from weft.launch.local_workers import Pool
from weft.nn.expert_roles import why_none_of
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.nn.models.decoder import rotary_table
from weft.parallel import expert_dispatch
from weft.pipeline.capture.tracer import trace_forward
from weft.train.trainer import train

pytestmark = pytest.mark.grid

VOCAB = 67


def hugging_face(kind: str) -> nn.Module:
    t = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
    }
    if kind == "mixtral":
        config: Any = t.MixtralConfig(**small, num_local_experts=4)
    elif kind == "qwen3":
        config = t.Qwen3MoeConfig(**small, num_experts=8, moe_intermediate_size=24, head_dim=8)
    elif kind == "qwen2":
        config = t.Qwen2MoeConfig(
            **small,
            num_experts=8,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        )
    elif kind == "olmoe":
        config = t.OlmoeConfig(**small, num_experts=8)
    else:
        config = t.DeepseekV3Config(
            **small | {"num_key_value_heads": 4},
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    model: nn.Module = t.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_a_chart_without_data(kind: str) -> None:
    """Whose weights are on the meta device: the same calls, of the same FLOPs, experts' too."""
    ids = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    with torch.device("meta"):
        bare = hugging_face(kind)
    model = hugging_face(kind)
    there, here = (
        [(e.name, e.flops) for e in trace_forward(one, ids).events] for one in (bare, model)
    )
    assert there == here
    experts = sum(flops for name, flops in there if name.endswith("mlp.experts"))
    active, width = 2, 48 if kind == "mixtral" else 24
    assert (
        experts == 2 * 2 * 16 * active * 3 * 32 * width
    )  # layers, FLOPs of a product, tokens, and three matrices


def subject(kind: str, recompute: Any = "none", **options: Any) -> Subject:
    build = (
        partial(hugging_face, kind)
        if not options
        else partial(decoder, VOCAB, 32, 2, 4, 4, **options)
    )
    return Subject(build, tokens, next_token, (("accumulate", 2), ("recompute", recompute)), 0.1)


GATES: dict[str, dict[str, Any]] = {
    "softmax": {"experts": 4, "hidden": 24, "balance": 0.5, "z": 0.1},
    "sigmoid": {
        "experts": 8,
        "active": 3,
        "shared": 1,
        "hidden": 24,
        "gate": "sigmoid",
        "balance": 0.5,
        "tied": True,
    },
    "capacity": {"experts": 4, "hidden": 24, "balance": 0.5, "capacity": 0.75},
    "bias": {
        "experts": 8,
        "active": 2,
        "shared": 1,
        "hidden": 24,
        "gate": "sigmoid",
        "balance": 0.0,
        "bias": 0.01,
    },
}


LAYOUTS = [
    "ep2",
    "ep4",
    "dp2.ep2",
    "dp2+ep",
    "fsdp2+ep",
    "fsdp2.ep2",
    "fsdp2+zero1.ep2",
    "dp2.fsdp2+ep",
    "cp2+ep",
    "dp2+ep.cp2+ep",
    "cp2.ep2",
    "ulysses2+ep.dp2",
    "pp2.ep2",
    "pp2.dp2+ep",
    "ep2.tp2",
    "dp2+ep.tp2",
    "tp2",
    "tp4",
    "tp2+sequence",
    "tp2+sequence+ep",
    "dp2+ep.tp2+sequence+ep",
    "fsdp2.tp2",
    "fsdp2+ep.tp2+sequence",
    "cp2.tp2+sequence",
    "pp2.tp2+sequence+ep",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_device(pool: Pool, layout: str) -> None:
    holds(pool, subject("mixtral"), layout)


@pytest.mark.parametrize("layout", ["ep2", "fsdp2+ep", "dp2+ep.cp2+ep", "dp2", "pp2", "cp2"])
@pytest.mark.parametrize("kind", ["qwen3", "olmoe", "deepseek"])
def test_every_model(pool: Pool, kind: str, layout: str) -> None:
    holds(pool, subject(kind), layout)


@pytest.mark.parametrize("layout", ["tp2", "tp2+sequence", "tp2+sequence+ep", "ep2.tp2+sequence"])
def test_a_shared_expert_of_flattened_tokens(pool: Pool, layout: str) -> None:
    holds(pool, subject("qwen2"), layout)


@pytest.mark.parametrize("layout", ["ep2", "dp2+ep.cp2+ep", "ep2.tp2+sequence", "pp2+zb-h1.ep2"])
@pytest.mark.parametrize(
    "frozen", ["embed_tokens layers.0", "embed_tokens layers.0. mlp.gate mlp.experts"]
)
def test_frozen(pool: Pool, frozen: str, layout: str) -> None:
    """Where tokens need no gradient they are not sent back, and with their experts frozen too
    nothing is."""
    made = Subject(partial(partly, frozen), tokens, next_token, (("accumulate", 2),), 0.1)
    holds(pool, made, layout)


def partly(frozen: str) -> nn.Module:
    model = hugging_face("mixtral")
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen.split()))
    return model


class Called(nn.Module):
    """Experts called by name, with dropout after them and in what all tokens go through."""

    def __init__(self, drop: float, within: float = 0.0) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 2, 4, 4, **GATES["sigmoid"])
        for block in self.inner.blocks:  # type: ignore[union-attr]
            mixture: Any = block.mlp
            mixture.forward = partial(self.call, mixture)
            mixture.drop = nn.Dropout(drop)
            mixture.shared = nn.Sequential(mixture.shared, nn.Dropout(drop))
            if within:
                mixture.experts.forward = partial(self.dropped, mixture.experts.forward, within)

    def call(self, mixture: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        _, index, weights = mixture.gate(tokens)
        y: Tensor = mixture.drop(mixture.experts(tokens, weights=weights, index=index).view_as(x))
        return y + mixture.shared(x)

    def dropped(self, forward: Any, p: float, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.nn.functional.dropout(forward(x, index, weights), p)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.inner(input_ids)
        return x


@pytest.mark.parametrize(
    "layout", ["dp2", "ep2", "ep2.tp2", "tp2+sequence+ep", "pp2.ep2", "cp2+ep"]
)
def test_dropout_around_experts(pool: Pool, layout: str) -> None:
    """The masks are one device's although the shared expert comes earlier."""
    holds(
        pool, Subject(partial(Called, 0.2), tokens, next_token, (("accumulate", 2),), 0.1), layout
    )


def test_dropout_within_experts_is_refused(pool: Pool) -> None:
    within = Subject(partial(Called, 0.0, 0.2), tokens, next_token)
    with pytest.raises(Refusal, match="drawn within experts"):
        holds(pool, within, "dp2")


@pytest.mark.parametrize("layout", ["ep2", "fsdp2+ep"])
def test_recomputed(pool: Pool, layout: str) -> None:
    holds(pool, subject("mixtral", "full"), layout)


GATED = [
    "dp2",
    "ep2",
    "dp2+ep.cp2+ep",
    "fsdp2.ep2",
    "pp2.ep2",
    "ep2.tp2",
    "ep2.tp2+sequence",
    "tp2",
    "tp2+sequence",
    "tp2+sequence+ep",
    "cp2.tp2+sequence+ep",
    "cp2+ulysses",
    "cp2.ulysses2+ep",
]


@pytest.mark.grid
@pytest.mark.parametrize(("gate", "layout"), in_turn(GATES, GATED, 7))
def test_a_decoder_with_experts(pool: Pool, gate: str, layout: str) -> None:
    """Its losses that balance the gate are of all tokens of a microbatch, on any layout."""
    holds(pool, subject("", **GATES[gate]), layout)


@pytest.mark.parametrize("gate", GATES)
def test_a_decoder_with_experts_recomputed(pool: Pool, gate: str) -> None:
    holds(pool, subject("", "full", **GATES[gate]), "ep2.cp2")


@pytest.mark.parametrize("layout", ["pp2+zb-h1.ep2", "pp2+dualpipev.dp2+ep"])
def test_in_a_split_backward(pool: Pool, layout: str) -> None:
    holds(pool, subject("", **GATES["sigmoid"]), layout)


@pytest.mark.parametrize("gate", ["capacity", "bias"])
def test_the_gate_does_what_it_is_to(gate: str) -> None:
    """Else nothing above would be seen: choices are dropped, and a bias changes what is chosen."""
    found = reference(subject("", **GATES[gate]))
    index = torch.cat(
        [routing.index.flatten() for trace in found.traces for routing in trace.routings]
    )
    assert bool((index < 0).any()) == (gate == "capacity")
    biases = [value for name, value in found.final.items() if name.endswith("bias.state")]
    assert bool(biases) == (gate == "bias") and all(
        bool(b[0].any()) and not bool(b[1].any()) for b in biases
    )


def skewed() -> nn.Module:
    """All tokens choose the same experts, in the first step."""
    model = hugging_face("mixtral")
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(p)
    return model


@pytest.mark.parametrize("layout", ["ep2", "ep4", "dp2+ep.cp2+ep"])
def test_where_no_token_comes(pool: Pool, layout: str) -> None:
    holds(pool, Subject(skewed, tokens, next_token, (("accumulate", 2),), 0.1), layout)


@pytest.mark.parametrize(
    ("build", "layout", "says"),
    [
        (partial(decoder, VOCAB, 32, 2, 4), "ep2", "finds no experts"),
        (partial(hugging_face, "mixtral"), "ep3", "4 experts, which do not divide over 3 ranks"),
        (partial(hugging_face, "mixtral"), "dp2+experts", "no option 'experts'. Known: ep"),
        (partial(hugging_face, "mixtral"), "tp2+ep", r"Write tp2\+sequence\+ep"),
        (
            partial(decoder, VOCAB, 32, 2, 4, 4, experts=4, hidden=25),
            "tp2",
            "has 25 features, which tp2",
        ),
    ],
)
def test_refused(build: Any, layout: str, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        weft.plan(build(), layout, batch=12, loss=next_token)


class Outside(nn.Module):
    """A mixture after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, other = (
            decoder(VOCAB, 32, 2, 4, 4),
            decoder(VOCAB, 32, 1, 4, 4, **GATES["softmax"]),
        )
        self.last = other.get_submodule("blocks.0.mlp")

    def forward(self, input_ids: Tensor) -> Tensor:
        inner: Any = self.inner
        x = inner.embedding(input_ids)
        rotary = rotary_table(input_ids.size(1), 8, inner.rope_base, x)
        for block in inner.blocks:
            x = block(x, rotary)
        y: Tensor = inner.head(inner.norm(x + self.last(x)))
        return y


@pytest.mark.parametrize("layout", ["ep2", "tp2+sequence", "ep2.tp2"])
def test_a_mixture_outside_of_blocks(pool: Pool, layout: str) -> None:
    holds(pool, Subject(Outside, tokens, next_token, (("accumulate", 2),), 0.1), layout)


def test_ranks_that_have_the_same_tokens_spread_no_experts() -> None:
    with pytest.raises(Refusal, match=r"last\.experts is outside of the blocks"):
        weft.plan(Outside(), "tp2+sequence+ep", batch=12, loss=next_token)


def test_without_a_flush_no_gate_adds_a_loss(pool: Pool) -> None:
    """What it is to be divided by is known to the last stage alone."""
    batch = {"input_ids": torch.randint(0, VOCAB, (2, 16))}
    options: dict[str, Any] = {"batch": 8, "accumulate": 4, "loss": next_token, "sample": batch}
    with pytest.raises(Refusal, match="an expert gate adds a balancing loss"):
        weft.plan(decoder(VOCAB, 32, 2, 4, 4, **GATES["softmax"]), "pp2+pipedream", **options)
    weft.plan(decoder(VOCAB, 32, 2, 4, 4, **GATES["bias"]), "pp2+pipedream", **options)


def test_biases_have_all_tokens() -> None:
    with pytest.raises(Refusal, match=r"each replica would update blocks\.0\.mlp\.gate\.bias"):
        weft.plan(
            decoder(VOCAB, 32, 2, 4, 4, **GATES["bias"]),
            "dp2",
            batch=12,
            loss=next_token,
            sync="diloco",
        )


def test_a_gate_may_add_its_loss_later() -> None:
    model = decoder(VOCAB, 32, 1, 4, 4, experts=4, hidden=24, balance=0.0)
    plan = weft.plan(model, "dp1", batch=2, loss=next_token)
    engine = Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    engine.step({"input_ids": torch.randint(0, VOCAB, (2, 8))})
    assert engine._training.functions is not None


class Kind(nn.Module):
    """Experts of the right form that are not each token's own, or that count themselves by another
    number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 1, 4, 4, experts=4, hidden=24)
        experts: Any = self.inner.get_submodule("blocks.0.mlp.experts")
        right = experts.forward

        def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if kind == "hard":
                for expert in range(4):
                    experts.up[expert].sum()
            made: Tensor = right(x, index, weights)
            return made * (1 + x.mean() * 100) if kind == "mean" else made

        experts.forward = forward
        if kind == "scale":
            experts.scale = nn.Parameter(torch.ones(32))

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.inner(input_ids)
        return x


def begin(kind: str, layout: str) -> None:
    torch.manual_seed(0)
    model, sample = Kind(kind), {"input_ids": torch.arange(8)[None]}
    plan = weft.plan(model, layout, batch=4, loss=next_token, sample=sample)
    Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu", sample=sample)


@pytest.mark.parametrize("kind", ["mean", "hard"])
def test_experts_that_compute_something_else_on_ranks_are_refused(pool: Pool, kind: str) -> None:
    pool.run(begin, "right", "ep2", world=2)
    with pytest.raises(
        Refusal, match="compute each token by itself, and give their number as num_experts"
    ):
        pool.run(begin, kind, "ep2", world=2)


def test_what_is_passed_over_is_named() -> None:
    named = (
        r"experts is not taken for experts: its parameter scale \[32\] has no part for each of 4"
    )
    with pytest.raises(Refusal, match=named):
        begin("scale", "ep2")


class Stacked(nn.Module):
    """Matrices of its own, of which dim 0 is `counts`; beside a linear, if there is one."""

    def __init__(self, *counts: int, linear: bool = False):
        super().__init__()
        for number, count in enumerate(counts):
            self.register_parameter(f"table{number}", nn.Parameter(torch.zeros(count, 6, 6)))
        if linear:
            self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x


def test_what_is_like_experts() -> None:
    """Stacks of matrices, of which some experts may have no second one, as LongCat's; and not the
    table of positions of an attention's heads."""
    like = "0 is not taken for experts: it has no attribute num_experts"
    for experts in (Stacked(4, 4), Stacked(4, 6)):
        assert why_none_of(nn.Sequential(experts)) == like
    for other in (Stacked(1), Stacked(4, linear=True)):
        assert why_none_of(nn.Sequential(other)) == ""


@pytest.mark.parametrize("sync", ["local_sgd", "parameter_server"])
def test_replicas_have_all_experts_to_themselves(sync: str) -> None:
    with pytest.raises(Refusal, match="spreads experts over replicas"):
        weft.plan(hugging_face("mixtral"), "dp2+ep", batch=12, loss=next_token, sync=sync)


# ---- what runs while tokens travel ---------------------------------------------------------------


def order(kind: str, recompute: str) -> list[str]:
    """What a rank does in a step, from a mixture's first exchange on."""
    said: list[str] = []

    class Said(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            said.append("shared")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            said.append("shared backward")
            return grads[0]

    torch.manual_seed(0)
    model = hugging_face(kind) if kind == "deepseek" else decoder(VOCAB, 32, 1, 4, 4, **GATES[kind])
    for name, module in model.named_modules():
        if name.endswith((".shared", ".shared_experts")):
            module.register_forward_hook(lambda _, __, out: Said.apply(out))
    plan = weft.plan(model, "ep2", batch=4, loss=next_token, recompute=recompute)
    engine = Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    engine.trial = None  # whose forwards have the model's hooks too
    with pytest.MonkeyPatch.context() as patch:
        start, wait = expert_dispatch._AsyncAllToAll.start, expert_dispatch._AsyncAllToAll.wait
        patch.setattr(
            expert_dispatch._AsyncAllToAll,
            "start",
            lambda self, x, back: said.append("back" if back else "out") or start(self, x, back),
        )
        patch.setattr(
            expert_dispatch._AsyncAllToAll, "wait", lambda self: said.append("wait") or wait(self)
        )
        engine.step(engine.local({"input_ids": torch.randint(0, VOCAB, (4, 8))}))
    return said


def sgd(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in params], lr=0.1)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["sigmoid", "deepseek"])
def test_the_shared_expert_runs_while_tokens_travel(pool: Pool, kind: str, recompute: str) -> None:
    """And its backward while their gradients do; it runs once."""
    forward = ["out", "shared", "wait", "out", "wait"]
    backward = ["back", "wait", "back", "shared backward", "wait"]
    again = forward if recompute == "full" else []
    assert pool.run(order, kind, recompute, world=2)[0] == [*forward, *again, *backward]


class Otherwise(nn.Module):
    """A model whose mixture calls what all tokens go through before its experts, or with something
    else."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.inner = decoder(VOCAB, 32, 1, 4, 4, **GATES["sigmoid"])
        self.before, mixture = before, self.inner.get_submodule("blocks.0.mlp")
        mixture.forward = partial(self.call, mixture)

    def call(self, mixture: Any, x: Tensor) -> Tensor:
        first = mixture.shared(x) if self.before else None
        tokens = x.flatten(0, 1)
        _, index, weights = mixture.gate(tokens)
        y: Tensor = mixture.experts(tokens, index, weights).view_as(x)
        return y + (mixture.shared(2 * x) if first is None else first)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.inner(input_ids)
        return x


@pytest.mark.parametrize("before", [True, False])
def test_a_shared_expert_that_is_called_otherwise(pool: Pool, before: bool) -> None:
    holds(
        pool,
        Subject(partial(Otherwise, before), tokens, next_token, (("accumulate", 2),), 0.1),
        "ep2",
    )


# ---- what a run says of its experts --------------------------------------------------------------

RUN = """
[model]
build = "weft.models:decoder"
vocab = 32
dim = 16
layers = 2
heads = 4
hidden = 16
seq_len = 8
experts = 4
balance = 0.1
[data]
build = "tests.train.test_trainer:Ramps"
[train]
batch = 8
steps = 4
log_every = 2
[optimizer]
lr = 1e-2
"""


def made(folder: Path, axes: str, steps: int = 4, **model: Any) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN)
    overrides = {f"model.{key}": value for key, value in model.items()}
    overrides |= {
        "layout.axes": axes,
        "train.steps": steps,
        "checkpoint.every": steps,
        "output": str(folder / "out"),
    }
    return run_config.load_run(
        folder / "run.toml", {key: json.dumps(value) for key, value in overrides.items()}
    )


def lines(run: RunConfig) -> list[dict[str, Any]]:
    return [
        json.loads(text) for text in (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    ]


def test_metrics_of_experts_are_the_same_on_any_layout(tmp_path: Path, pool: Pool) -> None:
    """Of 8 samples of 8 tokens with 2 choices each, in two layers; a step's and two steps'."""
    found = {}
    for axes in ("dp1", "ep2", "tp2", "tp2+sequence+ep", "pp2.ep2", "cp2+ep"):
        run = made(tmp_path / axes, axes, capacity=1.0)
        pool.run(train, run, False, world=weft.Layout.parse(axes).world)
        found[axes] = lines(run)
    steps = [1, 1, 2]
    for line, count in zip(found["dp1"], steps, strict=True):
        assert set(line["tokens_per_expert"]) == {"blocks.0.mlp.experts", "blocks.1.mlp.experts"}
        chosen = sum(map(sum, line["tokens_per_expert"].values()))
        assert chosen == count * 8 * 8 * 2 * 2  # with those that found no room
        assert 0 < line["dropped_share"] < 0.5 and 1 <= line["busiest_expert"] <= 2
        assert 0.19 < line["gate_loss"] < 0.4  # 0.1 for each of two layers, where all is even
        assert "dispatch_bytes" not in line
    for axes, others in found.items():
        for line, other in zip(found["dp1"], others, strict=True):
            assert other["tokens_per_expert"] == line["tokens_per_expert"], axes
            assert other["gate_loss"] == pytest.approx(line["gate_loss"], rel=1e-4)
    run = made(tmp_path / "evaluated", "ep2", capacity=1.0)
    run = run.model_copy(update={"train": run.train.model_copy(update={"eval_every": 1})})
    pool.run(train, run, False, world=2)
    evaluated = [line["dispatch_bytes"] for line in lines(run) if "loss" in line]
    assert evaluated == [line["dispatch_bytes"] for line in found["ep2"]]  # of training alone
    # four trips of half of the rows that are not dropped, of 16 numbers in float32; about half of
    # them stay
    for line, count in zip(found["ep2"], steps, strict=True):
        rows = (
            (1 - line["dropped_share"]) * sum(map(sum, line["tokens_per_expert"].values())) / count
        )
        assert 0.5 < line["dispatch_bytes"] / (4 * rows / 2 * 16 * 4 / 2) < 1.5
        others = line["sent_bytes"] - line["dispatch_bytes"]  # all else is as large in every step
        assert (
            abs(others - (found["ep2"][0]["sent_bytes"] - found["ep2"][0]["dispatch_bytes"])) < 2000
        )
        assert 0 < line["dispatch_exposed_s"] < line["step_s"] and line["dispatch_hidden_s"] >= 0


def test_a_gate_that_collapses_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, "dp1", build="tests.engine.test_experts:collapsed", balance=0.0)
    train(run, False)
    printed = capfd.readouterr().out
    assert (
        printed.count(
            "the gate of blocks.1.mlp.experts has collapsed: 100% of its choices are 3 of 8 experts"
        )
        == 1
    ), printed
    assert "blocks.0.mlp.experts has collapsed" not in printed
    assert re.search(
        r"the busiest has 4.00 times the mean \(\d of blocks\.1\.mlp\.experts\)", printed
    ), printed


def test_a_gate_that_picks_all_has_not_collapsed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(made(tmp_path, "dp1", experts=8, active=8), False)
    assert "collapsed" not in capfd.readouterr().out


def collapsed(**options: Any) -> nn.Module:
    """All tokens go to experts 0 and 1 of the second layer."""
    model = decoder(**{**options, "experts": 8})
    gate = model.get_submodule("blocks.1.mlp.gate")
    gate.weight.requires_grad_(False).zero_()  # of equal scores the first are chosen
    return model


@pytest.mark.parametrize("after", ["tp2+sequence+ep", "pp2.dp2", "dp1"])
def test_a_run_is_resumed_under_another_layout(tmp_path: Path, pool: Pool, after: str) -> None:
    """Experts by their global names, and the biases of their gates, of which each stage has its
    own."""
    options: dict[str, Any] = {"bias": 0.05, "capacity": 1.0, "gate": "sigmoid"}
    whole = made(tmp_path / "whole", "dp1", **options)
    train(whole, False)
    for before in ("ep2", "pp2.ep2"):
        short = made(tmp_path / before, before, 2, **options)
        pool.run(train, short, False, world=weft.Layout.parse(before).world)
        rest = made(tmp_path / before, after, **options)
        pool.run(train, rest, True, world=weft.Layout.parse(after).world)
        third, last = lines(rest)[-2:]  # a run's first step has a line of its own
        assert last["loss"] == pytest.approx(lines(whole)[-1]["loss"], rel=1e-4)
        for module, counts in lines(whole)[-1]["tokens_per_expert"].items():
            both = third["tokens_per_expert"][module], last["tokens_per_expert"][module]
            assert [sum(each) for each in zip(*both, strict=True)] == counts
