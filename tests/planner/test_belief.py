"""What measured steps say of constants: a machine with others is found from two of its steps, what
they do not tell stays, and intervals hold as many steps as they say."""

from __future__ import annotations

import numpy as np
import pytest

from weft.planner.cost.belief import (
    MOVED,
    PUBLISHED,
    Belief,
    ModelError,
    Move,
    Predict,
    moved,
)
from weft.planner.cost.hardware import Era
from weft.planner.cost.layout_batch import Array

ERA = Era(matmul=0.5, memory=0.6, network=0.5, fixed_s=0.01)
NAMES = list(MOVED)


def steps(work: Array) -> Predict:
    """Seconds of steps of so much computing, traffic and communication."""

    def predict(move: Move) -> Array:
        era = move(ERA)
        rates = np.array([era.matmul, era.memory, era.network])
        return (work / rates).sum(axis=1) + era.fixed_s

    return predict


def test_two_steps_tell_how_fast_a_machine_is() -> None:
    there = moved(
        ERA, np.array([{"matmul": -0.3, "network": 0.4}.get(name, 0.0) for name in NAMES])
    )
    seen, others = np.array([[3.0, 0, 0.01], [0.5, 0, 2]]), np.array([[2.0, 0, 1], [4, 0, 0.1]])
    true = [steps(work)(lambda era: there) for work in (seen, others)]
    belief = Belief.of(ModelError(spread=2, own=0.01)).learn(steps(seen), true[0])
    found = belief.move(ERA)
    assert found.matmul == pytest.approx(there.matmul, rel=0.02)
    assert found.network == pytest.approx(there.network, rel=0.02)
    assert steps(others)(belief.move) == pytest.approx(true[1], rel=0.02)
    assert abs(steps(others)(lambda era: era) / true[1] - 1).max() > 0.15  # before


def test_what_no_step_tells_stays() -> None:
    prior = Belief.of(PUBLISHED)
    belief = prior.learn(steps(np.array([[1.0, 0, 0]])), [3.0])
    network = NAMES.index("network")
    assert belief.shift[network] == pytest.approx(0, abs=1e-9)
    assert belief.covariance[network, network] == pytest.approx(prior.covariance[network, network])
    assert belief.shift[NAMES.index("matmul")] < -0.2
    assert belief.move(ERA).eight == pytest.approx(ERA.eight)


def test_steps_of_other_software_tell_less() -> None:
    prior, work = Belief.of(PUBLISHED), steps(np.array([[1.0, 0, 0]]))
    here = prior.learn(work, [3.0]).shift
    there = prior.learn(work, [3.0], [True]).shift
    at = NAMES.index("matmul")
    assert here[at] < there[at] < 0


def test_a_share_stays_one() -> None:
    assert moved(ERA, np.full(len(NAMES), 5.0)).matmul == 1.5


def test_intervals_hold_as_many_steps_as_they_say() -> None:
    """Machines drawn from what is believed before, with errors that no constant explains."""
    rng, error = np.random.default_rng(0), ModelError(spread=1, own=0.08)
    held, narrower = [], []
    for _ in range(60):
        work = rng.uniform(0.01, 2, (22, 3))
        prior = Belief.of(error)
        true = moved(ERA, rng.multivariate_normal(prior.shift, prior.covariance))
        own = np.exp(error.own * rng.normal(size=22))
        seconds = steps(work)(lambda era, true=true: true) * own
        belief = prior.learn(steps(work[:2]), seconds[:2])
        low, high = belief.interval(steps(work[2:]))
        held.append((low <= seconds[2:]) & (seconds[2:] <= high))
        before = prior.spread(steps(work[2:]))
        narrower.append(belief.spread(steps(work[2:])) < before)
    assert 0.76 < np.mean(held) < 0.84
    assert np.all(narrower)


def test_what_is_wrong_with_two_steps_alike_cancels() -> None:
    belief = Belief.of(ModelError(spread=2, own=0.01))
    same, other = np.array([[1.0, 0, 0.1], [1.1, 0, 0.11]]), np.array([[1.0, 0, 0], [0, 0, 1.0]])
    assert belief.spread(steps(same)).min() > 0.15
    assert belief.spread_of_ratios(steps(same))[0, 1] < 0.03
    assert belief.spread_of_ratios(steps(other))[0, 1] > 0.4
    assert belief.spread_of_ratios(steps(same))[0, 0] == 0
