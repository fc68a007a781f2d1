"""The trial before the first step: does the sharded model compute what the whole model does?

One forward and backward of each in evaluation mode and one in training mode, on a short sample,
from the same weights: the output, and the gradient of every parameter, agree as far as rounding
allows. In float64 where that is possible, as a fault may change less than what bf16 rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import nn

from weft.core import (
    DTYPES,
    LocalShard,
    Plan,
    Refusal,
    UnsupportedModel,
    broadcast_value,
    computes_whole_sequences,
)
from weft.nn import model_arguments
from weft.parallel import SEQUENCE_AXES, Mesh, parallelize

from .all_ranks_come import all_ranks_come
from .context_parallel.sequence import ContextParallel
from .context_parallel.whole_sequence import compute_graphs_on_parts, run_on_whole_sequences
from .draw_watch import draws_seeded
from .forward_refusals import (
    CUTTING,
    advice,
    does_not_run,
    does_not_run_in_part,
    has_no_backward_to_try,
)
from .function_overrides import FunctionOverrides
from .gathered_model import copy_without_weights
from .microbatch import Batch, MicroBatch
from .random_projection import size_of
from .training_modes import put_on_trial, training_modes
from .trial_branches import Branch
from .trial_run import TrialError, TrialRecord, TrialRun
from .trial_ways import TrialWay, positions_of, trial_ways
from .whole_role import (
    FIX_OR_LINES_IF_MIXED,
    MixesPositions,
    glob_to_be_whole,
    with_whole_sequences,
)
from .whole_weights import WholeWeights

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # numbers of positions are of no use to them


class _RefusedByAll(Exception):
    """A branch that the sample does not take runs on no rank. Where one takes it, it says so."""


class ShardingTrial:
    """Compares a model before and after it is sharded. Make it before.

    Args:
        model: the whole model; it may be on the meta device.
        plan: what it is to be sharded by.
        mesh: where this rank computes.
        sequence: what divides the sequence, if ranks share it.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, sequence: ContextParallel):
        self._plan, self._mesh, self._sequence = plan, mesh, sequence
        self._model, self._modes = copy_without_weights(model), training_modes(model)
        self._training = False  # the mode in which it runs
        self._branch: Branch | None = None  # that it takes; None: those of its sample
        self._tried, self._places = set[Branch](), count()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        sequence: ContextParallel,
        sample: Batch | None,
    ) -> ShardingTrial | None:
        """The trial of a model that is not sharded yet. None where nothing is cut, and without a
        sample, but for ranks that share a sequence: they take the first batch."""
        cut = plan.layout.active_axes(*CUTTING)
        return cls(model, plan, mesh, sequence) if sequence or (sample and cut) else None

    def check(self, sample: Batch, shards: Iterable[LocalShard]) -> None:
        """All ranks call it together.

        Args:
            sample: a batch of at least one sample; the first rank's is taken.
            shards: this rank's part of each weight.

        Raises:
            UnsupportedModel: The sharded model does not run, or computes something else.
        """
        weights = WholeWeights(self._plan, self._mesh, shards)
        group, device = self._mesh.group(*self._mesh.layout.active_axes()), self._mesh.device
        if group is not None:
            sample = broadcast_value(sample, 0, group)
        sample = {key: value.to(device) for key, value in sample.items()}
        if self._sequence:  # refuses what does not divide
            self._sequence.positions(self._sequence.length(sample), self._mesh.device)
        ways = [*trial_ways(self._model, self._plan, self._mesh, self._sequence, sample)]
        problem: TrialError | None = None
        compared = False
        # in evaluation mode too: with one number for all that is drawn some branches never run
        for self._training in (False, True):
            try:
                way, whole = self._whole(ways, weights)
            except TrialError as raised:  # it may run in the other mode alone, as Reformer's
                problem = raised
                continue
            if compared and not whole.output_shape:
                continue  # in training mode it returns its loss, of which each rank has a part
            compared = True
            self._compare_all(way, weights, whole)
            self._compare_other_branches(way, weights, whole)
        if compared or problem is None:
            return
        cause = problem.__cause__ or problem
        if problem.backward:
            raise has_no_backward_to_try(self._plan, cause) from cause
        raise cause from None

    def _compare_other_branches(
        self, way: TrialWay, weights: WholeWeights, whole: TrialRecord
    ) -> None:
        """Those that have not been tried, that the whole model runs, and that change what it
        computes."""
        branches = [branch for branch in whole.others if branch not in self._tried]
        self._tried.update(branches)
        for self._branch in branches:
            try:
                other = self._run(way, weights, None, self._plan, None)
            except TrialError:
                continue
            if other.output_shape and not _are_same(whole, other):
                with suppress(_RefusedByAll):
                    self._compare_all(way, weights, other)
        self._branch = None

    def _compare_all(self, way: TrialWay, weights: WholeWeights, whole: TrialRecord) -> None:
        if self._plan.layout.active_axes(*CUTTING):
            self._compare(way, weights, whole, self._plan, None)
        if self._sequence:
            self._compare_in_part(way, weights, whole)

    def _whole(
        self, ways: Sequence[TrialWay], weights: WholeWeights
    ) -> tuple[TrialWay, TrialRecord]:
        """What the whole model computes, in the first way in which it runs. Raises TrialError."""
        *others, last = ways
        for way in others:
            try:
                return way, self._run(way, weights, None, self._plan, None)
            except TrialError:
                continue  # a kernel without this dtype, or a length that is fixed
        return last, self._run(last, weights, None, self._plan, None)

    def _run(
        self,
        way: TrialWay,
        weights: WholeWeights,
        whole: TrialRecord | None,
        plan: Plan,
        sequence: ContextParallel | None,
    ) -> TrialRecord:
        """The model whole, or sharded by a plan where there is a record of the whole."""
        axes = CUTTING if sequence is None else (*CUTTING, *SEQUENCE_AXES)
        plan = _restricted(plan, axes)
        if whole is None:
            plan = replace(plan, steps=(), heads=(), batchnorms=())
        # a rounding to float8 would hide what a layout changes
        plan = replace(plan, precision=way.precision, reduce="fp32", float8=None)
        model, mesh = copy_without_weights(self._model), self._mesh
        put_on_trial(model, self._modes, self._training)
        parallelize(plan, model, mesh, self._sequence.randomness)
        if sequence is not None:
            run_on_whole_sequences(model, plan, sequence)
            compute_graphs_on_parts(model, sequence)
        run = TrialRun(
            model,
            plan,
            mesh,
            way.precision,
            weights,
            sequence,
            whole,
            training=self._training,
            branch=self._branch,
        )
        inputs = self._sequence.inputs
        micro = MicroBatch(way.sample, model_arguments(inputs, way.sample))
        if sequence is not None:
            micro = sequence.cut(way.sample)
        with draws_seeded(model, mesh.device, 0):
            return run(micro, positions_of(self._sequence, way.sample))

    def _compare_in_part(self, way: TrialWay, weights: WholeWeights, whole: TrialRecord) -> None:
        """Where a module needs whole sequences, the refusal names the lines of [roles] with which
        the model is as the whole one, if there are such."""
        plan, lines = self._plan, dict[str, None]()
        group = self._mesh.group(*self._mesh.layout.active_axes())
        first: MixesPositions | None = None
        while True:
            try:
                self._compare(way, weights, whole, plan, self._sequence)
            except MixesPositions as problem:
                first = first or problem
                glob = glob_to_be_whole(self._model, plan, problem.module)
                if glob and all_ranks_come(group, glob):
                    plan = with_whole_sequences(self._model, plan, glob)
                    lines = {
                        line: None for line in (*lines, glob) if not line.startswith(f"{glob}.")
                    }
                    continue
                raise first.with_lines(()) from problem
            except Refusal as problem:
                if first is None:
                    raise
                raise first.with_lines(()) from problem
            if first is not None:
                raise first.with_lines(lines)
            return

    def _compare(
        self,
        way: TrialWay,
        weights: WholeWeights,
        whole: TrialRecord,
        plan: Plan,
        sequence: ContextParallel | None,
    ) -> None:
        group = self._mesh.group(*self._mesh.layout.active_axes())
        try:
            found = self._run(way, weights, whole, plan, sequence)
        except (TrialError, Refusal) as problem:
            if self._branch is not None and all_ranks_come(group, f"branch {next(self._places)}"):
                raise _RefusedByAll from problem
            if isinstance(problem, Refusal):
                raise
            cause = problem.__cause__ or problem
            if sequence is not None:
                raise does_not_run_in_part(plan, problem.module, cause) from cause
            raise does_not_run(plan, problem.module, cause) from cause
        bound, floor = bounds(way.precision)
        assert whole.output is not None
        if found.output is None:
            raise self._refusal("sharding changes the shape of the model's output", "", sequence)
        error = _distance(whole.output, found.output, 0.0)
        names = list(whole.grads)
        total = sqrt(sum(whole.sizes.values()))
        wrong = {
            name: _distance(whole.grads[name], found.grads[name], total)
            for name in names
            if total
            and not _distance(
                whole.grads[name],
                found.grads[name],
                floor * total,
            )
            < bound
        }
        cut = "splitting the sequence" if sequence is not None else "sharding"
        cut += ", in training mode," if self._training else ""
        if not error < bound:
            module = next((m for m, e in _errors(whole, found) if not e < bound), "")
            what = f"{cut} changes the model's output by {error:.2g} of its norm"
            first = f", first that of {module}" if module else ""
            raise self._refusal(what + first, module, sequence)
        if wrong:
            raise self._wrong_gradient(whole, wrong, cut, sequence)
        if sequence is not None:
            self._refuse_whole_as_part(whole, found, sequence.length(way.sample), sequence)

    def _refuse_whole_as_part(
        self, whole: TrialRecord, found: TrialRecord, length: int, sequence: ContextParallel
    ) -> None:
        """What one device has [samples, as many as positions here, features] of is no part: dropout
        would take it for one."""
        here = length // sequence.size
        for call, shape in found.shapes.items():
            if len(shape) != 3 or shape[1] != here or whole.shapes.get(call) != shape:
                continue
            if call in found.no_positions:
                continue
            if not computes_whole_sequences(self._plan.steps, call[0]):
                what = f"{call[0]} gives [samples, {here}, features] on one device too, and {here}"
                what += " are the positions of a rank"
                fix = "give the model another length of sequence, or use dp or fsdp"
                raise UnsupportedModel("layout", str(self._plan.layout), what, fix)

    def _wrong_gradient(
        self,
        whole: TrialRecord,
        wrong: dict[str, float],
        cut: str,
        sequence: ContextParallel | None,
    ) -> UnsupportedModel:
        """`wrong`: parameter -> by how much of the norm of all gradients."""
        order = {name: i for i, (name, _) in enumerate(whole.outputs)}
        last = max(wrong, key=lambda name: order.get(name.rpartition(".")[0], -1))
        share = f"{wrong[last]:.2g} of the norm of all gradients"
        what = f"{cut} leaves the output as it is, and changes the gradient of {last} by {share}"
        if len(wrong) > 1:
            what += f" ({len(wrong)} gradients differ)"
        return self._refusal(what, last.rpartition(".")[0], sequence)

    def _refusal(
        self, problem: str, module: str, sequence: ContextParallel | None
    ) -> UnsupportedModel:
        layout = str(self._plan.layout)
        found, branch = problem, self._branch
        if branch is not None:
            found = f"{problem}, where {branch.line} reads {branch.value}"
        if sequence is not None:
            mixes = f"{found}: it mixes or counts positions outside attention and position_ids"
            fix = "use dp or fsdp"
            if not isinstance(self._model.get_submodule(module), CONVOLUTIONS):
                fix += ", or let its forward take position_ids, and use them"
            advised = FIX_OR_LINES_IF_MIXED
            return MixesPositions.of(self._plan.layout, mixes, fix, module, advised)
        return UnsupportedModel("layout", layout, found, advice(self._plan, module))


def bounds(precision: str) -> tuple[float, float]:
    """(relative error that counts as none, size of a gradient beside all gradients, below which its
    error is relative to that). Half of the digits that the dtype has; in float64, where nothing but
    a fault comes near, small gradients are looked at too."""
    digits = torch.finfo(DTYPES[precision]).eps
    return sqrt(digits), 1e-3 if precision == "fp64" else 0.1


def check_recompute(plan: Plan, functions: FunctionOverrides | None) -> None:
    """After a step: selective recomputation has found attention. A stage may have none."""
    if plan.recompute == "selective" and functions and not functions.attended:
        problem = "the model never calls scaled_dot_product_attention"
        fix = 'use "full" or "none", or attention through'
        fix += " torch.nn.functional.scaled_dot_product_attention"
        raise UnsupportedModel("train.recompute", "selective", problem, fix)


def _restricted(plan: Plan, axes: tuple[str, ...]) -> Plan:
    """The plan with what it divides over these axes alone."""
    steps = []
    for step in plan.steps:
        if step.sequence is not None and step.sequence.axis not in axes:
            continue
        params = tuple(p for p in step.params if p.axis in axes)
        steps.append(replace(step, params=params, gather=None))
    norms = plan.batchnorms if set(SEQUENCE_AXES) & set(axes) else ()
    return replace(plan, steps=tuple(steps), batchnorms=norms, staging=None, staged=None, sync=None)


def _are_same(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two runs of a model have computed the same."""
    first: dict[Any, torch.Tensor] = {**one.outputs, **one.grads}
    second: dict[Any, torch.Tensor] = {**other.outputs, **other.grads}
    return first.keys() == second.keys() and all(
        torch.equal(found, second[name]) for name, found in first.items()
    )


def _errors(whole: TrialRecord, found: TrialRecord) -> Iterator[tuple[str, float]]:
    """(module, relative error) of each call that can be compared, in order of execution."""
    for call, want in whole.outputs.items():
        if call in found.outputs:
            yield call[0], _distance(want, found.outputs[call], 0.0)


def _distance(want: torch.Tensor, found: torch.Tensor, floor: float) -> float:
    """Of two projected tensors, relative to the norm of the first, or `floor` if that is more."""
    error, size = float(size_of(found - want)), max(float(size_of(want)), floor)
    if not isfinite(error):
        return inf if isfinite(size) else 0.0
    return error / (size or 1.0)
