"""ForwardGraph: one forward of a model as data: which modules and functions ran, in which order, on
which tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.core import InputRef

# why a later stage could not replace a tensor, for error messages
WRITTEN_BY_EVERY_STAGE = (
    "was made by code without weights, which every stage runs, and then changed in place"
)
UNSEEN_BY_TORCH = "was made by something that is no PyTorch function"


@dataclass
class GraphNode:
    """A module call, or a function on tracked tensors. `parent`: the call in which it happened. It
    lasts until event `end` and made the tensors `made`. `reads` and `writes` are tensors made
    before it began; those that it `differentiates` took no gradient until then. `keeps`: another
    call reads a tensor that it made of the batch without weights, and did not return."""

    name: str
    call: bool
    parent: int
    line: str
    text: str
    within: str  # the autograd function that it runs in, from the call `parent` on
    end: int = 0
    made: range = range(0)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    differentiates: set[int] = field(default_factory=set)
    weights: dict[str, None] = field(default_factory=dict)
    buffers: dict[str, None] = field(default_factory=dict)
    random: bool = False
    reads_into_python: bool = False  # it reads an element into Python
    checks: bool = False  # what a distribution of torch is given, by that
    reshapes: bool = False  # it changes the shape of a tensor in place
    keeps: bool = False
    output: Any = None
    hidden: set[int] = field(
        default_factory=set
    )  # tensors that it returns inside objects of other classes
    changed: tuple[InputRef, ...] = ()
    filled: dict[int, InputRef] = field(default_factory=dict)  # local tensors that it changes first
    draws: int = 0
    flops: float = 0.0

    def depends_on_weights(self, tainted: Collection[int], changed: Collection[str]) -> bool:
        """Whether it depends on weights or random numbers, directly or through `tainted` tensors
        and `changed` buffers."""
        return bool(
            self.weights
            or self.random
            or not self.reads.isdisjoint(tainted)
            or any(b in changed for b in self.buffers)
        )


@dataclass(frozen=True)
class TensorInfo:
    """A tensor. `home`: why a later stage could not replace it; empty if it can. `local`: it has
    memory of its own, which every stage makes: a later stage can write into it what came."""

    name: str
    birth: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    storage: int
    home: str = ""
    local: bool = False


@dataclass(frozen=True)
class ParamInfo:
    """A parameter: all its names, and how many elements it has."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class ForwardGraph:
    """`events` in the order in which they began, the model's own call first; `tensors` as they were
    made.

    `changed`: buffers that the forward updates. `names`: every name of a module -> its first one.
    `containers`: modules that are a Sequential or own a list. `clock`: for each timed run, when
    each call began, in seconds, and the end. `unread`: places, among the tensors that the model
    returns, of those that its loss does not use.
    """

    events: tuple[GraphNode, ...]
    tensors: tuple[TensorInfo, ...]
    weights: Mapping[str, ParamInfo]
    changed: frozenset[str]
    names: Mapping[str, str]
    containers: frozenset[str]
    clock: tuple[tuple[float, ...], ...] = ()
    unread: frozenset[int] = frozenset()

    def calls(self) -> list[int]:
        return [i for i, event in enumerate(self.events) if event.call]

    def parts_weights(self, start: int) -> bool:
        """Whether no weight is used both before this event and from it on."""
        before, after = self.events[:start], self.events[start:]
        used = {name for event in before if not event.call for name in event.weights}
        return used.isdisjoint(n for event in after if not event.call for n in event.weights)


def containers_of(model: nn.Module) -> frozenset[str]:
    """Modules that are a Sequential or own a list."""
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential)
        or any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in module.children())
    )
