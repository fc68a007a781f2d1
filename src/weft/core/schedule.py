"""Schedule: which rank runs what, in which order. Pure data; no torch.

    1f1b, 2 ranks, 4 microbatches          rank 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
                                           rank 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

`needs` is the only pipeline semantics: checking, simulating, drawing and running all follow from
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

from .errors import ConfigError

Kind = Literal["F", "B", "W", "U"]
Versions = Literal["", "stash", "vertical", "2bw"]
DEFAULT_SCHEDULE = "1f1b"  # of a run that names none
CELL = re.compile(
    r"(\d+)([FBWUI])(\d+)"
)  # of a table; I is torch's word for a B whose W comes later


class Action(NamedTuple):
    """F: forward of one stage on one microbatch. B: its backward; if the schedule also has a W for
    the same stage and microbatch, B is the input's gradient alone and W the weights'. U: the
    stage's optimizer step with all gradients since its last one, up to this microbatch
    (asynchronous schedules only). Prints as `2F0`: stage 2, microbatch 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """`placement`: stage -> rank. `order`: rank -> its actions, in order.

    `versions`: how an asynchronous schedule (one with U) keeps weights: "stash" (each stage's F and
    B of a microbatch use the version that its F found), "vertical" (all stages use the version that
    stage 0 found), "2bw" (two versions).
    """

    name: str
    placement: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...]
    versions: Versions = ""

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for actions in self.order for a in actions), default=-1)

    @cached_property
    def split(self) -> bool:
        """Whether any backward is split into B and W."""
        return any(a.kind == "W" for actions in self.order for a in actions)

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must be done before this one may begin."""
        kind, stage, microbatch = action
        if kind == "F":
            if stage:
                yield Action("F", stage - 1, microbatch)
        elif kind == "B":
            yield Action("F", stage, microbatch)
            if stage + 1 < len(self.placement):
                yield Action("B", stage + 1, microbatch)
        else:  # W, and U where nothing is split
            yield Action("B", stage, microbatch)


def peak_live(schedule: Schedule) -> tuple[float, ...]:
    """Rank -> the most activations that it holds at once, in microbatches of all its stages (1F1B:
    p, p-1, ..., 1).

    An activation of one stage and microbatch is held from its F to its W, or to its B where there
    is no W.
    """
    chunks = [schedule.placement.count(rank) for rank in range(schedule.ranks)]
    peaks = []
    for actions, stages in zip(schedule.order, chunks, strict=True):
        split = {(a.stage, a.microbatch) for a in actions if a.kind == "W"}
        live = peak = 0
        for kind, stage, microbatch in actions:
            if kind == "F":
                live += 1
                peak = max(peak, live)
            elif kind == "W" or (kind == "B" and (stage, microbatch) not in split):
                live -= 1
        peaks.append(peak / max(stages, 1))
    return tuple(peaks)


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """(source rank, destination rank) -> the F and B whose results go from the one to the other, in
    the order sent.

    An F sends its activation to the next stage, a B its gradient to the one before, if that lies on
    another rank.
    """
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            kind, stage, _ = action
            target = stage + 1 if kind == "F" else stage - 1
            if (
                kind in ("F", "B")
                and 0 <= target < schedule.stages
                and schedule.placement[target] != rank
            ):
                found.setdefault((rank, schedule.placement[target]), []).append(action)
    return found


def to_csv(schedule: Schedule) -> str:
    """A line per rank, a cell per action, as in `0F0,0F1,0B0`; first a comment if the schedule has
    `versions`."""
    comment = [f"# versions = {schedule.versions}"] if schedule.versions else []
    rows = [",".join(map(str, actions)) or "," for actions in schedule.order]
    return "\n".join([*comment, *rows]) + "\n"


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that `to_csv` wrote, or a table of torch.distributed.pipelining, whose `0I0` is
    `0B0` here.

    Blank lines and cells are skipped; a rank that does nothing is a line of commas. A stage lies on
    the rank in whose line it stands. Raises ConfigError with line and column.
    `weft.pipeline.validate.find_faults` says whether it can run.
    """
    order: list[tuple[Action, ...]] = []
    placement: dict[int, int] = {}
    versions: Versions = ""

    def refuse(line: int, column: int, cell: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(
            "pipeline.schedule", cell, f"{name}, line {line}, column {column}: {problem}", fix
        )

    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            key, _, value = (part.strip() for part in line[1:].partition("="))
            if key == "versions":
                if value not in get_args(Versions):
                    choices = ", ".join(filter(None, get_args(Versions)))
                    raise refuse(
                        number, 1, line, "not a way to keep weights", f"choose one of {choices}"
                    )
                versions = cast(Versions, value)
        elif line.strip():
            actions = []
            for column, cell in enumerate(map(str.strip, line.split(",")), 1):
                if not cell:
                    continue
                if not (parts := CELL.fullmatch(cell)):
                    raise refuse(
                        number,
                        column,
                        cell,
                        "not an action",
                        "write stage, F, B, W or U, microbatch: 2F0",
                    )
                action = Action(
                    cast(Kind, parts[2].replace("I", "B")), int(parts[1]), int(parts[3])
                )
                rank = placement.setdefault(action.stage, len(order))
                if rank != len(order):
                    problem = f"stage {action.stage} is on rank {rank} already"
                    raise refuse(
                        number,
                        column,
                        cell,
                        problem,
                        "give each stage to one rank, which is one line",
                    )
                actions.append(action)
            order.append(tuple(actions))
    first = next((place for place, stage in enumerate(sorted(placement)) if place != stage), None)
    if first is not None:
        raise ConfigError(
            "pipeline.schedule",
            name,
            f"no rank runs stage {first}",
            "number stages from 0 without gaps",
        )
    if not placement:
        raise ConfigError(
            "pipeline.schedule", name, "no actions", "write a line per rank, such as 0F0,0B0"
        )
    return Schedule(
        name, tuple(placement[stage] for stage in range(len(placement))), tuple(order), versions
    )
