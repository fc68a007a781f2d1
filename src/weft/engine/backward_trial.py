"""The trial before the first step: has the model gradients of its own?

Every rank runs the whole model on the same samples, with the weights of one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from weft.core import DTYPES, LocalShard, Plan, UnsupportedModel, broadcast_value
from weft.nn import model_arguments
from weft.parallel import Mesh, parallelize

from .context_parallel.sequence import ContextParallel
from .draw_watch import draws_seeded
from .gathered_model import copy_without_weights
from .microbatch import Batch, MicroBatch
from .own_gradients import find_own_gradient
from .training_modes import training_modes
from .trial_run import TrialRun
from .trial_ways import TrialWay, positions_of, trial_ways, undivided
from .whole_weights import WholeWeights

PRECISIONS = ("fp64", "fp32")  # in others a small gradient may become zero


class BackwardTrial:
    """Looks for gradients of a model's own. Make it before the model is sharded.

    Args:
        model: the whole model; it may be on the meta device.
        plan: what it is trained by.
        mesh: where this rank computes.
        sequence: what the model is called with.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, sequence: ContextParallel):
        self._plan, self._mesh, self._sequence = plan, mesh, sequence
        self._model, self._modes = copy_without_weights(model), training_modes(model)

    def check(self, sample: Batch, shards: Iterable[LocalShard]) -> None:
        """All ranks call it together.

        Args:
            sample: a batch of a sample or two, of which the first rank's is taken.
            shards: this rank's part of each weight.

        Raises:
            UnsupportedModel: a gradient is not proportional to that of the output.
        """
        weights = WholeWeights(self._plan, self._mesh, shards)
        group, device = self._mesh.group(*self._mesh.layout.active_axes()), self._mesh.device
        if group is not None:
            sample = broadcast_value(sample, 0, group)
        sample = {key: value.to(device) for key, value in sample.items()}
        found: UnsupportedModel | None = None
        tried = trial_ways(self._model, self._plan, self._mesh, self._sequence, sample)
        ways = [way for way in tried if way.precision in PRECISIONS]
        for way in ways:
            try:
                found = self._find(way, ways, weights)
            except Exception:  # a kernel without this dtype, a backward that does not run here
                continue
            break
        if found is not None:
            raise found

    def _find(
        self, way: TrialWay, ways: Sequence[TrialWay], weights: WholeWeights
    ) -> UnsupportedModel | None:
        quickest = min(ways, key=lambda each: DTYPES[each.precision].itemsize)  # to look for any
        arguments = model_arguments(self._sequence.inputs, way.sample)
        micro, length = MicroBatch(way.sample, arguments), positions_of(self._sequence, way.sample)

        def forward() -> None:
            run = self._run(quickest, weights, 1.0)
            with draws_seeded(run.model, self._mesh.device, 0):
                run.output(model_arguments(self._sequence.inputs, quickest.sample))

        def backward(scale: float) -> Mapping[str, Tensor]:
            run = self._run(way, weights, scale)
            with draws_seeded(run.model, self._mesh.device, 0):
                return run(micro, length).grads

        bound = sqrt(torch.finfo(DTYPES[way.precision]).eps)
        return find_own_gradient(self._model, forward, backward, bound)

    def _run(self, way: TrialWay, weights: WholeWeights, scale: float) -> TrialRun:
        """The whole model in training mode."""
        alone = undivided(self._plan, way.precision)
        model = copy_without_weights(self._model)
        for name, module in model.named_modules():
            module.training = self._modes[name]
        parallelize(alone, model, self._mesh, self._sequence.randomness)
        precision = way.precision
        return TrialRun(model, alone, self._mesh, precision, weights, training=True, scale=scale)
