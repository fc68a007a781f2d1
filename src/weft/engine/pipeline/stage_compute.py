"""What one rank does for each action of a schedule: its stages of the model, on its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._torch.trees import tree_map
from weft.core import (
    STAGE_AXIS,
    Action,
    Plan,
    UnsupportedModel,
)
from weft.nn import Randomness, check_learns, mix_key, weighed_loss
from weft.parallel import (
    DATA_AXES,
    STEP_STATISTICS,
    ActivationOffload,
    Mesh,
    cast_arguments,
)

from ..compute_copies import ComputeCopies
from ..context_parallel.sequence import ContextParallel, on_the_part
from ..draw_watch import DrawWatch, undrawable
from ..fsdp_units import FSDPUnits
from ..function_overrides import FunctionOverrides
from ..grad_buckets import GradReducer
from ..microbatch import Batch, MicroBatch
from ..state_watch import StateWatch
from ..whole_batch import WholeBatchLoss
from .runner import Roots
from .stage_forward import StageForward
from .weight_stash import WeightStash

Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]


@dataclass
class StageModel:
    """The part of a model that one rank runs."""

    model: nn.Module
    plan: Plan
    device: torch.device
    staged: StageForward | None  # None: the model is one stage
    sequence: ContextParallel
    low: ComputeCopies | None = None  # None: weights are not trained here
    heads: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)

    def __call__(
        self, stage: int, micro: MicroBatch, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Any]:
        """({value: tensor} for other stages, what the model returns) where that is the last stage,
        else None."""
        if self.plan.asks_gradients and not torch.is_grad_enabled():
            with torch.enable_grad():  # as in validation, which keeps no graph
                return tree_map(_detached, self._run(stage, micro, received))
        return self._run(stage, micro, received)

    def _run(
        self, stage: int, micro: MicroBatch, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Any]:
        arguments = cast_arguments(self.plan.dtypes, micro.arguments)
        with self.heads:
            if self.staged is None:
                return {}, self.model(**arguments)
            return self.staged(stage, arguments, received)

    def is_last(self, stage: int) -> bool:
        return stage == self.plan.schedule.stages - 1


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _generator(device: torch.device) -> torch.Generator:
    """The one that a model draws from. torch.manual_seed would seed every device, and take its
    time."""
    return (
        torch.cuda.default_generators[device.index or 0]
        if device.type == "cuda"
        else torch.default_generator
    )


@dataclass
class InferenceCompute:
    """Forward alone: `done(output, microbatch)` gets what the model returns, on the rank of the
    last stage."""

    stages: StageModel
    micros: Sequence[MicroBatch]
    done: Callable[[Any, Batch], None]
    functions: FunctionOverrides | None = None

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        with self.functions or contextlib.nullcontext():
            values, output = self.stages(stage, self.micros[microbatch], received)
        if self.stages.is_last(stage):
            self.done(output, self.micros[microbatch].batch)
        return values, None

    def before(self, action: Action) -> None:
        if self.functions is not None:
            self.stages.sequence.begin(self.micros[action.microbatch], self.stages.model)

    def around_backward(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def after(self, action: Action) -> None:
        pass


@dataclass
class TrainingCompute:
    """One optimizer step's actions. `total` is what ranks agree upon at its end: squared norm,
    loss, weight, unreached parameters, and whether they ran the same modules and changed the same
    state; here it gets the losses and weights of this rank's microbatches.

    `watching`: whether forwards are watched for random numbers; one that draws without `functions`
    runs again after `if_drawn()`.
    `agree`: the group that sums it while the backwards still run, where nothing else is added to
    it.
    """

    stages: StageModel
    mesh: Mesh
    loss: Loss
    randomness: Randomness
    reducer: GradReducer
    units: FSDPUnits
    versions: WeightStash | None = None
    offload: ActivationOffload | None = None
    functions: FunctionOverrides | None = None  # what is replaced inside a forward; None: nothing
    if_drawn: Callable[[], None] | None = None  # called once a forward has drawn; sets functions
    watching: bool = True
    scale: float = 1.0  # of the loss that backward starts from
    agree: dist.ProcessGroup | None = None
    step: int = 0
    micros: Sequence[MicroBatch] = ()
    total: Tensor = field(init=False)
    agreed: dist.Work | None = None
    state: StateWatch = field(init=False)
    action: Action | None = None  # what runs
    ahead: bool = False  # whether forwards run for their outputs alone
    trying: bool = False  # whether they run to be compared, and count for nothing
    _whole: WholeBatchLoss | None = None

    def __post_init__(self) -> None:
        if self.stages.plan.whole_batch:
            self._whole = WholeBatchLoss(self.loss, self.stages.plan, self.mesh)
        schedule, rank = self.stages.plan.schedule, self.mesh.coords.get(STAGE_AXIS, 0)
        self._data = self.mesh.index(*DATA_AXES)
        plan, size = self.stages.plan, self.stages.plan.microbatch
        firsts = [(m * plan.data_size + self._data) * size for m in range(plan.accumulate)]
        device = self.stages.device
        self._samples = [torch.arange(first, first + size, device=device) for first in firsts]
        backwards = [a for a in schedule.order[rank] if a.kind in ("B", "W")]
        self._split = {a[1:] for a in backwards if a.kind == "W"}
        # of each stage, the action after which its gradients are complete
        self._last = {a.stage: a for a in backwards}
        self._last_forward = [a for a in schedule.order[rank] if a.kind == "F"][-1]
        self._generator = _generator(device)
        drawn_from = dict.fromkeys((self._generator, torch.default_generator))
        self._watch = DrawWatch(self.stages.model, [*drawn_from])
        self.state = StateWatch(self.stages.model, plan, self.mesh, self.units)
        self._held = (
            contextlib.ExitStack()
        )  # its microbatch's weights: a backward may compute a forward again

    def begin(self, step: int, micros: Sequence[MicroBatch], scale: float) -> None:
        self.step, self.micros, self.scale = step, micros, scale
        if self.functions is not None:
            self.functions.scale = scale
        self.total = torch.zeros(STEP_STATISTICS, dtype=torch.float64, device=self.stages.device)
        self.agreed = None
        if self.stages.low is not None:
            self.stages.low.begin()
        self.state.begin()  # after what writes the weights
        self.reducer.begin()
        if self.versions is not None:
            self.versions.begin()
        if self._whole is not None:
            self._whole.begin()
            if self.stages.plan.runs_forward_twice:
                self._forwards_ahead()

    def _forwards_ahead(self) -> None:
        """The first of two forwards of each microbatch, for its output alone: the loss is of all
        outputs. What it changes in buffers, such as running statistics, is undone."""
        model = self.stages.model
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        forward, self.ahead = self._watched if self.watching else self._forward, True
        for microbatch in range(len(self.micros)):
            self.before(Action("F", 0, microbatch))
            forward(0, microbatch, {})
        self.ahead = False
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)
                buffer.copy_(before)
        self.units.forget_forwards()
        assert self._whole is not None
        self._whole.again = True

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | Roots | None]:
        if self.watching:
            values, found = self._watched(stage, microbatch, received)
        else:
            values, found = self._forward(stage, microbatch, received)
        if found is None:
            return values, None
        loss, weight, output = found
        counted = torch.as_tensor(weight, device=self.total.device).detach().double()
        self.total[1:3] += torch.stack([loss.detach().double(), counted])
        if (
            self.versions is not None
        ):  # an update for every microbatch: the mean is that microbatch's own
            return values, loss * self.versions.divisor(counted, microbatch)
        if self._whole is not None:
            return values, partial(self._whole.roots, microbatch, output, self.scale)
        return values, loss * self.scale

    def _watched(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], tuple[Tensor, Tensor, Any] | None]:
        """A forward of the first step. One that draws without `functions` runs again with them."""
        seed, layout = mix_key(self.randomness.seed, self.step), self.stages.plan.layout
        forward = partial(self._forward, stage, microbatch, received)
        while True:
            self._watch.begin(seed)
            try:
                found = forward()
            except UnsupportedModel:
                self.state.refuse_new()  # what follows from it is no reason
                raise
            by_torch, by_python = self._watch.end()
            if found[1] is not None and self._whole is None:
                check_learns(self.loss, *found[1][:2])
            if by_torch and self.if_drawn is not None:
                self._watch.undo()
                self.if_drawn()
                self.randomness.begin(self.step, self._samples[microbatch])
                continue
            if (by_torch or by_python) and layout.active_axes():
                self.state.refuse_new()
                if by_torch or self._whole is not None or self._branches(microbatch, forward, seed):
                    raise undrawable(layout, by_torch)
            return found

    def _branches(self, microbatch: int, forward: Callable[[], Any], seed: int) -> bool:
        """Whether what a forward computes depends on numbers by Python or numpy."""

        def again() -> Any:
            self.randomness.begin(self.step, self._samples[microbatch])
            return forward()

        self.trying = True
        found = self._watch.changes(again, seed)
        self.trying = False
        return found

    def _forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], tuple[Tensor, Tensor, Any] | None]:
        """({value: tensor} for other stages, after the last stage what the loss returns, and of
        what output)."""
        micro, nothing = self.micros[microbatch], contextlib.nullcontext()
        with self.functions or nothing:
            weights = self.versions.of(stage, microbatch) if self.versions is not None else nothing
            with weights, torch.set_grad_enabled(not self.ahead):
                values, output = self.stages(stage, micro, received)
            if not self.stages.is_last(stage):
                return values, None
            if self._whole is not None:
                return values, (*self._whole(microbatch, output, micro.batch), output)
            with on_the_part(self.stages.sequence):
                return values, (*weighed_loss(self.loss, output, micro.batch), None)

    def now(self) -> tuple[str, int]:
        """The kind of the action that runs, and its microbatch: or "ahead" for the first of two
        forwards, "trial" for one that counts for nothing."""
        if self.action is None:
            return "", 0
        kind = "trial" if self.trying else "ahead" if self.ahead else self.action.kind
        return kind, self.action.microbatch

    def before(self, action: Action) -> None:
        self.action = action
        kind, stage, microbatch = action
        self.randomness.begin(self.step, self._samples[microbatch])
        self.stages.sequence.begin(self.micros[microbatch], self.stages.model)
        if kind == "F":
            if self.offload is not None:
                self.offload.begin_forward((stage, microbatch))
            place = (microbatch, self._data, stage) if stage else (microbatch, self._data)
            self._generator.manual_seed(mix_key(self.randomness.seed, self.step, *place) % 2**63)
            self.units.before_forward()
            return
        if self.versions is not None and kind in ("B", "W"):
            self._held.enter_context(self.versions.of(stage, microbatch))
        if self.offload is not None and kind in ("B", "W"):
            self.offload.begin_backward((stage, microbatch))
        last, split = action == self._last[stage], (stage, microbatch) in self._split
        self.units.before(action, last, split)
        if last:
            self.reducer.arm(stage)

    def around_backward(self) -> contextlib.AbstractContextManager:
        again = self.functions is not None and self.functions.repeated
        return self.functions if again and self.functions else contextlib.nullcontext()

    def after(self, action: Action) -> None:
        if action.kind == "F":
            if self.agree is not None and action == self._last_forward:
                self.agreed = dist.all_reduce(self.total, group=self.agree, async_op=True)
            return
        if action.kind == "U":
            assert self.versions is not None
            self.versions.update(action)
            return
        if self.versions is not None:
            self._held.close()
            if action.kind == "W" or action[1:] not in self._split:
                self.versions.done(*action[1:])
            return
        last = action == self._last[action.stage]
        self.units.after(action, last)
        if last:
            self.reducer.close(action.stage)
