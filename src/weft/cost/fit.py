"""Fit: the constants of an era from measured runs. Few constants, robustly, on the logarithm of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConfigError
from .choices import Array
from .hardware import Era, Layer

# Constant -> what it may be: outside of it, a fit has found something else than what its name says.
BOUNDS = {
    "matmul": (0.3, 0.9), "eight": (0.4, 1.2), "matmul_flops": (1e6, 1e10),
    "uneven": (0.3, 1.0), "ragged": (0.03, 1.0),
    "attention": (0.2, 0.95), "attention_backward": (0.15, 0.95), "memory": (0.5, 0.95), "traffic": (0.2, 3.0),
    "launch_s": (1e-7, 2e-4), "link": (0.3, 0.95), "network": (0.2, 0.95), "hidden": (0.05, 0.99),
    "contention": (1e-3, 1.0), "fixed_s": (1e-4, 0.1), "jitter": (1e-4, 0.2), "meet_s": (1e-7, 1e-3),
    "waits": (1e-3, 1.0), "context_gib": (0.1, 20.0),
}  # fmt: skip
LEAST = 0.01  # a relative error that is not worth a layer
OUTLIER = 0.05  # relative errors beyond this count by their size, not by its square


def fit(
    predict: Callable[[Era], Array], measured: Sequence[float], start: Era, names: Sequence[str],
    weights: Sequence[float] | None = None, rounds: int = 20,
) -> Era:  # fmt: skip
    """The era with which `predict` agrees best with what was `measured` of each run, seconds or bytes, where it is like
    `start` but for these constants.

    `weights` of runs: equal, if left out. Nonlinear least squares with a soft L1 loss, by scipy, an extra of weft's.
    Raises ConfigError for a name that is no constant, and without scipy.
    """
    unknown = next((name for name in names if name not in BOUNDS), None)
    if unknown is not None:
        raise ConfigError("--fit", unknown, "is no constant that is fitted", f"known: {', '.join(BOUNDS)}")
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise ConfigError("--fit", "scipy", "is not installed", 'pip install "weft[fit]"') from None
    seen = np.log(np.asarray(measured, float))
    share = np.ones(len(seen)) if weights is None else np.sqrt(np.asarray(weights, float))
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip(np.log([max(getattr(start, name), 1e-12) for name in names]), low + 1e-3, high - 1e-3)

    def era(x: Array) -> Era:
        return start.model_copy(update=dict(zip(names, map(float, np.exp(x)), strict=True)))

    def residuals(x: Array) -> Array:
        wrong = np.clip(np.log(predict(era(x))) - seen, -2, 2) / OUTLIER
        return np.sqrt(2 * (np.sqrt(1 + wrong**2) - 1)) * share  # soft L1 of each, whatever its weight

    found = least_squares(residuals, first, bounds=(low, high), diff_step=0.005, max_nfev=rounds)
    return era(found.x)


def learned(predicted: Array, measured: Sequence[float], at: Array, era: Era) -> Era:
    """`era` with `layers`: of each shape, what runs of it took over what was `predicted` by its constants, in the
    median. `at`: the shape of each run's layers, as `layers.shapes` has it."""
    left = np.log(np.asarray(measured, float)) - np.log(predicted)
    kinds, which = np.unique(np.round(at, 3), axis=0, return_inverse=True)
    found = []
    for kind, shape in enumerate(kinds):
        those = left[which.ravel() == kind]
        if abs(took := float(np.median(those))) > LEAST:
            flops, samples, tp = (float(f"{2**size:.4g}") for size in shape)
            found.append(Layer(flops=flops, samples=samples, tp=tp, took=float(f"{np.exp(took):.4g}"), runs=len(those)))
    return era.model_copy(update={"layers": tuple(found)})
