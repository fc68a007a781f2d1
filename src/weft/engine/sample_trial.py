"""The trial before the first step: does the model, or its loss, mix samples that a layout parts?

Ranks run the whole model on the same two samples, together and one by one, with the weights of one
block at a time, as in evaluation and as in training. Where each rank has all weights, every second
one runs as in training, and the others as in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.core import DTYPES, LocalShard, Plan, broadcast_value, gather_json
from weft.nn import find_experts, model_arguments
from weft.parallel import Mesh, parallelize

from .backward_trial import BackwardTrial
from .context_parallel.sequence import ContextParallel
from .gathered_model import copy_without_weights
from .microbatch import Batch
from .mixed_samples import Mixing, SamplePair, Seen, mixing_error
from .sharding_trial import ShardingTrial
from .training_modes import put_on_trial, training_modes
from .trial_run import TrialRun
from .trial_ways import TrialWay, trial_ways, undivided
from .whole_weights import WholeWeights

# relative; what computes with fewer digits is not looked at. In fp64 a model may compute its norms
# in float32, which is within 1e-6. The second: if another neighbour in the batch changes it too
BOUNDS = {"fp64": (1e-5, 1e-9), "fp32": (1e-2, 1e-2)}


class SampleTrial:
    """Compares samples alone with the same samples in a batch. Make it before the model is sharded.

    Args:
        model: the whole model; it may be on the meta device.
        plan: what it is trained by.
        mesh: where this rank computes.
        sequence: what the model is called with.
        loss: its loss, as the user gave it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        sequence: ContextParallel,
        loss: Callable[..., Any],
    ):
        self._plan, self._mesh, self._sequence, self._loss = plan, mesh, sequence, loss
        self._model, self._modes = copy_without_weights(model), training_modes(model)
        self._routes = bool(find_experts(model))

    def check(self, sample: Batch, shards: Iterable[LocalShard]) -> None:
        """All ranks call it together.

        Args:
            sample: a batch of at least one sample, which the first rank's is taken of.
            shards: this rank's part of each weight.

        Raises:
            Refusal: the model or the loss mixes samples.
        """
        weights = WholeWeights(self._plan, self._mesh, shards)
        group, device = self._mesh.group(*self._mesh.layout.active_axes()), self._mesh.device
        sample = {key: value[[0, -1]] for key, value in sample.items()}
        if group is not None:
            sample = broadcast_value(sample, 0, group)
        sample = {key: value.to(device) for key, value in sample.items()}
        ways = [*trial_ways(self._model, self._plan, self._mesh, self._sequence, sample)]
        modes = [False, True]  # some models mix samples only as they train
        shared = group if weights.local else None  # each rank takes one of them
        if shared is not None:
            modes = [modes[shared.rank() % len(modes)]]
        for found in self._found(modes, ways, weights, shared):
            raise mixing_error(found, self._model, self._loss, _divided(self._plan))

    def _found(
        self,
        modes: Sequence[bool],
        ways: Sequence[TrialWay],
        weights: WholeWeights,
        shared: dist.ProcessGroup | None,
    ) -> Iterator[Mixing]:
        """What each mode finds, and those of the ranks that share the modes."""
        for training in modes:
            found = self._in_mode(training, ways, weights)
            own = None if found is None else asdict(found)
            for each in [own] if shared is None else gather_json(own, shared):
                if each is not None:
                    yield Mixing(**each)

    def _in_mode(
        self, training: bool, ways: Iterable[TrialWay], weights: WholeWeights
    ) -> Mixing | None:
        for way in ways:
            if way.precision not in BOUNDS or (self._routes and way.precision != "fp64"):
                continue
            with suppress(Exception):  # a kernel without this dtype, a loss of no single sample
                return self._find(way, weights, training)
        return None

    def _find(self, way: TrialWay, weights: WholeWeights, training: bool) -> Mixing | None:
        plan, model = self._plan, copy_without_weights(self._model)
        put_on_trial(model, self._modes, training)
        alone = undivided(plan, way.precision)
        parallelize(alone, model, self._mesh, self._sequence.randomness)
        run = TrialRun(model, alone, self._mesh, way.precision, weights, training=training)
        dtype = DTYPES[way.precision]

        def forward(batch: Batch, seen: Seen | None = None) -> Any:
            return run.output(model_arguments(self._sequence.inputs, batch), seen)

        pair = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in way.sample.items()
        }
        with run.around():
            return SamplePair(model, forward, self._loss, pair, *BOUNDS[way.precision]).find()


class Trials:
    """What is tried before the first step: each once, with the first samples that it can take.

    Args:
        sharding: compares the whole with the sharded model; None: nothing is cut.
        samples: compares samples alone with the same in a batch; None: no layout parts them.
        backward: compares gradients of two gradients of the output.
    """

    def __init__(
        self,
        sharding: ShardingTrial | None,
        samples: SampleTrial | None,
        backward: BackwardTrial | None,
    ):
        self._sharding, self._samples, self._backward = sharding, samples, backward

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        sequence: ContextParallel,
        sample: Batch | None,
        loss: Callable[..., Any],
    ) -> Trials:
        """The trials of a model that is not sharded yet.

        Args:
            model: the whole model.
            plan: what it is to be sharded by.
            mesh: where this rank computes.
            sequence: what divides the sequence, if ranks share it.
            sample: a batch of a sample or two; None: trials take the first batch.
            loss: as the user gave it.
        """
        samples = backward = None
        with suppress(Exception):  # a model that cannot be copied is trained untried
            if plan.own_gradients:
                backward = BackwardTrial(model, plan, mesh, sequence)
            if plan.data_size > 1 or plan.accumulate > 1:
                samples = SampleTrial(model, plan, mesh, sequence, loss)
        return cls(ShardingTrial.of(model, plan, mesh, sequence, sample), samples, backward)

    def check(self, sample: Batch, shards: Callable[[], Iterable[LocalShard]], last: bool) -> None:
        """All ranks call it together.

        Args:
            sample: a batch of at least one sample.
            shards: this rank's part of each weight.
            last: whether no other sample comes.

        Raises:
            Refusal: sharding changes what the model computes, samples are mixed, or a gradient is
                not proportional to the output's.
        """
        sample = {key: value[:2] for key, value in sample.items()}
        sharding, self._sharding = self._sharding, None
        if sharding is not None:
            sharding.check(sample, shards())
        if not last and len(next(iter(sample.values()))) == 1:
            return
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.check(sample, shards())
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.check(sample, shards())


def _divided(plan: Plan) -> str:
    data = plan.layout.active_axes(*plan.token_axes)
    return ".".join(data) if data else f"accumulate = {plan.accumulate}"
