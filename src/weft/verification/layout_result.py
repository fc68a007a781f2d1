"""What one layout's run showed beside one device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from weft.engine import CompileCounts

from .difference import Bounds


@dataclass(frozen=True)
class LayoutResult:
    """What one layout's run showed. Errors are relative.

    `first` is what differs first in the order of the run: a batch entry, a module, the loss, a
    parameter. `problem` is state that does not lie where the plan says, or not once. `workers`:
    called by RPC, which nothing audits. By their names: `beyond` are errors above the bounds, if
    rounding may be what they are, and `widened` the bounds that hold them, if it is.
    """

    layout: str
    loss_rel_err: float
    grad_rel_err: float
    param_rel_err: float
    worst: str
    first: str | None
    comms_predicted: dict[tuple[str, str], tuple[int, int]]
    comms_seen: dict[tuple[str, str], tuple[int, int]]
    problem: str | None = None
    delayed: bool = False  # held to one device with the same delays, not to the plain run
    definition: str = ""  # of its synchroniser, which it is held to instead of the plain run
    steps: int = 0  # that were compared
    apart: bool = False  # replicas step by themselves: nothing audits what they exchange
    workers: tuple[str, ...] = ()
    compiled: CompileCounts | None = None  # in the steps after the first
    bounds: Bounds = field(default_factory=Bounds)
    refused: str | None = None  # why it cannot run
    beyond: dict[str, float] = field(default_factory=dict)
    widened: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        errors = (self.loss_rel_err, self.grad_rel_err, self.param_rel_err)
        named = (self.first, self.problem, self.stray)
        within = (self.bounds.loss, self.bounds.gradient, self.bounds.weight)
        equal = all(e < bound for e, bound in zip(errors, within, strict=True))
        return (equal or bool(self.widened)) and all(name is None for name in named)

    @property
    def stray(self) -> str | None:
        """The first collective that ran otherwise than the plan predicts."""
        for key in sorted({**self.comms_predicted, **self.comms_seen}):
            want, ran = self.comms_predicted.get(key, (0, 0)), self.comms_seen.get(key, (0, 0))
            if want != ran:
                kind, axis = key
                return (
                    f"{kind} over {axis}: {ran[0]} ran ({ran[1]:,} B), predicted were {want[0]}"
                    f" ({want[1]:,} B)"
                )
        return None


def failed_result(layout: str, problem: str) -> LayoutResult:
    """A layout that gives no numbers."""
    return LayoutResult(layout, inf, inf, inf, "nothing was computed", None, {}, {}, problem)


def refused_result(layout: str, reason: Exception) -> LayoutResult:
    """A layout that cannot run, while others can."""
    return replace(failed_result(layout, f"is refused: {reason}"), refused=str(reason))
