"""What a run meets on a cluster: the laws of steps that wait, of failures, of replicas that agree,
and of scaling."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.pipeline.test_simulator import random_costs, random_schedule
from weft import sync
from weft.cli.app import app
from weft.core.action_costs import ActionCosts
from weft.core.errors import ConfigError
from weft.core.layout import Layout
from weft.core.sync import AsyncServers, LocalSteps, SyncEveryStep
from weft.pipeline import schedules
from weft.pipeline.draw.style import seconds_text
from weft.pipeline.simulator import simulate
from weft.planner import simulate_run
from weft.planner.cluster_sim import (
    async_replicas,
    failures,
    replica_comparison,
    report,
    scaling,
    stragglers,
    wait_groups,
)
from weft.planner.cluster_sim.batched_pipelines import BatchedPipelines
from weft.planner.cluster_sim.failures import FailureModel
from weft.planner.cluster_sim.scenario import Scenario
from weft.planner.cost import transformer_work
from weft.planner.cost.belief import PUBLISHED, Belief, Move
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.precision_policy import PrecisionPolicy

MODEL = transformer_work.TransformerDims(16, 2048, 16, 32000, 2048, 5632, 4, gated=True, tied=False)
HOUR = 3600.0
UNMEASURED = Belief.of(PUBLISHED)


def setup(
    axes: str,
    batch: int = 64,
    accumulate: int = 4,
    named: str = "1f1b",
    chunks: int = 1,
    **era: Any,
) -> Scenario:
    layout = Layout.parse(axes)
    choices = LayoutBatch.of(
        [layout], batch=batch, accumulate=accumulate, schedule=named, chunks=chunks
    )
    cluster = Cluster.parse(f"h100x{layout.world}")
    software = cluster.hardware.era("megatron").model_copy(update=era)
    return Scenario(
        axes,
        transformer_work.transformer_work(MODEL),
        choices,
        cluster,
        software,
        PrecisionPolicy(added_bytes=12.0),
        1000,
    )


PLAIN = sync.make_sync("allreduce")
assert isinstance(PLAIN, SyncEveryStep)


def period(steps: int, fragments: int = 1, delay: int = 0) -> LocalSteps:
    return LocalSteps("mine", PLAIN.codec, steps, fragments=fragments, delay=delay)


def any_time(staleness: int | None) -> AsyncServers:
    return AsyncServers("mine", PLAIN.codec, 1, staleness)


def step_s(made: Scenario, slow: dict[int, float]) -> float:
    return float(
        stragglers.PacedScenario(made, tuple(slow.values())).step(stragglers.paces(made, slow))[0][
            0
        ]
    )


# ---- pipelines at their own paces ----------------------------------------------------------------


def test_a_fleet_is_each_of_its_pipelines_simulated() -> None:
    rng, numbers = random.Random(3), np.random.default_rng(3)
    for _ in range(60):
        made = random_schedule(rng)
        costs = random_costs(rng, made.stages)
        slower = replace(costs, **{f: [2 * t for t in costs.each(f, made.stages)] for f in TIMES})
        paces = numbers.uniform(1, 2, (5, made.ranks))
        found = BatchedPipelines(made, {1.0: costs, 2.0: slower}).ends(paces)
        for each, ends in zip(paces, found):
            own = {
                f: [t * each[made.placement[s]] for s, t in enumerate(costs.each(f, made.stages))]
                for f in TIMES
            }
            lanes = simulate(made, replace(costs, **own)).lanes
            assert ends == pytest.approx(
                [lane.stop_s[-1] if lane.stop_s else 0.0 for lane in lanes], abs=1e-9
            )


TIMES = ("forward_s", "backward_s", "weight_s")


@pytest.mark.parametrize("name", ["zb-v", "interleaved", "zb-h1", "pipedream"])
def test_a_fleet_of_one_pace_is_the_timeline(name: str) -> None:
    made = schedules.make_schedule(name, 4, 8)
    costs = ActionCosts(1.0, 1.5, 0.5, update_s=0.25, comm_s=0.125)
    fleet, timeline = BatchedPipelines(made, {1.0: costs}), simulate(made, costs)
    assert fleet.ends(np.ones((3, 4))).max(axis=1) == pytest.approx([timeline.makespan_s] * 3)
    assert fleet.busy(1, np.ones(2)) == pytest.approx([timeline.lanes[1].work_s] * 2)


def test_values_of_devices_lie_where_the_layout_puts_them() -> None:
    for axes in (
        "dp2.pp2.tp2",
        "pp2.dp3.tp2",
        "tp2.pp2.dp2",
        "fsdp2+zero2.pp3.dp2",
        "pp2.fsdp2.dp2.tp2",
    ):
        layout = Layout.parse(axes)
        choices = setup(axes, batch=48).choices
        values = np.random.default_rng(0).random(layout.world)
        found = wait_groups.by_pipeline(choices, values[None])[0]
        within = ["tp"] if "zero2" in axes else ["tp", "fsdp"]
        assert found.shape == (layout.size("dp"), 2 if "zero2" in axes else 1, layout.size("pp"))
        for rank in range(layout.world):
            place = layout.coords(rank)
            assert {
                **dict.fromkeys(wait_groups.device_coords(choices, rank), 0),
                **place,
            } == wait_groups.device_coords(choices, rank)
            highest = max(values[peer] for peer in layout.group_ranks(rank, *within))
            assert highest in found[place.get("dp", 0), :, place.get("pp", 0)]
            assert wait_groups.stage_of(choices)[rank] == place.get("pp", 0)


# ---- a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        "dp8",
        "tp8",
        "dp4.fsdp2+zero2",
        "fsdp8",
        "dp2.fsdp4.tp2+sequence",
        "cp2.dp4",
        "cp2+gather.dp4",
        "fsdp8+offload",
        "fsdp8+zero1+offload",
    ],
)
def test_without_a_pipeline_a_step_is_the_estimate(axes: str) -> None:
    made = setup(axes)
    assert step_s(made, {}) == pytest.approx(float(made.estimate().step_s[0]), rel=1e-9)
    small = made.cluster.hardware.device.model_copy(update={"memory_gib": 1.0})
    hardware = made.cluster.hardware.model_copy(update={"device": small})
    step = replace(made, cluster=made.cluster.model_copy(update={"hardware": hardware})).step()
    assert step.over_bytes == pytest.approx(step.memory_bytes - 2**30) and step.over_bytes > 0


@pytest.mark.parametrize(
    "axes, name, chunks",
    [
        ("pp4.dp2", "1f1b", 1),
        ("dp4.pp2.tp2", "gpipe", 1),
        ("pp2.tp2", "interleaved", 2),
        ("pp2.fsdp4", "interleaved", 2),
        ("pp2.fsdp4+offload", "1f1b", 1),
    ],
)
def test_a_pipeline_is_the_estimate_but_for_what_messages_overlap(
    axes: str, name: str, chunks: int
) -> None:
    made = setup(axes, 64, 8, name, chunks)
    found, wanted = step_s(made, {}), float(made.estimate().step_s[0])
    messages = sum(
        float(part.value[0]) for part in made.estimate().time if part.name == "pp exposed"
    )
    assert wanted - messages - 0.03 * wanted < found < wanted * 1.03


@pytest.mark.parametrize("axes", ["dp1", "pp4"])
def test_devices_that_are_all_slower_compute_so_much_longer(axes: str) -> None:
    made = setup(axes, fixed_s=0.0)
    free = replace(made, work=made.behind("pp", 1e-9).work) if "pp" in axes else made
    tiers = tuple(
        tier.model_copy(update={"latency_s": 0.0}) for tier in free.cluster.hardware.tiers
    )
    hardware = free.cluster.hardware.model_copy(update={"tiers": tiers})
    free = replace(free, cluster=free.cluster.model_copy(update={"hardware": hardware}))
    every = dict.fromkeys(range(made.devices), 1.7)
    assert step_s(free, every) == pytest.approx(1.7 * step_s(free, {}), rel=1e-6)


def test_where_a_slow_device_is() -> None:
    made = setup("dp4.pp4.tp2", 128, 8)
    planned = step_s(made, {})
    by_stage = [step_s(made, {rank * 2: 1.5}) for rank in range(4)]
    assert min(by_stage) > planned
    assert by_stage[3] == max(by_stage), "the last stage has the head, and sets the pace"
    assert (
        step_s(made, {7: 1.5}) == step_s(made, {6: 1.5}) == step_s(made, {30: 1.5}) == by_stage[3]
    )
    assert step_s(made, {6: 1.5, 14: 1.5}) == by_stage[3], "one is waited for as long as many"
    assert step_s(made, {6: 1.2}) < by_stage[3] < step_s(made, {6: 3.0})


def test_idle_is_what_no_device_computes() -> None:
    made = setup("pp4", 64, 8)
    [total], [idle] = stragglers.PacedScenario(made, (1.5,)).step(stragglers.paces(made, {2: 1.5}))
    costs, slow = made.step().costs, made.step(1.5).costs
    parts = {
        field: [(slow if i == 2 else costs).each(field, 4)[i] for i in range(4)] for field in TIMES
    }
    acted = simulate(made.schedule, replace(costs, **parts))
    after = made.step(1.5).after_s
    assert total == pytest.approx(acted.makespan_s + after)
    assert idle == pytest.approx(sum(acted.idle_s) / 4 / total)


@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_a_slow_link(axis: str) -> None:
    made = setup("dp4.pp2.tp2", 64, 8, launch_s=0.0)  # launches would hide it
    planned, *same = stragglers.straggler_table(made, {}, {axis: 1.0}, 0.0, 0)
    assert [row.step_s for row in same] == pytest.approx([planned.step_s] * len(same))
    slow = [
        max(row.step_s for row in stragglers.straggler_table(made, {}, {axis: f}, 0.0, 0)[1:])
        for f in (2.0, 8.0)
    ]
    assert planned.step_s < slow[0] < slow[1]


@pytest.mark.parametrize(
    "axis, zero", [("dp", ""), ("fsdp", ""), ("fsdp", "+zero1"), ("pp", ""), ("tp", "")]
)
def test_a_slow_link_in_company(axis: str, zero: str) -> None:
    """With a device that is hardly slower a step takes what it takes with the first link alone, and
    so it does where replicas agree each step; with a slow device of the same stage more than with
    either."""
    made = setup(f"dp2.fsdp2{zero}.pp2.tp2", 64, 8, launch_s=0.0)
    alone = stragglers.straggler_table(made, {}, {axis: 8.0}, 0.0, 0)[1].step_s
    *_, both = stragglers.straggler_table(made, {0: 1 + 1e-9}, {axis: 8.0}, 0.0, 0)
    assert both.name == "all together" and both.step_s == pytest.approx(alone, rel=1e-6)
    [agreed] = replica_comparison.compare_syncs(made, {"each step": PLAIN}, {}, {axis: 8.0}, 0.0, 0)
    assert agreed.met_s == pytest.approx(alone, rel=1e-9) and agreed.planned_s == pytest.approx(
        step_s(made, {})
    )
    *_, more = stragglers.straggler_table(made, {None: 1.5}, {axis: 8.0}, 0.0, 0)
    assert more.name == "all together, x1.5 on device 0" and more.step_s > max(
        alone, step_s(made, {0: 1.5})
    )
    assert stragglers.devices({None: 1.5, 0: 2.0}) == {1: 1.5, 0: 2.0}


@pytest.mark.parametrize("stage", range(4))
def test_what_is_slow_in_one_pipeline_is_simulated_together(stage: int) -> None:
    """A device of one stage, a link within the first, and the one after it."""
    made, slow = setup("dp2.pp4.tp2", 64, 8, launch_s=0.0), {"tp": 8.0, "pp": 200.0}
    *_, together = stragglers.straggler_table(made, {2 * stage: 2.0}, slow, 0.0, 0)
    steps = [
        made.step(2.0 if at == stage else 1.0, {"tp": 8.0} if at == 0 else None).costs
        for at in range(4)
    ]
    parts = {
        field: [one.each(field, 4)[at] for at, one in enumerate(steps)]
        for field in TIMES
        if field != "comm_s"
    }
    comm = [
        made.step(links={"pp": 200.0}).costs.each("comm_s", 3)[0],
        *made.step().costs.each("comm_s", 3)[1:],
    ]
    acted = simulate(made.schedule, replace(steps[0], **parts, comm_s=comm))
    assert together.step_s == pytest.approx(acted.makespan_s + made.step(2.0).after_s, rel=1e-9)


def test_a_slow_link_is_one_replicas() -> None:
    """Others go on without it, where they may."""
    made = setup("dp4.pp2.tp2", 64, 8, launch_s=0.0)
    [free] = replica_comparison.compare_syncs(
        made, {"free": any_time(None)}, {}, {"tp": 8.0}, 0.0, 0
    )
    alone = stragglers.straggler_table(made, {}, {"tp": 8.0}, 0.0, 0)[1].step_s
    even = stragglers.straggler_table(made, {}, {}, 0.0, 0)[0].step_s
    assert free.met_s / free.planned_s == pytest.approx(4 / (3 + even / alone), rel=0.03)


def test_who_waits_for_a_slow_link_between_replicas() -> None:
    """All, where they agree each step; all, once a period; one, where it comes and goes by
    itself."""
    made = setup("dp8", 64, 8, launch_s=0.0)
    ways = {"each": PLAIN, "period": period(10), "any": any_time(None)}
    each, periods, any_ = replica_comparison.compare_syncs(made, ways, {}, {"dp": 50.0}, 0.0, 0)
    longer = {one.name: one.met_s - one.planned_s for one in (each, periods, any_)}
    exchange = [
        replace(made, sync=period(10)).step(links={"dp": by}).exchange_s for by in (1.0, 50.0)
    ]
    assert longer["period"] == pytest.approx((exchange[1] - exchange[0]) / 10)
    assert longer["each"] > 5 * longer["period"]
    turn = [
        replace(made, sync=any_time(None)).step(links={"dp": by}).exchange_s / 7
        for by in (1.0, 50.0)
    ]
    assert 0 < longer["any"] < turn[1] - turn[0], "seven of eight do not go over it"
    with pytest.raises(ValueError):
        async_replicas.step_ends(any_time(None), np.ones((4, 3)), np.ones(2))


def test_jitter_is_the_highest_of_so_many_draws() -> None:
    """Of replicas of one device each, whose step is their own work: E max of n normals, by
    integration."""
    made, sigma = setup("dp512", 512, 1, fixed_s=0.0), 0.03
    row = stragglers.straggler_table(made, {}, {}, sigma, 0)[1]
    z = np.linspace(-8, 8, 20001)
    normal = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(normal) * (z[1] - z[0])
    expected = float(np.sum(np.exp(sigma * z) * 512 * below**511 * normal) * (z[1] - z[0]))
    every = dict.fromkeys(range(512), expected)
    assert abs(row.step_s - step_s(made, every)) < 4 * row.error_s + 1e-4 * row.step_s
    more = stragglers.straggler_table(setup("dp4096", 4096, 1, fixed_s=0.0), {}, {}, sigma, 0)[1]
    assert more.idle > row.idle > stragglers.straggler_table(made, {}, {}, 0.01, 0)[1].idle > 0


# ---- replicas ------------------------------------------------------------------------------------


def own(steps: int = 240, replicas: int = 32, jitter: float = 0.1) -> Any:
    return np.exp(jitter * np.random.default_rng(5).standard_normal((steps, replicas)))


def rate(how: Any, seconds: Any, exchange_s: float = 0.0) -> float:
    return async_replicas.long_run_step_s(how, async_replicas.step_ends(how, seconds, exchange_s))


def test_a_period_of_one_step_is_synchronous() -> None:
    seconds = own()
    assert np.allclose(
        async_replicas.step_ends(period(1), seconds, 0.25),
        async_replicas.step_ends(PLAIN, seconds, 0.25),
    )


@pytest.mark.parametrize("steps", [2, 10, 60])
def test_a_period_takes_the_longest_of_its_sums(steps: int) -> None:
    seconds = own()
    law = (seconds.reshape(-1, steps, 32).sum(axis=1).max(axis=1) + 0.5).sum()
    assert async_replicas.step_ends(period(steps), seconds, 0.5)[-1] == pytest.approx([law] * 32)
    assert rate(period(steps), seconds) < rate(PLAIN, seconds)


def test_an_exchange_beside_training_is_hidden() -> None:
    even = np.ones((100, 4))
    assert rate(period(10), even, 3.0) == pytest.approx(1.3)
    assert rate(period(10, delay=3), even, 3.0) == pytest.approx(1.0)
    assert rate(period(10, delay=2), even, 3.0) == pytest.approx(1.1)
    assert rate(period(10, fragments=5), even, 3.0) == pytest.approx(1.3)
    assert rate(period(5, fragments=5, delay=4), even, 10.0) == pytest.approx(2.0), (
        "exchanges wait for one another"
    )
    assert rate(period(10, fragments=5, delay=1), even, 3.0) == pytest.approx(1.0), (
        "one at a time, and each short"
    )


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_step_begins_when_the_slowest_is_near_enough(bound: int) -> None:
    """Step by step from the definition: with no staleness, when all have ended the step before."""
    seconds = own()
    ends = async_replicas.step_ends(any_time(bound), seconds)
    for k in range(1, len(seconds)):
        slowest = ends[k - 1 - bound].max() if k > bound else 0.0
        assert np.allclose(ends[k], np.maximum(ends[k - 1], slowest) + seconds[k])
    if bound == 0:
        assert rate(any_time(0), seconds) == pytest.approx(rate(PLAIN, seconds), rel=0.01)


def test_staleness_frees_the_fast_as_far_as_its_bound() -> None:
    seconds = own()
    rates = [rate(any_time(bound), seconds) for bound in (0, 1, 4, None)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(seconds.mean(), rel=0.01)
    slow = np.ones((400, 8))
    slow[:, 3] = 2.0
    assert rate(any_time(4), slow) == pytest.approx(2.0, rel=0.02), (
        "who is bound goes as the slowest"
    )
    assert rate(any_time(None), slow) == pytest.approx(8 / 7.5, rel=0.02)


def test_servers_take_one_replica_at_a_time() -> None:
    even = np.ones((60, 10))
    assert rate(any_time(None), even, 0.02) == pytest.approx(1.02, rel=0.01)
    assert rate(any_time(None), even, 2.0) == pytest.approx(10.0, rel=0.05), (
        "10 pushes of 1 s on one link"
    )


# ---- failures ------------------------------------------------------------------------------------


def test_young_and_daly() -> None:
    assert failures.young_s(FailureModel(5000.0, 10.0)) == pytest.approx(math.sqrt(2 * 10 * 5000))
    assert failures.daly_s(FailureModel(100.0, 200.0)) == 100.0, (
        "no shorter than what a checkpoint takes"
    )
    for mtbf, pause in [(HOUR, 5.0), (24 * HOUR, 60.0), (HOUR, 60.0)]:
        faults = FailureModel(mtbf, pause, restart_s=200.0, written_s=20.0)
        steps, step_s = 10**9, failures.young_s(faults) / 10_000
        tried = np.arange(1000, 40_000)
        best = tried[failures.expected_s(faults, steps, step_s, tried).argmin()] * step_s
        assert failures.daly_s(faults) == pytest.approx(best, rel=0.01)
        assert failures.young_s(faults) > failures.daly_s(faults)


@pytest.mark.parametrize("mtbf_s, minutes", [(24 * HOUR, 117), (6 * HOUR, 57), (0.25 * HOUR, 9.1)])
def test_the_intervals_that_daly_printed(mtbf_s: float, minutes: float) -> None:
    """Figures 3 to 5 of the paper: a dump of 5 minutes, a restart of 10."""
    assert failures.daly_s(FailureModel(mtbf_s, 300.0, 600.0)) / 60 == pytest.approx(
        minutes, abs=0.5 if minutes > 10 else 0.05
    )


@pytest.mark.parametrize(
    "faults",
    [
        FailureModel(HOUR, 60.0, 300.0),
        FailureModel(HOUR, 60.0, 300.0, 90.0),
        FailureModel(1000.0, 30.0),
        FailureModel(1000.0, 30.0, 900.0, 150.0),
    ],
)
@pytest.mark.parametrize("every", [40, 100])
def test_runs_drawn_at_random_take_as_long_as_the_formula_says(
    faults: FailureModel, every: int
) -> None:
    drawn = failures.simulate_failures(faults, 40_000, 5.0, every, runs=300, seed=1)
    expected = float(failures.expected_s(faults, 40_000, 5.0, every))
    assert abs(drawn.wall_s - expected) < 4 * drawn.error_s
    assert drawn.error_s < 0.01 * expected


def test_without_failures_only_checkpoints_cost() -> None:
    faults = FailureModel(1e15, 7.0)
    assert failures.simulate_failures(faults, 100, 2.0, 30).wall_s == 200 + 3 * 7.0
    assert float(failures.expected_s(faults, 100, 2.0, 30)) == pytest.approx(200 + 3 * 7.0)


def test_more_failures_cost_more() -> None:
    shares = [
        failures.failure_cost(FailureModel(hours * HOUR, 30.0, 300.0), 10_000, 3.0).best.goodput
        for hours in (1, 3, 24, 1000)
    ]
    assert shares == sorted(shares) and 0.5 < shares[0] < shares[-1] < 1
    assert failures.mtbf_of_all(1000, 5000 * HOUR) == 5 * HOUR
    assert failures.mtbf_of_all(1000, 5000 * HOUR, 125, 625 * HOUR) == 2.5 * HOUR
    with pytest.raises(ConfigError, match=r"--mtbf = '10 s of all devices together'"):
        failures.failure_cost(FailureModel(10.0, 60.0, 300.0), 1000, 1.0)


@pytest.mark.parametrize(
    "faults",
    [
        FailureModel(3000.0, 60.0, 200.0),
        FailureModel(3000.0, 60.0, 200.0, 150.0),
        FailureModel(9e3, 9e4),
    ],
)
@pytest.mark.parametrize("steps", [100, 150, 200, 700])
def test_short_runs(faults: FailureModel, steps: int) -> None:
    """They save as often as is best for them, which may be never; by all ways that there are, and
    as drawn."""
    found = failures.failure_cost(faults, steps, 5.0, every=1000)
    every = np.arange(max(1, math.ceil(faults.written_s / 5.0)), steps + 1)
    wanted = failures.expected_s(faults, steps, 5.0, every)
    assert found.expected_s == pytest.approx(wanted.min(), rel=1e-4)
    assert abs(found.drawn.wall_s - found.expected_s) < 5 * found.drawn.error_s
    assert found.best.every == steps or (faults.pause_s < 1e4 and steps > 100)
    [own] = [each for each in found.intervals if each.name == "run file"]
    anew = (
        faults.mtbf_s
        * math.exp(faults.restart_s / faults.mtbf_s)
        * math.expm1(5 * steps / faults.mtbf_s)
    )
    assert own.every == steps and 5 * steps / own.goodput == pytest.approx(anew), "it never saves"
    assert max(interval for interval, _ in found.curve) == pytest.approx(5 * steps)


# ---- scaling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["weak", "strong"])
@pytest.mark.parametrize(
    "axes, larger",
    [("dp2.pp2.tp2", "dp8.pp2.tp2"), ("pp2.dp2.tp2", "pp2.dp8.tp2"), ("tp8", "dp4.tp8")],
)
def test_a_point_is_the_layout_with_more_replicas(
    mode: scaling.Mode, axes: str, larger: str
) -> None:
    points = scaling.scaling_curve(setup(axes, 64, 8), mode, setup(larger).devices)
    wanted = setup(larger, 256, 8) if mode == "weak" else setup(larger, 64, 2)
    assert points[-1].step_s == pytest.approx(float(wanted.estimate().step_s[0]))
    assert points[-1].batch == wanted.choices.batch[0] and points[-1].devices == wanted.devices
    assert points[0].efficiency == 1 and len(points) == 3


def test_a_strong_curve_ends_with_the_samples() -> None:
    points = scaling.scaling_curve(setup("dp4", 64, 4), "strong", 4096)
    assert [point.devices for point in points] == [4, 8, 16, 32, 64]
    assert all(point.batch == 64 for point in points)
    shares = [point.efficiency for point in points]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.9


# ---- all of it -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything() -> report.SimulationReport:
    asked = simulate_run.SimulateRequest(
        slow={None: 1.5, 3: 1.2},
        links={"tp": 4.0},
        jitter=0.03,
        mtbf_h=5000.0,
        node_mtbf_h=9000.0,
        storage_gbps=20.0,
        every=100,
        scale="weak",
        to=64,
    )
    return simulate_run.simulate_scenario(setup("dp4.pp2.tp2", 128, 8), asked, UNMEASURED)


def test_a_step_has_the_interval_that_plan_has(everything: report.SimulationReport) -> None:
    made = everything.setup

    def predict(move: Move) -> Any:
        return replace(made, era=move(made.era)).estimate().step_s

    [low], [high] = UNMEASURED.interval(predict)
    found = json.loads(report.report_json(everything))
    assert found["step_s_low"] < found["step_s"] < found["step_s_high"]
    assert found["step_s_high"] / found["step_s"] == pytest.approx((high / low) ** 0.5)
    assert found["step_s"] / found["step_s_low"] == pytest.approx((high / low) ** 0.5)
    said = f"80 % of steps within {seconds_text(found['step_s_low'])} and"
    assert said in report.report_text(everything).plain


def test_figures_agree_with_one_another(everything: report.SimulationReport) -> None:
    found = json.loads(report.report_json(everything))
    assert found["step_s"] == pytest.approx(found["stragglers"][0]["step_s"])
    assert found["step_s"] == pytest.approx(found["replicas"][0]["planned_s"])
    assert found["step_s"] == pytest.approx(
        found["pipeline"]["makespan_s"] + sum(found["after_s"].values())
    )
    assert found["replicas"][0]["met_s"] == pytest.approx(
        found["stragglers"][-1]["step_s"], rel=0.01
    )
    assert found["replicas"][1]["met_s"] < found["replicas"][0]["met_s"]
    assert found["failures"]["faults"]["mtbf_s"] == pytest.approx(HOUR / (16 / 5000 + 2 / 9000))
    faults, params = found["failures"]["faults"], everything.setup.work.params
    assert faults["written_s"] == pytest.approx(params * 12 / 20e9), "weights and two moments"
    assert faults["pause_s"] == pytest.approx(params / 4 * 12 / 55e9, rel=0.05), (
        "a rank of pp2.tp2 copies its part"
    )
    assert faults["restart_s"] == 300
    assert found["failures"]["expected_s"] == pytest.approx(
        found["failures"]["drawn"]["wall_s"], rel=0.1
    )
    assert [point["devices"] for point in found["scaling"]["points"]] == [16, 32, 64]


def test_a_slow_link_alone_is_shown_where_replicas_agree() -> None:
    found = simulate_run.simulate_scenario(
        setup("dp4.tp2"), simulate_run.SimulateRequest(links={"dp": 9.0}), UNMEASURED
    )
    assert [row.name for row in found.stragglers] == ["as planned", "a link of dp x9"]
    assert found.replicas[0].met_s == pytest.approx(found.stragglers[1].step_s)


def test_links_of_stages_on_one_rank_are_none() -> None:
    """Of a V: the fourth and the fifth stage are on the last rank, and others' links carry two
    ways."""
    rows = stragglers.straggler_table(setup("pp4.dp2", 64, 8, "zb-v", 2), {}, {"pp": 50.0}, 0.0, 0)
    assert [row.name for row in rows[1:]] == [
        f"a link of pp x50, after stages {i} and {6 - i}" for i in range(3)
    ]
    assert all(row.step_s > 1.01 * rows[0].step_s for row in rows[1:])


def test_the_best_of_every_interval_that_there_is() -> None:
    rng = random.Random(2)
    for _ in range(40):
        faults = FailureModel(
            10 ** rng.uniform(3, 5), 10 ** rng.uniform(-3, 2), 300.0, 10 ** rng.uniform(0, 3)
        )
        steps = rng.randrange(1, 2000)
        found = failures.failure_cost(faults, steps, 5.0)
        every = np.arange(min(steps, max(1, math.ceil(faults.written_s / 5.0))), steps + 1)
        assert found.expected_s == pytest.approx(
            failures.expected_s(faults, steps, 5.0, every).min(), rel=1e-9
        )
    assert failures.failure_cost(FailureModel(1e300, 1e9), 10, 5.0).best.every == 10


def test_no_interval_is_shorter_than_writing() -> None:
    found = failures.failure_cost(FailureModel(3000.0, 1.0, 10.0, 400.0), 1000, 5.0, every=10)
    assert [each.every >= 80 for each in found.intervals] == [True] * 4 and found.curve[0][0] >= 400
    assert found.intervals[-1].name == "run file, as writing lets it"


def test_each_is_named_once() -> None:
    assert simulate_run.require_unique(
        [simulate_run.parse_slow("1.5"), simulate_run.parse_slow("3=2")], "--slow"
    ) == {None: 1.5, 3: 2.0}
    with pytest.raises(ConfigError, match=r"--slow = 4\.0: 3 is given twice"):
        simulate_run.require_unique(map(simulate_run.parse_slow, ("3=2", "3=4")), "--slow")
    with pytest.raises(ConfigError, match="--slow without a device is given twice"):
        simulate_run.require_unique(map(simulate_run.parse_slow, ("3", "4")), "--slow")


def test_a_slow_turn_is_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each of many replicas is simulated, or some in place of all."""
    made, way = setup("dp512", 512, 1, launch_s=0.0), {"any": any_time(None)}
    [every] = replica_comparison.compare_syncs(made, way, {}, {"dp": 300.0}, 0.0, 0)
    monkeypatch.setattr(replica_comparison, "TURNS", 2000)
    [some] = replica_comparison.compare_syncs(made, way, {}, {"dp": 300.0}, 0.0, 0)
    assert some.planned_s == pytest.approx(every.planned_s, rel=0.05)
    assert (
        some.met_s == pytest.approx(every.met_s, rel=0.05) and every.met_s > 1.2 * every.planned_s
    )


def test_ways_to_agree_cost_their_exchanges(everything: report.SimulationReport) -> None:
    each_step, periods, any_time = everything.replicas
    step = everything.step
    alone = each_step.planned_s - step.after["dp exposed"]
    assert periods.planned_s == pytest.approx(alone + step.exchange_s / 10)
    served = made_with(
        everything.setup, sync.make_sync("parameter_server", staleness=4, servers=4)
    ).step()
    assert served.after["optimizer"] == pytest.approx(step.after["optimizer"] / 4), (
        "each server updates its part"
    )
    alone += served.after["optimizer"] - step.after["optimizer"]
    turns = 4 * served.exchange_s / 3  # one at each server
    assert any_time.planned_s == pytest.approx(alone + turns, rel=1e-3), "they come in turns"


@pytest.mark.parametrize(
    "way",
    [
        period(8),
        period(8, 2),
        period(8, 2, 1),
        period(8, 4, 2),
        period(8, 2, 4),
        period(8, 4, 3),
        period(6, 1, 5),
        any_time(None),
        any_time(4),
        AsyncServers("mine", PLAIN.codec, 3, 4),
    ],
)
@pytest.mark.parametrize("axes", ["dp8", "dp4.cp2"])
@pytest.mark.parametrize(
    ("slower", "update"), [(1.0, 1.0), (30.0, 1.0), (200.0, 1.0), (2000.0, 1.0), (1.0, 99.0)]
)
def test_the_closed_form_waits_for_others_as_they_do_in_turn(
    way: Any, slower: float, update: float, axes: str
) -> None:
    """On networks where exchanges are hidden, or cost some of a step, or all of it; and where
    updates do."""
    made = setup(axes)
    more = {
        "reduce_bytes": slower * made.practice.reduce_bytes,
        "update_bytes": update * made.practice.update_bytes,
    }
    made = made_with(replace(made, practice=replace(made.practice, **more)), way)
    [found] = replica_comparison.compare_syncs(made_with(made, PLAIN), {"way": way}, {}, {}, 0.0, 0)
    closed = made.estimate()
    assert float(closed.step_s[0]) == pytest.approx(found.planned_s, rel=0.01)
    if isinstance(
        way, AsyncServers
    ):  # its link carries all that it sends, and gets; a server's what all do
        waits = next(part.value for part in closed.time if part.name == "dp exposed")
        step, count = made.step(), made.size("dp")
        turn, own = (
            step.exchange_s / (count - 1),
            float(closed.step_s[0] - waits[0]) + step.summed_s,
        )
        by_hand = max(own + way.servers * turn, count * (turn / 2 + step.after["optimizer"]))
        assert float(closed.step_s[0]) == pytest.approx(by_hand, rel=1e-3)


def test_servers_take_an_update_out_of_a_step_at_the_pace_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, original = [], async_replicas.step_ends

    def ends(sync: Any, own: Any, *rest: Any) -> Any:
        seen.append(own)
        return original(sync, own, *rest)

    monkeypatch.setattr(async_replicas, "step_ends", ends)
    made = setup("dp8")
    for times in (1, 300):
        practice = replace(made.practice, update_bytes=times * made.practice.update_bytes)
        replica_comparison.compare_syncs(
            replace(made, practice=practice), {"any": any_time(None)}, {3: 0.1}, {}, 0.0, 0
        )
    short, short_slow, long, long_slow = seen
    assert long == pytest.approx(short) and long_slow == pytest.approx(short_slow), (
        "however long updates are"
    )
    assert short_slow[0, 3] < 0.5 * short[0, 3]


def test_checkpoints_are_of_all_that_servers_hold() -> None:
    made = setup("dp8")
    served = made_with(made, sync.make_sync("parameter_server", staleness=4, servers=8))
    assert simulate_run.checkpoint_bytes(served) == simulate_run.checkpoint_bytes(
        made_with(made, None)
    )


@pytest.mark.parametrize(
    "way", [period(8), period(8, 2, 1), sync.make_sync("parameter_server", staleness=4, servers=4)]
)
def test_one_replica_waits_for_nobody(way: Any) -> None:
    made = setup("tp8")
    assert made_with(made, way).estimate().step_s[0] == pytest.approx(made.estimate().step_s[0])


def test_ranks_of_a_sequence_agree_in_each_step_all_the_same() -> None:
    apart, alone = (
        next(part for part in one.estimate().time if part.name == "dp exposed").value[0]
        for one in (made_with(setup("dp4.cp2"), period(10**9)), setup("cp2", batch=16))
    )
    assert apart == pytest.approx(alone, rel=1e-6) and alone > 0


def made_with(one: Scenario, how: Any) -> Scenario:
    return replace(one, sync=how)


def test_files(everything: report.SimulationReport, tmp_path: Path) -> None:
    for suffix in (".svg", ".html", ".json", ".csv"):
        report.write_report(tmp_path / f"out{suffix}", everything)
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    titles = [
        each.text
        for each in root.iter("{http://www.w3.org/2000/svg}text")
        if each.get("font-weight")
    ]
    assert titles == [everything.title, "Goodput", "Weak scaling", "Weak scaling: shares"]
    assert "reduce" in (tmp_path / "out.json").read_text()
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["devices"] for row in rows] == ["16", "32", "64"]
    page = (tmp_path / "out.html").read_text()
    held = re.search(r'id="data">(.*?)</script>', page)
    assert held is not None
    sections = {one["id"]: one["blocks"] for one in json.loads(held[1])["sections"]}
    assert list(sections) == ["summary", "step", "stragglers", "replicas", "failures", "scaling"]
    assert sections["step"][0]["kind"] == "timeline" and sections["step"][0]["spans"]
    with pytest.raises(ConfigError, match=r"--out = .*ends in one of \.svg, \.html, \.json, \.csv"):
        report.write_report(tmp_path / "out.pdf", everything)


def test_text(everything: report.SimulationReport) -> None:
    said = report.report_text(everything, width=100).plain
    for wanted in (
        "a device x1.5, stage 1",
        "device 3 (",
        "a link of tp x4, stage 0",
        "every 10 steps (local_sgd)",
        "Daly",
        "run file",
        "efficiency",
    ):
        assert wanted in said


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"slow": {16: 2.0}}, "--slow = 16: h100x16 has no such device"),
        ({"slow": {0: 0.0}}, "--slow = 0.0"),
        (
            {"slow": {None: 1.5, **dict.fromkeys(range(16), 2.0)}},
            "--slow = 1.5: without DEVICE= adds one slow device",
        ),
        (
            {"links": {"cp": 4.0}},
            "--slow-link = 'cp': is not an axis of .* Write one of pp, dp, tp",
        ),
        ({"links": {"tp": 0.5}}, "--slow-link = 0.5"),
        ({"jitter": 3.0}, "--jitter = 3.0"),
        (
            {"checkpoint_s": 3.0},
            "--checkpoint = 3.0: applies only to failures, and the simulation has none",
        ),
        ({"storage_gbps": 3.0}, "--storage = 3.0: applies only to failures"),
        ({"restart_s": 3.0}, "--restart = 3.0: applies only to failures"),
        ({"mtbf_h": 100.0}, "--checkpoint = None: the time of a checkpoint is not given"),
        ({"mtbf_h": 100.0, "checkpoint_s": 3.0, "storage_gbps": 3.0}, "--checkpoint = 3.0"),
        ({"mtbf_h": -1.0, "checkpoint_s": 3.0}, "--mtbf = -1.0"),
        ({"scale": "weak"}, "--scale = 'weak': --scale and --to go together"),
        ({"to": 64}, "--to = 64: --scale and --to go together"),
        ({"scale": "weak", "to": 8}, "--to = 8: is fewer than the 16 devices"),
    ],
)
def test_what_cannot_be(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate_run.simulate_scenario(
            setup("dp2.pp4.tp2", 64, 8), simulate_run.SimulateRequest(**asked), UNMEASURED
        )


def test_a_layout_that_does_not_fit() -> None:
    made = setup("dp4")
    fix = "Give --layout with 8 ranks, or --cluster with 4 devices"
    with pytest.raises(
        ConfigError, match=rf"dp4': is a layout of 4, and h100x8 has 8 devices. {fix}"
    ):
        replace(made, cluster=Cluster.parse("h100x8"))
    with pytest.raises(
        ConfigError,
        match=r"train.batch = 64: .* 4 microbatches over 3 data ranks.* a multiple of 12",
    ):
        setup("dp3")
    with pytest.raises(ConfigError, match="the model has 19 parts, and pp32 has 32 stages"):
        setup("pp32")


def test_many_devices() -> None:
    """100,000, each at its own pace: 1,562 pipelines of which no two are equal, in steps that are
    drawn."""
    made = setup("dp1563.pp8.tp8", 1563 * 16, 16)
    planned, jittered = stragglers.straggler_table(made, {}, {}, 0.03, 0)
    assert (
        made.devices > 100_000
        and jittered.step_s > planned.step_s + 50 * jittered.error_s > planned.step_s
    )


RUN = """
[model]
build = "weft.models:decoder"
dim = 512
heads = 8
layers = 8
vocab = 1024
seq_len = 256
[data]
build = "weft.data:stdlib"
seq_len = 256
[precision]
compute = "bf16"
[train]
batch = 128
accumulate = 8
steps = 10000
[checkpoint]
every = 500
"""


def simulate_cli(tmp_path: Path, *arguments: str) -> Any:
    (tmp_path / "run.toml").write_text(RUN)
    return CliRunner().invoke(
        app, ["simulate", str(tmp_path / "run.toml"), "--cluster", "h100x32", *arguments]
    )


def test_a_schedule_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_registered", {})
    found = [
        json.loads(
            simulate_cli(
                tmp_path, "--layout", "dp8.pp4", "--json", "--set", f"pipeline.schedule={name}"
            ).stdout
        )
        for name in ("gpipe", "tests.staged:own_gpipe")
    ]
    assert [each.pop("pipeline")["schedule"] for each in found] == ["gpipe", "own"]
    estimates = ("estimate_s", "step_s_low", "step_s_high")  # of parts in another order
    one, own = ([each.pop(name) for name in estimates] for each in found)
    assert one == pytest.approx(own, rel=1e-9)
    assert found[0] == found[1]
    other = simulate_cli(
        tmp_path, "--layout", "dp8.pp4", "--set", "pipeline.schedule=tests.staged:none"
    )
    assert other.exit_code == 2 and "'tests.staged:none': tests.staged has no none" in other.output


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    options = [
        "--layout",
        "dp4.pp4.tp2",
        "--slow",
        "1.5",
        "--slow",
        "31=2",
        "--slow-link",
        "pp=4",
        "--jitter",
        "0.02",
    ]
    more = [
        "--mtbf",
        "1000",
        "--checkpoint",
        "2",
        "--restart",
        "60",
        "--scale",
        "strong",
        "--to",
        "128",
    ]
    done = simulate_cli(tmp_path, *options, *more, "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["devices"] == 32 and found["fits"] and found["pipeline"]["schedule"] == "1f1b"
    assert found["estimate_s"] == pytest.approx(found["step_s"], rel=0.1)
    assert [interval["name"] for interval in found["failures"]["intervals"]] == [
        "Young",
        "Daly",
        "best",
        "run file",
    ]
    assert found["failures"]["intervals"][3]["every"] == 500
    assert '"id":"scaling"' in out.read_text() and found["timeline"]["ranks"]
    shown = simulate_cli(tmp_path, "--layout", "dp4.pp4.tp2+sequence")
    assert (
        shown.exit_code == 0
        and "the estimate's closed form" in shown.stdout
        and "rank 3" in shown.stdout
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layout", "dp4"], "--layout = 'dp4': is a layout of 4"),
        (["--layout", "dp32", "--slow", "x=3"], "--slow = 'x=3': is neither a factor nor"),
        (["--layout", "dp16+much.tp2"], "axis dp has no option 'much'"),
        (
            ["--layout", "fsdp32", "--set", "sync.name=parameter_server"],
            "sync.name = 'parameter_server'",
        ),
        (
            ["--layout", "dp8.pp4", "--set", "pipeline.cut=bogus"],
            "pipeline.cut = 'bogus': not a way to cut stages",
        ),
        (
            ["--layout", "dp8.pp4", "--set", 'pipeline.cut=["blocks.2"]'],
            "1f1b over dp8.pp4 has 4 stages",
        ),
        (
            ["--layout", "dp32", "--slow", "2", "--slow", "3"],
            "--slow = 3.0: --slow without a device is given twice",
        ),
        (
            ["--layout", "dp32", "--slow-link", "dp"],
            "--slow-link = 'dp': is not an axis with a factor",
        ),
        (["--layout", "dp16.tp2", "--scale", "up", "--to", "64"], "--scale = 'up'"),
        (["--layout", "dp16.tp2", "--era", "none"], "--era = 'none'"),
        (["--layout", "dp16.tp2", "--out", "x.pdf"], "--out = 'x.pdf'"),
    ],
)
def test_the_command_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = simulate_cli(tmp_path, *arguments)
    assert done.exit_code == 2 and message in done.stderr
