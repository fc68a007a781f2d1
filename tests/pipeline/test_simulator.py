"""The simulator against the definition of time, written out; and against the laws of uneven stages
and messages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

import pytest

from weft.core.action_costs import ActionCosts
from weft.core.errors import ConfigError
from weft.core.schedule import Action, Schedule
from weft.pipeline import schedules
from weft.pipeline.simulator import simulate


def random_schedule(rng: random.Random) -> Schedule:
    """Any placement, any order that can run; each backward split or not."""
    stages, ranks, microbatches = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
    placement = tuple(rng.randrange(ranks) for _ in range(stages))
    split = {(s, m) for s in range(stages) for m in range(microbatches) if rng.random() < 0.5}
    left = {
        Action(kind, s, m)
        for kind in ("F", "B")
        for s in range(stages)
        for m in range(microbatches)
    }
    left |= {Action("W", s, m) for s, m in split}
    made = Schedule("random", placement, ((),) * ranks)
    order: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        action = rng.choice(sorted(a for a in left if not left.intersection(made.needs(a))))
        left.remove(action)
        order[placement[action.stage]].append(action)
    return Schedule("random", placement, tuple(map(tuple, order)))


def random_costs(rng: random.Random, stages: int) -> ActionCosts:
    def some(count: int) -> float | Sequence[float]:
        return rng.choice(
            [rng.random(), [rng.choice([0.0, rng.random(), 1.0]) for _ in range(count)]]
        )

    return ActionCosts(some(stages), some(stages), some(stages), comm_s=some(stages - 1))


def defined(made: Schedule, costs: ActionCosts) -> dict[Action, tuple[float, float]]:
    """Start and stop of every action, straight from the definition."""
    of = {
        field: costs.each(field, made.stages) for field in ("forward_s", "backward_s", "weight_s")
    }
    comm = costs.each("comm_s", made.stages - 1)
    everything = {a for order in made.order for a in order}
    before = {b: a for order in made.order for a, b in itertools.pairwise(order)}

    def seconds(a: Action) -> float:
        if a.kind == "F":
            return of["forward_s"][a.stage]
        whole = a.kind == "B" and Action("W", *a[1:]) not in everything
        return of["backward_s"][a.stage] * (a.kind == "B") + of["weight_s"][a.stage] * (
            whole or a.kind == "W"
        )

    @cache
    def stop(a: Action) -> float:
        return start(a) + seconds(a)

    @cache
    def start(a: Action) -> float:
        arrivals = [stop(before[a])] if a in before else [0.0]
        for need in made.needs(a):
            away = made.placement[need.stage] != made.placement[a.stage]
            arrivals.append(stop(need) + (comm[min(need.stage, a.stage)] if away else 0.0))
        return max(arrivals)

    return {a: (start(a), stop(a)) for a in everything}


def test_random_schedules_and_costs() -> None:
    rng = random.Random(0)
    for _ in range(300):
        made = random_schedule(rng)
        costs = random_costs(rng, made.stages)
        found = {
            a: (start, stop)
            for lane in simulate(made, costs).lanes
            for a, start, stop in lane.spans
        }
        want = defined(made, costs)
        assert found.keys() == want.keys()
        for action, times in want.items():
            assert found[action] == pytest.approx(times, abs=1e-12), (
                f"{action} of {made} with {costs}"
            )


def uneven(rng: random.Random, ranks: int) -> tuple[list[float], ActionCosts]:
    """Seconds of a microbatch per stage, F and B in one proportion everywhere."""
    times = [0.1 + rng.random() for _ in range(ranks)]
    parts = {
        f: [share * t for t in times]
        for f, share in (("forward_s", 0.3), ("backward_s", 0.45), ("weight_s", 0.25))
    }
    return times, ActionCosts(**parts)


def test_uneven_stages() -> None:
    """T = sum t + (m-1) max t (Alpa, Zheng et al. 2022): gpipe exactly; 1f1b never longer, and
    exactly where the last is slowest: a slow stage before it fills its wait with the forwards that
    1f1b lets it do ahead."""
    rng = random.Random(1)
    for _ in range(100):
        ranks, microbatches = rng.randint(1, 6), rng.randint(1, 12)
        times, costs = uneven(rng, ranks)
        law = sum(times) + (microbatches - 1) * max(times)
        assert simulate(
            schedules.make_schedule("gpipe", ranks, microbatches), costs
        ).makespan_s == pytest.approx(law, abs=1e-9)
        found = simulate(schedules.make_schedule("1f1b", ranks, microbatches), costs).makespan_s
        assert found <= law + 1e-9
        if times[-1] == max(times):
            assert found == pytest.approx(law, abs=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_messages_take_time_between_ranks_only(ranks: int) -> None:
    # One microbatch there and back: every boundary is crossed twice.
    made = schedules.make_schedule("gpipe", ranks, 1)
    assert simulate(made, ActionCosts(comm_s=0.5)).makespan_s == 3.0 * ranks + 2 * 0.5 * (ranks - 1)
    lone = Schedule("lone", (0,) * ranks, (tuple(a for a in sorted_by_run(made)),))
    assert simulate(lone, ActionCosts(comm_s=0.5)).makespan_s == 3.0 * ranks


def sorted_by_run(made: Schedule) -> list[Action]:
    timeline = simulate(made)
    return [
        a for _, a in sorted((start, a) for lane in timeline.lanes for a, start, _ in lane.spans)
    ]


def test_a_rank_computes_while_it_sends() -> None:
    timeline = simulate(schedules.make_schedule("gpipe", 2, 4), ActionCosts(comm_s=10.0))
    assert list(timeline.lanes[0].start_s)[:4] == [0.0, 1.0, 2.0, 3.0]
    assert list(timeline.lanes[1].start_s)[:4] == [11.0, 12.0, 13.0, 14.0]


def test_each_boundary_has_its_own_time() -> None:
    made = schedules.make_schedule("gpipe", 3, 1)
    assert simulate(made, ActionCosts(comm_s=(0.25, 2.0))).makespan_s == 9.0 + 2 * 2.25


def test_an_update_takes_its_time() -> None:
    made = schedules.make_schedule("pipedream", 1, 3)
    assert simulate(made, ActionCosts(update_s=0.5)).makespan_s == 3 * 3.5
    assert simulate(made, ActionCosts(update_s=0.5)).lanes[0].seconds["U"] == 1.5


def test_activation_sizes() -> None:
    timeline = simulate(
        schedules.make_schedule("1f1b", 2, 4),
        ActionCosts(activation_bytes=(100.0, 7.0), freed_by_b=0.5),
    )
    assert timeline.peak_memory == (200.0, 7.0)
    split = simulate(
        schedules.make_schedule("zb-h1", 2, 4), ActionCosts(activation_bytes=100.0, freed_by_b=0.5)
    )
    assert split.peak_live == (2.0, 2.0) and split.peak_memory == (200.0, 150.0), (
        "rank 1: B0 is done before F1"
    )


def test_large_schedules_in_closed_form() -> None:
    """64 ranks, 512 microbatches: too large for anything that is not near-linear."""
    assert simulate(schedules.make_schedule("1f1b", 64, 512)).bubble_s == 63 * 3
    halves = ActionCosts(0.5, 0.5, 0.5)
    assert simulate(
        schedules.make_schedule("interleaved", 64, 512), halves
    ).bubble_s == pytest.approx(63 * 3 / 2, abs=1e-9)


def test_a_deadlock_is_named() -> None:
    a, b = (Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0))
    with pytest.raises(ConfigError, match="1B0 on rank 1 stands before 1F0"):
        simulate(Schedule("mine", (0, 1), (a, b)))
    first = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    second = (Action("F", 1, 1), Action("F", 1, 0), Action("B", 1, 0), Action("B", 1, 1))
    with pytest.raises(
        ConfigError, match="deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"
    ):
        simulate(Schedule("mine", (0, 1), (first, second)))


@pytest.mark.parametrize(
    "costs, message",
    [
        (
            ActionCosts(forward_s=(1.0, 2.0)),
            r"costs.forward_s = \(1.0, 2.0\): 2 numbers for 4 stages",
        ),
        (ActionCosts(comm_s=(1.0,) * 4), "costs.comm_s = .*: 4 numbers for 3 boundaries"),
        (ActionCosts(weight_s=-1.0), "costs.weight_s = -1.0: not a time or size"),
        (ActionCosts(backward_s=float("nan")), "costs.backward_s = nan"),
        (ActionCosts(activation_bytes=float("inf")), "costs.activation_bytes = inf"),
    ],
)
def test_costs_that_do_not_fit(costs: ActionCosts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(schedules.make_schedule("1f1b", 4, 8), costs)


def test_a_share_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"costs.freed_by_b = 1.5"):
        ActionCosts(freed_by_b=1.5)


def test_costs_of_a_rank_are_shared_by_its_stages() -> None:
    costs = ActionCosts(
        forward_s=1.0, backward_s=(4.0, 2.0, 6.0), comm_s=0.5, activation_bytes=12.0
    ).shared((0, 1, 0))
    assert costs.forward_s == (0.5, 1.0, 0.5) and costs.weight_s == (0.5, 1.0, 0.5)
    assert costs.activation_bytes == (6.0, 12.0, 6.0)
    assert costs.backward_s == (4.0, 2.0, 6.0) and costs.comm_s == 0.5, (
        "a list is per stage, a message is a message"
    )
    assert ActionCosts().shared((0, 1, 0)).activation_bytes == 1.0, "a count stays a count"
