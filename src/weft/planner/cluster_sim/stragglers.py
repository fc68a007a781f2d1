"""What a slow device, a slow link, or varying devices cost a synchronous step.

Within a layer the ranks of tp wait for the slowest of them, within a pipeline the stages for
messages, and at its end every replica for the slowest. Jitter is drawn anew for each device and
step: exp(jitter x a standard normal).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core import (
    STAGE_AXIS,
    ConfigError,
)

from ..cost.breakdown import TimePart
from ..cost.layout_batch import Array
from . import slow_links as links, wait_groups
from .batched_pipelines import BatchedPipelines
from .scenario import Scenario, StepParts

BUDGET = 2e8  # actions of single pipelines that are drawn
AT_ONCE = 300  # pipelines whose actions take as long as one alone
DRAWS = (4, 64)  # steps that are drawn: at least, at most
TAIL = 7.0  # standard deviations of jitter up to which devices are priced


@dataclass(frozen=True)
class StragglerRow:
    """Seconds of a step, and its standard error where steps were drawn; `idle`: the share of all
    devices' time in which they wait for a message or for a slower device."""

    name: str
    step_s: float
    idle: float
    error_s: float = 0.0


class PacedScenario:
    """A setup whose devices vary by `jitter` and are by one of the factors `slow` slower, and of
    whose first pipeline one link of each axis in `links` is. `paces` are [draws, devices], in the
    order of ranks. Raises Refusal."""

    def __init__(
        self,
        setup: Scenario,
        slow: Sequence[float] = (),
        jitter: float = 0.0,
        slow_links: Mapping[str, float] | None = None,
    ):
        spread = [math.exp(part * TAIL * jitter) for part in (-1, -0.5, 0, 0.5, 1)]
        self.setup, self.jitter = setup, jitter
        self.points = sorted({by * factor for by in spread for factor in (1.0, *slow)})
        self._planned = [setup.step(pace) for pace in self.points]
        self.steps = (
            [setup.step(pace, slow_links) for pace in self.points] if slow_links else self._planned
        )
        self._fleet = BatchedPipelines(
            setup.schedule, {pace: step.costs for pace, step in zip(self.points, self._planned)}
        )
        self._behind = self._fleet
        if slow_links:
            each = zip(self.points, self._planned, self.steps)
            priced = {
                pace: links.slow_first_link(setup, step, slow, slow_links)
                for pace, step, slow in each
            }
            self._behind = BatchedPipelines(setup.schedule, priced)
        self._stage = wait_groups.stage_of(setup.choices)

    def pipelines_s(self, paces: Array) -> Array:
        """[draws, replicas] seconds until the last pipeline has ended."""
        shaped = wait_groups.by_pipeline(self.setup.choices, paces)
        ends = self._fleet.ends(shaped.reshape(-1, shaped.shape[-1])).max(axis=1)
        ends = ends.reshape(shaped.shape[:-1])
        if self._behind is not self._fleet:
            ends[:, 0, 0] = self._behind.ends(shaped[:, 0, 0]).max(axis=1)
        return ends.max(axis=2)

    def alone_s(self, paces: Array, updates: float = 1.0) -> Array:
        """[draws, replicas] seconds of a step by itself: pipelines and this share of the optimizer,
        without exchanges over dp."""
        slowest = wait_groups.by_pipeline(self.setup.choices, paces).max(axis=(2, 3))
        after = np.interp(slowest, self.points, [_own_s(step, updates) for step in self._planned])
        after[:, 0] = np.interp(
            slowest[:, 0], self.points, [_own_s(step, updates) for step in self.steps]
        )
        return self.pipelines_s(paces) + after

    def step(self, paces: Array) -> tuple[Array, Array]:
        """Of each draw: seconds of a step in which all wait for all, and the idle share."""
        acted = self.pipelines_s(paces).max(axis=1)
        after = [step.after_s for step in self.steps]
        total = acted + np.interp(paces.max(axis=1), self.points, after)
        stages = range(self.setup.size(STAGE_AXIS))
        busy = [
            self._fleet.busy(rank, paces[:, self._stage == rank]).mean(axis=1) for rank in stages
        ]
        return total, np.maximum(
            0.0, acted - np.mean(busy, axis=0)
        ) / total  # which may be below it by rounding

    def draw(self, slow: Mapping[int, float], rng: np.random.Generator) -> Array:
        """As many steps as there is time for; without jitter one."""
        if not self.jitter:
            return paces(self.setup, slow)
        pipelines = wait_groups.by_pipeline(self.setup.choices, self._stage[None])[..., 0].size
        draws = int(np.clip(BUDGET / self._fleet.actions / max(pipelines, AT_ONCE), *DRAWS))
        drawn = np.exp(self.jitter * rng.standard_normal((draws, self.setup.devices)))
        return drawn * paces(self.setup, slow)


def _own_s(step: StepParts, updates: float) -> float:
    """What of a step follows the pipeline, without the exchanges over dp, and with this share of
    the optimizer."""
    return (
        step.after_s
        - step.after.get(TimePart.GRADIENTS, 0.0)
        - (1 - updates) * step.after.get(TimePart.OPTIMIZER, 0.0)
    )


def paces(setup: Scenario, *slow: Mapping[int, float]) -> Array:
    """[cases, devices], one case for each of `slow`, in which these devices are so much slower."""
    found = np.ones((len(slow), setup.devices))
    for case, factors in zip(found, slow):
        for device, factor in factors.items():
            case[device] = factor
    return found


def check_scenario(
    setup: Scenario,
    slow: Mapping[int | None, float],
    slow_links: Mapping[str, float],
    jitter: float,
) -> None:
    """Raises ConfigError for what cannot be asked of this setup."""
    for device, factor in slow.items():
        if device is not None and not 0 <= device < setup.devices:
            fix = f"name one of 0 to {setup.devices - 1}"
            raise ConfigError("--slow", device, f"{setup.cluster} has no such device", fix)
        if not 0.1 <= factor <= 1000:
            raise ConfigError(
                "--slow",
                factor,
                "is not a factor from 0.1 to 1000",
                "write 1.5 for half as long again",
            )
    if None in slow and len(slow) > setup.devices:
        fix = "leave it out, or name fewer"
        raise ConfigError(
            "--slow",
            slow[None],
            "without DEVICE= adds one slow device, and all devices are named already",
            fix,
        )
    for axis, factor in slow_links.items():
        setup.behind(axis, factor)
        if not 1 <= factor <= 1e6:
            raise ConfigError(
                "--slow-link",
                factor,
                "is not a factor from 1 to 1000000",
                "write 4 for a quarter of the bandwidth",
            )
    if not 0 <= jitter <= 0.5:
        raise ConfigError(
            "--jitter", jitter, "is not a fraction from 0 to 0.5", "write a number from 0 to 0.5"
        )


def straggler_table(
    setup: Scenario,
    slow: Mapping[int | None, float],
    slow_links: Mapping[str, float],
    jitter: float,
    seed: int,
) -> list[StragglerRow]:
    """A step as planned; with each of these devices slow, by itself; with one device (None) slow,
    by its place in a pipeline; with a slow link of each axis; with jitter; with all together.
    Raises Refusal."""
    check_scenario(setup, slow, slow_links, jitter)
    cases: dict[str, dict[int, float]] = {"as planned": {}}
    for device, factor in slow.items():
        if device is not None:
            cases[f"device {device} ({_device_place(setup, device)}) x{factor:g}"] = {
                device: factor
            }
            continue
        for rank in range(setup.size(STAGE_AXIS)):
            first = rank * int(setup.choices.strides[STAGE_AXIS][0])
            cases[setup.on_stages(f"a device x{factor:g}", rank)] = {first: factor}
    steps, idle = PacedScenario(setup, tuple(slow.values())).step(paces(setup, *cases.values()))
    found = [StragglerRow(*row) for row in zip(cases, steps.tolist(), idle.tolist())]
    for axis, factor in slow_links.items():
        found += [StragglerRow(*row) for row in links.slow_link_cost(setup, axis, factor)]
    if jitter:
        found.append(_draw_steps(f"jitter {100 * jitter:g} %", setup, {}, {}, jitter, seed))
    if len(slow) + len(slow_links) + bool(jitter) > 1:
        found.append(
            _draw_steps(_describe_slow(slow), setup, devices(slow), slow_links, jitter, seed)
        )
    return found


def devices(slow: Mapping[int | None, float]) -> dict[int, float]:
    """One that may be anywhere is the first that is not named."""
    first = next(device for device in range(len(slow) + 1) if device not in slow)
    return {first if device is None else device: factor for device, factor in slow.items()}


def _describe_slow(slow: Mapping[int | None, float]) -> str:
    anywhere = next((device for device in devices(slow) if device not in slow), None)
    if None not in slow:
        return "all together"
    return f"all together, x{slow[None]:g} on device {anywhere}"


def _draw_steps(
    name: str,
    setup: Scenario,
    slow: Mapping[int, float],
    slow_links: Mapping[str, float],
    jitter: float,
    seed: int,
) -> StragglerRow:
    """The mean of steps; one without jitter."""
    paced = PacedScenario(setup, tuple(slow.values()), jitter, slow_links)
    steps, idle = paced.step(paced.draw(slow, np.random.default_rng(seed)))
    error = float(steps.std(ddof=1) / math.sqrt(len(steps))) if jitter else 0.0
    return StragglerRow(name, float(steps.mean()), float(idle.mean()), error)


def _device_place(setup: Scenario, device: int) -> str:
    return ", ".join(
        f"{axis} {index}"
        for axis, index in wait_groups.device_coords(setup.choices, device).items()
        if setup.size(axis) > 1
    )
