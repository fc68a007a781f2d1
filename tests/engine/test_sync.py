"""Synchronisers that agree in every step: as they are, each equals one device under every layout of
a replica, and what they send is what was predicted; with a codec, replicas stay equal bit for bit.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.cases import BATCH, SUBJECTS, Subject, in_turn, laid, seeded
from tests.staged import STAGED
from tests.train.test_trainer import lines, make, saved
from tests.verification.test_parity import run
from weft import sync
from weft.core.codec import Codec
from weft.core.errors import Refusal
from weft.core.run_config import RunConfig, SyncConfig
from weft.core.step import COPY
from weft.engine.collective_audit import Audit
from weft.engine.grad_buckets import local_tensor
from weft.launch import local_workers
from weft.launch.local_workers import Pool
from weft.nn.losses import mse
from weft.parallel.predict_comms import collective_totals, predict_collectives
from weft.train import run_checks
from weft.train.trainer import train

pytestmark = pytest.mark.grid


def with_sync(name: str, made: Any, **plan: Any) -> Subject:
    subject = SUBJECTS.get(name) or STAGED[name]
    return replace(subject, plan=tuple({**dict(subject.plan), "sync": made, **plan}.items()))


EXACT = {
    "ring": sync.make_sync("ring", bucket_mb=0.01),
    "rings": sync.make_sync("ring", local=2),
    "central": sync.make_sync("central", bucket_mb=0.02),
    "servers": sync.make_sync("parameter_server", servers=2, bucket_mb=0.01),
}
LAYOUTS = [
    *(
        "dp2",
        "dp4",
        "dp2.tp2",
        "dp2.tp2+sequence",
        "dp2.fsdp2",
        "dp2.fsdp2+zero1",
        "pp2.dp2",
        "dp2.pp2+zb-v",
    ),
    "dp2.cp2+ulysses",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EXACT)
def test_equals_one_device(pool: Pool, name: str, layout: str) -> None:
    if name == "rings" and layout != "dp4":
        layout = layout.replace("dp2", "dp4") if "." not in layout else layout
        if weft.Layout.parse(layout).size("dp") != 4:
            pytest.skip("two replicas are one ring")
    subject = with_sync("deep" if "pp" in layout else "decoder", EXACT[name])
    result = run(pool, replace(subject, clip=0.5), layout)
    assert result.passed, result


def trained(codec: Codec | str, route: str, layout: str, options: dict, steps: int) -> Any:
    """(losses, weights, states, seen, predicted) of this rank."""
    subject = with_sync(
        "deep" if "pp" in layout else "decoder", sync.make_sync(route, codec, **options)
    )
    model = seeded(subject.build)
    plan = laid(subject, model, layout)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(model, plan, optimizer=optimizer, loss=subject.loss, device="cpu")
    engine.trial = None  # its collectives come once, before the first step
    losses, seen, wanted = [], {}, {}
    torch.manual_seed(3)
    batch = subject.data()
    for step in range(steps):
        if step == 0:
            with Audit(engine.mesh) as audit:
                result = engine.step(engine.local(batch))
            seen = {
                k: v for k, v in collective_totals(audit.seen).items() if k[1] in ("dp", "fsdp")
            }
            values = dict.fromkeys(range(9), 0)
            buffers = engine.buffers.nbytes
            wanted = collective_totals(
                predict_collectives(
                    plan, {}, 8, buffers=buffers, rank=engine.mesh.rank, values=values
                )
            )
            wanted = {k: v for k, v in wanted.items() if k[1] in ("dp", "fsdp")}
        else:
            result = engine.step(engine.local(batch))
        losses.append(float(result.loss))
    # under tp what a rank holds whole it holds as the others do
    whole = {
        n
        for n, axes in plan.params().items()
        if all(p.stored == COPY for a, p in axes.items() if a == "tp")
    }
    weights = {n: (local_tensor(p.detach()).clone(), n in whole) for n, p in engine.params.items()}
    return losses, weights, engine.mesh.coords, seen, wanted


TOPK, DGC = {"name": "topk", "density": 0.1}, {"name": "dgc", "density": 0.1}
RANDOM = {"name": "int8", "stochastic": True}
LOSSY = ["bf16", "fp16", "int8", "int4", RANDOM, "sign", TOPK, DGC, {"name": "powersgd", "rank": 2}]
ROUTES = [
    ("allreduce", "dp2", {}),
    ("allreduce", "dp4", {"bucket_mb": 0.01}),
    ("ring", "dp4", {}),
    ("ring", "dp4", {"local": 2}),
    ("central", "dp4", {}),
    ("parameter_server", "dp2.tp2", {"servers": 2}),
    ("allreduce", "dp2.tp2+sequence", {}),
    ("allreduce", "dp2.fsdp2", {}),
    ("allreduce", "pp2.dp2", {}),
]


CODED = [(codec, *route) for codec, route in in_turn(LOSSY, ROUTES, 4)]


@pytest.mark.parametrize(("codec", "route", "layout", "options"), CODED, ids=str)
def test_replicas_stay_equal_under_a_codec(
    pool: Pool, codec: Any, route: str, layout: str, options: dict
) -> None:
    world = weft.Layout.parse(layout).world
    found = pool.run(trained, codec, route, layout, options, 6, world=world)
    for losses, _, _, seen, wanted in found:
        assert losses == found[0][0]
        assert losses[-1] < losses[0]
        assert seen == wanted
    for _, weights, coords, _, _ in found:
        for _, others, at, _, _ in found:
            if {**coords, "dp": 0, "tp": 0} == {**at, "dp": 0, "tp": 0}:
                same = coords.get("tp") == at.get("tp")
                assert all(
                    torch.equal(weights[n][0], others[n][0])
                    for n, (_, copy) in weights.items()
                    if same or copy
                )


class Sometimes(nn.Module):
    """A parameter that only some samples reach."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        marked = input[:, 0] > 1.0
        if bool(marked.any()):
            input = torch.where(marked[:, None], self.token.expand_as(input), input)
        for block in self.blocks:
            input = torch.tanh(block(input))
        return input


def marked(rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The samples in these rows are marked."""
    x = torch.rand(BATCH, 8)
    x[list(rows), 0] = 2.0
    return {"input": x, "target": torch.rand(BATCH, 8)}


@pytest.mark.parametrize(
    "rows", [(5, 7), (0, 2), ()]
)  # of the second replica, of the first, of none
@pytest.mark.parametrize("layout", ["dp2.fsdp2", "dp4"])
@pytest.mark.parametrize("name", ["ring", "central", "servers"])
def test_a_parameter_that_one_replica_reaches(
    pool: Pool, name: str, layout: str, rows: tuple[int, ...]
) -> None:
    plan = (("accumulate", 1), ("sync", EXACT[name]))
    case = Subject(Sometimes, partial(marked, rows), mse, plan)
    result = run(pool, case, layout)
    assert max(result.loss_rel_err, result.param_rel_err) < 1e-9, result


class Bare(nn.Module):
    """All parameters are in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            input = torch.tanh(block(input))
        return input


def bare(layout: str) -> float:
    batch = {key: value.double() for key, value in marked(()).items()}
    sample = {key: value[:2] for key, value in batch.items()}
    model = seeded(Bare)
    made = sync.make_sync("allreduce", "int8")
    plan = weft.plan(
        model,
        layout,
        batch=BATCH,
        accumulate=2,
        loss=mse,
        precision="fp64",
        sample=sample,
        sync=made,
    )
    engine = weft.Engine(
        model, plan, optimizer=partial(torch.optim.SGD, lr=0.5), loss=mse, device="cpu"
    )
    losses = [float(engine.step(engine.local(batch)).loss) for _ in range(5)]
    return losses[0] - losses[-1]


@pytest.mark.parametrize("layout", ["fsdp2", "pp2.fsdp2"])
def test_a_model_with_nothing_outside_of_its_blocks(pool: Pool, layout: str) -> None:
    assert all(fell > 0 for fell in pool.run(bare, layout, world=weft.Layout.parse(layout).world))


def clipped(clip: float | None) -> float:
    """How far a step with the whole gradient in DGC's message goes, after a step that says how much
    counts."""
    codec = {"name": "dgc", "density": 1.0, "momentum": 0.0} | ({"clip": clip} if clip else {})
    subject = with_sync("decoder", sync.make_sync("allreduce", codec))
    model = seeded(subject.build)
    engine = weft.Engine(
        model,
        laid(subject, model, "dp2"),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        loss=subject.loss,
        device="cpu",
    )
    batch = subject.data()
    engine.step(engine.local(batch))
    before = {n: p.detach().clone() for n, p in engine.params.items()}
    engine.step(engine.local(batch))
    return float(
        sum((p.detach() - before[n]).square().sum() for n, p in engine.params.items()) ** 0.5
    )


def test_dgc_clips_the_mean_gradient(pool: Pool) -> None:
    """One bucket, two replicas: each part of the mean is clipped to clip / sqrt(2)."""
    (free, _), (loose, _), (tight, _) = (
        pool.run(clipped, clip, world=2) for clip in (None, 10.0, 0.01)
    )
    assert loose == pytest.approx(free, rel=1e-6)
    assert free > 0.1
    assert tight <= 0.01 * 2**0.5 * (1 + 1e-6)
    assert tight > 0.005


def test_a_weight_that_two_stages_share_stays_one(pool: Pool) -> None:
    found = pool.run(shared, "dp2.pp2", world=4)
    assert all(torch.equal(weight, found[0][0]) for weight, _ in found)
    assert all(moved for _, moved in found)


def shared(layout: str) -> tuple[torch.Tensor, bool]:
    """The tied weight of this rank after some steps, and whether it changed."""
    subject = with_sync("tied", sync.make_sync("allreduce", "int4"), schedule="1f1b")
    model = seeded(STAGED["tied"].build)
    plan = laid(replace(subject, build=STAGED["tied"].build), model, layout)
    engine = weft.Engine(
        model, plan, optimizer=partial(torch.optim.SGD, lr=0.1), loss=subject.loss, device="cpu"
    )
    before = engine.params["embedding.weight"].detach().clone()
    batch = subject.data()
    for _ in range(3):
        engine.step(engine.local(batch))
    after = engine.params["embedding.weight"].detach().clone()
    return after, not torch.equal(before, after)


SCATTERED = ["bf16", "fp16", "int8", "int4", "sign"]


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp4+zero2", "fsdp2.tp2+sequence", "pp2.fsdp2"])
@pytest.mark.parametrize("codec", SCATTERED)
def test_a_codec_on_fsdps_reduce_scatter(pool: Pool, codec: str, layout: str) -> None:
    if "tp" in layout and codec not in ("bf16", "fp16"):
        with pytest.raises(Refusal, match="the replicated ones would diverge"):
            laid(
                with_sync("decoder", sync.make_sync("allreduce", codec)),
                seeded(SUBJECTS["decoder"].build),
                layout,
            )
        return
    found = pool.run(
        trained, codec, "allreduce", layout, {}, 6, world=weft.Layout.parse(layout).world
    )
    exact = pool.run(
        trained, "identity", "allreduce", layout, {}, 6, world=weft.Layout.parse(layout).world
    )
    for losses, _, _, seen, wanted in found:
        assert losses == found[0][0]
        assert losses[-1] < losses[0]
        assert losses != exact[0][0]
        assert losses == pytest.approx(exact[0][0], rel=0.05)
        assert seen == wanted
    for _, weights, coords, _, _ in found:
        for _, others, at, _, _ in found:
            if {**coords, "tp": 0} == {**at, "tp": 0}:
                assert all(
                    torch.equal(weights[n][0], others[n][0])
                    for n, (_, copy) in weights.items()
                    if copy
                )


RESUMED = [
    ("dp2", "allreduce", "int4", {}),
    ("dp2.fsdp2", "allreduce", {"name": "powersgd", "rank": 2}, {}),
    ("dp2.tp2", "ring", {"name": "topk", "density": 0.1}, {}),
    ("dp4", "central", "sign", {}),
    ("dp2.fsdp2", "parameter_server", "int8", {"servers": 2}),
    ("fsdp2", "allreduce", "int4", {}),
    ("dp2", "allreduce", {"name": "dgc", "density": 0.1, "warmup": 4}, {}),
]


@pytest.mark.grid(3, ci=2)
@pytest.mark.parametrize(("axes", "name", "codec", "options"), RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, pool: Pool, axes: str, name: str, codec: Any, options: dict
) -> None:
    """What codecs keep is in the checkpoint, and so is the optimizer's state, wherever its owner
    is."""
    settings = {
        "sync__name": name,
        "sync__codec": codec,
        **{f"sync__{k}": v for k, v in options.items()},
    }
    if isinstance(codec, dict) and codec["name"] == "dgc":
        settings |= {"optimizer__name": "sgd"}
    world = weft.Layout.parse(axes).world
    whole_run = written(tmp_path / "whole", axes, settings)
    pool.run(train, whole_run, False, world=world)
    part = written(tmp_path / "part", axes, {**settings, "train__steps": 3})
    pool.run(train, part, False, world=world)
    pool.run(train, written(tmp_path / "part", axes, settings), True, world=world)
    want, got = saved(whole_run, 6), saved(part, 6)
    assert want.keys() == got.keys()
    assert any(key.startswith("sync/") for key in want)
    assert [key for key in want if not torch.equal(want[key], got[key])] == []


def test_what_a_codec_kept_is_forgotten_under_another_layout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"sync__codec": "int4"}
    local_workers.run_workers(
        train, 2, written(tmp_path, "dp2", {**settings, "train__steps": 3}), False
    )
    local_workers.run_workers(
        train, 2, written(tmp_path, "dp2", {**settings, "train__steps": 4}), True
    )
    assert "begins anew" not in capfd.readouterr().out
    local_workers.run_workers(train, 4, written(tmp_path, "dp4", settings), True)
    assert "it begins anew" in capfd.readouterr().out


def written(folder: Path, axes: str, settings: dict[str, Any]) -> RunConfig:
    """`make` of a run file that names a synchroniser."""
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    run = make(folder, axes, **plain)
    tables = {
        key.partition("__")[2]: value for key, value in settings.items() if isinstance(value, dict)
    }
    return run.model_copy(update={"sync": run.sync.model_copy(update=tables)})


def test_what_a_run_says_of_its_messages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for codec in ("identity", "int8"):
        run = written(tmp_path / codec, "dp2", {"sync__codec": codec, "sync__name": "ring"})
        local_workers.run_workers(train, 2, run, False)
        out = capfd.readouterr().out
        assert "a rank sends dp" in out
        assert ("over dp 1/3" in out) == (codec == "int8")
        last = [line for line in lines(run) if "loss" in line][-1]
        assert last["sync_exposed_s"] > 0
        assert last["sync_hidden_s"] >= 0
        sizes[codec] = last["sent_bytes"]
    assert 3 < sizes["identity"] / sizes["int8"] < 4
    alone = written(tmp_path / "alone", "dp1", {})
    train(alone, False)
    assert "sent_bytes" not in lines(alone)[-1]


def test_what_is_allowed() -> None:
    """fp16 with what keeps nothing of gradients, or with nobody to send to."""
    model = SUBJECTS["decoder"].build()
    for layout, codec in [
        ("dp2", {"name": "int8", "stochastic": True, "feedback": False}),
        ("dp1", "int8"),
    ]:
        weft.plan(
            model, layout, batch=BATCH, precision="fp16", sync=sync.make_sync("allreduce", codec)
        )
    assert weft.plan(model, "dp2", batch=BATCH, sync="ring").uses_custom_dp_sync
    with pytest.raises(Refusal, match="neither a name nor a codec"):
        sync.make_sync("allreduce", 7)  # type: ignore[arg-type]


REFUSED: list[tuple[str, dict, dict, str]] = [
    ("dp2", {"name": "gossip"}, {}, "not a synchroniser"),
    ("dp2", {"name": "ring", "servers": 2}, {}, "is not an option of ring"),
    ("dp2", {"codec": "int5"}, {}, "not a codec"),
    ("dp2", {"codec": {"rank": 2}}, {}, "not a codec"),
    ("dp2", {"codec": {"name": "int8", "blocks": 2}}, {}, "is not an option of int8"),
    ("dp2", {"bucket_mb": 0}, {}, "is not allowed"),
    ("dp2", {"name": "parameter_server", "servers": 3}, {}, "has 2 replicas"),
    ("dp4", {"name": "ring", "local": 3}, {}, "does not divide the 4 replicas"),
    ("fsdp2", {"name": "ring"}, {}, "has no replicas"),
    ("fsdp2", {"codec": "powersgd"}, {}, "has no reduce-scatter"),
    ("dp2", {"codec": "int8"}, {"precision__compute": "fp16"}, "another loss scale"),
    (
        "pp2+pipedream.dp2",
        {"codec": "int8"},
        {"train__accumulate": 2},
        "updates each stage by itself",
    ),
    ("dp2", {"codec": "dgc"}, {}, "dgc applies the momentum"),
    ("dp2", {"codec": {"name": "powersgd", "rank": "8"}}, {}, "is not allowed"),
    ("dp2", {"bucket_mb": "4"}, {}, "is not allowed"),
    ("dp2", {"bucket_mb": float("inf")}, {}, "is not allowed"),
]


@pytest.mark.parametrize(("axes", "table", "settings", "says"), REFUSED)
def test_what_is_refused_before_any_process(
    tmp_path: Path, axes: str, table: dict, settings: dict, says: str
) -> None:
    run = make(tmp_path, axes, **settings)
    run = run.model_copy(update={"sync": SyncConfig(**table)})
    with pytest.raises(Refusal, match=says):
        run_checks.check_run(run)


def test_an_engine_that_is_done_with_leaves_no_thread(pool: Pool) -> None:
    """Its process groups, and its own thread, end with it."""
    threads = []
    for _ in range(5):
        pool.run(trained, "int4", "ring", "dp2", {}, 1, world=2)
        threads.append(pool.run(living_threads, world=2))
    # a thread of torch's own may come once, and one of an earlier test go; what an engine leaves
    # comes with each
    for counts in zip(*threads[1:], strict=True):
        assert not all(before < after for before, after in pairwise(counts)), threads


def living_threads() -> int:
    """The fewest of a second: some of the task before are told to end, and not waited for."""
    counts = []
    for _ in range(20):
        linux = os.path.isdir("/proc/self/task")
        counts.append(len(os.listdir("/proc/self/task")) if linux else threading.active_count())
        time.sleep(0.05)
    return min(counts)
