"""`weft simulate`: from a run file and a scenario to a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    ConfigError,
    RunConfig,
    Sync,
)
from weft.sync import make_sync
from weft.train import build_dataset, build_skeleton

from .cluster_sim import replica_comparison, scaling, stragglers, timeline as picture
from .cluster_sim.failures import FailureModel, failure_cost, mtbf_of_all
from .cluster_sim.report import SimulationReport
from .cluster_sim.scaling import Mode
from .cluster_sim.scenario import Scenario
from .cost.belief import Belief
from .cost.breakdown import TimePart
from .cost.hardware import Cluster
from .measured_constants import measured_constants
from .search.feasibility import FeasibilityChecker
from .search.query_from_run import era_of, query_from_run, work_of_run

RESTART_S = 300.0  # where it is not said
LOCAL_STEPS, STALENESS = 10, 4  # of the ways to agree that are shown beside all-reduce
GB = 1e9


@dataclass(frozen=True)
class SimulateRequest:
    """`slow`: device -> factor, None for one device anywhere. `mtbf_h`, `node_mtbf_h`: hours, of
    one device or node. A checkpoint stops training for `checkpoint_s`; or, with `storage_gbps` (GB
    per second of all ranks together), for a copy to host memory, and is written beside training.
    `restart_s`, or RESTART_S. `every`: the run's own steps between checkpoints."""

    slow: Mapping[int | None, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0
    mtbf_h: float | None = None
    node_mtbf_h: float | None = None
    checkpoint_s: float | None = None
    storage_gbps: float | None = None
    restart_s: float | None = None
    every: int = 0
    scale: Mode | None = None
    to: int | None = None

    def __post_init__(self) -> None:
        if (self.scale is None) != (self.to is None):
            name, value = ("--scale", self.scale) if self.to is None else ("--to", self.to)
            raise ConfigError(
                name, value, "--scale and --to go together", "write --scale weak --to 4096"
            )
        takes = {
            "--checkpoint": self.checkpoint_s,
            "--storage": self.storage_gbps,
            "--restart": self.restart_s,
        }
        for name, number in takes.items():
            if number is not None and not self.fails:
                fix = "write --mtbf HOURS or --node-mtbf HOURS too, or leave it out"
                raise ConfigError(
                    name, number, "applies only to failures, and the simulation has none", fix
                )
        given = {
            "--mtbf": self.mtbf_h,
            "--node-mtbf": self.node_mtbf_h,
            "--storage": self.storage_gbps,
        }
        for name, number in given.items():
            if number is not None and not (math.isfinite(number) and number > 0):
                raise ConfigError(name, number, "is not allowed", "write a number above 0")
        if self.fails and (self.checkpoint_s is None) == (self.storage_gbps is None):
            problem = "is not given" if self.checkpoint_s is None else "is given by --storage too"
            fix = (
                "write either --checkpoint 20 (seconds) or --storage 100 (GB per second of all"
                " ranks together)"
            )
            raise ConfigError(
                "--checkpoint", self.checkpoint_s, f"the time of a checkpoint {problem}", fix
            )

    @property
    def fails(self) -> bool:
        """Whether failures are asked for."""
        return self.mtbf_h is not None or self.node_mtbf_h is not None


def make_scenario(
    run: RunConfig,
    cluster: str,
    era: str | None,
    measured: Sequence[str | Path] = (),
    kept: bool = True,
) -> tuple[Scenario, Belief, tuple[str, ...]]:
    """A run as its file has it, on a cluster.

    Args:
        run: The run.
        cluster: Hardware sheet and number of devices, as in h100x64.
        era: The software to price; default: as the run has it.
        measured: metrics.jsonl of runs on such devices, or CSV files with measured steps.
        kept: Also use runs that weft train has noted on this machine.

    Returns:
        The scenario; what is believed of its era's constants; and notes: which measurements were
        used, and what they changed.

    Raises:
        Refusal: The run cannot be laid so, or a file cannot be used.
    """
    if run.workers:
        raise ConfigError(
            "workers",
            list(run.workers),
            "run whole modules, so there is no layout to simulate",
            "leave [workers] out",
        )
    where = Cluster.parse(cluster)
    learned = measured_constants(run, where, era_of(where, era, run), measured, kept)
    bare, held = build_skeleton(run), build_dataset(run)
    FeasibilityChecker(run, bare, held).check_layout(run.layout.axes)
    asked = query_from_run(run, work=work_of_run(run, bare, held, where.hardware.kind))
    scenario = Scenario(
        str(run.layout.axes),
        asked.work,
        asked.choices,
        where,
        learned.era,
        asked.practice,
        run.train.steps,
        asked.sync,
    )
    return scenario, learned.belief, learned.notes


def parse_slow(text: str) -> tuple[int | None, float]:
    """`1.5`, or `17=1.5`: device and factor. Raises ConfigError."""
    device, equals, factor = text.rpartition("=")
    try:
        return (int(device) if equals else None), float(factor)
    except ValueError:
        fix = "write 1.5, or --slow 17=1.5 for device 17"
        raise ConfigError(
            "--slow", text, "is neither a factor nor a device and a factor", fix
        ) from None


def parse_slow_link(text: str) -> tuple[str, float]:
    """`tp=4`. Raises ConfigError."""
    axis, _, factor = text.partition("=")
    try:
        return axis, float(factor)
    except ValueError:
        fix = "write tp=4 for a quarter of the bandwidth"
        raise ConfigError("--slow-link", text, "is not an axis with a factor", fix) from None


def require_unique(pairs: Iterable[tuple[Any, float]], field: str) -> dict[Any, float]:
    """Raises ConfigError where one stands twice."""
    found: dict[Any, float] = {}
    for name, factor in pairs:
        if name in found:
            what = "--slow without a device" if name is None else f"{name}"
            raise ConfigError(field, factor, f"{what} is given twice", "name each once")
        found[name] = factor
    return found


def parse_scale_mode(text: str | None) -> Mode | None:
    """Raises ConfigError."""
    if text not in (None, "weak", "strong"):
        raise ConfigError("--scale", text, "is not a way to scale", "write weak or strong")
    return cast(Mode | None, text)


def simulate_scenario(setup: Scenario, asked: SimulateRequest, belief: Belief) -> SimulationReport:
    """All that was asked for. `belief` is about the constants of the scenario's era. Raises
    Refusal."""
    faults = _faults(setup, asked) if asked.fails else None
    step = setup.step()
    acted = picture.pipeline_timeline(setup, step)
    timeline = picture.step_timeline(acted, step)
    varies = bool(asked.slow or asked.links or asked.jitter)
    rows = stragglers.straggler_table(setup, asked.slow, asked.links, asked.jitter, asked.seed)
    agreed = []
    if varies and setup.size(REPLICA_AXIS) > 1:
        factors = stragglers.devices(asked.slow)
        agreed = replica_comparison.compare_syncs(
            setup, _ways(setup), factors, asked.links, asked.jitter, asked.seed
        )
    return SimulationReport(
        setup,
        step,
        acted,
        timeline,
        setup.interval_factor(belief),
        rows,
        agreed,
        (
            failure_cost(faults, setup.steps, timeline.makespan_s, asked.every, asked.seed)
            if faults
            else None
        ),
        (
            scaling.scaling_curve(setup, asked.scale, asked.to)
            if asked.scale and asked.to is not None
            else ()
        ),
        asked.scale or "",
    )


def _ways(setup: Scenario) -> dict[str, Sync]:
    """All-reduce, and beside it how the run's replicas agree, or, if that is it, two other ways."""
    found = {"each step (allreduce)": make_sync("allreduce")}
    if setup.sync is not None and not setup.sync.plain:
        return {**found, f"the run's ({setup.sync.name})": setup.sync}
    servers = setup.size(REPLICA_AXIS)
    found[f"every {LOCAL_STEPS} steps (local_sgd)"] = make_sync("local_sgd", period=LOCAL_STEPS)
    found[f"any time, {STALENESS} steps apart (parameter_server)"] = make_sync(
        "parameter_server", servers=servers, staleness=STALENESS
    )
    return found


def _faults(setup: Scenario, asked: SimulateRequest) -> FailureModel:
    mtbf = mtbf_of_all(
        setup.devices,
        3600 * (asked.mtbf_h or math.inf),
        setup.cluster.nodes,
        3600 * (asked.node_mtbf_h or math.inf),
    )
    restart = RESTART_S if asked.restart_s is None else asked.restart_s
    if asked.checkpoint_s is not None:
        return FailureModel(mtbf, asked.checkpoint_s, restart)
    assert asked.storage_gbps is not None
    own, everything = checkpoint_bytes(setup)
    return FailureModel(
        mtbf,
        own / setup.cluster.hardware.device.host_bps,
        restart,
        everything / (asked.storage_gbps * GB),
    )


def checkpoint_bytes(setup: Scenario) -> tuple[float, float]:
    """Of a rank that saves, and of the whole: weights and optimizer state, each once."""
    work, practice = setup.work, setup.practice
    weights = (work.params - work.int8_params) * practice.weight_bytes + work.int8_params
    whole = weights + work.trained_params * practice.state_bytes
    update = next(part for part in setup.estimate().time if part.name == TimePart.OPTIMIZER)
    share = float(np.max(update.symbols["params"])) / max(1.0, work.trained_params)
    return share * whole, whole
