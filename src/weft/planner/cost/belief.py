"""What measured steps say of an era's constants, and how sure a predicted step is.

Before anything is measured the log of each constant is normal around what the hardware sheet has.
The log of a measured step is normal around the log of its estimate. The most probable constants are
found by Gauss-Newton (Tarantola, Inverse Problem Theory, 2005, equation 3.51); what no measurement
tells of stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .hardware import Era
from .layout_batch import Array

# Constant -> the fields of an era that move with it, and the standard deviation of its log between
# machines with the same sheet.
MOVED: Mapping[str, tuple[tuple[str, ...], float]] = {
    "matmul": (("matmul",), 0.12),
    "eight": (("eight",), 0.1),
    "attention": (("attention", "attention_backward"), 0.2),
    "memory": (("memory",), 0.15),
    "launch_s": (("launch_s",), 0.5),
    "link": (("link",), 0.25),
    "network": (("network",), 0.25),
    "meet_s": (("meet_s",), 0.7),
    "fixed_s": (("fixed_s",), 0.7),
}
SECONDS = ("launch_s", "meet_s", "fixed_s")  # the others are shares
MOST = 1.5  # of a share, as a hardware sheet has it
Z80 = 1.2816  # standard deviations on each side that hold 80 % of a normal distribution
ROUNDS, ENOUGH, STEP = 20, 1e-4, 0.02  # of Gauss-Newton; of differences that give slopes

Move = Callable[[Era], Era]
Predict = Callable[[Move], Array]  # seconds of steps, where each era's constants are moved


@dataclass(frozen=True)
class ModelError:
    """How far estimates are from what is measured. `spread`: the standard deviations of MOVED are
    so many times as large; `own`: standard deviation of the log of what one layout takes longer,
    which no constant explains."""

    spread: float
    own: float


# Of sheets that come with weft, by published sources that no constant was fitted to: there
# benchmarks/published/unseen.py finds these to score best: intervals of 80 % hold 80 % of the rows
# of 14 sources, and 81 % after two rows are given.
PUBLISHED = ModelError(spread=1, own=0.08)
# Of the sheet that `weft calibrate` writes: 39 runs of two processes, half of them within 6 %
# (benchmarks/local).
CALIBRATED = ModelError(spread=0.5, own=0.08)


@dataclass(frozen=True)
class Belief:
    """About the constants of an era, as logs of factors on it: the most probable `shift` and the
    `covariance`, in the order of MOVED; `own`: standard deviation of the log of a step beyond
    them."""

    shift: Array
    covariance: Array
    own: float

    @classmethod
    def of(cls, error: ModelError) -> Belief:
        """Before anything is measured."""
        spread = np.array([one for _, one in MOVED.values()]) * error.spread
        return cls(np.zeros(len(MOVED)), np.diag(spread**2), error.own)

    def move(self, era: Era) -> Era:
        """The era with the most probable constants."""
        return moved(era, self.shift)

    def learn(
        self, predict: Predict, measured: Sequence[float], elsewhere: Sequence[bool] | None = None
    ) -> Belief:
        """The belief after these steps were measured.

        Args:
            predict: Seconds of the same steps, where each era is moved by the function it is given.
            measured: Seconds of each step.
            elsewhere: Which of the steps were measured under another era of software, or on other
                hardware: they tell as much as constants that differ by their spread do.
        """
        seen = np.log(np.asarray(measured, float))
        other = np.zeros(len(seen)) if elsewhere is None else np.asarray(elsewhere, float)
        shift = self.shift
        for _ in range(ROUNDS):
            logs, slope = slopes(predict, shift)
            apart = np.einsum("ij,jk,ik->i", slope, self.covariance, slope) * other
            noise = np.diag(self.own**2 + apart)
            seen_spread = slope @ self.covariance @ slope.T + noise
            gain = self.covariance @ slope.T @ np.linalg.inv(seen_spread)
            before = shift
            shift = self.shift + gain @ (seen - logs + slope @ (shift - self.shift))
            if np.abs(shift - before).max() < ENOUGH:
                break
        left = self.covariance - gain @ slope @ self.covariance
        return replace(self, shift=shift, covariance=(left + left.T) / 2)

    def settled(self) -> Belief:
        """The same about an era that `move` has moved."""
        return replace(self, shift=np.zeros(len(MOVED)))

    def spread(self, predict: Predict) -> Array:
        """The standard deviation of the log of each step."""
        _, slope = slopes(predict, self.shift)
        return np.sqrt(np.einsum("ij,jk,ik->i", slope, self.covariance, slope) + self.own**2)

    def factor(self, predict: Predict) -> Array:
        """Of each step: so many times shorter or longer than priced it is at most in 80 of 100
        cases."""
        return np.exp(Z80 * self.spread(predict))

    def interval(self, predict: Predict) -> tuple[Array, Array]:
        """Seconds between which each step is in 80 of 100 cases."""
        factor, seconds = self.factor(predict), predict(self.move)
        return seconds / factor, seconds * factor

    def spread_of_ratios(self, predict: Predict) -> Array:
        """[i, j]: the standard deviation of the log of step i over step j. What is wrong with both
        alike cancels."""
        _, slope = slopes(predict, self.shift)
        apart = slope[:, None] - slope[None]
        found = np.einsum("ijk,kl,ijl->ij", apart, self.covariance, apart) + 2 * self.own**2
        return np.sqrt(found * (1 - np.eye(len(slope))))


def moved(era: Era, shift: Array) -> Era:
    """The era with the log of each constant of MOVED so much higher."""
    factors = np.exp(shift)
    found = {}
    for (fields, _), factor, name in zip(MOVED.values(), factors, MOVED, strict=True):
        for one in fields:
            value = getattr(era, one) * float(factor)
            found[one] = value if name in SECONDS else min(value, MOST)
    return era.model_copy(update=found)


def slopes(predict: Predict, shift: Array) -> tuple[Array, Array]:
    """The logs of steps at this shift, and [step, constant]: how they change with each constant's
    log."""
    logs = np.log(predict(_mover(shift)))
    found = []
    for place in range(len(shift)):
        there = shift.copy()
        there[place] += STEP
        found.append((np.log(predict(_mover(there))) - logs) / STEP)
    return logs, np.stack(found, axis=-1)


def _mover(shift: Array) -> Move:
    return lambda era: moved(era, shift)
