"""Weights that a forward changes in place, as by a mask that is multiplied into them: of what ranks
have gathered of a weight, nothing is kept. Found by a run on tensors without elements."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft._torch.modes import TorchDispatchMode
from weft._torch.tensors import fake_mode

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def changed_weights(request: PlanRequest) -> tuple[str, ...]:
    """Names of the weights that the forward changes, as far as it runs without elements; nothing
    without a sample."""
    if request.sample is None:
        return ()
    mode = fake_mode()
    model = copy_without_elements(request.model, mode)
    writes = _Writes()
    try:
        with without_elements(mode), writes:
            model(**request.arguments())
    except Exception:  # the rest of it is not seen; the first step looks at the elements
        pass
    return tuple(n for n, p in model.named_parameters() if _storage(p) in writes.storages)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Writes(TorchDispatchMode):
    """The storages that operators have written into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given, declared in zip(args, func._schema.arguments, strict=False):
            written = declared.alias_info is not None and declared.alias_info.is_write
            if written and isinstance(given, Tensor):
                self.storages.add(_storage(given))
        return func(*args, **(kwargs or {}))
