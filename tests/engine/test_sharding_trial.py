"""The trial before the first step: what it refuses, the module and the line that it names, and what
it lets pass in every precision."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, FusedAttention
from weft.core.errors import UnsupportedModel
from weft.engine import trial_ways
from weft.launch import Pool
from weft.losses import next_token
from weft.models import decoder

DIM = 16


class NormedTable(nn.Embedding):
    """Its forward ends in a norm that it holds without registering it: shards by rows give the
    norm's weight a part of its gradient."""

    def __init__(self, rows: int, dim: int, norm: nn.Module):
        super().__init__(rows, dim)
        self.norms = [norm]

    def forward(self, input: Tensor) -> Tensor:
        return self.norms[0](super().forward(input))


class NormedEmbedding(nn.Module):
    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.table = NormedTable(rows, dim, self.norm)

    def forward(self, input: Tensor) -> Tensor:
        return self.table(input)


class ShortConvolution(nn.Module):
    """A causal convolution along the sequence, as small as an early step makes it (lfm2), and
    written so that no structure tells."""

    def __init__(self, dim: int, scale: float):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, dim)), scale

    def forward(self, x: Tensor) -> Tensor:
        earlier = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
        return self.scale * torch.einsum("bsdk,kd->bsd", earlier, self.weight)


class FixedHeads(FusedAttention):
    """Takes its number of heads from where nobody else finds it."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, 4, self.head_dim) for y in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        return self.proj(out.transpose(1, 2).reshape(b, s, -1))


class _InTrainingAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.training = training
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert ctx.training, "call model.train() first"
        return grads[0], None


class Reversible(Fused):
    """As Reformer's layers."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return _InTrainingAlone.apply(super().forward(input_ids), self.training)


class Convolved(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.attention, self.short = FusedAttention(DIM, 4), ShortConvolution(DIM, scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.short(x)


class MeanOfMany(nn.Module):
    """Adds the mean over positions of sequences that are longer than this."""

    def __init__(self, longer_than: int) -> None:
        super().__init__()
        self.attention, self.longer_than = FusedAttention(DIM, 4), longer_than

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + x.mean(1, keepdim=True) if x.shape[1] > self.longer_than else x


def mean_of_many(longer_than: int) -> nn.Module:
    model = Fused(dim=DIM)
    model.position = nn.Embedding(2 * trial_ways.POSITIONS, DIM)
    model.blocks = nn.ModuleList(MeanOfMany(longer_than) for _ in range(2))
    return model


class MixedInTraining(nn.Module):
    """Adds an earlier position in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + 0.1 * x.cumsum(1) if self.training else x


class Checkpointed(nn.Module):
    """A block that its model checkpoints by itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.attention, self.reentrant = FusedAttention(DIM, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.attention, x, use_reentrant=self.reentrant)


class TakesGradients(nn.Module):
    """Moves its output down the gradient of a loss of its own, as test-time training does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.inner = FusedAttention(DIM, 4), nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        weight = self.inner + 0.0
        loss = (x @ weight - x.tanh()).square().mean()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return x + (x.detach() @ (weight - grad)).tanh()


class SometimesMixed(nn.Module):
    """Adds the mean over positions to half of the samples in training, and to all in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, mean = x + self.attention(x), x.mean(1, keepdim=True)
        kept = torch.rand(len(x), 1, 1) < 0.5 if self.training else torch.ones(len(x), 1, 1)
        return x + mean * kept


class MaskedInTraining(Fused):
    """As masked diffusion: most tokens are hidden in training, and all by a number of 0.5."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim=dim)
        self.blocks = nn.ModuleList(MeanOfMany(0) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            gone = torch.rand_like(input_ids, dtype=torch.float32) < 0.6
            input_ids = torch.where(gone, 0, input_ids)
        return super().forward(input_ids)


class Waiting(nn.Module):
    """Draws until it likes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        while self.training and torch.rand(()) < 0.9:
            pass
        return x + self.attention(x)


class Drawing(nn.Module):
    """Draws in training: whether it runs, noise, choices, masks of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 4, dropout=0.2, batch_first=True)
        self.choose, self.out, self.drop = nn.Linear(DIM, 4), nn.Linear(4, DIM), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.01:
            return x
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        attended, _ = self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        x = x + self.drop(attended)
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + torch.bernoulli(torch.full_like(x, 0.1))
        return x + self.out(F.gumbel_softmax(self.choose(x)) if self.training else self.choose(x))


def with_blocks(block: Callable[[], nn.Module]) -> nn.Module:
    model = Fused(dim=DIM)
    model.blocks = nn.ModuleList(block() for _ in range(2))
    return model


def normed_embedding() -> nn.Module:
    model = Fused(dim=DIM)
    model.embedding = NormedEmbedding(VOCAB, DIM)
    return model


def convolved(scale: float) -> nn.Module:
    model = Fused(dim=DIM)
    model.blocks = nn.ModuleList(Convolved(scale) for _ in range(2))
    return model


def fixed_heads() -> nn.Module:
    model = Fused(dim=DIM)
    for block in model.blocks:
        block.attention = FixedHeads(DIM, 4)
    return model


class Mixed(nn.Module):
    """A block that multiplies with what all blocks share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.attention, self.shared = FusedAttention(DIM, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(self.attention(x))


class CallsForward(nn.Module):
    """Calls the forward of a module, which passes over that module's hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


def calling_forward() -> nn.Module:
    model = Fused(dim=DIM)
    for block in model.blocks:
        block.attention = CallsForward(block.attention)
    return model


def sharing() -> nn.Module:
    model, shared = Fused(dim=DIM), nn.Linear(DIM, DIM)
    model.blocks = nn.ModuleList(Mixed(shared) for _ in range(2))
    return model


def begin(
    build: Callable[[], nn.Module],
    layout: str,
    precision: str = "fp32",
    sample: bool = True,
    deferred: bool = False,
    planned: bool = True,
    length: int = LENGTH,
    **arguments: Any,
) -> float:
    """The first loss. `planned`: the plan has a sample; `sample`: the trial, before the step."""
    model = weft.deferred_init(build, seed=0) if deferred else seeded(build)
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(VOCAB, (BATCH, length), generator=generator)}
    two = {key: value[:2] for key, value in batch.items()}
    seen = two if planned else None
    plan = weft.plan(
        model, layout, batch=BATCH, loss=next_token, precision=precision, sample=seen, **arguments
    )
    sgd = partial(torch.optim.SGD, lr=0.1)
    given = two if sample else None
    engine = weft.Engine(
        model, plan, optimizer=sgd, loss=next_token, device="cpu", sample=given, compile="off"
    )
    loss = float(engine.step(engine.local(batch)).loss)
    engine.close()
    return loss


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def line_of(problem: UnsupportedModel) -> dict[str, str]:
    """The lines of [roles] that a refusal says to write."""
    return dict(re.findall(r'"([^"]+)" = "(whole)"', str(problem)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_partial_gradient_beside_a_cut_weight_is_refused(
    pool: Pool, precision: str, deferred: bool
) -> None:
    start = partial(begin, normed_embedding, "tp2", precision, deferred=deferred)
    with pytest.raises(UnsupportedModel, match=r"the gradient of embedding\.norm\.weight") as found:
        pool.run(start, world=2)
    assert "leaves the output as it is" in str(found.value)
    lines = line_of(found.value)
    assert lines == {"embedding": "whole"}
    want = pool.run(begin, normed_embedding, "dp1", precision, world=1)[0]
    got = pool.run(partial(start, roles=lines), world=2)[0]
    assert got == pytest.approx(want, rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("layout", ["cp2", "cp2+gather", "tp2.cp2"])
def test_a_small_mixture_of_positions_is_refused(pool: Pool, layout: str, sample: bool) -> None:
    world = weft.Layout.parse(layout).world
    pool.run(partial(begin, Fused, layout, "bf16", sample), world=world)
    with pytest.raises(UnsupportedModel, match="splitting the sequence") as found:
        pool.run(partial(begin, partial(convolved, 1e-4), layout, "bf16", sample), world=world)
    assert "blocks.0.short" in str(found.value) and "cp" in str(found.value)


def test_what_mixes_positions_in_training_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(UnsupportedModel, match="sequence, in training mode, changes the model's"):
        pool.run(begin, partial(with_blocks, MixedInTraining), "cp2", world=2)


def test_a_forward_that_takes_gradients_of_its_own_is_tried(pool: Pool) -> None:
    build = partial(with_blocks, TakesGradients)
    want = pool.run(begin, build, "dp1", world=1)[0]
    assert pool.run(begin, build, "tp2", world=2)[0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_the_model_checkpoints_is_refused(pool: Pool, reentrant: bool) -> None:
    build = partial(with_blocks, partial(Checkpointed, reentrant))
    with pytest.raises(UnsupportedModel, match=r"is inside torch\.utils\.checkpoint") as why:
        pool.run(begin, build, "cp2", world=2)
    assert 'train.recompute = "full"' in str(why.value)
    want = pool.run(begin, build, "dp1", world=1)[0]
    assert pool.run(begin, build, "tp2", world=2)[0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("build", [partial(with_blocks, SometimesMixed), MaskedInTraining])
def test_what_one_number_for_all_draws_hides_is_refused(
    pool: Pool, build: Callable[[], nn.Module]
) -> None:
    with pytest.raises(UnsupportedModel, match="splitting the sequence changes the model's output"):
        pool.run(begin, build, "cp2", world=2)


@pytest.mark.parametrize("block", [Drawing, Waiting])
@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_what_draws_in_training_is_let_pass(
    pool: Pool, layout: str, block: Callable[[], nn.Module]
) -> None:
    build = partial(with_blocks, block)
    want = pool.run(begin, build, "dp1", world=1)[0]
    got = pool.run(begin, build, layout, world=2)[0]
    assert got == pytest.approx(want, rel=1e-5)


def test_a_model_that_computes_otherwise_on_many_positions_is_tried_on_all(pool: Pool) -> None:
    few = trial_ways.POSITIONS
    start = partial(begin, layout="cp2", length=2 * few)
    pool.run(partial(start, partial(mean_of_many, 2 * few)), world=2)
    with pytest.raises(UnsupportedModel, match="splitting the sequence changes the model's output"):
        pool.run(partial(start, partial(mean_of_many, few)), world=2)


@pytest.mark.parametrize("layout", ["tp2", "tp2+sequence"])
def test_a_cut_model_that_raises_is_refused_with_the_line_to_write(pool: Pool, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    with pytest.raises(UnsupportedModel, match="the sharded model does not run: shape") as found:
        pool.run(partial(begin, fixed_heads, layout, planned=False), world=world)
    assert "in blocks.0.attention" in str(found.value)
    lines = line_of(found.value)
    assert lines == {"blocks.*.attention": "whole"}
    want = pool.run(begin, fixed_heads, "dp1", world=1)[0]
    if "sequence" in layout:  # a whole attention would have a part of the positions
        assert "tp without sequence" in str(found.value)
        layout = "tp2"
    got = pool.run(partial(begin, fixed_heads, layout, roles=lines), world=world)[0]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2", "pp2.tp2"])
def test_a_plan_that_has_a_sample_leaves_it_whole(pool: Pool, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    got = pool.run(partial(begin, fixed_heads, layout), world=world)[0]
    assert got == pytest.approx(pool.run(begin, fixed_heads, "dp1", world=1)[0], rel=1e-5)


def test_a_backward_that_runs_in_training_mode_alone_is_tried(pool: Pool) -> None:
    want = pool.run(begin, Reversible, "dp1", world=1)[0]
    got = pool.run(begin, Reversible, "tp2", world=2)[0]
    assert got == pytest.approx(want, rel=1e-5)


def test_an_attention_that_stays_whole_is_refused_under_sequence() -> None:
    with pytest.raises(UnsupportedModel, match=r"blocks\.0\.attention fails on a rank's shard"):
        begin(fixed_heads, "tp2+sequence")


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_forward_that_is_called_by_itself_is_tried(pool: Pool, layout: str) -> None:
    """A block runs again in the trial's backward: once, and not in itself without an end."""
    want = pool.run(begin, calling_forward, "dp1", world=1)[0]
    got = pool.run(begin, calling_forward, layout, world=2)[0]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_module_that_blocks_share_is_tried(pool: Pool, layout: str) -> None:
    want = pool.run(begin, sharing, "dp1", world=1)[0]
    assert pool.run(begin, sharing, layout, world=2)[0] == pytest.approx(want, rel=1e-5)


@dataclass
class Record:
    logits: Tensor


class FusedRecord(Fused):
    def forward(self, input_ids: Tensor) -> Record:  # type: ignore[override]
        return Record(super().forward(input_ids))


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_model_that_returns_a_dataclass_is_tried(pool: Pool, layout: str) -> None:
    want = pool.run(begin, FusedRecord, "dp1", world=1)[0]
    assert pool.run(begin, FusedRecord, layout, world=2)[0] == pytest.approx(want, rel=1e-5)


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "fused": partial(Fused, dropout=0.1),
    "grouped": partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH),
    "experts": partial(decoder, VOCAB, 32, 2, 4, 4, experts=4, hidden=24, seq_len=LENGTH),
}


@pytest.mark.grid
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("fused", "tp2"),
        ("fused", "vp2"),
        ("fused", "cp2"),
        ("fused", "fsdp2.tp2+sequence"),
        ("grouped", "pp2.tp2"),
        ("grouped", "tp4"),
        ("grouped", "dp2.cp2"),
        ("grouped", "tp2+sequence.cp2"),
        ("experts", "ep2"),
        ("experts", "tp2"),
        ("experts", "tp2+sequence+ep"),
        ("experts", "cp2+ep"),
        ("experts", "ep2.tp2"),
    ],
)
def test_what_is_right_passes(pool: Pool, name: str, layout: str, precision: str) -> None:
    pool.run(partial(_passes, name, layout, precision), world=weft.Layout.parse(layout).world)


def _passes(name: str, layout: str, precision: str) -> None:
    begin(RIGHT[name], layout, precision, deferred=precision != "fp64")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("name", "layout"), [("fused", "tp2"), ("grouped", "cp2")])
def test_what_is_right_passes_where_float64_does_not_fit(
    pool: Pool, name: str, layout: str, precision: str
) -> None:
    pool.run(partial(_passes_in_its_own, name, layout, precision), world=2)
    if layout == "tp2":
        with pytest.raises(UnsupportedModel, match=r"embedding\.norm\.weight"):
            pool.run(partial(_passes_in_its_own, "normed", layout, precision), world=2)


def _passes_in_its_own(name: str, layout: str, precision: str) -> None:
    models = {**RIGHT, "normed": normed_embedding}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_ways, "affordable", lambda plan, mesh, precision: False)
        begin(models[name], layout, precision)
