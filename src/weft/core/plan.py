"""Plan: all that is decided about a run, and nothing that runs.

A strategy emits Steps (step.py); a Plan is all of them with the layout, the batch, the stages and
the synchroniser. Interpreters read it; none needs to know which strategy wrote a Step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from .axis_traits import AxisTable, Divides
from .data_order import zigzag_spans
from .dropped_shapes import DroppedShapes
from .errors import LayoutError
from .float8 import Float8Linears
from .layout import REPLICA_AXIS, STAGE_AXIS, Layout
from .module_names import is_inside
from .plan_text import float8_table, plan_tables, stage_table
from .precision import DtypeRule
from .schedule import Action, Schedule
from .stages import Staging
from .step import COPY, SUM, Param, Step, Weight
from .sync import Sync, SyncEveryStep


def _accumulation(microbatches: int) -> Schedule:
    """Gradient accumulation: the schedule of one rank."""
    actions = tuple(Action(kind, 0, i) for i in range(microbatches) for kind in ("F", "B"))
    return Schedule("accumulation", (0,), (actions,))


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a process starts. `print(plan)` is a table."""

    layout: Layout
    steps: tuple[Step, ...]
    weights: tuple[Weight, ...]
    batch: int
    axes: AxisTable = field(repr=False)  # all axes there are, with what each divides
    accumulate: int = 1  # microbatches
    blocks: tuple[str, ...] = ()  # the repeated modules: units of recompute
    recompute: str | int | tuple[str, ...] = "none"  # none, selective, full, every k-th, or these
    precision: str = "fp32"  # fp64, fp32, bf16, fp16: what is computed in
    reduce: str = "fp32"  # what gradients are summed in: fp32, or with bf16 also bf16
    batchnorms: tuple[str, ...] = ()  # modules whose statistics are the whole microbatch's
    notes: tuple[str, ...] = field(default=(), compare=False)
    staging: Staging | None = None  # how the model is cut into stages; None: it is one
    staged: Schedule | None = None  # order of the stages; None: gradient accumulation on one rank
    dynamic_shapes: bool = False  # of what crosses stages: the batch's shapes do not tell them
    sync: Sync | None = None  # how replicas synchronise; None: the backend sums their gradients
    counted: tuple[str, ...] = ()  # modules beside `blocks` that count their dropout masks
    chosen: tuple[str, ...] = ()  # modules that a forward calls only where its data say so
    asks_gradients: bool = False  # whether the forward itself computes gradients
    logits: str = "auto"  # whole, chunks (made by the loss, of some tokens at a time), or auto
    heads: tuple[str, ...] = ()  # modules whose output the loss can make in chunks
    offload_activations: bool = False  # what blocks save for backward rests in host memory
    fsdp_prefetch: int | None = None  # units gathered ahead of the one that runs; None: FSDP2's way
    float8: Float8Linears | None = None  # which linears multiply in float8; None: no one does
    dropped: DroppedShapes = field(default_factory=DroppedShapes)  # which dim counts samples
    whole_batch: bool = False  # the loss is one of all samples, of all microbatches and data ranks
    pairs: frozenset[int] = frozenset()  # leaves of the output that compare samples, if whole_batch
    of_one_state: tuple[str, ...] = ()  # axes that keep, alone, what the forward changes of weights
    own_gradients: bool = field(default=True, compare=False)  # a hook may change gradients
    every: tuple[Weight, ...] = ()  # in a part of a plan: the weights of the whole

    @property
    def dtypes(self) -> DtypeRule:
        """What is computed, and summed, in which dtype."""
        return DtypeRule(self.precision, self.reduce)

    @property
    def uses_custom_dp_sync(self) -> bool:
        """Whether gradients are summed over `dp` by a synchroniser, apart from what the backend
        sums."""
        made = self.sync
        apart = made is not None and not (made.independent or made.plain)
        return apart and self.layout.replica_count > 1

    @property
    def replicas_step_independently(self) -> bool:
        """Whether each replica on `dp` steps by itself."""
        return self.sync is not None and self.sync.independent and self.layout.replica_count > 1

    @property
    def gradient_sync(self) -> SyncEveryStep | None:
        """The synchroniser that sums gradients in every step; None: the backend sums them, or
        replicas step by themselves."""
        made = self.sync
        return made if isinstance(made, SyncEveryStep) and not made.plain else None

    def replica(self) -> Plan:
        """The plan that one replica steps by: this one, unless replicas step independently."""
        if not self.replicas_step_independently:
            return self
        layout = self.layout.without(REPLICA_AXIS)
        steps = [
            replace(s, params=tuple(p for p in s.params if p.axis != REPLICA_AXIS))
            for s in self.steps
        ]
        kept = [s for s in steps if s != Step(s.module, s.by)]  # something is left of it
        return replace(
            self,
            layout=layout,
            steps=tuple(kept),
            batch=self.batch // self.layout.replica_count,
            sync=None,
            batchnorms=self.batchnorms
            if layout.active_axes(*self.axes.dividing(Divides.SAMPLES, Divides.POSITIONS))
            else (),
        )

    @cached_property
    def schedule(self) -> Schedule:
        """What runs, in which order."""
        return self.staged if self.staged is not None else _accumulation(self.accumulate)

    @property
    def fsdp_uses_codec(self) -> bool:
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
                if any(is_inside(module, m) or is_inside(m, module) for m in s.modules)
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
            heads=tuple(n for n in self.heads if stage_runs_module(n, modules)),
            float8=self.float8
            and self.float8.within(lambda name: stage_runs_module(name, modules)),
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
        around = [
            step
            for step in self.steps
            if step.activation_sharding is not None and module.startswith(step.module + ".")
        ]
        innermost = max(around, key=lambda step: len(step.module), default=None)
        return innermost is not None and innermost.activation_sharding == "sequence"

    @property
    def runs_forward_twice(self) -> bool:
        """Whether a forward runs first for its output alone. In a pipeline outputs wait."""
        return self.whole_batch and self.accumulate > 1 and self.staging is None

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
            and not (gathered and axis == REPLICA_AXIS and not self.uses_custom_dp_sync)
        ]
        return (*axes, STAGE_AXIS) if len(self.holders(name)) > 1 else tuple(axes)

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
        if isinstance(self.recompute, tuple):
            return self.recompute
        return self.blocks[:: self.recompute] if isinstance(self.recompute, int) else ()

    def __str__(self) -> str:
        staging, schedule = self.staging, self.schedule
        stages = () if staging is None else stage_table(staging, schedule, self.weights)
        products = () if self.float8 is None else float8_table(self.float8)
        return "\n".join([self._head, *plan_tables(stages, self.steps, products, self.notes)])

    @property
    def _head(self) -> str:
        count = sum(prod(weight.shape) for weight in self.weights) / 1e6
        again = ", ".join(r) if isinstance(r := self.recompute, tuple) else r
        ahead = f"; fsdp_prefetch {self.fsdp_prefetch}" if self.fsdp_prefetch else ""
        return (
            f"layout {self.layout}: {self.layout.world} ranks; batch {self.batch} ="
            f" {self.data_size} data ranks x {self.accumulate} microbatches x {self.microbatch}"
            f" samples\n{count:.2f} M parameters in {len(self.weights)} tensors; compute"
            f" {self.dtypes}; recompute {again}"
            f"{'; activations offloaded' if self.offload_activations else ''}{ahead}"
        )


def emulate_float8(plan: Plan) -> Plan:
    """The same plan for any device: where it multiplies in float8, by emulation."""
    return replace(plan, float8=plan.float8 and replace(plan.float8, emulated=True))


def stage_runs_module(module: str, modules: Iterable[str]) -> bool:
    """Whether a stage that calls `modules` runs this one, all or part of it."""
    return not module or any(is_inside(m, module) or is_inside(module, m) for m in modules)
