"""What a run loses to failures, and the best interval between checkpoints. Formulas, and the run
itself drawn at random.

Failures come at a constant rate, `mtbf_s` apart on average over the whole cluster. Each costs the
restart and what was done since the last checkpoint that is whole. A checkpoint stops training for
`pause_s`, and is whole `written_s` later, beside training. All times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.core import ConfigError

from ..cost.layout_batch import Array

LEAST_S = 1e-9  # of what takes time
TRIED = 100_000  # numbers of checkpoints, of which the best is taken
LEAST = 1e-3  # of goodput: with less a run hardly ever gets from one checkpoint to the next


@dataclass(frozen=True)
class FailureModel:
    """How often the cluster fails, what a checkpoint takes and what a restart takes."""

    mtbf_s: float
    pause_s: float
    restart_s: float = 0.0
    written_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("mtbf", self.mtbf_s, LEAST_S),
            ("checkpoint", self.pause_s, LEAST_S),
            ("restart", self.restart_s, 0.0),
            ("storage", self.written_s, 0.0),
        ):
            if not math.isfinite(value) or value < least:
                raise ConfigError(f"--{name}", value, "is not a time", "use a number above 0")


@dataclass(frozen=True)
class MonteCarlo:
    """Many runs with failures drawn at random: the mean of their seconds, and its standard error;
    failures of a run."""

    wall_s: float
    error_s: float
    failures: float


def mtbf_of_all(
    devices: int, device_mtbf_s: float = math.inf, nodes: int = 0, node_mtbf_s: float = math.inf
) -> float:
    """Seconds between failures of any of them: rates add up."""
    return 1 / (devices / device_mtbf_s + nodes / node_mtbf_s)


def young_s(faults: FailureModel) -> float:
    """Seconds of training between checkpoints, to first order: sqrt(2 C M) (Young 1974, CACM
    17(9))."""
    return math.sqrt(2 * faults.pause_s * faults.mtbf_s)


def daly_s(faults: FailureModel) -> float:
    """The same to higher order: sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M from C = 2M on
    (Daly 2006, Future Generation Computer Systems 22(3))."""
    share = faults.pause_s / (2 * faults.mtbf_s)
    if share >= 1:
        return faults.mtbf_s
    return young_s(faults) * (1 + math.sqrt(share) / 3 + share / 9) - faults.pause_s


def expected_s(faults: FailureModel, steps: int, step_s: float, every: Array | int) -> Array:
    """Seconds that a run of so many steps takes, in expectation, if it saves after `every` of them,
    and not at its end:

        M exp((R+L)/M) (n (exp((t+C)/M) - 1) + exp(u/M) - 1)

    of n parts of t seconds between checkpoints, and u after the last. Daly's complete model (2006),
    with failures also while it saves, restarts or does work again. Files written beside training
    (L) count like a longer restart R: what was done while the last one was written is done again.
    Before the first L is 0.
    """
    mtbf, every = faults.mtbf_s, np.asarray(every)
    saves = (steps - 1) // every
    with np.errstate(over="ignore", invalid="ignore"):
        part = np.expm1((every * step_s + faults.pause_s) / mtbf)
        last = np.expm1((steps - saves * every) * step_s / mtbf)
        later = np.exp(faults.written_s / mtbf)
        parts = np.where(saves > 0, part + later * ((saves - 1) * part + last), last)
        return mtbf * np.exp(faults.restart_s / mtbf) * np.where(np.isnan(parts), np.inf, parts)


def simulate_failures(
    faults: FailureModel, steps: int, step_s: float, every: int, runs: int = 400, seed: int = 0
) -> MonteCarlo:
    """`runs` runs of `steps` steps that save after every `every` of them, failure by failure.

    Raises ConfigError for runs that would hardly end.
    """
    if steps * step_s < LEAST * expected_s(faults, steps, step_s, every):
        raise hopeless(faults)
    rng, mtbf, part_s = np.random.default_rng(seed), faults.mtbf_s, every * step_s + faults.pause_s
    wall, failures = np.zeros(runs), np.zeros(runs)
    whole = np.zeros(runs, int)  # checkpoints that are
    going, restart = np.arange(runs), 0.0
    while len(going):
        left = steps - whole[going] * every
        saves = (left - 1) // every  # before the end
        needed = restart + left * step_s + saves * faults.pause_s
        fails = rng.exponential(mtbf, len(going))
        wall[going] += np.minimum(fails, needed)
        up, failed = fails - restart, fails < needed
        done = np.clip((up - faults.written_s) // part_s, 0, saves).astype(int)
        whole[going] += np.where(failed, done, 0)
        failures[going] += failed
        going = going[failed]
        restart = faults.restart_s
    return MonteCarlo(wall.mean(), wall.std(ddof=1) / math.sqrt(runs), failures.mean())


def hopeless(faults: FailureModel) -> ConfigError:
    """Of a cluster on which a run hardly gets on."""
    written = f", is complete {faults.written_s:.3g} s later," if faults.written_s else ""
    problem = (
        f"a checkpoint takes {faults.pause_s:.3g} s{written} and a restart {faults.restart_s:.3g} s"
    )
    fix = "use fewer devices, or save and restart in less time"
    return ConfigError("--mtbf", f"{faults.mtbf_s:.3g} s of all devices together", problem, fix)


@dataclass(frozen=True)
class SaveInterval:
    """One way to choose how often to save: `every` steps, which take `interval_s`; the goodput that
    follows. As many steps as the run has: it never saves."""

    name: str
    every: int
    interval_s: float
    goodput: float


@dataclass(frozen=True)
class FailureCost:
    """What failures make of a run: `intervals` to choose from, the `best` among them; the run drawn
    at random with it; (interval_s, goodput) of a `curve`."""

    faults: FailureModel
    steps: int
    step_s: float
    intervals: tuple[SaveInterval, ...]
    drawn: MonteCarlo
    curve: tuple[tuple[float, float], ...]

    @property
    def best(self) -> SaveInterval:
        return next(each for each in self.intervals if each.name == "best")

    @property
    def best_first(self) -> list[SaveInterval]:
        return sorted(self.intervals, key=lambda each: each.name != "best")

    @property
    def planned_s(self) -> float:
        return self.steps * self.step_s

    @property
    def expected_s(self) -> float:
        return self.planned_s / self.best.goodput

    @property
    def lost_s(self) -> float:
        return self.expected_s - self.planned_s


def failure_cost(
    faults: FailureModel, steps: int, step_s: float, every: int = 0, seed: int = 0
) -> FailureCost:
    """`every`: steps between checkpoints that the run asks for, 0 if none. Raises ConfigError for a
    run that would hardly end."""

    def at(name: str, count: int) -> SaveInterval:
        count = min(count, steps)
        return SaveInterval(name, count, count * step_s, share(count))

    def share(count: int) -> float:
        return steps * step_s / float(expected_s(faults, steps, step_s, count))

    least = max(
        1, math.ceil(min(steps, faults.written_s / step_s))
    )  # one is written before the next
    ways = {"Young": young_s, "Daly": daly_s}
    choices = [
        at(name, max(least, round(min(way(faults), steps * step_s) / step_s)))
        for name, way in ways.items()
    ]
    even = -(
        -steps // _geometric_steps(1, -(-steps // least), TRIED)
    )  # of so many parts, as equal as can be
    tried = np.unique(np.maximum(least, np.append(even, _geometric_steps(least, steps, TRIED))))
    best = at("best", int(tried[expected_s(faults, steps, step_s, tried).argmin()]))
    if every:
        name = "run file" if every >= least else "run file, as writing lets it"
        choices.append(at(name, max(every, least)))
    choices.insert(2, best)
    if best.goodput < LEAST:
        raise hopeless(faults)
    counts = [each.every for each in choices]
    shown = _geometric_steps(
        max(least, min(best.every // 20, *counts)), min(max(best.every * 20, *counts), steps), 41
    )
    curve = tuple((count * step_s, share(count)) for count in shown.tolist())
    return FailureCost(
        faults,
        steps,
        step_s,
        tuple(choices),
        simulate_failures(faults, steps, step_s, best.every, seed=seed),
        curve,
    )


def _geometric_steps(low: int, high: int, number: int) -> Array:
    """Whole numbers from one to the other, each so many times the one before."""
    return np.unique(np.geomspace(low, high, number).round().astype(int))
