"""Failures: what a run loses to them, and how often it is to save. Formulas, and the run itself drawn at random.

Failures come at a constant rate, `mtbf_s` apart on average over the whole cluster. Each costs the restart and what was
done since the last checkpoint that is whole. A checkpoint stops training for `pause_s`, and is whole `written_s` later,
beside training. All times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..cost.choices import Array
from ..errors import ConfigError

LEAST_S = 1e-9  # of what takes time
LEAST = 1e-3  # of goodput: with less a run hardly ever gets from one checkpoint to the next


@dataclass(frozen=True)
class Faults:
    """How often the cluster fails, what a checkpoint takes and what a restart takes."""

    mtbf_s: float
    pause_s: float
    restart_s: float = 0.0
    written_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("mtbf", self.mtbf_s, LEAST_S), ("checkpoint", self.pause_s, LEAST_S),
            ("restart", self.restart_s, 0.0), ("storage", self.written_s, 0.0),
        ):  # fmt: skip
            if not math.isfinite(value) or value < least:
                raise ConfigError(f"--{name}", value, "is no time", "use a number above 0")


@dataclass(frozen=True)
class Drawn:
    """Many runs with failures drawn at random: the mean of their seconds, and its standard error; failures of a run."""

    wall_s: float
    error_s: float
    failures: float


def mtbf_of_all(devices: int, device_mtbf_s: float = math.inf, nodes: int = 0, node_mtbf_s: float = math.inf) -> float:
    """Seconds between failures of any of them: rates add up."""
    return 1 / (devices / device_mtbf_s + nodes / node_mtbf_s)


def young_s(faults: Faults) -> float:
    """Seconds of training between checkpoints, to first order: sqrt(2 C M) (Young 1974, CACM 17(9))."""
    return math.sqrt(2 * faults.pause_s * faults.mtbf_s)


def daly_s(faults: Faults) -> float:
    """The same to higher order: sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M from C = 2M on (Daly 2006, Future
    Generation Computer Systems 22(3))."""
    share = faults.pause_s / (2 * faults.mtbf_s)
    if share >= 1:
        return faults.mtbf_s
    return young_s(faults) * (1 + math.sqrt(share) / 3 + share / 9) - faults.pause_s


def best_s(faults: Faults) -> float:
    """The interval with the highest `goodput`, where t/M = 1 - exp(-(t+C)/M). By bisection: no closed form without
    Lambert's W."""
    low, high = 0.0, faults.mtbf_s
    for _ in range(100):
        middle = (low + high) / 2
        if middle < -faults.mtbf_s * math.expm1(-(middle + faults.pause_s) / faults.mtbf_s):
            low = middle
        else:
            high = middle
    return high


def goodput(interval_s: Array | float, faults: Faults) -> Array:
    """The share of a long run's time that is training which lasts, if it saves every `interval_s` of training:

        t/M exp(-(R+L)/M) / (exp((t+C)/M) - 1)

    Daly's complete model (2006), with failures also while it saves, restarts or does work again. Files
    written beside training (L) count like a longer restart R: from one whole checkpoint to the next take t+C seconds,
    and L more after a failure, for what was done while the last one was written is done again.
    """
    interval = np.asarray(interval_s, float)
    with np.errstate(over="ignore"):
        tries = np.expm1((interval + faults.pause_s) / faults.mtbf_s)
        return interval / faults.mtbf_s * math.exp(-(faults.restart_s + faults.written_s) / faults.mtbf_s) / tries


def drawn(faults: Faults, steps: int, step_s: float, every: int, runs: int = 400, seed: int = 0) -> Drawn:
    """`runs` runs of `steps` steps that save after every `every` of them, failure by failure.

    What the formula leaves out is here: whole steps, an end, and no checkpoint after it. Raises ConfigError for runs
    that would hardly end.
    """
    if float(goodput(every * step_s, faults)) < LEAST:
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
    return Drawn(wall.mean(), wall.std(ddof=1) / math.sqrt(runs), failures.mean())


def hopeless(faults: Faults) -> ConfigError:
    """Of a cluster on which a run hardly gets on."""
    problem = f"a checkpoint takes {faults.pause_s:.3g} s and a restart {faults.restart_s:.3g} s"
    fix = "use fewer devices, or save and restart in less time"
    return ConfigError("--mtbf", f"{faults.mtbf_s:.3g} s of all devices together", problem, fix)


@dataclass(frozen=True)
class Interval:
    """One way to choose how often to save: `every` steps, which take `interval_s`; the goodput that follows. As many
    steps as the run has: it never saves."""

    name: str
    every: int
    interval_s: float
    goodput: float


@dataclass(frozen=True)
class Lost:
    """What failures make of a run: `intervals` to choose from, of which `best` has the highest goodput; the run drawn
    at random with it; (interval_s, goodput) of a `curve`."""

    faults: Faults
    steps: int
    step_s: float
    intervals: tuple[Interval, ...]
    drawn: Drawn
    curve: tuple[tuple[float, float], ...]

    @property
    def best(self) -> Interval:
        return max(self.intervals, key=lambda each: each.goodput)

    @property
    def best_first(self) -> list[Interval]:
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


def lost(faults: Faults, steps: int, step_s: float, every: int = 0, seed: int = 0) -> Lost:
    """`every`: steps between checkpoints that the run asks for, 0 if none. Raises ConfigError for a run that would
    hardly end."""

    def at(name: str, count: int) -> Interval:
        never = replace(faults, pause_s=LEAST_S, written_s=0.0)
        found = goodput(count * step_s, faults) if count < steps else goodput(steps * step_s, never)
        return Interval(name, min(count, steps), min(count, steps) * step_s, float(found))

    def whole(interval_s: float) -> int:  # one is written before the next
        return max(1, round(interval_s / step_s), math.ceil(faults.written_s / step_s))

    ways = {"Young": young_s, "Daly": daly_s, "best": best_s}
    choices = [at(name, whole(way(faults))) for name, way in ways.items()]
    if every:
        choices.append(at("run file", every))
    best = max(choices[:3], key=lambda each: each.goodput)
    if best.goodput < LEAST:
        raise hopeless(faults)
    spans = [each.interval_s for each in choices]
    longest = min(max(best.interval_s * 20, *spans), steps * step_s)
    intervals = np.geomspace(min(best.interval_s / 20, *spans), longest, 41)
    curve = tuple(zip(intervals.tolist(), goodput(intervals, faults).tolist()))
    return Lost(faults, steps, step_s, tuple(choices), drawn(faults, steps, step_s, best.every, seed=seed), curve)
