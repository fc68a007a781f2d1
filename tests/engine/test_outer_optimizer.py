"""Replicas that step by themselves: local SGD, BMUF and DiLoCo equal their papers' equations on one
process, whatever a replica is inside; in their limit they equal all-reduce; a resumed run goes on
bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, SUBJECTS, Subject, laid, seeded, tokens
from tests.engine.test_sync import written
from tests.staged import STAGED
from tests.train.test_trainer import lines, saved
from weft import sync
from weft.core.data_order import data_rank_indices
from weft.core.errors import Refusal
from weft.core.run_config import SyncConfig
from weft.core.shards import LocalShard
from weft.core.sync import LocalSteps, SyncEveryStep, bucket_owners
from weft.engine.grad_buckets import local_tensor
from weft.launch.local_workers import Pool
from weft.nn.losses import mse
from weft.train import run_checks
from weft.train.trainer import train

pytestmark = pytest.mark.grid

ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1)


class Even(nn.Module):
    """Everything counts alike, so a mean of means is the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input


def even() -> dict[str, Tensor]:
    return {"input": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 6)}


EVEN = Subject(Even, even, mse, (("accumulate", 2),))


def all_count() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "labels": batch["labels"].clamp(min=0)}


OWN = {"even": EVEN, "even decoder": replace(SUBJECTS["decoder"], data=all_count)}


def subject(name: str, made: Any) -> Subject:
    found = OWN.get(name) or SUBJECTS.get(name) or STAGED[name]
    return replace(found, plan=tuple({**dict(found.plan), "sync": made}.items()))


def batches(of: Subject, steps: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    return [
        {k: v.double() if v.is_floating_point() else v for k, v in of.data().items()}
        for _ in range(steps)
    ]


def trained(
    name: str, made: Any, layout: str, steps: int, optimizer: Callable
) -> dict[str, Tensor]:
    """The weights of this rank's replica, whole."""
    of = subject(name, made)
    model = seeded(of.build)
    plan = laid(of, model, layout)
    engine = weft.Engine(model, plan, optimizer=optimizer, loss=of.loss, device="cpu")
    for batch in batches(of, steps):
        engine.step(engine.local(batch))
    if "." not in layout:
        return {name: local_tensor(p.detach()).clone() for name, p in engine.params.items()}
    return {
        piece.name: gathered(piece) for piece in engine.tensors() if piece.name in engine.params
    }


def gathered(piece: LocalShard) -> Tensor:
    """What this rank holds of it, in its place, and nan elsewhere."""
    whole = torch.full(tuple(piece.shape), float("nan"), dtype=piece.tensor.dtype)
    for own, position in piece.chunks:
        whole[position] = piece.tensor[own]
    return whole


def by_the_equations(
    name: str, made: LocalSteps, replicas: int, steps: int, optimizer: Callable
) -> list[dict]:
    """Every replica on this process, by the papers' equations. Chen & Huo 2016: G = mean W - W_g; D
    = eta D + zeta G; W = W + D; W_g = W, or with Nesterov momentum W + eta D. DiLoCo's outer SGD is
    torch's own."""
    of = subject(name, None)
    models = [seeded(of.build) for _ in range(replicas)]
    plan = laid(of, models[0], "dp1")
    inner = [optimizer([(n, p) for n, p in model.named_parameters()]) for model in models]
    names = [n for n, _ in models[0].named_parameters()]
    params = [dict(model.named_parameters()) for model in models]
    anchor = {n: params[0][n].detach().clone() for n in names}
    outer = torch.optim.SGD(
        anchor.values(), lr=made.lr, momentum=made.momentum, nesterov=made.nesterov
    )
    if made.name == "bmuf":
        d, w = (
            {n: torch.zeros_like(anchor[n]) for n in names},
            {n: a.clone() for n, a in anchor.items()},
        )
    place = dict(
        zip(
            names, bucket_owners([params[0][n].numel() for n in names], made.fragments), strict=True
        )
    )
    due: dict[int, list] = {}
    for step, batch in enumerate(batches(of, steps), 1):
        for r in range(replicas):
            index = torch.tensor(data_rank_indices(BATCH, plan.accumulate, r, replicas))
            mine = {k: v[index] for k, v in batch.items()}
            inner[r].zero_grad()
            total, weight = of.loss(
                models[r](mine["input"] if "input" in mine else mine["input_ids"]), mine
            )
            (total / weight).backward()
            inner[r].step()
        for number in range(made.fragments):
            here = [n for n in names if place[n] == number]
            if (step - (number + 1) * made.period // made.fragments) % made.period == 0:
                sent = [{n: p[n].detach().clone() for n in here} for p in params]
                due.setdefault(step + made.delay, []).append(sent)
        for sent in due.pop(step, []):
            here = list(sent[0])
            mean = {n: sum(s[n] for s in sent) / replicas for n in here}
            if made.name == "bmuf":
                for n in here:
                    d[n] = made.momentum * d[n] + made.lr * (mean[n] - anchor[n])
                    w[n] = w[n] + d[n]
                    anchor[n].data = (
                        (w[n] + made.momentum * d[n]) if made.nesterov else w[n].clone()
                    )
            else:
                for n in names:
                    anchor[n].grad = anchor[n] - mean[n] if n in here else None
                outer.step()
            with torch.no_grad():
                for r in range(replicas):
                    for n in here:
                        params[r][n].copy_(anchor[n] + (params[r][n] - sent[r][n]))
    return [{n: p.detach() for n, p in each.items()} for each in params]


PERIODIC = {
    "local_sgd": sync.make_sync("local_sgd", period=3),
    "bmuf": sync.make_sync("bmuf", period=2, momentum=0.6, rate=0.8),
    "bmuf nesterov": sync.make_sync("bmuf", period=2, momentum=0.6, rate=0.8, nesterov=True),
    "diloco": sync.make_sync("diloco", period=3),
    "streaming": sync.make_sync("diloco", period=4, fragments=3, delay=2),
    "local fragments": sync.make_sync("local_sgd", period=3, fragments=3, delay=1),
}
STEPS = 9


@pytest.mark.parametrize("name", ["even", "decoder"])
@pytest.mark.parametrize("kind", PERIODIC)
def test_replicas_follow_the_equations(pool: Pool, kind: str, name: str) -> None:
    made = PERIODIC[kind]
    assert isinstance(made, LocalSteps)
    wants = by_the_equations(name, made, 2, STEPS, ADAMW)
    found = pool.run(trained, name, made, "dp2", STEPS, ADAMW, world=2)
    for got, want in zip(found, wants, strict=True):
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-11)
    differ = any(not torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert differ or STEPS % made.period == 0


@pytest.mark.parametrize(
    "layout", ["dp2.tp2", "tp2.dp2", "dp2.fsdp2", "dp2.pp2", "pp2+zb-h1.dp2", "dp2.cp2+ulysses"]
)
@pytest.mark.parametrize("kind", ["bmuf nesterov", "streaming"])
def test_whatever_a_replica_is_inside(pool: Pool, kind: str, layout: str) -> None:
    name = "deep" if "pp" in layout else "decoder"
    parsed = weft.Layout.parse(layout)
    found = pool.run(trained, name, PERIODIC[kind], layout, 5, ADAMW, world=parsed.world)
    alone = pool.run(trained, name, PERIODIC[kind], "dp2", 5, ADAMW, world=2)
    seen = [set(), set()]
    for rank, weights in enumerate(found):
        replica = parsed.coords(rank)["dp"]
        for key, got in weights.items():
            want = alone[replica].get(key)
            if want is not None:
                seen[replica].add(key)
                torch.testing.assert_close(
                    torch.where(got.isnan(), want, got), want, rtol=1e-8, atol=1e-10
                )


def test_in_its_limit_it_is_all_reduce(pool: Pool) -> None:
    for kind in ("local_sgd", "bmuf", "diloco"):
        rates = {"bmuf": {"momentum": 0.0}, "diloco": {"momentum": 0.0, "lr": 1.0}}.get(kind, {})
        found = pool.run(
            trained, "even", sync.make_sync(kind, period=1, **rates), "dp2", 5, SGD, world=2
        )
        want = pool.run(trained, "even", None, "dp2", 5, SGD, world=2)
        for got in found:
            for key in got:
                torch.testing.assert_close(got[key], want[0][key], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "codec", ["bf16", "int8", "int4", "sign", {"name": "topk", "density": 0.2}, "powersgd"]
)
@pytest.mark.parametrize("layout", ["dp2", "dp4"])
def test_replicas_agree_on_the_same_bits_under_a_codec(pool: Pool, codec: Any, layout: str) -> None:
    made = sync.make_sync("local_sgd", codec, period=2)
    found = pool.run(
        trained, "decoder", made, layout, 4, ADAMW, world=weft.Layout.parse(layout).world
    )
    for got in found:
        assert all(torch.equal(got[key], found[0][key]) for key in found[0])


RESUMED = [
    ("dp2", {"name": "diloco", "period": 4, "fragments": 2, "delay": 2, "codec": "int4"}),
    ("dp2.tp2", {"name": "bmuf", "period": 2}),
    ("dp2.fsdp2", {"name": "diloco", "period": 2, "delay": 1}),
    ("pp2.dp2", {"name": "local_sgd", "period": 4}),
]


@pytest.mark.grid(2)
@pytest.mark.parametrize(("axes", "table"), RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, pool: Pool, axes: str, table: dict
) -> None:
    settings = {f"sync__{key}": value for key, value in table.items()}
    whole = written(tmp_path / "whole", axes, settings)
    apart = weft.Layout.parse(axes).replicas()
    pool.run(train, whole, False, replica_ranks=apart)
    part_run = written(tmp_path / "part", axes, {**settings, "train__steps": 3})
    pool.run(train, part_run, False, replica_ranks=apart)
    pool.run(train, written(tmp_path / "part", axes, settings), True, replica_ranks=apart)
    want, got = saved(whole, 6), saved(part_run, 6)
    assert want.keys() == got.keys()
    assert any(key.startswith("outer/") for key in want)
    assert [key for key in want if not torch.equal(want[key], got[key])] == []
    assert [line["loss"] for line in lines(whole)] == [line["loss"] for line in lines(part_run)]


def test_another_layout_goes_on_from_the_first_replica(tmp_path: Path, pool: Pool) -> None:
    settings = {"sync__name": "diloco", "sync__period": 3}
    pool.run(
        train,
        written(tmp_path, "dp2", {**settings, "train__steps": 3}),
        False,
        replica_ranks=[[0], [1]],
    )
    wide = written(tmp_path, "dp2.tp2", settings)
    pool.run(train, wide, True, replica_ranks=[[0, 1], [2, 3]])
    assert lines(wide)[-1]["step"] == 6


def validated(layout: str) -> tuple[float, list[float]]:
    """The loss of an evaluation; sum and weight of this replica alone."""
    of = subject("decoder", PERIODIC["local_sgd"])
    model = seeded(of.build)
    engine = weft.Engine(
        model, laid(of, model, layout), optimizer=ADAMW, loss=of.loss, device="cpu"
    )
    first, batch = batches(of, 2)
    engine.step(engine.local(first))
    mine = engine.local(batch)
    found = float(engine.evaluate(mine).loss)
    with torch.no_grad():
        total, weight = of.loss(model.eval()(mine["input_ids"]), mine)
    return found, torch.stack([total, torch.as_tensor(weight)]).tolist()


def test_validation_is_over_all_replicas(pool: Pool) -> None:
    found = pool.run(validated, "dp2", world=2)
    totals = torch.tensor([parts for _, parts in found]).double().sum(0)
    assert [loss for loss, _ in found] == pytest.approx(
        [float(totals[0] / totals[1])] * 2, rel=1e-6
    )


def test_what_is_sent_is_counted_by_the_step(tmp_path: Path, pool: Pool) -> None:
    sizes = {}
    for period in (2, 3):
        run = written(
            tmp_path / str(period), "dp2", {"sync__name": "local_sgd", "sync__period": period}
        )
        pool.run(train, run, False, replica_ranks=[[0], [1]])
        last = [line for line in lines(run) if "loss" in line][-1]
        sizes[period] = sum(line["sent_bytes"] for line in lines(run) if "loss" in line)
        assert last["sync_exposed_s"] >= 0
    assert sizes[2] > sizes[3] > 0


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"name": "diloco", "period": 0}, "is not allowed"),
        ({"name": "diloco", "period": 4, "delay": 4}, "below period = 4"),
        ({"name": "diloco", "period": 4, "fragments": 5}, "from 1 to period = 4"),
        ({"name": "bmuf", "momentum": 1.0}, "is not allowed"),
        ({"name": "local_sgd", "momentum": 0.5}, "is not an option of local_sgd"),
        ({"name": "local_sgd", "codec": "dgc"}, "keeps momentum of gradients"),
    ],
)
def test_what_is_refused(tmp_path: Path, table: dict, says: str) -> None:
    run = written(tmp_path, "dp2", {}).model_copy(update={"sync": SyncConfig(**table)})
    with pytest.raises(Refusal, match=says):
        run_checks.check_run(run)


def test_verification_is_of_an_all_reduce() -> None:
    from weft.verification.verified_settings import exact_sync

    assert exact_sync(SyncConfig(name="diloco", codec="int4", period=3)) == SyncConfig()
    ring = exact_sync(SyncConfig(name="ring", codec="int4", local=2))
    assert (ring.name, ring.codec, ring.arguments) == ("ring", "identity", {"local": 2})
    assert isinstance(sync.make_sync(ring.name), SyncEveryStep)
