"""Plan: all that is decided about a run, and nothing that runs.

A strategy emits Steps. A Step says, for one module, where its parameters lie on an axis of the mesh
(`Param`), where the tensor that enters or leaves it lies outside and inside (`Boundary`), and
whether its parameters are gathered as one unit (`Gather`). Interpreters read Steps; none needs to
know which strategy wrote them.

Which collective a Boundary implies follows from two facts. Values: forward moves outside -> inside
on entry and inside -> outside on exit. Gradients: inside a module a copy's gradient is a partial
sum, a partial sum's gradient is a copy, a shard's is a shard; outside, ranks compute the same
thing, so a copy's gradient is a copy (the conjugate operators f and g of Megatron-LM, Shoeybi et
al. 2019, and their sequence-parallel forms, Korthikanti et al. 2022).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .axis_traits import AxisTable, Divides
from .data_order import zigzag_spans
from .errors import LayoutError
from .layout import REPLICA_AXIS, STAGE_AXIS, Layout
from .schedule import Action, Schedule
from .stages import Staging
from .sync import BUCKET_BYTES, Sync, SyncEveryStep, bucket_owners

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
    """Where one parameter lies on one axis.

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
    unit, which backward needs first, once a microbatch.
    """

    axis: str
    gathered: Literal["step", "microbatch", "use"]
    reduced: Literal["step", "microbatch"]
    offload: bool = False


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
    """What one strategy asks of one module. `interior`: how activations are cut once the input
    boundary is passed.

    `attributes` are the module's own numbers that become local (a stored head count). `sequence`:
    of the whole model.
    """

    module: str
    by: str
    params: tuple[Param, ...] = ()
    input: Boundary | None = None
    output: Boundary | None = None
    interior: ActivationSharding | None = None
    attributes: tuple[tuple[str, int], ...] = ()
    gather: FSDPUnit | None = None
    sequence: SequenceShard | None = None
    dispatch: ExpertDispatch | None = None


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


@dataclass(frozen=True)
class GradBucket:
    """One all-reduce of gradients: of these parameters, over these axes.

    `among`: the positions on `pp` that take part, where that axis is among `axes` (stages that
    share a weight). `stage`: the one whose last backward fills it; None where it is filled when all
    backwards are done. `owner`: the replica that a synchroniser with owners sums it on.
    """

    axes: tuple[str, ...]
    names: tuple[str, ...]
    among: tuple[int, ...] = ()
    stage: int | None = 0
    owner: int = 0


def _accumulation(microbatches: int) -> Schedule:
    """Gradient accumulation: the schedule of one rank."""
    actions = tuple(Action(kind, 0, i) for i in range(microbatches) for kind in ("F", "B"))
    return Schedule("accumulation", (0,), (actions,))


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a process starts. `print(plan)` is a table a person reads.

    `accumulate` counts microbatches. `pipeline`: how the model is cut into stages; None for one
    stage.
    """

    layout: Layout
    steps: tuple[Step, ...]
    weights: tuple[Weight, ...]
    batch: int
    axes: AxisTable = field(repr=False)  # all axes there are, with what each divides
    accumulate: int = 1
    blocks: tuple[str, ...] = ()  # the repeated modules: units of recompute
    recompute: str | int = "none"  # none, selective, full, or k: every k-th block
    precision: str = "fp32"  # fp64, fp32, bf16, fp16: what is computed in
    batchnorms: tuple[str, ...] = ()  # modules whose statistics are the whole microbatch's
    notes: tuple[str, ...] = field(default=(), compare=False)
    staging: Staging | None = None  # how the model is cut into stages; None: it is one
    staged: Schedule | None = (
        None  # in which order the stages run; None: gradient accumulation on one rank
    )
    dynamic_shapes: bool = (
        False  # what crosses stages has shapes that the batch's shapes do not tell
    )
    sync: Sync | None = None  # how replicas agree; None: the backend sums their gradients
    counted: tuple[
        str, ...
    ] = ()  # modules beside `blocks` that count their dropout masks by themselves
    every: tuple[Weight, ...] = ()  # in a part of a plan: the weights of the whole

    @property
    def apart(self) -> bool:
        """Whether gradients are summed over `dp` by a synchroniser, apart from what the backend
        sums."""
        return (
            self.sync is not None
            and not (self.sync.independent or self.sync.plain)
            and self.layout.replica_count > 1
        )

    @property
    def separate(self) -> bool:
        """Whether each replica on `dp` steps by itself."""
        return self.sync is not None and self.sync.independent and self.layout.replica_count > 1

    def replica(self) -> Plan:
        """The plan of one replica by itself."""
        layout = self.layout.without(REPLICA_AXIS)
        steps = [
            replace(s, params=tuple(p for p in s.params if p.axis != REPLICA_AXIS))
            for s in self.steps
        ]
        kept = [
            s
            for s in steps
            if s.params
            or s.input
            or s.output
            or s.interior
            or s.attributes
            or s.gather
            or s.sequence
            or s.dispatch
        ]
        return replace(
            self,
            layout=layout,
            steps=tuple(kept),
            batch=self.batch // self.layout.replica_count,
            sync=None,
            batchnorms=self.batchnorms
            if layout.live(*self.axes.dividing(Divides.SAMPLES, Divides.POSITIONS))
            else (),
        )

    @cached_property
    def schedule(self) -> Schedule:
        """What runs, in which order."""
        return self.staged if self.staged is not None else _accumulation(self.accumulate)

    @property
    def scattered(self) -> bool:
        """Whether FSDP2's reduce-scatter goes through a synchroniser's codec: where there is `fsdp`
        and no `dp`."""
        live = self.layout.replica_count == 1 and any(step.gather for step in self.steps)
        sync = self.sync
        return sync is not None and not (sync.independent or sync.plain) and bool(live)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that this rank runs."""
        position = self.layout.stage_of(rank)
        return tuple(
            stage for stage, where in enumerate(self.schedule.placement) if where == position
        )

    def users(self, name: str) -> tuple[int, ...]:
        """The stages that use a parameter; the first one holds what no stage uses."""
        return self._users.get(name, (0,))

    @cached_property
    def _users(self) -> dict[str, tuple[int, ...]]:
        users: dict[str, tuple[int, ...]] = {}
        for stage in self.staging.stages if self.staging is not None else ():
            for name in stage.weights:
                users[name] = (*users.get(name, ()), stage.index)
        return users

    def stage_of(self, module: str) -> int:
        """The stage that runs a module; the first one if none names it."""
        stages = self.staging.stages if self.staging is not None else ()
        return next(
            (
                s.index
                for s in stages
                if any(_inside(module, m) or _inside(m, module) for m in s.modules)
            ),
            0,
        )

    def backwards(self, stage: int, microbatch: int) -> int:
        """How often backward goes over a stage: twice where it is split, unless none of its inputs
        has a gradient."""
        return 2 if (stage, microbatch) in self._split and stage in self._asked else 1

    @cached_property
    def _asked(self) -> set[int]:
        values = self.staging.values if self.staging is not None else ()
        return {stage for value in values if value.differentiable for stage in value.targets}

    @cached_property
    def _split(self) -> set[tuple[int, int]]:
        return {
            (a.stage, a.microbatch)
            for actions in self.schedule.order
            for a in actions
            if a.kind == "W"
        }

    def holders(self, name: str) -> tuple[int, ...]:
        """The positions on `pp` whose ranks hold a parameter."""
        return tuple(sorted({self.schedule.placement[stage] for stage in self.users(name)}))

    def of(self, rank: int) -> Plan:
        """The part of the plan that concerns one rank: the parameters, modules and Steps of its
        stages."""
        if self.staging is None:
            return self
        mine = self.stages(rank)
        names = {w.name for w in self.weights if set(self.users(w.name)) & set(mine)}
        modules = [m for stage in mine for m in self.staging.stages[stage].modules]

        steps = [
            replace(step, params=tuple(p for p in step.params if p.name in names))
            for step in self.steps
            if stage_runs_module(step.module, modules)
        ]
        return replace(
            self,
            weights=tuple(w for w in self.weights if w.name in names),
            steps=tuple(steps),
            blocks=tuple(b for b in self.blocks if stage_runs_module(b, modules)),
            batchnorms=tuple(n for n in self.batchnorms if stage_runs_module(n, modules)),
            counted=tuple(n for n in self.counted if stage_runs_module(n, modules)),
            every=self.weights,
        )

    @property
    def data_size(self) -> int:
        """Number of parts that a batch is divided into."""
        return self.layout.size(*self.axes.dividing(Divides.SAMPLES))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have other tokens where a gate sees them."""
        found = self.axes.dividing(Divides.SAMPLES, Divides.POSITIONS)
        slices = self.axes.dividing(Divides.FEATURES) if self.layout.has_option("sequence") else ()
        return (*found, *slices)

    def sliced(self, module: str) -> bool:
        """Whether the ranks of `tp` have different positions inside of a module."""
        return any(
            s.interior == "sequence" and module.startswith(s.module + ".") for s in self.steps
        )

    @property
    def sequence_size(self) -> int:
        """Number of parts that a sample's sequence is divided into."""
        return self.layout.size(*self.axes.dividing(Divides.POSITIONS))

    def positions(self, rank: int, length: int) -> list[int]:
        """Which positions of a sequence a rank has, in the order of its rows. Raises
        LayoutError."""
        if self.sequence_size == 1:
            return [*range(length)]
        methods = [step.sequence for step in self.steps if step.sequence is not None]
        keys = [m.axis for m in methods if m.method != "ulysses"]
        heads = [m.axis for m in methods if m.method == "ulysses"]
        index, size = (self.layout.index(rank, *keys), self.layout.size(*keys)) if keys else (0, 1)
        if (
            length % (parts := self.sequence_size * (2 if keys else 1))
            or length < 2 * self.sequence_size
        ):
            problem = (
                f"its {length} positions do not divide over {self.sequence_size} ranks, at least"
                " two for each"
            )
            raise LayoutError("sequence", length, problem, f"use a multiple of {parts}")
        held = [i for span in zigzag_spans(length, size)[index] for i in range(*span)]
        index, size = (
            (self.layout.index(rank, *heads), self.layout.size(*heads)) if heads else (0, 1)
        )
        each = len(held) // size
        return held[index * each : (index + 1) * each]

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch on one rank."""
        return self.batch // self.accumulate // self.data_size

    def params(self) -> dict[str, dict[str, Param]]:
        """Parameter name -> axis -> Param, merged over all steps."""
        table: dict[str, dict[str, Param]] = {weight.name: {} for weight in self.weights}
        for step in self.steps:
            for param in step.params:
                table[param.name][param.axis] = param
        return table

    def reduced_over(self, name: str, table: Mapping[str, Mapping[str, Param]]) -> tuple[str, ...]:
        """The axes over which this parameter's gradient is all-reduced whole (not through a
        Gather)."""
        gathered = any(p.stored != p.compute for p in table[name].values())
        axes = [
            axis
            for axis, p in table[name].items()
            if p.grad == SUM
            and p.stored == COPY
            and not (gathered and axis == REPLICA_AXIS and not self.apart)
        ]
        return (*axes, STAGE_AXIS) if len(self.holders(name)) > 1 else tuple(axes)

    def buckets(self) -> list[GradBucket]:
        """Each gradient all-reduce, those of a stage in the order in which backward fills them."""
        if self.schedule.versions:
            return []  # every update reduces its own gradients
        table = self.params()
        owned = self.owners()
        buckets: list[tuple[tuple, list[str]]] = []
        room: dict[tuple, tuple[int, list[str]]] = {}
        gathered = {p.name for s in self.steps if s.gather is not None for p in s.params}
        for weight in reversed(self.weights):
            axes = self.reduced_over(weight.name, table)
            if not axes or not weight.trainable:
                continue
            users = self.users(weight.name)
            among = self.holders(weight.name) if STAGE_AXIS in axes else ()
            # with a synchroniser FSDP2's hooks tell when a shard's gradient is there, where no
            # stages part its backward
            late = (weight.name in gathered and not (self.apart and self.staging is None)) or len(
                users
            ) > 1
            owner = owned.get(weight.name, 0)
            # what ranks hold alike they encode alike: not in one message with what each has its own
            # part of
            cut = (
                tuple(a for a, p in table[weight.name].items() if p.stored != COPY)
                if self.apart
                else ()
            )
            key = (
                axes,
                among,
                None if late else users[0],
                owner,
                weight.dtype,
                weight.name in gathered,
                cut,
            )
            left, names = room.get(key, (0, []))
            nbytes = prod(self.local_shape(weight, table)) * weight.dtype.itemsize
            if nbytes > left:
                left, names = (
                    (
                        self.sync.bucket_bytes
                        if isinstance(self.sync, SyncEveryStep)
                        else BUCKET_BYTES
                    ),
                    [],
                )
                buckets.append((key, names))
            names.append(weight.name)
            room[key] = (left - nbytes, names)
        return [
            GradBucket(axes, tuple(names), among, stage, owner)
            for (axes, among, stage, owner, *_), names in buckets
        ]

    def owners(self) -> dict[str, int]:
        """Parameter -> the replica that alone updates it; empty where all do."""
        if (
            not self.apart
            or not isinstance(self.sync, SyncEveryStep)
            or self.sync.route != "owners"
        ):
            return {}
        trained = [w for w in self.every or self.weights if w.trainable]
        found = bucket_owners([prod(w.shape) for w in trained], self.sync.servers)
        return {w.name: owner for w, owner in zip(trained, found, strict=True)}

    def local_shape(
        self,
        weight: Weight,
        table: Mapping[str, Mapping[str, Param]],
        coords: Mapping[str, int] | None = None,
    ) -> tuple[int, ...]:
        """Shape of what a rank computes with: cut, not sharded for storage. `coords`: its positions
        on the axes, for uneven cuts; the first rank's if None."""
        here = coords or {}
        shape = list(weight.shape)
        for axis, param in table[weight.name].items():
            if param.cut is not None and param.stored != COPY:
                shape[param.cut.dim] = sum(
                    b - a for a, b in param.cut.intervals(here.get(axis, 0), self.layout.size(axis))
                )
        return tuple(shape)

    def recomputed(self) -> tuple[str, ...]:
        """The blocks whose forward runs again in backward."""
        if self.recompute == "full":
            return self.blocks
        return self.blocks[:: self.recompute] if isinstance(self.recompute, int) else ()

    def __str__(self) -> str:
        count = sum(prod(weight.shape) for weight in self.weights)
        head = (
            f"layout {self.layout}: {self.layout.world} ranks; batch {self.batch} ="
            f" {self.data_size} data ranks x {self.accumulate} microbatches x {self.microbatch}"
            f" samples\n{count / 1e6:.2f} M parameters in {len(self.weights)} tensors; compute"
            f" {self.precision}; recompute {self.recompute}"
        )
        tables = [self._stage_lines()] if self.staging is not None else []
        if self.steps or not tables:
            tables.append(
                _table(
                    [
                        ("by", "module", "parameters", "enters", "leaves"),
                        *_fold(map(_row, self.steps)),
                    ]
                )
            )
        if self.notes:
            tables.append([f"note: {note}" for note in self.notes])
        return "\n".join([head, *(line for table in tables for line in ("", *table))])

    def _stage_lines(self) -> list[str]:
        """A table of the stages: where each runs, what it holds, what it sends on."""
        assert self.staging is not None
        sizes = {w.name: prod(w.shape) for w in self.weights}
        kept = f", weight versions: {self.schedule.versions}" if self.schedule.versions else ""
        rows = [("stage", "rank", "parameters", "modules", "sends")]
        for stage in self.staging.stages:
            first, last = (
                stage.modules[0] if stage.modules else "",
                stage.modules[-1] if stage.modules else "",
            )
            sent = [
                f"{v.name} -> {', '.join(map(str, v.targets))}"
                for v in self.staging.values
                if v.source == stage.index
            ]
            rows.append(
                (
                    str(stage.index),
                    str(self.schedule.placement[stage.index]),
                    f"{sum(sizes[n] for n in stage.weights):,}",
                    first if first == last else f"{first} .. {last}",
                    "; ".join(sent),
                )
            )
        schedule = self.schedule
        head = f"pipeline {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks{kept}"
        return [head, *_table(rows)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _inside(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(outer + ".")


def stage_runs_module(module: str, modules: Iterable[str]) -> bool:
    """Whether a stage that calls `modules` runs this one, all or part of it."""
    return not module or any(_inside(m, module) or _inside(module, m) for m in modules)


def _letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement == COPY else "P"


def _row(step: Step) -> tuple[str, str, str, str, str]:
    def crossing(boundary: Boundary | None, entry: bool) -> str:
        if boundary is None:
            return ""
        cells = []
        for axis, forward, backward in boundary.moves(entry):
            ops = " / ".join(collective(*move) or "-" for move in (forward, backward))
            cells.append(f"{axis}: {_letter(forward[0])}->{_letter(forward[1])} ({ops})")
        return ", ".join(cells)

    kinds: dict[str, int] = {}
    for param in step.params:
        leaf = param.name.removeprefix(step.module + ".") if step.module else ""
        moved = "" if param.stored == param.compute else f"->{_letter(param.compute)}"
        text = f"{param.axis}:{_letter(param.stored)}{moved}" + (
            " grad P" if param.grad == SUM else ""
        )
        text = f"{leaf} {text}" if leaf and "." not in leaf else text
        kinds[text] = kinds.get(text, 0) + 1
    params = ", ".join(text if n == 1 else f"{n} x {text}" for text, n in kinds.items())
    if step.gather is not None:
        params += f" gathered per {step.gather.gathered}, reduced per {step.gather.reduced}"
        params += ", offloaded" if step.gather.offload else ""
    if step.dispatch is not None:
        beside = (
            f", {step.dispatch.beside.rpartition('.')[2]} beside the exchange"
            if step.dispatch.beside
            else ""
        )
        params += f", {step.dispatch.experts} experts{beside}"
    if step.sequence is not None:
        params += f", sequence by {step.sequence.method}"
    return (
        step.by,
        step.module or "(model)",
        params,
        crossing(step.input, True),
        crossing(step.output, False),
    )


def _fold(rows: Iterable[tuple[str, str, str, str, str]]) -> list[tuple[str, str, str, str, str]]:
    """One row for all rows that differ only in a number within the module's name."""
    folded: dict[tuple[str, ...], list[str]] = {}
    for by, module, *rest in rows:
        key = (by, re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module), *rest)
        folded.setdefault(key, []).append(module)
    return [
        (key[0], modules[0] if len(modules) == 1 else f"{key[1]} [{len(modules)}]", *key[2:])  # type: ignore[misc]
        for key, modules in folded.items()
    ]
