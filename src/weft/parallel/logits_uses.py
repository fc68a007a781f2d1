"""Whether a forward combines logits with other tensors, as BART adds a bias of its own to them:
these would meet a rank's part of the vocabulary. Found by a run on tensors without elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from weft._torch.tensors import fake_mode
from weft._torch.trees import tree_leaves

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def combines_logits(request: PlanRequest, heads: Iterable[str]) -> bool:
    """Whether an operator takes what a head makes and another tensor with dims. False where the
    forward does not run so far."""
    if request.sample is None:
        return False
    mode = fake_mode()
    model = copy_without_elements(request.model, mode)
    uses = _Uses()
    for name in heads:
        model.get_submodule(name).register_forward_hook(lambda _, args, out: uses.add(out))
    try:
        with without_elements(mode), uses:
            model(**request.arguments())
    except Exception:  # the rest of it is not seen; a trial compares the numbers
        pass
    return uses.combined


class _Uses(TorchFunctionMode):
    """Follows tensors that are made of logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self._logits: Any = WeakTensorKeyDictionary()
        self.combined = False

    def add(self, output: Any) -> None:
        for tensor in tree_leaves(output, Tensor):
            self._logits[tensor] = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs or {}), Tensor)
        out = func(*args, **(kwargs or {}))
        if any(t in self._logits for t in given):
            if any(t not in self._logits and t.ndim for t in given):
                self.combined = True
            self.add(out)
        return out
