"""Decides what stands around a model's forward in training: functions that are overridden, and a
BlockForward for each block. A model that needs none of it runs as it is."""

from __future__ import annotations

from torch import nn

from weft.core import Plan
from weft.nn import RepeatedDraws, may_drop, may_route
from weft.parallel import Mesh, wrap_blocks

from .compile_blocks import CompiledBlocks
from .expert_load import ExpertLoad
from .function_overrides import FunctionOverrides
from .pipeline.stage_compute import TrainingCompute


class ForwardOverrides:
    """Of one rank.

    Args:
        model: the model after it is sharded.
        plan: this rank's part of a plan.
        mesh: the process groups of the layout.
        training: what runs forwards; gets the overridden functions.
        loads: the modules that hold experts.
        compiled: the blocks that are to be compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        training: TrainingCompute,
        loads: ExpertLoad,
        compiled: CompiledBlocks,
    ):
        self._model, self._plan, self._mesh, self._training = model, plan, mesh, training
        self._loads, self._compiled, self._wrapped = loads, compiled, False
        sequence, self._selective = training.stages.sequence, plan.recompute == "selective"
        self._always = bool(self._selective or sequence or loads)
        if self._always or may_drop(model) or may_route(model):
            self._override()
            return
        training.if_drawn, training.randomness.in_use = self._override, False
        sliced = any(step.activation_sharding == "sequence" for step in plan.steps)
        if plan.recomputed() or sliced or compiled or training.offload is not None:
            self._wrap()

    def settle(self) -> None:
        """After a step: override no functions that the model has not called."""
        training = self._training
        training.if_drawn, training.watching = None, False
        if training.functions is None or self._always:
            return
        if not (training.functions.routed or training.randomness.drawn):
            training.functions, training.randomness.in_use = None, False

    def _override(self) -> None:
        training, randomness = self._training, self._training.randomness
        parts = training.stages.sequence or None
        plan = self._plan
        parted = plan.accumulate > 1 or bool(plan.layout.active_axes(*plan.token_axes))
        training.functions = FunctionOverrides(
            randomness,
            self._selective,
            parts,
            mesh=self._mesh,
            loads=self._loads,
            repeated=RepeatedDraws(),
            parted=parted,
        )
        training.functions.scale = training.scale
        training.if_drawn, randomness.in_use = None, True
        self._wrap()

    def _wrap(self) -> None:
        if not self._wrapped:
            self._wrapped = True
            training = self._training
            wrap_blocks(self._plan, self._model, training.randomness, training.offload)
            self._compiled.compile_blocks()
