"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weft.core import ConfigError

MOST_CHECKED = 1000  # steps

Factor = Callable[[int], float]


class ScheduleFailed(ConfigError):
    """A user's function has failed, or has returned no factor: of the same step on all ranks."""

    exit_code = 1  # in a run; before one it is refused


def lr_factor(
    step: int,
    steps: int,
    warmup: int = 0,
    decay: str = "constant",
    min_ratio: float = 0.0,
    *,
    warmup_shape: str = "linear",
    start_ratio: float = 0.0,
    decay_share: float | None = None,
) -> float:
    """What the learning rate of step `step` (the first is 0) of `steps` is multiplied by.

    Rises over the first `warmup` steps from `start_ratio` to 1, stays, and falls in the last steps,
    a `decay_share` of all (None: all that are left), to `min_ratio` at step `steps`: in a line, as
    half a cosine (Loshchilov and Hutter 2017), as 1 minus a square root (Haegele et al. 2024), or
    not at all ("constant").
    """
    if step < warmup:
        risen = (step + 1) / warmup
        if warmup_shape == "cosine":
            risen = (1 - math.cos(math.pi * risen)) / 2
        return start_ratio + (1 - start_ratio) * risen
    if decay == "constant":
        return 1.0
    begin = warmup
    if decay_share is not None:
        begin = max(warmup, steps - max(1, round(decay_share * steps)))
    progress = min(1.0, max(0, step - begin) / max(1, steps - begin))
    falling = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "sqrt": 1 - math.sqrt(progress),
    }[decay]
    return min_ratio + (1 - min_ratio) * falling


def tried_steps(steps: int, most: int) -> list[int]:
    """About `most` of so many steps, the first and the last among them."""
    return sorted({*range(0, steps, max(1, steps // most)), steps - 1})


def check_factors(build: Callable[[], Factor], name: str, steps: int) -> None:
    """Refuse a user's function whose factors are no numbers, or depend on the calls before. A run
    that resumes calls it for the first time in the middle. `build`: makes it, `checked`. Raises
    ConfigError."""
    forward, backward = build(), build()
    tried = tried_steps(steps, MOST_CHECKED)
    found = {step: forward(step) for step in tried}
    for step in reversed(tried):
        if (again := backward(step)) != found[step]:
            problem = (
                f"returns {found[step]:.9g} for step {step}, and {again:.9g} when it is called"
                " for the steps in another order"
            )
            fix = "let the factor depend only on the step"
            raise ConfigError("lr_schedule.build", name, problem, fix)


def checked(function: Callable[[int], Any], name: str) -> Factor:
    """A user's function, which raises ConfigError where it fails or returns no factor. `name`: as
    the run file has it."""
    fix = "return a function from a step to a number that is not negative"

    def factor(step: int) -> float:
        try:
            value = float(function(step))
        except Exception as error:  # a user's function may fail in any way
            said = " ".join(f"{type(error).__name__}: {error}".split())
            problem = f"its function fails at step {step}: {said}"
            raise ScheduleFailed("lr_schedule.build", name, problem, fix) from error
        if not 0 <= value < math.inf:
            problem = f"its function returns {value} for step {step}"
            raise ScheduleFailed("lr_schedule.build", name, problem, fix)
        return value

    return factor
