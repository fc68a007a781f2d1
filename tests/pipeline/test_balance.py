"""partition: against every partition of small chains, by its laws, and at its full size."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from weft.core.errors import ConfigError
from weft.pipeline.balance import partition

RANDOM = random.Random(5)


def stages(
    costs: Sequence[float], cuts: Sequence[int], crossing: Sequence[float] | None = None
) -> list[float]:
    """Time of each stage, by the definition."""
    n = len(costs)
    cross = [0.0] * (n + 1) if crossing is None else [0.0, *crossing[1:], 0.0]
    return [sum(costs[a:i]) + cross[a] + cross[i] for a, i in zip(cuts, [*cuts[1:], n])]


def every(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    return ((0, *cuts) for cuts in itertools.combinations(range(1, n), parts - 1))


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_best_of_all_partitions(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 10)
    parts = rng.randint(1, n)
    costs = [rng.choice([rng.random(), rng.randint(0, 4), 0.1]) for _ in range(n)]
    crossing = [rng.choice([0.0, rng.random(), math.inf]) for _ in range(n)] if seed % 2 else None
    sizes = [rng.randint(0, 3) for _ in range(n)] if seed % 3 else None
    limit = rng.randint(2, 12)
    fixed = rng.sample(range(1, n), min(n - 1, rng.randint(0, 2)))

    def fits(cuts: tuple[int, ...]) -> bool:
        return set(fixed) <= set(cuts) and (sizes is None or max(stages(sizes, cuts)) <= limit)

    times = [max(stages(costs, cuts, crossing)) for cuts in every(n, parts) if fits(cuts)]
    best = min(times, default=math.inf)
    ask = {"crossing": crossing, "fixed": fixed, "sizes": sizes, "limit": limit}
    if math.isinf(best):
        with pytest.raises(ConfigError, match="pipeline"):
            partition(costs, parts, **ask)
    else:
        found = partition(costs, parts, **ask)
        assert len(found) == parts and found[0] == 0 and fits(found)
        assert max(stages(costs, found, crossing)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("cost", [1.0, 0.1, 1 / 3, 0.0])
def test_equal_atoms_give_even_stages(cost: float) -> None:
    for n in range(1, 26):
        for parts in range(1, n + 1):
            cuts = partition([cost] * n, parts)
            sizes = [i - a for a, i in zip(cuts, [*cuts[1:], n])]
            if cost:
                assert max(sizes) - min(sizes) <= 1, (n, parts, cuts)


def test_a_cut_that_costs_is_taken_where_it_costs_least() -> None:
    assert partition([1, 1, 1, 1], 2) == (0, 2)
    assert partition([1, 1, 1, 1], 2, crossing=[0, 0, 5, 0]) in {(0, 1), (0, 3)}
    assert partition([1, 1, 1, 1], 2, crossing=[0, math.inf, math.inf, 9]) == (0, 3)


def test_a_difference_of_a_billionth_decides() -> None:
    assert partition([1 - 2e-9, 1e-9, 1], 2) == (0, 2)
    assert partition([1, 1e-9, 1 - 2e-9], 2) == (0, 1)


def test_laws() -> None:
    for _ in range(20):
        n = RANDOM.randint(2, 40)
        costs = [RANDOM.random() for _ in range(n)]
        best = [max(stages(costs, partition(costs, parts))) for parts in range(1, n + 1)]
        assert all(b <= a + 1e-12 for a, b in itertools.pairwise(best)), (
            "more stages are never slower"
        )
        assert best[0] == pytest.approx(sum(costs)) and best[-1] == max(costs)

        parts = RANDOM.randint(1, n)
        assert partition([c * 2.0**20 for c in costs], parts) == partition(costs, parts), (
            "the unit does not matter"
        )
        more = list(costs)
        more[RANDOM.randrange(n)] += 0.5
        assert max(stages(more, partition(more, parts))) >= best[parts - 1] - 1e-12, (
            "more work is never faster"
        )
        back = partition(costs[::-1], parts)
        assert max(stages(costs[::-1], back)) == pytest.approx(best[parts - 1]), "either direction"


@pytest.mark.parametrize("tail", [False, True])
def test_ten_thousand_atoms_in_512_stages(tail: bool) -> None:
    rng = random.Random(1)
    costs = [rng.paretovariate(1.1) if tail else rng.random() for _ in range(10_000)]
    crossing = [0.01 * rng.random() for _ in costs]
    cuts = partition(costs, 512, crossing=crossing)
    slowest = max(stages(costs, cuts, crossing))
    assert len(set(cuts)) == 512
    bound = max(max(costs), sum(costs) / 512)
    assert bound <= slowest <= bound * (1.001 if tail else 1.06)


def ranks(times: Sequence[float], placement: Sequence[int]) -> list[float]:
    return [
        sum(t for t, r in zip(times, placement) if r == rank) for rank in sorted(set(placement))
    ]


@pytest.mark.parametrize("shape", ["loop", "v"])
def test_a_placement_balances_ranks(shape: str) -> None:
    """Never above the chain's own partition, above the best of all by 3 % on average at most."""
    rng, ratios = random.Random(3), []
    placement = (0, 1, 0, 1) if shape == "loop" else (0, 1, 1, 0)
    for _ in range(30):
        costs = [rng.random() for _ in range(14)]
        found = max(ranks(stages(costs, partition(costs, 4, placement=placement)), placement))
        assert found <= max(ranks(stages(costs, partition(costs, 4)), placement)) + 1e-12
        ratios.append(
            found / min(max(ranks(stages(costs, cuts), placement)) for cuts in every(14, 4))
        )
    assert min(ratios) >= 1 - 1e-12 and sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda: partition([1, 1], 3),
            "pipeline = 3: the model has only 2 parts to divide among stages. Use at most 2",
        ),
        (lambda: partition([1, 1], 0), "pipeline = 0: a pipeline needs at least one stage"),
        (lambda: partition([1, -1], 2), "a time is negative"),
        (lambda: partition([1, math.nan], 2), "a time is negative or not a number"),
        (
            lambda: partition([1, 1, 1], 2, sizes=[1, 5, 1], limit=4),
            "atom 1 alone is above the limit of 4",
        ),
        (
            lambda: partition([1, 1, 1], 2, sizes=[3, 3, 3], limit=4),
            "no partition keeps every stage within",
        ),
        (lambda: partition([1, 1, 1], 2, fixed=[1, 2]), "2 cuts are fixed. Use at least 3 stages"),
        (lambda: partition([1, 1, 1], 2, fixed=[3]), "a fixed cut lies outside atoms 1 to 2"),
        (
            lambda: partition([1, 1, 1], 3, crossing=[0, math.inf, 0]),
            "2 cuts are needed and 1 allowed",
        ),
        (
            lambda: partition([1, 1, 1], 2, crossing=[0, math.inf, 0], fixed=[1]),
            "a fixed cut is also forbidden",
        ),
        (lambda: partition([1, 1, 1], 2, placement=[0]), "the placement has 1 stages"),
    ],
)
def test_refusals_name_the_number(ask, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ask()
    assert words in str(refusal.value)
