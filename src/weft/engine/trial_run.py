"""One forward and backward of a trial: what is compared of the whole and of the sharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._torch.autograd import in_backward
from weft._torch.tensors import is_in_transform, without_function_modes
from weft.core import COPY, DTYPES, EXPERTS, SUM, DtypeRule, Plan, Refusal, Weight
from weft.nn import module_calls
from weft.parallel import FEATURE_AXES, SEQUENCE_AXES, Mesh
from weft.pipeline import tensors_in

from .context_parallel.sequence import ContextParallel, MaskOfOwnKeys
from .context_parallel.whole_marks import is_fixed
from .float64_mode import Float64Mode
from .function_overrides import FunctionOverrides
from .gathered_model import GatheredModel
from .microbatch import MicroBatch
from .random_projection import RandomProjection
from .trial_branches import Branch, BranchReads
from .trial_functions import TrialFunctions
from .whole_weights import WholeWeights

Call = tuple[str, int]  # a module, and which call of it


@dataclass
class TrialRecord:
    """Projections of outputs, in order of execution, and of gradients. `output`: the first tensor
    that the model returned. Of a sharded run they are summed over ranks when it is done."""

    outputs: dict[Call, Tensor] = field(default_factory=dict)
    shapes: dict[Call, tuple[int, ...]] = field(default_factory=dict)
    no_positions: set[Call] = field(default_factory=set)  # known to give none of a sequence
    grads: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    output_shape: tuple[int, ...] = ()
    sizes: dict[str, float] = field(default_factory=dict)  # squared norms of gradients
    others: list[Branch] = field(default_factory=list)  # the branches that it has not taken


class TrialError(Exception):
    """The model raised. `module`: where. `backward`: whether in its backward."""

    def __init__(self, module: str, backward: bool = False):
        super().__init__(module)
        self.module, self.backward = module, backward


class TrialRun:
    """Runs a model that has no weights of its own.

    Args:
        model: whole, or sharded by `plan`; becomes this object's own.
        plan: what it is sharded by.
        mesh: where this rank computes.
        precision: what is computed in: "fp64", "fp32" or the plan's own.
        weights: gives each weight whole, by name.
        sequence: what divides the sequence, if it is divided.
        whole: the record of the whole model, if this one is sharded.
        training: whether the model runs as in training mode.
        branch: which it takes, whatever its tensors hold.
        scale: of the output's gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        precision: str,
        weights: WholeWeights,
        sequence: ContextParallel | None = None,
        whole: TrialRecord | None = None,
        training: bool = False,
        branch: Branch | None = None,
        scale: float = 1.0,
    ):
        self._plan, self._mesh, self._whole_weight = plan, mesh, weights
        self._sequence, self._whole = sequence, whole
        self._rule, self._dtype = DtypeRule(precision), DTYPES[precision]
        self._table, self._weights = plan.params(), {w.name: w for w in plan.weights}
        self._project = RandomProjection(mesh.device)
        self._record, self._positions = TrialRecord(), torch.empty(0, dtype=torch.long)
        self._length, self._counted, self._scale = 0, Counter[str](), scale
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not self._rule.low:
                    setattr(module, name, buffer.to(self._dtype))
        self._reads = BranchReads(branch)
        functions = partial(TrialFunctions, training, self._reads)
        self.around = _modes(precision, sequence, functions)  # active where the model runs
        handed = sequence is None or not sequence.gathers
        self._run = GatheredModel(model, plan.blocks, self._make, self.around, self._take, handed)

    @property
    def model(self) -> nn.Module:
        return self._run.model

    # ---- weights ---------------------------------------------------------------------------------

    def _make(self, name: str) -> Tensor:
        """This rank's part of a weight, as it is computed with."""
        tensor = self._whole_weight(name)
        if self._whole is not None:
            for dim, rows in enumerate(self._rows_of(self._weights[name])):
                tensor = tensor if rows is None else tensor.index_select(dim, rows)
        if tensor.is_floating_point():
            low = self._rule.low
            tensor = tensor.to(self._rule.computed(tensor.dtype) if low else self._dtype)
        return tensor

    def _rows_of(self, weight: Weight) -> list[Tensor | None]:
        """For each dim of a weight, which rows this rank has."""
        rows: list[Tensor | None] = [None] * len(weight.shape)
        for param in self._table[weight.name].values() if self._whole is not None else ():
            if param.cut is None or param.stored == COPY:
                continue
            dim, place = param.cut.dim, (self._mesh.index(param.axis), self._mesh.size(param.axis))
            before = rows[dim]
            if before is None:
                before = torch.arange(weight.shape[dim], device=self._mesh.device)
            rows[dim] = torch.cat([before[a:b] for a, b in param.cut.intervals(*place)])
        return rows

    # ---- what is recorded ------------------------------------------------------------------------

    def _take(self, name: str, grad: Tensor) -> None:
        weight = self._weights[name]
        share = self._share_of(weight) if self._whole is not None else 1.0
        found = share * self._project(grad, self._rows_of(weight), weight.shape)
        record = self._record
        record.grads[name] = record.grads[name] + found if name in record.grads else found
        if self._whole is None:
            size = float(grad.double().square().sum())
            record.sizes[name] = record.sizes.get(name, 0.0) + size

    def _share_of(self, weight: Weight) -> float:
        """What to multiply a rank's gradient with so that the sum over all ranks, which have the
        same samples here, is that of the whole model."""
        layout, share = self._mesh.layout, 1.0
        table = self._table[weight.name]
        parts = {
            axis
            for axis, p in table.items()
            if p.stored != COPY or (p.grad == SUM and axis in (*FEATURE_AXES, *SEQUENCE_AXES))
        }
        spread = layout.expand(EXPERTS) if EXPERTS in parts else ()
        for axis in layout.active_axes():
            if axis not in (*parts, *spread) or (axis in spread and not self._parts_tokens(axis)):
                share /= layout.size(axis)
        return share

    def _parts_tokens(self, axis: str) -> bool:
        """Whether ranks on this axis have other tokens in this run."""
        if axis in SEQUENCE_AXES:
            return self._sequence is not None
        return axis in FEATURE_AXES and self._plan.layout.has_option("sequence")

    def _seen(self, name: str, output: Any) -> None:
        """A module has run."""
        if in_backward() or any(name.startswith(f"{s.module}.") for s in self._dispatching()):
            return
        with without_function_modes():
            tensor = first_tensor(output)
            call = name, self._counted[name]
            self._counted[name] += 1
            if tensor is None or isinstance(tensor, DTensor):
                return
            self._record.shapes[call] = tuple(tensor.shape)
            if is_fixed(tensor):
                self._record.no_positions.add(call)
            if self._whole is None:
                rows: list[Tensor | None] | None = [None] * tensor.ndim
            else:
                rows = self._own_rows(self._whole.shapes.get(call, ()), tensor)
            if rows is not None:
                self._record.outputs[call] = self._projected(tensor, rows, call)

    def _dispatching(self) -> list:
        return [step for step in self._plan.steps if step.dispatch is not None]

    def _projected(self, tensor: Tensor, rows: Sequence[Tensor | None], call: Call) -> Tensor:
        if self._whole is None:
            return self._project(tensor, rows)
        found = self._project(tensor, rows, self._whole.shapes[call])
        return found * self._part_of_sum(rows)

    def _part_of_sum(self, rows: Sequence[Tensor | None]) -> float:
        """Ranks that have the same are counted once."""
        layout = self._mesh.layout
        parts = layout.size(*self._dividing()) if any(r is not None for r in rows) else 1
        return parts / layout.world

    def _dividing(self) -> tuple[str, ...]:
        """The axes over which positions are divided."""
        if self._sequence is not None:
            return SEQUENCE_AXES
        return FEATURE_AXES if self._plan.layout.has_option("sequence") else ()

    def _own_rows(self, whole: tuple[int, ...], part: Tensor) -> list[Tensor | None] | None:
        """For each dim, which positions this rank has of an activation; None if that is unknown."""
        rows: list[Tensor | None] = [None] * part.ndim
        if tuple(part.shape) == whole:
            return rows
        length, here = self._length, len(self._positions)
        different = [d for d in range(part.ndim) if len(whole) == part.ndim]
        different = [d for d in different if part.shape[d] != whole[d]]
        if len(different) != 1 or not 0 < here < length:
            return None
        (dim,) = different
        if dim and (whole[dim], part.shape[dim]) == (length, here):
            rows[dim] = self._positions
            return rows
        samples, rest = divmod(whole[dim], length)
        if dim == 0 and not rest and part.shape[0] == samples * here:
            # samples and positions in one dim
            first = torch.arange(samples, device=part.device).unsqueeze(1) * length
            rows[0] = (first + self._positions).flatten()
            return rows
        return None

    # ---- the run ---------------------------------------------------------------------------------

    def __call__(self, micro: MicroBatch, length: int) -> TrialRecord:
        """All ranks call it together.

        Args:
            micro: what the model is called with: this rank's positions, if they are divided.
            length: positions of a whole sequence.

        Raises:
            TrialError: The model has raised, in this module.
        """
        model, record = self._run.model, self._record
        arguments = {key: self._computed(value) for key, value in micro.arguments.items()}
        micro = replace(micro, arguments=arguments)
        self._length, device = length, self._mesh.device
        self._positions = self._own_positions(length)
        if self._sequence is not None:
            self._sequence.begin(micro, model)
        inside: list[str] = []
        backward = False
        try:
            with module_calls(model, self._seen) as inside, self._run.weights():
                output = first_tensor(self._run.forward(arguments), integers=True)
                assert output is not None, "the model returns no tensor"
                output = output.full_tensor() if isinstance(output, DTensor) else output
                shape = tuple(output.shape) if self._whole is None else self._whole.output_shape
                rows = [None] * output.ndim
                if self._whole is not None:
                    rows = self._own_rows(shape, output)  # type: ignore[assignment]
                if rows is None:  # nothing to compare it with
                    return record
                record.output_shape = shape
                share = 1.0 if self._whole is None else self._part_of_sum(rows)
                record.output = share * self._project(output, rows, shape)
                backward = True
                if output.requires_grad:
                    self._backward(output, rows, shape)
        except MaskOfOwnKeys as problem:
            raise TrialError(inside[-1] if inside else "") from problem
        except Refusal:
            raise
        except Exception as problem:
            raise TrialError(inside[-1] if inside else "", backward) from problem
        finally:
            if self._sequence is not None:
                self._sequence.end()
                self._sequence.forwards.forget()
        record.others = self._reads.others()
        if self._whole is not None:
            self._sum(record, device)
        return record

    def output(
        self, arguments: dict[str, Any], seen: Callable[[str, Any], None] | None = None
    ) -> Any:
        """What the model returns, without a record. All ranks call it together.

        Args:
            arguments: what it is called with.
            seen: gets name and output of each module that has run, but for those of a backward.
        """
        arguments = {key: self._computed(value) for key, value in arguments.items()}
        after = seen or (lambda name, output: None)
        with module_calls(self._run.model, after), self._run.weights():
            return self._run.forward(arguments)

    def _backward(
        self, output: Tensor, rows: Sequence[Tensor | None], shape: Sequence[int]
    ) -> None:
        """From a random gradient of the output, the same for all runs."""
        generator = torch.Generator().manual_seed(len(shape))
        cotangent = torch.randn(shape, dtype=torch.float64, generator=generator)
        cotangent = self._scale * cotangent.to(output.device)
        for dim, mine in enumerate(rows):
            cotangent = cotangent if mine is None else cotangent.index_select(dim, mine)
        if self._sequence is not None and all(mine is None for mine in rows):
            cotangent = cotangent / self._sequence.size  # ranks add up their gradients
        output.backward(cotangent.to(output.dtype))

    def _own_positions(self, length: int) -> Tensor:
        if self._whole is None or not length:
            return torch.empty(0, dtype=torch.long)
        if self._sequence is not None:
            return self._sequence.positions(length, self._mesh.device)
        axes = self._dividing()
        each = length // self._mesh.size(*axes) if axes else length
        first = self._mesh.index(*axes) * each if axes else 0
        return torch.arange(first, first + each, device=self._mesh.device)

    def _computed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(self._rule.computed(value.dtype) if self._rule.low else self._dtype)

    def _sum(self, record: TrialRecord, device: torch.device) -> None:
        """Add up what ranks have recorded. They all have run the same."""
        group = self._mesh.group(*self._mesh.layout.active_axes())
        if group is None:
            return
        assert self._whole is not None
        zero = torch.zeros_like(next(iter(self._whole.outputs.values())))
        rows = [record.outputs.get(call, zero) for call in self._whole.outputs]
        seen = [
            torch.full_like(zero, float(call in record.outputs)) for call in self._whole.outputs
        ]
        grads = [record.grads.get(name, zero) for name in self._weights]
        output = zero if record.output is None else record.output
        table = torch.stack([*rows, *seen, *grads, output])
        dist.all_reduce(table, group=group)
        calls, names = len(rows), list(self._weights)
        everywhere = (table[calls : 2 * calls, 0] == group.size()).tolist()
        record.outputs = {
            call: table[i] for i, call in enumerate(self._whole.outputs) if everywhere[i]
        }
        found = table[2 * calls : -1]
        record.grads = {name: found[i] for i, name in enumerate(names)}
        if record.output is not None:
            record.output = table[-1]


def _modes(
    precision: str, sequence: ContextParallel | None, trial: Callable[[], TrialFunctions]
) -> Callable[[], ExitStack]:
    """Enters the modes of a trial, the innermost last: it sees calls first."""
    modes: list[Callable[[], Any]] = [Float64Mode] if precision == "fp64" else []
    if sequence is not None:
        functions = FunctionOverrides(sequence.randomness, False, sequence)
        modes.append(lambda: functions)
    modes.append(trial)

    def around() -> ExitStack:
        stack = ExitStack()
        for mode in modes:
            stack.enter_context(mode())
        return stack

    return around


def first_tensor(value: Any, integers: bool = False) -> Tensor | None:
    """The first tensor, of floating-point numbers or any, in what a module returns: of a model
    usually the logits. None inside of a function transform."""
    found = (t for t in tensors_in(value) if integers or t.is_floating_point())
    return next((t for t in found if not is_in_transform(t)), None)
