"""The learning rate of every step, by its definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

# how much of a fall is left when a share of its steps is done
FALLS: Mapping[str, Callable[[Fraction], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: float(1 - done),
    # Loshchilov and Hutter 2017, equation 5, without restarts
    "cosine": lambda done: math.cos(math.pi * float(done) / 2) ** 2,
    # Haegele et al. 2024, section 3
    "sqrt": lambda done: 1.0 - float(done) ** 0.5,
}


def rate_factor(
    step: int,
    steps: int,
    warmup: int,
    decay: str,
    least: float,
    *,
    rise: str = "linear",
    first: float = 0.0,
    share: float | None = None,
) -> float:
    """What the learning rate of a step is multiplied by.

    Args:
        step: its number; the first is 0.
        steps: of the run.
        warmup: steps in which the factor rises to 1.
        decay: how it falls after them: one of FALLS.
        least: the factor that it falls to.
        rise: how it rises: "linear", by as much in each step, or "cosine", half a wave.
        first: the factor that it rises from, before the first step.
        share: of all steps, in which it falls: the last ones. None: in all but warm-up.
    """
    if step < warmup:
        part = float(Fraction(step + 1, warmup))
        wave = math.sin(math.pi * part / 2) ** 2
        return first + (1.0 - first) * (wave if rise == "cosine" else part)
    falling = steps - warmup if share is None else max(1, round(share * steps))
    falling = min(falling, steps - warmup)
    gone = step - (steps - falling)  # steps of the fall that are over
    if decay == "constant" or gone <= 0:
        return 1.0
    return least + (1.0 - least) * FALLS[decay](Fraction(gone, falling))
