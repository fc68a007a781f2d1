"""bf16 and fp16: masters and copies, what is cast, what stays float32, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from weft.core.errors import ConfigError
from weft.nn.losses import classification, mse, next_token
from weft.nn.models import convnet, decoder

VOCAB, LENGTH, BATCH = 64, 16, 8
tiny = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)
LOW = torch.bfloat16


def tokens(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH))}


def vectors(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(BATCH, 6, 8), "target": torch.randn(BATCH, 6, 8)}


def engine(
    layout: str,
    build: Any = tiny,
    loss: Any = next_token,
    optimizer: Any = None,
    **plan: Any,
) -> weft.Engine:
    torch.manual_seed(0)
    model = build()
    data = vectors if loss is mse else tokens
    given = {"precision": "bf16", "sample": {k: v[:2] for k, v in data(0).items()}} | plan
    laid = weft.plan(model, layout, batch=BATCH, loss=loss, **given)
    made = optimizer or partial(torch.optim.AdamW, lr=3e-3)
    return weft.Engine(model, laid, optimizer=made, loss=loss, device="cpu")


# ---- masters and copies --------------------------------------------------------------------------


def held(layout: str, reduce: str) -> list[tuple[torch.dtype, ...]]:
    """Of each parameter after a step: dtype of the module's, of its gradient's sum, of the master
    and its gradient."""
    e = engine(layout, accumulate=2, reduce=reduce)
    e.step(e.local(tokens(0)))
    filled = [e.low.filled[name] for name in e.params]
    assert dict(e.model.named_parameters()).keys() >= e.params.keys()
    return [
        (low.dtype, low.grad.dtype, p.dtype, p.grad.dtype)
        for low, p in zip(filled, e.params.values(), strict=True)
        if p.grad is not None and not isinstance(p, DTensor)
    ]


@pytest.mark.parametrize(("reduce", "summed"), [("fp32", torch.float32), ("bf16", LOW)])
@pytest.mark.parametrize("layout", ["dp1", "dp2", "tp2", "pp2"])
def test_modules_hold_copies_and_the_optimizer_masters(
    pool: Any, layout: str, reduce: str, summed: torch.dtype
) -> None:
    for rank in pool.run(held, layout, reduce, world=weft.Layout.parse(layout).world):
        assert rank and set(rank) == {(LOW, summed, torch.float32, torch.float32)}


def small_steps(layout: str) -> tuple[bool, bool]:
    """Whether steps far below a rounding of bf16 move the masters, and leave nearly all copies."""
    e = engine(layout, optimizer=partial(torch.optim.SGD, lr=1e-3))
    name = "blocks.0.mlp.up.weight"
    e.step(e.local(tokens(0)))
    before = weft.engine.local_tensor(e.params[name].detach()).clone()
    e.step(e.local(tokens(0)))
    after = weft.engine.local_tensor(e.params[name].detach())
    return bool((before != after).any()), float(
        (before.to(LOW) != after.to(LOW)).float().mean()
    ) < 0.02


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
def test_steps_below_a_rounding_are_kept(pool: Any, layout: str) -> None:
    for moved, same in pool.run(small_steps, layout, world=2):
        assert moved and same


def many_small(precision: str, accumulate: int) -> Tensor:
    """The gradient of a bias that is one large and many small parts, of a microbatch each."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (output * batch["target"]).sum(), torch.tensor(len(output))

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    plan = weft.plan(model, "dp1", batch=8, accumulate=8, loss=loss, precision=precision)
    sgd = partial(torch.optim.SGD, lr=0.0)
    e = weft.Engine(model, plan, optimizer=sgd, loss=loss, inputs=["input"], device="cpu")
    target = torch.tensor([512.0] + [1.0] * 7).view(8, 1)
    e.step({"input": torch.zeros(8, 1), "target": target})
    grad = e.params["bias"].grad
    assert grad is not None
    return grad.clone()


def test_microbatches_are_added_in_float32() -> None:
    assert float(many_small("bf16", 8)) == 519 / 8  # in bf16 512 + 1 is 512


def saved(layout: str, precision: str) -> dict[str, tuple]:
    """What a checkpoint holds: dtype and whole shape, by name."""
    e = engine(layout, precision=precision)
    e.step(e.local(tokens(0)))
    return {piece.name: (piece.tensor.dtype, piece.shape) for piece in e.tensors()}


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
def test_a_checkpoint_is_that_of_float32(pool: Any, layout: str) -> None:
    found = pool.run(saved, layout, "bf16", world=2)[0]
    assert found == saved("dp1", "fp32") and found == saved("dp1", "bf16")


def another() -> nn.Module:
    torch.manual_seed(1)
    return tiny()


def evaluated_after_load(precision: str) -> tuple[float, float]:
    """The loss of weights, and of the same weights loaded into an engine of another seed."""
    first = engine("dp1", precision=precision)
    first.step(tokens(0))
    other = engine("dp1", another, precision="bf16")
    pieces = {piece.name: piece.tensor for piece in first.tensors()}
    for piece in other.tensors(pieces.keys()):
        piece.tensor.copy_(pieces[piece.name])
    found = [float(e.evaluate(tokens(2)).loss) for e in (first, other)]
    return found[0], found[1]


def test_loaded_masters_are_what_is_evaluated() -> None:
    same, loaded = evaluated_after_load("bf16")
    assert same == loaded
    full, rounded = evaluated_after_load("fp32")
    assert full != rounded and rounded == pytest.approx(full, rel=1e-2)


# ---- inputs, buffers, norms, losses --------------------------------------------------------------


class Sums(nn.Module):
    """A model with what autocast would have cast: a table of positions in float32, an RNN, a
    parameter without a module, a frozen linear."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.enter.requires_grad_(False)
        self.register_buffer("table", torch.randn(6, 8))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        y, _ = self.rnn(self.enter(x) + self.table)
        return self.leave(y * self.scale)


def losses_of_sums(layout: str) -> tuple[list[float], set, torch.dtype]:
    e = engine(layout, Sums, mse)
    found = [float(e.step(e.local(vectors(0))).loss) for _ in range(8)]
    return found, e.model.seen, e.model.table.dtype  # type: ignore[return-value, union-attr]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2"])
def test_buffers_stay_float32_and_inputs_are_cast(pool: Any, layout: str) -> None:
    for found, seen, table in pool.run(losses_of_sums, layout, world=2):
        assert seen == {LOW} and table == torch.float32
        assert found[-1] < 0.97 * found[0]


def mean_of_logits(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    assert output.dtype == torch.float32
    return output.square().sum(), torch.tensor(float(output.numel()))


def test_a_loss_of_ones_own_gets_float32() -> None:
    e = engine("dp1", loss=mean_of_logits)
    assert float(e.step(tokens(0)).loss) > float(e.step(tokens(0)).loss)


def test_gates_compute_in_float32() -> None:
    e = engine("dp1", partial(tiny, experts=4))
    seen: list[torch.dtype] = []
    gate = e.model.blocks[0].mlp.gate  # type: ignore[union-attr, index]
    gate.register_forward_hook(lambda m, a, out: seen.extend(t.dtype for t in out))
    e.step(tokens(0))
    assert seen == [torch.float32, torch.int64, LOW]


def statistics(layout: str, sync: bool) -> torch.dtype:
    images = {"image": torch.randn(BATCH, 1, 8, 8), "label": torch.randint(0, 5, (BATCH,))}
    two = {key: value[:2] for key, value in images.items()}
    build = partial(convnet, 8, 5)
    e = engine(layout, build, classification, sync_batchnorm=sync, sample=two)
    first = float(e.step(e.local(images)).loss)
    for _ in range(10):
        last = float(e.step(e.local(images)).loss)
    assert last < first and float(e.evaluate(e.local(images)).loss) > 0
    return next(b.dtype for n, b in e.model.named_buffers() if n.endswith("running_mean"))


@pytest.mark.parametrize("sync", [True, False])
def test_batch_norms_keep_float32_statistics(pool: Any, sync: bool) -> None:
    assert pool.run(statistics, "dp2", sync, world=2) == [torch.float32] * 2
    assert pool.run(statistics, "fsdp2", sync, world=2) == [torch.float32] * 2


def no_autocast(layout: str) -> bool:
    e, seen = engine(layout), set()
    e.model.norm.register_forward_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    e.step(e.local(tokens(0)))
    return seen == {False}


def test_nothing_is_left_to_autocast(pool: Any) -> None:
    assert all(pool.run(no_autocast, "dp2", world=2))


# ---- replicas, schedules, other precisions -------------------------------------------------------


def learns(layout: str, plan: dict[str, Any]) -> tuple[float, float]:
    e = engine(layout, **plan)
    found = [float(e.step(e.local(tokens(step % 2))).loss) for step in range(16)]
    e.close()
    return found[0], found[-1]


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("dp2", {"sync": weft.sync.make_sync("ring", "int8")}),
    ("dp2", {"sync": weft.sync.make_sync("allreduce", "bf16")}),
    ("fsdp2", {"sync": weft.sync.make_sync("allreduce", "int8")}),
    ("dp2", {"sync": weft.sync.make_sync("central")}),
    ("dp2", {"sync": weft.sync.make_sync("local_sgd", period=4)}),
    ("dp2.tp2", {"sync": weft.sync.make_sync("diloco", period=4)}),
    ("pp2", {"accumulate": 4, "schedule": "pipedream"}),
    ("pp2.dp2", {"accumulate": 4, "schedule": "pipedream"}),
    ("fsdp2+offload", {"precision": "fp16"}),
    ("tp2+sequence", {"precision": "fp16"}),
]


@pytest.mark.parametrize(("layout", "plan"), WAYS)
def test_every_way_to_train_learns(pool: Any, layout: str, plan: dict[str, Any]) -> None:
    for first, last in pool.run(learns, layout, plan, world=weft.Layout.parse(layout).world):
        assert last < first - 0.2


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"reduce": "int8"}, "not a dtype in which gradients are summed"),
        ({"reduce": "bf16", "precision": "fp32"}, "computes in fp32"),
        ({"reduce": "bf16", "precision": "fp16"}, "are scaled"),
        ({"reduce": "bf16", "sync": "ring"}, "set the dtype in which replicas exchange"),
        ({"precision": "fp8"}, "float8"),
    ],
)
def test_what_cannot_be_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        weft.plan(tiny(), "dp2", batch=BATCH, **({"precision": "bf16"} | plan))
