"""One optimizer step: precision, clipping, unsynchronised statistics, and what the engine
refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from weft.core.errors import ConfigError, UnsupportedModel
from weft.nn.losses import classification, next_token
from weft.nn.models import convnet, decoder

VOCAB, LENGTH, BATCH = 64, 16, 8
tiny = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)


def batch(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH))}


def engine(
    layout: str,
    build: Any = tiny,
    loss: Any = next_token,
    clip: float | None = None,
    optimizer: Any = None,
    **plan: Any,
):
    torch.manual_seed(0)
    model = build()
    if plan.get("precision") == "fp64":
        model.double()
    made = optimizer or partial(torch.optim.AdamW, lr=3e-3)
    laid = weft.plan(model, layout, batch=BATCH, loss=loss, **plan)
    return weft.Engine(model, laid, optimizer=made, loss=loss, clip=clip, device="cpu")


def losses(layout: str, steps: int, plan: dict[str, Any]) -> list[float]:
    e = engine(layout, **plan)
    return [float(e.step(e.local(batch(step % 2))).loss) for step in range(steps)]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2+sequence", "fsdp2.tp2"])
def test_bf16_follows_fp32(pool: Any, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    low = pool.run(losses, layout, 20, {"precision": "bf16"}, world=world)[0]
    full = losses("dp1", 20, {})
    assert low[-1] < full[0] - 0.3  # it learns
    assert low == pytest.approx(full, rel=3e-2)
    assert low != full


def dtypes(layout: str) -> tuple[set, set, set]:
    e = engine(layout, precision="bf16")
    seen: set = set()
    e.model.blocks[0].mlp.up.register_forward_hook(lambda m, a, out: seen.add(out.dtype))
    e.step(e.local(batch(0)))
    state = {t.dtype for s in e.optimizer.state.values() for t in s.values() if t.ndim}
    return seen, {p.dtype for p in e.params.values()}, state


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
def test_bf16_computes_low_and_keeps_master_weights(pool: Any, layout: str) -> None:
    computed, weights, state = pool.run(dtypes, layout, world=2)[0]
    assert (computed, weights, state) == ({torch.bfloat16}, {torch.float32}, {torch.float32})


def scaled(layout: str) -> tuple[list[float], list[bool], list[float], bool]:
    e = engine(layout, precision="fp16")
    before = {name: p.detach().clone() for name, p in e.params.items()}
    e._update.loss_scale.value = (
        2.0**40
    )  # gradients overflow: steps are skipped and the scale falls
    results = [e.step(e.local(batch(0)))]
    unchanged = all(torch.equal(before[name], p.detach()) for name, p in e.params.items())
    scales = [e.loss_scale]
    for _ in range(40):
        results.append(e.step(e.local(batch(0))))
        scales.append(e.loss_scale)
    return [float(r.loss) for r in results], [r.skipped for r in results], scales, unchanged


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_fp16_skips_steps_that_overflow(pool: Any, layout: str) -> None:
    for values, skipped, scales, unchanged in pool.run(scaled, layout, world=2):
        assert skipped[0] and unchanged and scales[0] == 2.0**39
        assert not skipped[-1] and values[-1] < values[0] - 0.2
        assert scales[-1] == 2.0 ** (40 - sum(skipped)) and sum(skipped) < 35


def running(layout: str, sync: bool) -> tuple[Tensor, list[int]]:
    e = engine(layout, partial(convnet, 8, 5), classification, sync_batchnorm=sync)
    for step in range(2):
        torch.manual_seed(step)
        e.step(
            e.local({"image": torch.randn(BATCH, 1, 8, 8), "label": torch.randint(0, 5, (BATCH,))})
        )
    e.buffers.refresh()
    return (
        next(b for n, b in e.model.named_buffers() if n.endswith("running_mean")).clone(),
        e.buffers.nbytes,
    )


def test_statistics_of_replicas(pool: Any) -> None:
    alone, _ = running("dp1", True)
    synced = pool.run(running, "dp2", True, world=2)
    assert (
        torch.allclose(synced[0][0], alone)
        and torch.equal(synced[0][0], synced[1][0])
        and not synced[0][1]
    )
    local = pool.run(running, "dp2", False, world=2)
    assert torch.equal(local[0][0], local[1][0]) and local[0][1]  # the first replica's, broadcast
    assert not torch.allclose(local[0][0], alone)


def test_a_whole_batch_is_not_taken_for_a_part(pool: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.local"):
        pool.run(whole_batch, world=2)


def whole_batch() -> None:
    e = engine("dp2")
    e.step(batch(0))


class Muon(torch.optim.SGD.__base__):  # type: ignore[misc, name-defined]
    """An optimizer that looks at whole matrices."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1.0})


def whole_tensor_optimizer(layout: str) -> None:
    engine(layout, optimizer=Muon)


def test_an_optimizer_of_whole_tensors_is_refused_where_they_are_cut(pool: Any) -> None:
    pool.run(whole_tensor_optimizer, "dp2", world=2)
    for layout in ("fsdp2", "tp2"):
        with pytest.raises(ConfigError, match=r"Muon.*not known to update each tensor"):
            pool.run(whole_tensor_optimizer, layout, world=2)


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        for (linear,) in self.blocks:
            features = linear(features)
        return features


def test_selective_recompute_without_an_attention_core_is_refused() -> None:
    e = engine(
        "dp1", NoAttention, lambda out, b: (out.sum(), torch.tensor(8.0)), recompute="selective"
    )
    with pytest.raises(UnsupportedModel, match="never calls scaled_dot_product_attention"):
        e.step({"features": torch.randn(BATCH, 4)})


@pytest.mark.parametrize("recompute", ["selective", 2, "full"])
def test_recomputation_changes_no_bit(recompute: str | int) -> None:
    build = partial(tiny, dropout=0.3)

    def gradients(how: str | int) -> list[Tensor]:
        e = engine("dp1", build, recompute=how)
        e.step(batch(0))
        e.step(batch(1))
        return [p.grad.clone() for p in e.params.values()]

    plain, again = gradients("none"), gradients(recompute)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_memory_of_recompute() -> None:
    """Full recomputation keeps less for backward than none."""

    def saved(recompute: str) -> int:
        e = engine("dp1", recompute=recompute)
        total = 0

        def pack(t: Tensor) -> Tensor:
            nonlocal total
            total += t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            e.loss(e.stages(0, e.sequence.cut(batch(0)), {})[1], batch(0))
        return total

    assert saved("full") < saved("none") / 3


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "fsdp2.tp2"])
def test_the_global_norm_counts_every_element_once(pool: Any, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    want = norm("dp1")
    assert pool.run(norm, layout, world=world) == pytest.approx([want] * world, rel=1e-12)


def norm(layout: str) -> float:
    e = engine(layout, clip=1.0, precision="fp64")
    result = e.step(e.local(batch(0)))
    assert result.grad_norm is not None
    return float(result.grad_norm)


class Interleaved(nn.Module):
    """Attention whose fused linear holds query, key and value head by head, as GPT-NeoX has it:
    sizes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InterleavedBlock() for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return features


class InterleavedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, self.num_heads, 3, 4).permute(3, 0, 2, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(1, 2).reshape(b, s, -1))


def guessed(build: Any, sample: bool) -> None:
    torch.manual_seed(0)
    model = build()
    laid = weft.plan(model, "tp2", batch=BATCH, loss=next_token)
    data = {"features": torch.randn(1, 8, 16), "input_ids": torch.randint(0, VOCAB, (1, LENGTH))}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    weft.Engine(
        model,
        laid,
        optimizer=optimizer,
        loss=next_token,
        sample=data if sample else None,
        device="cpu",
    )


def test_a_guess_that_changes_the_output_is_refused(pool: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"sharding changes the model's output by 0\.\d+"):
        pool.run(guessed, Interleaved, True, world=2)
    pool.run(guessed, tiny, True, world=2)


def test_evaluation_is_the_mean_over_all_ranks(pool: Any) -> None:
    want = evaluated("dp1")
    for layout in ("dp2", "fsdp2", "tp2+sequence"):
        assert pool.run(evaluated, layout, world=2) == pytest.approx([want] * 2, rel=1e-12)


def evaluated(layout: str) -> float:
    e = engine(layout, precision="fp64")
    return float(e.evaluate(e.local(batch(3))).loss)


# ---- steps that are left out ---------------------------------------------------------------------


def weighed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`next_token`, times what the batch says."""
    loss, weight = next_token(output, batch)
    return loss * batch["label_factor"].mean(), weight


def with_factors(
    layout: str, factors: list[float], skip: float | None
) -> tuple[list[bool], dict[str, Tensor], list]:
    torch.manual_seed(0)
    model = decoder(16, 16, 1, 2, seq_len=8)
    plan = weft.plan(model, layout, batch=4, loss=weighed)
    e = weft.Engine(model, plan, optimizer=partial(sgd, 0.1), loss=weighed, skip=skip, device="cpu")
    skipped = []
    for step, factor in enumerate(factors):
        torch.manual_seed(step)
        ids = torch.randint(0, 16, (4, 8))
        skipped.append(
            e.step(e.local({"input_ids": ids, "label_factor": torch.full((4,), factor)})).skipped
        )
    return (
        skipped,
        {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in e.params.items()
        },
        e.scalars().get("norms", []),
    )


def sgd(rate: float, params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in params], lr=rate)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
def test_a_step_that_is_not_to_be_trusted_is_left_out(pool: Any, layout: str) -> None:
    """With a gradient that is not finite at any time, with a large one when it is known what is
    usual; on all ranks."""
    usual = [1.0] * 17
    factors = [1e3, float("nan"), *usual, 1e3, 1.0]
    for skipped, weights, norms in pool.run(with_factors, layout, factors, 10.0, world=2):
        assert [i for i, left_out in enumerate(skipped) if left_out] == [1, 19]
        assert len(norms) == 19 and max(norms[1:]) < 20
        assert all(bool(p.isfinite().all()) for p in weights.values())
    # what is left out moves nothing: as if its place had been of no weight
    (_, once, _), (_, other, _) = (
        with_factors("dp1", [*usual, f], 10.0) for f in (float("inf"), 1e4)
    )
    assert all(torch.equal(once[name], other[name]) for name in once)
    _, taken, _ = with_factors("dp1", [*usual, 1e4], None)
    assert not all(torch.equal(once[name], taken[name]) for name in once)


@pytest.mark.parametrize(
    "given, reason",
    [
        ((torch.zeros(BATCH, LENGTH),), "batch = 'tuple': weft calls a model with entries"),
        ({"input_ids": [0] * BATCH}, "batch.'input_ids'. = 'list': is not a tensor"),
        ({"input_ids": torch.tensor(0)}, "is not a tensor whose first dim is the samples"),
    ],
)
def test_a_batch_that_is_no_dict_of_tensors_is_refused(given: Any, reason: str) -> None:
    made = engine("dp1")
    for take in (made.local, made.step, made.evaluate):
        with pytest.raises(ConfigError, match=reason):
            take(given)
