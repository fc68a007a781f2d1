"""solved: never slower than a fixed schedule, faster where stages are uneven, within the memory
cap, near the bound."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from weft.core.action_costs import ActionCosts
from weft.core.errors import ConfigError
from weft.core.schedule import Action, Schedule
from weft.pipeline import schedules
from weft.pipeline.schedules import solved
from weft.pipeline.schedules._scheduling_problem import SchedulingProblem
from weft.pipeline.simulator import simulate
from weft.pipeline.timeline import Timeline
from weft.pipeline.validate import find_faults

QUICK = 120  # evaluations


def uneven(seed: int, stages: int) -> ActionCosts:
    """Each stage's F, B and W up to 4 times those of another; messages of up to 0.1."""
    rng = random.Random(seed)
    forward, backward, weight = ([rng.uniform(0.5, 2.0) for _ in range(stages)] for _ in range(3))
    return ActionCosts(forward, backward, weight, comm_s=rng.choice([0.0, 0.1]))


def peak(timeline: Timeline) -> float:
    """The most activations that any rank has live, each stage's counted as one."""
    return max(peak * len(lane.stages) for peak, lane in zip(timeline.peak_live, timeline.lanes))


def fixed(
    placement: tuple[int, ...], microbatches: int, costs: ActionCosts, memory: float
) -> Iterator[float]:
    """Makespans of the folder's synchronous schedules of this placement within the cap."""
    ranks = 1 + max(placement)
    for name, build in schedules.registry().items():
        options = (
            {"chunks": len(placement) // ranks}
            if "chunks" in inspect.signature(build).parameters
            else {}
        )
        if name == solved.NAME or options == {"chunks": 1}:
            continue
        made = schedules.make_schedule(name, ranks, microbatches, **options)
        if made.placement == placement and not made.versions:
            timeline = simulate(made, costs)
            if peak(timeline) <= memory:
                yield timeline.makespan_s


# ranks, microbatches, chunks, placement, memory; then, on average: time saved against the best
# fixed schedule at least, and time above the bound at most. Set from what seeds 100 to 119 gave,
# with a margin, and held here on others. The bound leaves 1 to 7 % to save; with memory for 2 only
# naive fits, hence the 40 %.
GRID = [
    (4, 8, 1, "loop", math.inf, 0.0, 0.01),
    (4, 8, 1, "loop", 4, 0.008, 0.01),
    (4, 12, 1, "loop", 7, 0.0, 0.01),
    (4, 8, 1, "loop", 2, 0.40, 0.125),
    (8, 16, 1, "loop", 8, 0.008, 0.018),
    (4, 8, 2, "v", 8, 0.014, 0.028),
    (4, 8, 2, "loop", 10, 0.023, 0.04),
]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "shape", "memory", "saved", "gap"), GRID
)
def test_beats_the_fixed_ones_where_stages_are_uneven(
    ranks: int, microbatches: int, chunks: int, shape: str, memory: float, saved: float, gap: float
) -> None:
    saves, gaps = [], []
    for seed in range(6):
        costs = uneven(seed, ranks * chunks)
        ask = {"costs": costs, "memory": memory, "placement": shape, "chunks": chunks}
        found = solved.build(ranks, microbatches, **ask, evaluations=QUICK)
        assert find_faults(found) == ()
        timeline = simulate(found, costs)
        assert peak(timeline) <= memory
        best = min(fixed(found.placement, microbatches, costs, memory), default=math.inf)
        bound = solved.bound(ranks, microbatches, **ask)
        assert bound * (1 - 1e-9) <= timeline.makespan_s <= best * (1 + 1e-9)
        saves.append(1 - timeline.makespan_s / best)
        gaps.append(timeline.makespan_s / bound - 1)
    print(f"saved {sum(saves) / 6:.3f}, above the bound {sum(gaps) / 6:.4f}")
    assert sum(saves) / 6 >= saved
    assert sum(gaps) / 6 <= gap


@pytest.mark.parametrize("split", [True, False])
def test_its_clock_is_the_simulator_s(split: bool) -> None:
    for seed in range(5):
        costs = uneven(seed, 6)
        problem = SchedulingProblem(3, 5, costs, None, "v", 2, split)
        found = solved.build(
            3, 5, costs=costs, placement="v", chunks=2, split=split, evaluations=60
        )
        orders = problem.orders(found)
        assert orders is not None and found.split == split
        times = problem.times(orders)
        assert times is not None
        timeline = simulate(found, costs)
        for order, lane in zip(orders, timeline.lanes):
            assert [times[0][a] for a in order] == pytest.approx(list(lane.start_s), abs=1e-12)
            assert [times[1][a] for a in order] == pytest.approx(list(lane.stop_s), abs=1e-12)
        peaks = [max(timeline.memory(rank)[1]) * 2 for rank in range(3)]  # a rank holds two stages
        assert problem.peaks(orders) == pytest.approx(peaks)


def all_schedules(placement: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    """Every order of whole backwards, deadlocks too."""
    ranks = range(1 + max(placement))
    actions = [
        Action(k, s, j)
        for s in range(len(placement))
        for j in range(microbatches)
        for k in ("F", "B")
    ]
    own = [[a for a in actions if placement[a.stage] == r] for r in ranks]
    for order in itertools.product(*map(itertools.permutations, own)):
        yield Schedule("any", placement, order)


def test_nothing_is_faster_than_the_bound_and_small_cases_are_solved() -> None:
    every = [made for made in all_schedules((0, 1), 2) if not find_faults(made)]
    assert len(every) > 10
    for seed, memory in itertools.product(range(12), (1, 2)):
        costs = uneven(seed, 2)
        timed = [simulate(made, costs) for made in every]
        best = min(t.makespan_s for t in timed if peak(t) <= memory)
        bound = solved.bound(2, 2, costs=costs, memory=memory, split=False)
        found = simulate(
            solved.build(2, 2, costs=costs, memory=memory, split=False), costs
        ).makespan_s
        assert bound <= best * (1 + 1e-9) and found == pytest.approx(best, rel=1e-9)


def test_even_stages_reach_the_known_bubbles() -> None:
    """Bubbles of the optimum: (p-1)(F+B-W) with the memory of 1F1B; (p-1)F without a cap, the way
    to the last rank."""
    costs = ActionCosts(1.0, 1.1, 0.6)
    for ranks in (4, 8):
        made = simulate(solved.build(ranks, 4 * ranks, costs=costs, memory=ranks), costs)
        assert made.bubble_s == pytest.approx((ranks - 1) * 1.5, abs=1e-9)
        made = simulate(solved.build(ranks, 4 * ranks, costs=costs), costs)
        assert made.bubble_s == pytest.approx(ranks - 1, abs=1e-9)
        whole = simulate(
            solved.build(ranks, 4 * ranks, costs=costs, memory=ranks, split=False), costs
        )
        assert whole.bubble_s == pytest.approx((ranks - 1) * 2.7, abs=1e-9)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_size_is_sound(ranks: int) -> None:
    for microbatches, (shape, chunks) in itertools.product(
        (1, 2, 3, 9), (("loop", 1), ("v", 2), ("loop", 3))
    ):
        for memory in (chunks, 2 * chunks + 1):
            made = solved.build(
                ranks, microbatches, memory=memory, placement=shape, chunks=chunks, evaluations=20
            )
            assert find_faults(made) == () and (made.ranks, made.microbatches) == (
                ranks,
                microbatches,
            )
            assert peak(simulate(made)) <= memory


@pytest.mark.parametrize("names", [("gpipe", "1f1b"), ("1f1b", "gpipe")])
def test_of_equally_fast_ones_the_least_memory(names: tuple[str, str]) -> None:
    problem = SchedulingProblem(3, 6, ActionCosts(), None, "loop", 1, split=False)
    search = solved._ScheduleSearch(problem, random.Random(0))
    search.makespan = search.peak = math.inf
    for name in names:
        orders = problem.orders(schedules.make_schedule(name, 3, 6))
        assert orders is not None
        search.offer(24.0, orders)
    assert search.peak == 3
    assert search.best == problem.orders(schedules.make_schedule("1f1b", 3, 6))


@pytest.mark.parametrize("step", ["rules", "moves"])
def test_each_search_is_worth_its_time(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def total() -> float:
        made = (
            (costs, solved.build(4, 12, costs=costs, memory=5, chunks=2, evaluations=QUICK))
            for costs in several
        )
        return sum(simulate(found, costs).makespan_s for costs, found in made)

    several = [uneven(seed, 8) for seed in range(4)]
    whole = total()
    monkeypatch.setattr(solved._ScheduleSearch, step, lambda self, count: None)
    assert total() > whole * 1.003


def test_a_cap_per_rank_in_bytes_with_what_a_backward_frees() -> None:
    costs = ActionCosts(activation_bytes=[3.0, 2.0, 1.0], freed_by_b=0.75)
    made = simulate(solved.build(3, 9, costs=costs, memory=[9.0, 4.0, 1.5]), costs)
    assert all(peak <= cap for peak, cap in zip(made.peak_memory, [9.0, 4.0, 1.5]))
    assert made.peak_memory[2] == 1.25 and made.makespan_s < 3 * 9 * 3, (
        "the next F begins before the W is done"
    )


def test_the_same_on_every_rank_and_run() -> None:
    ask = {"costs": uneven(3, 4), "memory": 2, "evaluations": 60}
    first = solved.build(4, 8, **ask)
    random.seed(1)
    assert solved.build(4, 8, **ask) == first == schedules.make_schedule("solved", 4, 8, **ask)
    assert solved.build(4, 8, **ask, seed=1) != first, "chance has a part"


def test_a_user_s_schedule_may_be_a_solved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_registered", {})
    schedules.register(
        lambda ranks, microbatches: solved.build(ranks, microbatches, memory=2), "mine"
    )
    assert find_faults(schedules.make_schedule("mine", 3, 4)) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"memory": 0.5},
            (
                "pipeline.memory = 0.5: one microbatch alone keeps more than that live on a rank."
                " Use at"
            ),
        ),
        ({"memory": 1, "placement": "v", "chunks": 2}, "Use at least 2"),
        ({"memory": [1, 0.5, 1]}, "Use at least [1.0, 1.0, 1.0]"),
        ({"memory": [1, 1]}, "2 numbers for 3 ranks"),
        ({"memory": math.nan}, "pipeline.memory"),
        ({"placement": "w"}, "pipeline.placement = 'w': is not a placement"),
        ({"placement": [0, 1, 1]}, "every rank at least once"),
        ({"chunks": 0}, "pipeline.chunks = 0"),
        ({"costs": ActionCosts([1.0, 2.0])}, "2 numbers for 3 stages"),
    ],
)
def test_refusals(options: dict, words: str) -> None:
    for ask in (solved.build, solved.bound):
        with pytest.raises(ConfigError) as refusal:
            ask(3, 4, **options)
        assert words in str(refusal.value)


def test_the_least_cap_that_is_named_works() -> None:
    costs = ActionCosts(activation_bytes=[1.0, 2.0, 0.5, 0.25])
    with pytest.raises(ConfigError) as refusal:
        solved.build(2, 4, costs=costs, memory=1, chunks=2)
    assert "at least 2.25" in str(refusal.value)
    made = solved.build(2, 4, costs=costs, memory=2.25, chunks=2, evaluations=20)
    assert find_faults(made) == () and max(simulate(made, costs).peak_memory) <= 2.25
