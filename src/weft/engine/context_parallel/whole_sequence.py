"""Modules that compute on whole sequences where ranks share them: what enters is gathered, every
rank computes all positions, and keeps its own of what leaves.

The gradient of what enters is a part of the sum on each rank, as that of the weights inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from weft._torch.trees import tree_leaves, tree_map
from weft.core import COPY, Boundary, Plan, UnsupportedModel
from weft.nn import named_inputs
from weft.parallel import Crossing

from .sequence import ContextParallel, WholeSequence, whole_mask


def run_on_whole_sequences(model: nn.Module, plan: Plan, sequence: ContextParallel) -> None:
    """Make the modules that `plan` names compute so, from now on."""
    for step in plan.steps:
        if step.whole_sequence and sequence:
            module = model.get_submodule(step.module)
            around = _AroundModule(step.module, named_inputs(module), sequence)
            # outermost: boundaries of other axes take whole sequences over
            module.register_forward_pre_hook(around.enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(around.leave)


class _AroundModule:
    def __init__(self, name: str, inputs: tuple[str, ...], sequence: ContextParallel):
        self._name, self._masked = name, "attention_mask" in inputs
        self._sequence, self._outside = sequence, list[WholeSequence]()
        self._gathers = [
            Crossing(Boundary({axis: Shard(1)}, {axis: COPY}), True, sequence.mesh)
            for axis in (*sequence.heads, *sequence.keys)
        ]

    @torch.compiler.disable
    def enter(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        outside = WholeSequence(self._sequence)
        self._outside.append(outside)
        if outside.length:
            self._sequence.calls += 1
            if self._masked and self._sequence.now.valid is not None:
                self._check_mask(args, kwargs)
            args, kwargs = tree_map(lambda x: self._gathered(x, outside.length), (args, kwargs))
        outside.begin()
        return args, kwargs

    @torch.compiler.disable
    def leave(self, _: nn.Module, __: tuple, out: Any) -> Any:
        outside = self._outside.pop()
        outside.end()
        length = outside.length

        def own(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == length):
                return x
            return x.index_select(1, self._sequence.positions(length, x.device))

        return tree_map(own, out) if length else out

    def _check_mask(self, *arguments: Any) -> None:
        """A mask of its own part would be left out where that part has no padding."""
        if not any(x.is_meta for x in tree_leaves(arguments, Tensor)):
            raise UnsupportedModel(
                "batch['attention_mask']",
                "with padding",
                f"{self._name} needs whole sequences, and is told of the padding in a part of one",
                "leave attention_mask out of the model's inputs, or use dp, fsdp, tp or pp",
            )

    def _gathered(self, x: Any, length: int) -> Any:
        """All positions, in their order, of what has this rank's in dim 1."""
        if not isinstance(x, Tensor):
            return x
        if x.is_meta and hasattr(x, "weft_pattern"):  # else the model has computed with it
            return whole_mask(x, torch.arange(length), length)
        if x.ndim < 2 or x.shape[1] * self._sequence.size != length:
            return x
        for gather in self._gathers:
            x = gather(x)
        return x.index_select(1, torch.argsort(self._sequence.order(length)).to(x.device))
