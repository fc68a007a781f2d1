"""Corners where a layout could go wrong without an error: each either equals one device or is
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Subject, laid, reference, seeded
from weft.core.errors import ConfigError, Refusal, UnsupportedModel
from weft.engine.function_overrides import FunctionOverrides
from weft.nn.dropout_rng import Randomness
from weft.nn.losses import mse, next_token
from weft.nn.models import decoder
from weft.nn.module_roles import find_roles
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult

DIM = 8


def vectors(shape: tuple[int, ...] = (BATCH, 4, DIM)) -> dict[str, Tensor]:
    return {"x": torch.randn(shape), "target": torch.randn(shape)}


class Attention(nn.Module):
    """Learned temperature: a parameter of its own, used on this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q * self.temperature, k, v)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Gated(nn.Module):
    """A feed-forward whose activation is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(DIM, 2 * DIM), nn.PReLU(), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return y if scale is None else y * scale


class Stack(nn.Module):
    """Residual blocks made by `make`."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Residual(make) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.part = make()

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return x + self.part(x, *more)


class Conditioned(nn.Module):
    """Blocks that take a second tensor which needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Residual(Plain) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        for block in self.blocks:
            x = block(x, scale)
        return x


class Averages(nn.Module):
    """A buffer of the state that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        return self.linear(x - self.mean)


class Routed(nn.Module):
    """One of two equal experts, by the data: ranks may run different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual(Plain) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() > 0)](x)


class Hidden(Routed):
    """The same, in a way that its source does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = self.experts
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        return self._modules["parts"][int(x.sum() > 0)](x)  # type: ignore[index]


class Stacked(nn.Module):
    """Experts in one weight, of which its forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, DIM, DIM) / DIM**0.5)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return x @ self.weight[number]


class CalledForEach(nn.Module):
    """Calls one module for each expert that its samples choose, as DBRX does."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum((1, 2)) > 0).long()
        made, hit = torch.zeros_like(x), chosen.unique()
        for number in hit:
            made[chosen == number] = self.stack(x[chosen == number], number)
        return x + made


class Shared(nn.Module):
    """Two blocks that hold one weight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(Plain) for _ in range(2))
        self.blocks[1].part.up.weight = self.blocks[0].part.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Twice(nn.Module):
    """One table of tokens behind two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.decoder.weight = self.encoder.weight
        self.blocks = nn.ModuleList(Residual(Plain) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.encoder(input_ids) + self.decoder(input_ids.flip(1))
        for block in self.blocks:
            x = block(x)
        return x


class Scored(Twice):
    """Its own forward, too, uses the table that its embeddings hold: as whole, which a cut one is
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Module()
        self.scores.weight = self.encoder.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) @ self.scores.weight.T


class Biased(nn.Module):
    """Holds the bias of a module inside it, as BERT's head does; `used`: and adds it once more."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.body, self.used = Twice(), used
        self.head = nn.Linear(DIM, VOCAB)
        self.bias = self.head.bias

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.body(input_ids))
        return logits + self.bias.mean() if self.used else logits


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.2, batch_first=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(encoder_layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Channels(nn.Module):
    """Dropout of whole channels, and SELU's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.alpha = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Dropout2d(0.3),
            nn.AlphaDropout(0.3),
        )
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.conv(x.unsqueeze(1)))
        return self.out(self.alpha(nn.functional.selu(x))).squeeze(1)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_dropout_of_channels_and_of_selu(pool: Any, layout: str) -> None:
    result = run(pool, Channels, layout)
    assert result.passed, result


def test_masks_have_their_rate_and_keep_the_mean() -> None:
    functions = FunctionOverrides(Randomness(0, samples=torch.arange(64)), selective=False)
    x = nn.functional.selu(torch.randn(64, 50, 6, 6))
    with functions:
        plain = nn.functional.dropout(torch.ones(64, 1000), 0.3)
        channels = nn.functional.dropout2d(torch.ones(64, 50, 6, 6), 0.3)
        alpha = nn.functional.alpha_dropout(x, 0.3, training=True)
    assert (plain == 0).double().mean() == pytest.approx(
        0.3, abs=0.01
    ) and plain.mean() == pytest.approx(1.0, abs=0.01)
    whole = channels.flatten(2)
    assert torch.equal(whole.amin(2), whole.amax(2)) and (
        whole[..., 0] == 0
    ).double().mean() == pytest.approx(0.3, abs=0.03)
    assert alpha.mean() == pytest.approx(
        float(x.mean()), abs=0.02
    ) and alpha.std() == pytest.approx(float(x.std()), rel=0.05)


def test_a_dropout_without_a_mask_of_its_own_is_refused() -> None:
    with (
        FunctionOverrides(Randomness(0), selective=False),
        pytest.raises(UnsupportedModel, match="feature_alpha_dropout"),
    ):
        nn.functional.feature_alpha_dropout(torch.ones(2, 3, 4), 0.5, training=True)


def run(pool: Any, build: Callable[[], nn.Module], layout: str) -> LayoutResult:
    subject = Subject(build, vectors, mse)
    return pool.run(
        check_layout,
        subject.case(),
        layout,
        reference(subject),
        world=weft.Layout.parse(layout).world,
    )[0]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2.tp2"])
def test_dropout_inside_torchs_own_encoder_layer(pool: Any, layout: str) -> None:
    result = run(pool, Encoder, layout)
    assert result.passed, result


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2+zero2"])
def test_a_weight_shared_between_blocks(pool: Any, layout: str) -> None:
    result = run(pool, Shared, layout)
    assert result.passed, result


@pytest.mark.parametrize(("part", "says"), [(Attention, "temperature"), (Gated, "act.weight")])
def test_a_parameter_of_its_own_inside_a_chain_leaves_it_whole(
    part: type[nn.Module], says: str
) -> None:
    found = find_roles(Stack(part))
    assert not found.chains and any(says in note and "left whole" in note for note in found.notes)
    columns, row = ("*.part.up", "*.part.down") if part is Gated else ("*.part.[qkv]", "*.part.out")
    with pytest.raises(UnsupportedModel, match=says):
        find_roles(Stack(part), {columns: "column", row: "row"})


def steps(
    build: Callable[[], nn.Module],
    layout: str,
    data: dict[str, Tensor],
    loss: Any,
    sample: bool,
    **plan: Any,
) -> Any:
    model = seeded(build)
    plan = {"precision": "fp64", **plan}
    model = model.float() if plan["precision"] != "fp64" else model
    laid_out = weft.plan(model, layout, batch=BATCH, loss=loss, **plan)
    one = {key: value[:1] for key, value in data.items()} if sample else None
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    engine = weft.Engine(model, laid_out, optimizer=optimizer, loss=loss, device="cpu", sample=one)
    losses = [float(engine.step(engine.local(data)).loss) for _ in range(3)]
    return (
        losses,
        {n: b.clone() for n, b in engine.model.named_buffers()},
        float(engine.evaluate(engine.local(data)).loss),
    )


def test_a_second_tensor_that_needs_a_gradient_is_refused(pool: Any) -> None:
    torch.manual_seed(0)
    data = vectors()
    with pytest.raises(UnsupportedModel, match="more than one tensor that needs a gradient"):
        pool.run(
            steps, Conditioned, "tp2", {k: v.double() for k, v in data.items()}, mse, False, world=2
        )


def test_statistics_of_a_models_own_are_refused_where_ranks_have_other_samples(pool: Any) -> None:
    torch.manual_seed(0)
    data = {key: value.double() for key, value in vectors().items()}
    for layout in ("dp2", "fsdp2"):
        with pytest.raises(UnsupportedModel, match="mean is changed by the model's forward"):
            pool.run(steps, Averages, layout, data, mse, False, world=2)
    alike = {key: value[:4].repeat(2, 1, 1) for key, value in data.items()}
    pool.run(steps, Averages, "dp2", alike, mse, False, world=2)


def test_ranks_that_run_different_modules_are_refused_under_fsdp(pool: Any) -> None:
    torch.manual_seed(0)
    data = {key: value.double() for key, value in vectors().items()}
    data["x"] = data["x"].abs() * torch.tensor([1.0] * 4 + [-1.0] * 4).view(-1, 1, 1)
    with pytest.raises(Refusal, match="ran different modules"):
        pool.run(steps, Hidden, "fsdp2", data, mse, False, world=2)
    pool.run(steps, Hidden, "dp2", data, mse, False, world=2)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2+zero1"])
def test_ranks_may_choose_different_experts(pool: Any, layout: str) -> None:
    """Whose weights then have no gradient on one of them."""
    torch.manual_seed(0)
    data = {key: value.double() for key, value in vectors().items()}
    data["x"] = data["x"].abs() * torch.tensor([1.0] * 4 + [-1.0] * 4).view(-1, 1, 1)
    want, *_ = steps(Routed, "dp1", data, mse, False, accumulate=2)  # of one kind each
    found, *_ = pool.run(partial(steps, Routed, layout, data, mse, False), world=2)[0]
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2+zero2", "dp2"])
def test_ranks_may_call_a_module_for_each_of_other_numbers_of_experts(
    pool: Any, layout: str
) -> None:
    torch.manual_seed(0)
    data = {key: value.double() for key, value in vectors().items()}
    data["x"] = data["x"].abs() * torch.tensor([1.0] * 5 + [-1.0] * 3).view(-1, 1, 1)
    want, *_ = steps(CalledForEach, "dp1", data, mse, False)
    found, *_ = pool.run(steps, CalledForEach, layout, data, mse, False, world=2)[0]
    assert found == pytest.approx(want, rel=1e-12)


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH))}


small = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)


@pytest.mark.parametrize(
    "layout", ["tp2", "fsdp2.tp2", "fsdp2+zero1.tp2+sequence", "fsdp2+zero2.tp2"]
)
def test_the_trial_of_a_cut_leaves_no_trace(pool: Any, layout: str) -> None:
    want = steps(small, "dp1", tokens(), next_token, False)
    found = pool.run(
        steps, small, layout, tokens(), next_token, True, world=weft.Layout.parse(layout).world
    )
    for losses, _, held_out in found:
        assert losses == pytest.approx(want[0], rel=1e-9) and held_out == pytest.approx(
            want[2], rel=1e-9
        )


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2+zero2"])
def test_bf16_with_norms_under_every_data_layout(pool: Any, layout: str) -> None:
    torch.manual_seed(0)
    data = vectors()
    want = steps(Encoder, "dp1", data, mse, False, precision="bf16")
    found = pool.run(partial(steps, precision="bf16"), Encoder, layout, data, mse, False, world=2)
    assert found[0][0] == pytest.approx(want[0], rel=2e-2)


@pytest.mark.parametrize("layout", ["tp2", "fsdp2.tp2", "pp2.tp2"])
def test_a_weight_that_several_modules_hold(pool: Any, layout: str) -> None:
    subject = Subject(partial(Biased, used=False))
    result = pool.run(
        check_layout,
        subject.case(),
        layout,
        reference(subject),
        world=weft.Layout.parse(layout).world,
    )[0]
    assert result.passed, result


def test_a_table_that_the_models_own_forward_reads_is_left_whole() -> None:
    plan = laid(Subject(partial(Scored)), Scored(), "tp2")
    assert "encoder.weight" not in {param.name for step in plan.steps for param in step.params}
    assert any("encoder: its weight is read by Scored" in note for note in plan.notes)


class Normalised(nn.Module):
    """All linears are called with a norm of their weights, as in nGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    @staticmethod
    def normed(linear: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(linear.weight, dim=-1))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (
            self.normed(each, x).unflatten(-1, (2, 8)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.normed(self.o, y)
        x = x + self.normed(self.down, F.silu(self.normed(self.up, x)))
        return F.linear(x, F.normalize(self.embedding.weight, dim=-1)) + self.head(x)


def test_linears_whose_weight_something_else_reads_are_not_to_be_declared() -> None:
    with pytest.raises(UnsupportedModel, match="its weight is read by Normalised") as refusal:
        laid(Subject(Normalised), Normalised(), "tp2")
    assert "declare" not in refusal.value.fix


def test_a_bias_that_its_holder_uses_is_found_by_the_trial(pool: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match="the sharded model does not run"):
        pool.run(steps, partial(Biased, used=True), "tp2", tokens(), next_token, True, world=2)


def zero_head() -> nn.Module:
    model = small()
    nn.init.zeros_(model.head.weight)
    return model


def test_a_head_of_zeros_is_no_difference(pool: Any) -> None:
    pool.run(steps, zero_head, "tp2", tokens(), next_token, True, world=2)


def test_what_cannot_be_laid_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnsupportedModel, match="shared with scores"):
        weft.plan(Scored(), "tp2", batch=BATCH)  # a sample would tell that `scores` is no module
    table = small()
    table.embedding.max_norm = 1.0
    with pytest.raises(UnsupportedModel, match="max_norm"):
        laid(Subject(small), table, "tp2")
    with pytest.raises(ConfigError, match="not a key of this role"):
        find_roles(small(), {"*.wq": {"role": "column", "heads": 4}})


def test_declared_linears_of_a_module_that_counts_heads_are_an_attention() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head = 4
            self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))

    found = find_roles(Stack(Odd), {"*.part.[abc]": "column", "*.part.d": "row"})
    assert [chain.heads for chain in found.chains] == [4, 4]


def test_a_users_own_draws_are_left_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    model = small()
    engine = weft.Engine(
        model,
        weft.plan(model, "dp1", batch=BATCH),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=next_token,
    )
    batch = tokens()
    torch.manual_seed(3)
    engine.step(batch)
    assert torch.equal(torch.rand(3), want)


def test_frozen_statistics_stay_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)

    model = Frozen()
    model.norm.eval()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(
        model, weft.plan(model, "dp1", batch=BATCH), optimizer=optimizer, loss=mse, device="cpu"
    )
    engine.step(vectors())
    assert torch.equal(model.norm.running_mean, torch.zeros(DIM))
    model.eval()  # as from_pretrained returns it: all of it is to be trained
    assert weft.plan(model, "dp2", batch=BATCH).batchnorms == ("norm",)


class Again(nn.Module):
    """Recomputes by itself what drops."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant, self.inner, self.outer = (
            reentrant,
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def test_dropout_under_a_reentrant_checkpoint_is_refused() -> None:
    """In backward torch's own mask would be drawn, and gradients be another forward's."""
    model = Again(reentrant=True)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return output.square().sum(), torch.tensor(float(len(output)))

    laid = weft.plan(model, "dp1", batch=4, loss=loss)
    engine = weft.Engine(model, laid, optimizer=partial(torch.optim.SGD, lr=0.1), loss=loss)
    with pytest.raises(UnsupportedModel, match=r"another dropout mask.*use_reentrant=False"):
        engine.step({"x": torch.randn(4, 4)})
    model.inner[1].p = 0.0  # type: ignore[union-attr, assignment]
    engine.step({"x": torch.randn(4, 4)})
