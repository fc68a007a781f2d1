"""Staging: the stages of a model and the tensors that cross between them. Plain data that can
be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorRef:
    """Stands for tensor `number` of the recorded forward."""

    number: int


@dataclass(frozen=True)
class InputRef:
    """Stands for a tensor among the arguments of a call: number `index` within the argument of this
    position or name."""

    argument: int | str
    index: int


@dataclass(frozen=True)
class ParamRef:
    """Stands for a parameter or buffer of the model."""

    name: str


@dataclass(frozen=True)
class OpaqueRef:
    """Stands for an object that weft cannot look into, of class `kind`. `argument`: which argument
    of the call it is, or None."""

    kind: str
    argument: int | str | None


@dataclass(frozen=True)
class PathNode:
    """One piece of work on the path that is split into stages: a module call that no split point
    divides, or a function between such calls. Only work that depends on weights is on the path;
    every stage runs the rest.

    `output`: what it returns, with TensorRef, InputRef and ParamRef in place of tensors. For each
    of these, `names` has a name for error messages and `differentiable` says whether it takes a
    gradient; `made` has the indices of the new ones. `changed`: arguments that it changes in place.
    `filled`: tensors that every stage makes and that it is the first to change, with the arguments
    that they, or views of them, are.
    `numbers`: whether it returns int or float, which may depend on shapes. `draws`: how often
    it draws random numbers outside of blocks. `blocks`: those that it calls, in order.
    `reads` and `weights`: of a function, the tensors of the recorded forward and the parameters
    whose elements it reads. `writes`: tensors of the recorded forward that it changes in place.
    `within`: whether it runs inside an autograd function or a checkpoint.
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
    filled: tuple[tuple[int, InputRef], ...]
    numbers: bool
    draws: int
    blocks: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    weights: tuple[str, ...]
    within: bool


@dataclass(frozen=True)
class Value:
    """One tensor that crosses from stage `source` to the stages `targets`. `key`: (number of the
    tensor, position on the path of its last writer). `shape` and `dtype` are those of the sample.
    `differentiable`: whether a gradient is sent back. `unread`: it would have one, but with
    the sample the loss used neither it nor what these stages compute with it."""

    key: tuple[int, int]
    name: str
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    unread: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage. `first`: the module with whose call it begins. `modules`: the modules that it
    calls, in order. `weights`: the parameters that it uses; a shared one is in several stages.
    `buffers`: the buffers that it changes."""

    index: int
    first: str
    modules: tuple[str, ...]
    weights: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Staging:
    """How a model is split. `items`: the path. `around`: modules whose calls contain a split point.
    `copied`: (stage, tensor) for tensors that the stage receives and changes in place, so that it
    works on a copy. `noted`: buffers that change and that functions between calls use. `early`: the
    points whose stages begin with the functions before the call."""

    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    items: tuple[PathNode, ...]
    around: tuple[str, ...]
    copied: frozenset[tuple[int, int]]
    noted: frozenset[str]
    early: frozenset[str] = frozenset()
