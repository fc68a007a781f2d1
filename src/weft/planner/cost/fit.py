"""Fits the constants of an era to measured runs. Few constants, robustly, on the logarithm of
what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.core import ConfigError

from .hardware import Era, LayerTiming
from .layout_batch import Array

# Constant -> what it may be: outside of it, a fit has found something else than what its name says.
BOUNDS = {
    "matmul": (0.3, 0.9),
    "eight": (0.4, 1.2),
    "matmul_flops": (1e6, 1e10),
    "uneven": (0.3, 1.0),
    "ragged": (0.03, 1.0),
    "ragged_heads": (0.03, 1.0),
    "attention": (0.2, 0.95),
    "attention_backward": (0.15, 0.95),
    "memory": (0.5, 0.95),
    "traffic": (0.2, 3.0),
    "launch_s": (1e-7, 2e-4),
    "link": (0.3, 0.95),
    "network": (0.2, 0.95),
    "hidden": (0.05, 0.99),
    "contention": (1e-3, 1.0),
    "fixed_s": (1e-4, 0.1),
    "jitter": (1e-4, 0.2),
    "meet_s": (1e-7, 1e-3),
    "waits": (1e-3, 1.0),
    "context_gib": (0.1, 20.0),
}
SEVERAL, ALIKE = (
    3,
    0.03,
)  # runs that tell of a layer, where what constants leave of them differs by no more
PASSES, ENOUGH = 6, 1e-3
OUTLIER = 0.05  # relative errors beyond this count by their size, not by its square


def fit_era(
    predict: Callable[[Era], Array],
    measured: Sequence[float],
    start: Era,
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    rounds: int = 20,
    toward: float = 0.0,
) -> Era:
    """The era with which `predict` agrees best with what was `measured` of each run, seconds or
    bytes, where it is like `start` but for these constants.

    `weights` of runs: equal, if left out. `toward` the start: the weight, against those, of a
    constant that lies a quarter of its bounds from it, so that what no run tells stays there
    (maximum a posteriori, with a normal prior of the logarithm). Nonlinear least squares with a
    soft L1 loss, by scipy, an extra of weft's. Raises ConfigError for a name that is no constant,
    and without scipy.
    """
    unknown = next((name for name in names if name not in BOUNDS), None)
    if unknown is not None:
        raise ConfigError(
            "--fit", unknown, "is not a constant that can be fitted", f"known: {', '.join(BOUNDS)}"
        )
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise ConfigError("--fit", "scipy", "is not installed", 'pip install "weft[fit]"') from None
    seen = np.log(np.asarray(measured, float))
    share = np.ones(len(seen)) if weights is None else np.sqrt(np.asarray(weights, float))
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip(
        np.log([max(getattr(start, name), 1e-12) for name in names]), low + 1e-3, high - 1e-3
    )

    def era(x: Array) -> Era:
        return start.model_copy(update=dict(zip(names, map(float, np.exp(x)), strict=True)))

    def residuals(x: Array) -> Array:
        wrong = np.clip(np.log(predict(era(x))) - seen, -2, 2) / OUTLIER
        # soft L1 of each, whatever its weight
        loss = np.sqrt(2 * (np.sqrt(1 + wrong**2) - 1)) * share
        return np.append(loss, np.sqrt(toward) * (x - first) / ((high - low) / 4))

    found = least_squares(residuals, first, bounds=(low, high), diff_step=0.005, max_nfev=rounds)
    return era(found.x)


def fit_layers(
    predict: Callable[[Era], Array], measured: Sequence[float], at: Array, era: Era
) -> Era:
    """`era` with `layers`: how many times as long as its constants say layers took, for each shape
    of which several runs agree, so that `predict` meets their median. `at`: the shape of each run's
    layers, as `layers.shapes` has it.
    """
    seen = np.log(np.asarray(measured, float))
    kinds, which = np.unique(np.round(at, 3), axis=0, return_inverse=True)
    those = [which.ravel() == kind for kind in range(len(kinds))]
    left = seen - np.log(predict(era))
    told = [
        i for i, runs in enumerate(those) if runs.sum() >= SEVERAL and _apart(left[runs]) <= ALIKE
    ]
    took, share = np.zeros(len(told)), np.ones(len(told))  # a layer is a part of a step alone
    for _ in range(PASSES):
        wrong = np.array([np.median(left[those[i]]) for i in told])
        took = took + wrong / share
        era = era.model_copy(
            update={"layers": tuple(_layer(kinds[i], by) for i, by in zip(told, took, strict=True))}
        )
        left = seen - np.log(predict(era))
        mended = wrong - [np.median(left[those[i]]) for i in told]
        share = np.where(
            np.abs(wrong) > ENOUGH,
            np.clip(share * mended / np.where(wrong == 0, 1, wrong), 0.05, 1),
            share,
        )
    return era


def _apart(left: Array) -> float:
    return float(np.median(np.abs(left - np.median(left))))


def _layer(shape: Array, took: float) -> LayerTiming:
    flops, tokens, samples, tp = (float(f"{2**size:.4g}") for size in shape)
    return LayerTiming(
        flops=flops, tokens=tokens, samples=samples, tp=tp, took=float(f"{np.exp(took):.4g}")
    )
