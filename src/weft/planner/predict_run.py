"""Compares what a run took with the estimate that `weft plan` gives for this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal

from weft.core import PREDICTION, Refusal, RunConfig, replace_file
from weft.parallel import FEATURE_AXES

from .calibrate.kept_runs import keep_run
from .cost.breakdown import TimePart
from .cost.card_sheet import sheet_of_card
from .cost.estimate import estimate
from .cost.hardware import GIB, LOCAL, Cluster, Hardware, local_sheet, named_sheet, sheet_names
from .search.constraints import cuts_features
from .search.query_from_run import query_from_run

ERA = "eager"  # of what weft itself runs
PROCESS = "process"  # the part of a prediction for what a process holds beside tensors


@dataclass(frozen=True)
class Prediction:
    """Of one step: bytes that a rank holds at most, in parts, and bytes that it sends over each
    axis. Where the speed of this machine is known, `by` names whose it is: seconds of the step in
    parts, else none, and `why` not."""

    memory: Mapping[str, float]
    traffic: Mapping[str, float]
    time: Mapping[str, float]
    by: str = ""
    why: str = ""

    @property
    def step_s(self) -> float:
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def bubble(self) -> float:
        """The share of the step in which the pipeline is idle."""
        return self.time.get(TimePart.BUBBLE, 0.0) / self.step_s

    def json(self) -> str:
        """What prediction.json has: seconds and bytes."""
        found: dict[str, Any] = {"memory": self.memory, "traffic": self.traffic}
        if self.time:
            found |= {"step_s": self.step_s, "time": self.time, "by": self.by}
        return json.dumps(found | ({"why": self.why} if self.why else {})) + "\n"

    def sent(self) -> str:
        """Bytes by axis."""
        return ", ".join(
            f"{axis} {decimal(round(nbytes))}"
            for axis, nbytes in self.traffic.items()
            if nbytes >= 1
        )


def machine_sheet(device: torch.device) -> Hardware | None:
    """This machine's own, as `weft calibrate` left it, or the one whose name is in that of the
    GPU."""
    if local_sheet().exists():
        found = named_sheet(LOCAL)
        return found if found.kind == device.type else None
    if device.type != "cuda":
        return None
    card = sheet_of_card(torch.cuda.get_device_name(device))
    return named_sheet(card) if card else None


def predict(run: RunConfig, device: torch.device) -> Prediction:
    """What to expect of this run on this machine, and what is not known, and why."""
    try:
        own = machine_sheet(device)
        # what a rank holds and sends does not depend on how fast a machine is
        hardware = own or named_sheet(sheet_names()[0])
        cluster = Cluster.of(hardware, run.layout.axes.world)
        asked = query_from_run(run, device=device.type)
        if run.layout.axes.active_axes(*FEATURE_AXES) and not cuts_features(asked.work):
            return Prediction({}, {}, {}, why="no prediction: a cut of single layers is not priced")
        era = hardware.eras.get(ERA) or next(iter(hardware.eras.values()))
        made = estimate(asked.work, asked.choices, cluster, era, asked.practice, asked.sync)
    except Refusal as error:
        return Prediction({}, {}, {}, why=str(error))
    except Exception as error:  # of the user's code: the run is done, and goes on
        return Prediction({}, {}, {}, why=f"no prediction: {type(error).__name__}: {error}")
    memory = {part.name: float(part.value[0]) for part in made.memory}
    traffic = {axis: float(np.asarray(nbytes)[0]) for axis, nbytes in made.traffic.items()}
    if own is None:
        why = "run `weft calibrate` once to get time and memory predictions"
        return Prediction(memory, traffic, {}, why=why)
    if device.type == "cpu":  # of CUDA, what the allocator has given is counted
        memory |= {PROCESS: era.context_gib * GIB}
    time = {part.name: float(part.value[0]) for part in made.time}
    return Prediction(memory, traffic, time, by=own.title)


def compare_with_prediction(run: RunConfig, device: torch.device, step_s: float) -> dict[str, str]:
    """The lines of a run's summary that say what this machine was expected to take; the whole
    prediction goes into the run folder, and the folder into the index of those that the next
    `weft plan` learns from.

    Args:
        run: The run that has ended.
        device: The device of this rank.
        step_s: The measured seconds of one step.
    """
    found = predict(run, device)
    with suppress(OSError):
        replace_file(Path(run.output) / PREDICTION, found.json())
    keep_run(Path(run.output), device)
    if not found.time:
        return {"expected": found.why}
    rows = {"expected": f"{found.step_s:.3g} s a step, which took {step_s:.3g} s ({found.by})"}
    rows["on a rank"] = f"{decimal(round(found.memory_bytes))} of memory"
    if found.sent():
        rows["on the wire"] = f"{found.sent()} a step"
    if found.bubble:
        rows["in the pipe"] = f"{found.bubble:.0%} of a step idle"
    return rows
