"""Stragglers: what a slow device, a slow link, or devices that vary cost a step in which all wait for all.

Within a layer the ranks of tp wait for the slowest of them, within a pipeline the stages for messages, and at its end
every replica for the slowest. Jitter is drawn anew for each device and step: exp(jitter x a standard normal).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost.choices import Array
from ..costs import Costs
from ..errors import ConfigError
from ..simulate import simulate
from . import grid
from .fleet import Fleet
from .setup import Setup, Step

BUDGET = 2e8  # actions of single pipelines that are drawn
AT_ONCE = 300  # pipelines whose actions take as long as one alone
DRAWS = (4, 64)  # steps that are drawn: at least, at most
TAIL = 7.0  # standard deviations of jitter up to which devices are priced


@dataclass(frozen=True)
class Row:
    """Seconds of a step, and its standard error where steps were drawn; `idle`: the share of all devices' time in which
    they wait for a message or for a slower device."""

    name: str
    step_s: float
    idle: float
    error_s: float = 0.0


class Paced:
    """A setup whose devices vary by `jitter` and are by one of the factors `slow` slower. `paces` are [draws, devices],
    in the order of ranks. Raises Refusal."""

    def __init__(self, setup: Setup, slow: Sequence[float] = (), jitter: float = 0.0):
        spread = [math.exp(part * TAIL * jitter) for part in (-1, -0.5, 0, 0.5, 1)]
        self.setup, self.jitter = setup, jitter
        self.points = sorted({by * factor for by in spread for factor in (1.0, *slow)})
        self.steps = {pace: setup.step(pace) for pace in self.points}
        self._fleet = Fleet(setup.schedule, {pace: step.costs for pace, step in self.steps.items()})
        self._stage = grid.stage_of(setup.choices)

    def pipelines_s(self, paces: Array) -> Array:
        """[draws, replicas] seconds until the last pipeline has ended."""
        shaped = grid.pipelines(self.setup.choices, paces)
        ends = self._fleet.ends(shaped.reshape(-1, shaped.shape[-1])).max(axis=1)
        return ends.reshape(shaped.shape[:-1]).max(axis=2)

    def alone_s(self, paces: Array) -> Array:
        """[draws, replicas] seconds of a step by itself: pipelines and optimizer, without exchanges over dp."""
        slowest = grid.pipelines(self.setup.choices, paces).max(axis=(2, 3))
        after = [step.after_s - step.after.get("dp exposed", 0.0) for step in self.steps.values()]
        return self.pipelines_s(paces) + np.interp(slowest, self.points, after)

    def step(self, paces: Array) -> tuple[Array, Array]:
        """Of each draw: seconds of a step in which all wait for all, and the idle share."""
        acted = self.pipelines_s(paces).max(axis=1)
        after = [step.after_s for step in self.steps.values()]
        total = acted + np.interp(paces.max(axis=1), self.points, after)
        stages = range(self.setup.size("pp"))
        busy = [self._fleet.busy(rank, paces[:, self._stage == rank]).mean(axis=1) for rank in stages]
        return total, np.maximum(0.0, acted - np.mean(busy, axis=0)) / total  # which may be below it by rounding

    def draw(self, slow: Mapping[int, float], rng: np.random.Generator) -> Array:
        """As many steps as there is time for; without jitter one."""
        if not self.jitter:
            return paces(self.setup, slow)
        pipelines = grid.pipelines(self.setup.choices, self._stage[None])[..., 0].size
        draws = int(np.clip(BUDGET / self._fleet.actions / max(pipelines, AT_ONCE), *DRAWS))
        drawn = np.exp(self.jitter * rng.standard_normal((draws, self.setup.devices)))
        return drawn * paces(self.setup, slow)


def paces(setup: Setup, *slow: Mapping[int, float]) -> Array:
    """[cases, devices], one case for each of `slow`, in which these devices are so much slower."""
    found = np.ones((len(slow), setup.devices))
    for case, factors in zip(found, slow):
        for device, factor in factors.items():
            case[device] = factor
    return found


def hold(setup: Setup, slow: Mapping[int | None, float], links: Mapping[str, float], jitter: float) -> None:
    """Raises ConfigError for what cannot be asked of this setup."""
    for device, factor in slow.items():
        if device is not None and not 0 <= device < setup.devices:
            fix = f"name one of 0 to {setup.devices - 1}"
            raise ConfigError("--slow", device, f"{setup.cluster} has no such device", fix)
        if not 0.1 <= factor <= 1000:
            raise ConfigError("--slow", factor, "is no factor of time", "write 1.5 for half as long again")
    for axis, factor in links.items():
        setup.behind(axis, factor)
        if not 1 <= factor <= 1e6:
            raise ConfigError("--slow-link", factor, "is no factor of time", "write 4 for a quarter of the bandwidth")
    if not 0 <= jitter <= 0.5:
        raise ConfigError("--jitter", jitter, "is no share of a device's time", "write a number from 0 to 0.5")


def table(
    setup: Setup, slow: Mapping[int | None, float], links: Mapping[str, float], jitter: float, seed: int
) -> list[Row]:
    """A step as planned; with each of these devices slow, by itself; with one device (None) slow, by its place in a
    pipeline; with a slow link of each axis; with jitter, and with jitter and all slow devices. Raises Refusal."""
    hold(setup, slow, links, jitter)
    cases: dict[str, dict[int, float]] = {"as planned": {}}
    for device, factor in slow.items():
        if device is not None:
            cases[f"device {device} ({_place(setup, device)}) x{factor:g}"] = {device: factor}
            continue
        for rank in range(setup.size("pp")):
            first = rank * int(setup.choices.strides["pp"][0])
            cases[_staged(setup, f"a device x{factor:g}", rank)] = {first: factor}
    steps, idle = Paced(setup, tuple(slow.values())).step(paces(setup, *cases.values()))
    found = [Row(*row) for row in zip(cases, steps.tolist(), idle.tolist())]
    for axis, factor in links.items():
        found += _links(setup, axis, factor)
    if jitter:
        found.append(_drawn(f"jitter {100 * jitter:g} %", setup, {}, jitter, seed))
        if slow:
            found.append(_drawn("jitter, and slow devices", setup, devices(slow), jitter, seed))
    return found


def devices(slow: Mapping[int | None, float]) -> dict[int, float]:
    """One that may be anywhere is the first."""
    return {device or 0: factor for device, factor in slow.items()}


def _drawn(name: str, setup: Setup, slow: Mapping[int, float], jitter: float, seed: int) -> Row:
    """The mean of steps."""
    paced = Paced(setup, tuple(slow.values()), jitter)
    steps, idle = paced.step(paced.draw(slow, np.random.default_rng(seed)))
    return Row(name, float(steps.mean()), float(idle.mean()), float(steps.std(ddof=1) / math.sqrt(len(steps))))


def _links(setup: Setup, axis: str, factor: float) -> list[Row]:
    """One link of this axis: between two stages, of a stage of one pipeline, or of those that sum gradients."""
    planned, slow = setup.step(), setup.step(slow_link=(axis, factor))
    name, ranks = f"a link of {axis} x{factor:g}", setup.size("pp")
    if axis == "pp":
        places = [(f"{name}, after stage {i}", i) for i in range(setup.schedule.stages - 1)]
    elif slow.costs == planned.costs:
        places = [(name, -1)]
    else:
        places = [(_staged(setup, name, rank), rank) for rank in range(ranks)]
    busy = sum(lane.work_s for lane in simulate(setup.schedule, planned.costs).lanes) / ranks
    found = []
    for title, place in places:
        acted = simulate(setup.schedule, _mixed(setup, planned, slow, axis, place)).makespan_s
        total = acted + slow.after_s
        found.append(Row(title, total, (acted - busy) / total))
    return found


def _mixed(setup: Setup, planned: Step, slow: Step, axis: str, place: int) -> Costs:
    """The costs of a pipeline of which one place, a boundary of pp or else a rank, has those of `slow`."""
    messages = axis == "pp"
    places = range(setup.schedule.stages - 1) if messages else setup.schedule.placement
    mixed: dict[str, Any] = {}
    for field in ("comm_s",) if messages else ("forward_s", "backward_s", "weight_s"):
        pairs = zip(planned.costs.each(field, len(places)), slow.costs.each(field, len(places)))
        mixed[field] = tuple(b if at == place else a for at, (a, b) in zip(places, pairs))
    return replace(planned.costs, **mixed)


def _staged(setup: Setup, what: str, rank: int) -> str:
    if setup.size("pp") == 1:
        return what
    held = [stage for stage, on in enumerate(setup.schedule.placement) if on == rank]
    return f"{what}, stage{'s' * (len(held) > 1)} {' and '.join(map(str, held))}"


def _place(setup: Setup, device: int) -> str:
    return ", ".join(
        f"{axis} {index}" for axis, index in grid.place(setup.choices, device).items() if setup.size(axis) > 1
    )
