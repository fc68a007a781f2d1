"""Estimate: time, memory and traffic of many choices at once, each as named parts that sum to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..costs import Costs
from .choices import Array, Choices
from .hardware import Cluster, Era
from .practice import Practice
from .work import Work


@dataclass(frozen=True)
class Part:
    """`value` of each choice, and the formula that gave it, with the arrays that its symbols stand for."""

    name: str
    value: Array
    formula: str
    symbols: Mapping[str, Array | float]


@dataclass(frozen=True)
class Estimate:
    """Of each choice: seconds of a step and bytes of a rank's peak, in parts; bytes that a rank sends over each axis in
    a step; `mfu` by the model's definition; whether it fits."""

    time: tuple[Part, ...]
    memory: tuple[Part, ...]
    traffic: Mapping[str, Array]
    step_s: Array
    peak_bytes: Array
    fits: Array
    mfu: Array
    tokens_per_s: Array
