"""Modules that compute on whole sequences where ranks share them: what enters is gathered, every
rank computes all positions, and keeps its own of what leaves.

The gradient of what enters is a part of the sum on each rank, as that of the weights inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.trees import tree_leaves, tree_map
from weft.core import Plan
from weft.nn import named_inputs
from weft.parallel import dim_of_positions

from ..whole_role import LINES_AROUND, MixesPositions
from .mask_rules import whole_mask
from .sequence import ContextParallel, WholeSequence, check_path, on_the_part
from .whole_marks import (
    dims_of_positions,
    is_alike,
    is_fixed,
    is_marked,
    set_whole_shape,
    whole_of,
)


def run_on_whole_sequences(model: nn.Module, plan: Plan, sequence: ContextParallel) -> None:
    """Make the modules that `plan` names compute so, from now on. Inside of what runs a block again
    in backward."""
    names = [step.module for step in plan.steps if step.whole_sequence] if sequence else []
    modules = {model.get_submodule(name): name for name in reversed(names)}
    for module, name in modules.items():
        around = _AroundForward(name, "attention_mask" in named_inputs(module), sequence)
        module.forward = _whole_sequence_forward(around, module.forward)  # type: ignore[method-assign]


def compute_graphs_on_parts(model: nn.Module, sequence: ContextParallel) -> None:
    """Let modules that are compiled elsewhere compute here as their graphs do: nothing in them is
    followed for all positions."""
    for module in map(model.get_submodule, sequence.graphs):
        module.forward = _on_the_part(module.forward, sequence)  # type: ignore[method-assign]


def _on_the_part(forward: Callable[..., Any], sequence: ContextParallel) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with on_the_part(sequence):
            return forward(*args, **kwargs)

    return call


def _whole_sequence_forward(around: _AroundForward, forward: Callable[..., Any]) -> Any:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        outside, args, kwargs = around.enter(args, kwargs)
        return around.leave(outside, forward(*args, **kwargs))

    return call


class _AroundForward:
    def __init__(self, name: str, masked: bool, sequence: ContextParallel):
        self._name, self._masked, self._sequence = name, masked, sequence

    @torch.compiler.disable
    def enter(self, args: tuple, kwargs: dict) -> tuple[WholeSequence | None, tuple, dict]:
        """Without a sequence to leave where all that enters is known to be of no position. Raises
        MixesPositions for what does not tell which positions it is of."""
        outside = WholeSequence(self._sequence)
        if outside.length:
            check_path(self._sequence)
            entering = tree_leaves((args, kwargs), Tensor)
            if entering and all(is_fixed(x) for x in entering):
                return None, args, kwargs
            self._check(entering, outside)
            args, kwargs = tree_map(lambda x: self._gathered(x, outside.length), (args, kwargs))
            self._sequence.calls += 1
        outside.begin()
        return outside, args, kwargs

    @torch.compiler.disable
    def leave(self, outside: WholeSequence | None, out: Any) -> Any:
        if outside is None:
            return out
        outside.end()
        length = outside.length

        def own(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            # [samples, positions, features], or [samples, positions, heads, features]; of 4 dims,
            # heads may come first
            if x.ndim < 3 or x.shape[1] != length or (x.ndim > 3 and x.shape[2] == length):
                return set_whole_shape(x, tuple(x.shape))
            part = x.index_select(1, self._sequence.positions(length, x.device))
            return set_whole_shape(part, tuple(x.shape))

        return tree_map(own, out) if length else out

    def _check(self, entering: list[Tensor], outside: WholeSequence) -> None:
        here = outside.length // self._sequence.size
        pairs = [x for x in entering if x.ndim == 2 and x.shape[1] == here]
        if not pairs and not any(x.ndim == 3 and x.shape[1] == here for x in entering):
            raise self._error(
                "and no tensor [samples, positions, features] enters it",
                "lay its input so, or use dp or fsdp",
            )
        for x in pairs:
            if self._sequence.whole_entry(x) is None:
                raise self._error(
                    f"and what enters as {list(x.shape)} may be of positions or not",
                    "if it is not, give the model another length of sequence; else use dp or fsdp",
                )
        padded = self._masked and self._sequence.now.valid is not None
        # a mask of its own part would be left out where that part has no padding
        if padded and not any(x.is_meta for x in entering):
            raise self._error(
                "and is told of the padding in a part of one",
                "leave attention_mask out of the model's inputs, or use dp or fsdp",
            )

    def _error(self, problem: str, fix: str) -> MixesPositions:
        problem = f"{self._name} needs whole sequences, {problem}"
        return MixesPositions.of(self._sequence.layout, problem, fix, self._name, LINES_AROUND)

    def _gathered(self, x: Any, length: int) -> Any:
        """All positions, in their order, of what has this rank's."""
        if not isinstance(x, Tensor) or is_alike(x):
            return x
        if x.is_meta and hasattr(x, "weft_pattern"):
            return whole_mask(x, torch.arange(length), length)
        here = length // self._sequence.size
        if whole_of(x) is not None or (x.ndim == 2 and x.shape[1] == here):
            return self._sequence.whole_entry(x)
        dim = by_size = dim_of_positions(x.shape, here)
        if is_marked(x):
            dim = next(iter(dims_of_positions(x)), None)
            if self._sequence.known is not None and dim != by_size:
                self._sequence.known.use()
        return x if dim is None else self._sequence.gathered(x, dim)
