"""What is known of each tensor of a forward: its mark, and those of parameters and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .feature_marks import NOTHING, FeatureTrace, Given, Mark


class TensorMarks:
    """The marks of tensors, which are forgotten with them.

    Args:
        model: what runs.
        trace: takes down which parameters and arguments are used, and how.
    """

    def __init__(self, model: nn.Module, trace: FeatureTrace):
        self._trace = trace
        self._params = {id(p): name for name, p in model.named_parameters()}
        self._marks: Any = WeakTensorKeyDictionary()
        self._before: dict[str, list[tuple[Tensor, Mark]]] = {}  # of what modules were given
        self.sizes = {name: p.shape for name, p in model.named_parameters()}

    def __getitem__(self, t: Tensor) -> Mark:
        found = self._marks.get(t)
        if found is None:
            name = self._params.get(id(t))
            if name is None:
                return NOTHING
            found = self._marks[t] = Mark(
                params=frozenset([name]), places=partial(_numbered, t.shape)
            )
        return found

    def __setitem__(self, t: Tensor, mark: Mark) -> None:
        self._marks[t] = mark

    def of_parameters(self, t: Tensor) -> frozenset[str]:
        """The parameters of the model that a tensor is made of, if it is made of nothing else."""
        return self[t].params - self._trace.given.keys()

    def has_gradient(self, t: Tensor) -> bool:
        """Whether a tensor depends on parameters."""
        return self[t].active or bool(self.of_parameters(t))

    def give(self, module: str, arguments: Mapping[str, Any]) -> None:
        """Take down what a module is given that has no gradient, until it is left (`take_back`)."""
        before = self._before.setdefault(module, [])
        for key, t in arguments.items():
            if not isinstance(t, Tensor) or not t.is_floating_point() or not t.ndim:
                continue
            mark, name = self[t], f"{module}({key})"
            if mark.labels is None and not self.has_gradient(t):
                first = self._trace.given.setdefault(name, Given(module, key, t.shape))
                if first.shape == t.shape:
                    before.append((t, mark))
                    self[t] = replace(
                        mark, params=frozenset([name]), places=partial(_numbered, t.shape)
                    )

    def take_back(self, module: str) -> None:
        """A module is left: what it was given is no argument of it any more."""
        for t, mark in self._before.pop(module, []):
            self[t] = mark

    def origin(self, given: list[Tensor], live: bool, pointwise: bool, now: str) -> Mark:
        """What an operator in the module `now` makes of these, without its labels. A parameter
        beside constants, one by one, is still that parameter's: a table of biases plus a mask."""
        trace, marks = self._trace, [(t, self[t]) for t in given]
        names = frozenset(name for _, mark in marks for name in mark.params)
        own = names - trace.given.keys()
        trace.read |= own
        entered = any(mark.entered for _, mark in marks)
        others = [m for t, m in marks if not m.params and t.ndim and t.is_floating_point()]
        mixed = live or any(m.active or not pointwise for m in others)
        if mixed and not live:
            trace.used_whole |= names
        if mixed and own:
            used = trace.before if entered else trace.after
            used |= own
            return Mark(active=True, made=now, entered=entered)
        active = any(mark.active for _, mark in marks)
        params = frozenset[str]() if mixed else own or names
        return Mark(params=params, active=active, made=now, entered=entered)


def _numbered(shape: torch.Size) -> Tensor:
    """The number of each element."""
    return torch.arange(shape.numel()).reshape(shape)
