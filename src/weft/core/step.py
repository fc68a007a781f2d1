"""Step: what one strategy asks of one module, as data.

A Step says where the module's parameters lie on an axis of the mesh (`Param`), where the tensor
that enters or leaves it lies outside and inside (`Boundary`), and whether its parameters are
gathered as one unit (`FSDPUnit`).

Which collective a Boundary implies follows from two facts. Values: forward moves outside -> inside
on entry and inside -> outside on exit. Gradients: inside a module a copy's gradient is a partial
sum, a partial sum's gradient is a copy, a shard's is a shard; outside, ranks compute the same
thing, so a copy's gradient is a copy (the conjugate operators f and g of Megatron-LM, Shoeybi et
al. 2019, and their sequence-parallel forms, Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from .module_names import is_inside

Spec = Mapping[str, Placement]  # axis -> placement; an axis left out is Replicate


COPY = Replicate()


SUM = Partial()


def collective(src: Placement, dst: Placement) -> str | None:
    """The collective that turns a tensor placed as `src` into one placed as `dst`; None if no rank
    needs another."""
    if src in (dst, COPY):
        return None
    if src == SUM:
        return "all_reduce" if dst == COPY else "reduce_scatter"
    return "all_gather" if dst == COPY else "all_to_all"


def dual(placement: Placement) -> Placement:
    """Where the gradient of a tensor lies inside a module."""
    return {COPY: SUM, SUM: COPY}.get(placement, placement)


@dataclass(frozen=True)
class DimShard:
    """How one dim is divided over an axis: each part by itself, never inside a unit.

    A fused QKV of 8 query and 2 key heads of 64 is `Cut(0, parts=(512, 128, 128), units=(8, 2,
    2))`. A part with fewer units than ranks is shared: neighbouring ranks hold the same unit.
    """

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...]

    def intervals(self, index: int, size: int) -> tuple[tuple[int, int], ...]:
        """What rank `index` of `size` holds: a (start, stop) of the global dim for each part."""
        intervals, offset = [], 0
        for length, units in zip(self.parts, self.units, strict=True):
            width = length // units
            if units < size:
                first = index * units // size
                last = first + 1
            else:
                each = -(-units // size)  # torch.chunk's rule: the last ranks get less
                first, last = min(index * each, units), min((index + 1) * each, units)
            intervals.append((offset + first * width, offset + last * width))
            offset += length
        return tuple(intervals)

    def shared(self, size: int) -> bool:
        """Whether some unit lies on more than one of `size` ranks."""
        return any(units < size for units in self.units)


@dataclass(frozen=True)
class Param:
    """Where one parameter lies on one axis, or on several together (`axis` "fsdp.tp").

    `stored` is where it rests, `compute` what a rank computes with, `grad` what backward leaves on
    a rank. stored != compute is a gather before use, and grad != stored is a reduction after
    backward. A `cut` with `stored` a copy is a rank's view of a whole parameter (key heads fewer
    than ranks).
    """

    name: str
    axis: str
    stored: Placement
    compute: Placement
    grad: Placement
    cut: DimShard | None = None


@dataclass(frozen=True)
class Boundary:
    """One tensor crossing a module's edge. `typed`: the outside value is a DTensor that carries its
    placement. `every`: not the first tensor alone that enters, but all do."""

    outside: Spec
    inside: Spec
    typed: bool = False
    every: bool = False

    def moves(
        self, entry: bool
    ) -> Iterator[tuple[str, tuple[Placement, Placement], tuple[Placement, Placement]]]:
        """Per axis: its name, forward (from, to), backward (from, to)."""
        for axis in {**self.outside, **self.inside}:
            outside, inside = self.outside.get(axis, COPY), self.inside.get(axis, COPY)
            if entry:
                yield axis, (outside, inside), (dual(inside), outside)
            else:
                yield axis, (inside, outside), (outside, dual(inside))


ActivationSharding = Literal["whole", "sequence", "heads", "features"]


@dataclass(frozen=True)
class FSDPUnit:
    """Parameters below a module (less those of deeper Gathers) that are gathered and reduced
    together.

    ZeRO-1: gathered and reduced once a step. ZeRO-2: reduced every microbatch. ZeRO-3: also
    gathered at every use, in forward and again in backward (Rajbhandari et al. 2020); its last
    unit, which backward needs first, once a microbatch. `axis` may be several, joined by dots.
    `copies`: of the ranks that reduce, how many compute the same gradient; the sum is divided by
    it. `beside`: further modules of the unit, which run after the first.
    """

    axis: str
    gathered: Literal["step", "microbatch", "use"]
    reduced: Literal["step", "microbatch"]
    offload: bool = False
    copies: int = 1
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceShard:
    """The sequence is cut over `axis` through the whole model; attention reaches the other parts by
    `method`."""

    axis: str
    method: str  # ring, gather or ulysses


@dataclass(frozen=True)
class ExpertDispatch:
    """The module holds its part of the weights of `experts` experts, to which tokens travel.
    `names` of its forward's arguments: tokens, experts, weights. `beside`: a module that runs
    meanwhile."""

    experts: int
    names: tuple[str, ...]
    beside: str = ""


@dataclass(frozen=True)
class Step:
    """What one strategy asks of one module. `activation_sharding`: how activations are cut once
    the input boundary is passed.

    `attributes` are the module's own numbers that become local (a stored head count). `sequence`:
    of the whole model. `whole_sequence`: the module computes on all positions, on every rank of the
    axes that divide them. `mean_over`: the axis whose ranks share the features that the module
    normalises by their root mean square. `arguments`: (name, axis, how it is divided) of what the
    module is called with, and takes its part of. `dropped`: how the input of a dropout is cut that
    stands where other activations are cut in another way.
    """

    module: str
    by: str
    params: tuple[Param, ...] = ()
    input: Boundary | None = None
    output: Boundary | None = None
    activation_sharding: ActivationSharding | None = None
    attributes: tuple[tuple[str, int], ...] = ()
    gather: FSDPUnit | None = None
    sequence: SequenceShard | None = None
    dispatch: ExpertDispatch | None = None
    whole_sequence: bool = False
    mean_over: str = ""
    arguments: tuple[tuple[str, str, DimShard], ...] = ()
    dropped: ActivationSharding | None = None


def computes_whole_sequences(steps: Iterable[Step], module: str) -> bool:
    """Whether a module is in one that has all positions on every rank, or is that one: what enters
    and leaves it is of the rank's own."""
    return any(step.whole_sequence and is_inside(module, step.module) for step in steps)


@dataclass(frozen=True)
class Weight:
    """A parameter of the model as it is on one device. `aliases`: further names of the same tensor
    (tied)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()


def sequence_step(axis: str, method: str, weights: Iterable[Weight]) -> Step:
    """The Step by which the sequence is cut over an axis: every gradient is a partial sum over
    it."""
    params = tuple(Param(weight.name, axis, COPY, COPY, SUM) for weight in weights)
    return Step("", "context", params=params, sequence=SequenceShard(axis, method))
