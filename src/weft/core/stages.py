"""Staging: a model's stages, what crosses between them, and the path of its forward. Plain data,
which pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor that was made: `number` of the chart."""

    number: int


@dataclass(frozen=True)
class InputRef:
    """Stands for a tensor that the work was given: the `index`-th within this argument (its
    position or its name)."""

    argument: int | str
    index: int


@dataclass(frozen=True)
class ParamRef:
    """Stands for a parameter or buffer of the model."""

    name: str


@dataclass(frozen=True)
class OpaqueRef:
    """Stands for an object of a class that is no structure of tensors: this argument of the work,
    if it is one."""

    kind: str
    argument: int | str | None


@dataclass(frozen=True)
class PathNode:
    """One piece of work of the path along which a model is cut: a module call that is done whole,
    or a function between such calls. Only work that depends on weights counts: the rest is done
    again by every stage.

    `output`: what it returns, with Made, Given and State in place of tensors; these have `names`,
    for people, those that are `differentiable` take a gradient, and those at the places `made` are
    new. `changed`: arguments that it changes in place. `numbers`: whether it returns int or float,
    which may follow from shapes. `dropouts`: masks that it draws outside of blocks.
    """

    name: str
    call: bool
    stage: int
    line: str
    output: Any
    names: tuple[str, ...]
    differentiable: tuple[bool, ...]
    made: tuple[int, ...]
    changed: tuple[InputRef, ...]
    numbers: bool
    dropouts: int


@dataclass(frozen=True)
class Value:
    """One tensor that crosses stages. `key`: (tensor of the chart, place on the path of what wrote
    it last). `shape` and `dtype` are those on the sample; `differentiable`: whether a gradient
    comes back."""

    key: tuple[int, int]
    name: str
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class Stage:
    """`first`: the module with whose call it begins. `modules`: those that it calls whole, in
    order. `weights`: the parameters that it uses, a shared one in every stage that does. `buffers`:
    those that it changes."""

    index: int
    first: str
    modules: tuple[str, ...]
    weights: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Staging:
    """`items`: the path. `around`: modules whose calls contain a cut. `copied`: (stage, tensor)
    that the stage receives and changes in place, so it works on a copy. `noted`: changed buffers
    that functions between calls use."""

    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    items: tuple[PathNode, ...]
    around: tuple[str, ...]
    copied: frozenset[tuple[int, int]]
    noted: frozenset[str]
