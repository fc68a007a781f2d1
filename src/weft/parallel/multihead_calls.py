"""How a model calls nn.MultiheadAttention, seen in a run on tensors without elements.

One whose weights of attention, the second output, the model reads stays whole: no rank has those of
all heads. One whose keys are of another sequence is known as such.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import fake_mode
from weft.nn import Roles
from weft.pipeline import tensors_in, tensors_read

from .axes import FEATURE_AXES
from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def called_attentions(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without attentions that ranks cannot divide; a note says why."""
    size = request.layout.size(*FEATURE_AXES)
    heads = {c.entry or "": c.heads for c in roles.chains if c.by_entry}
    if size == 1 or not heads:
        return roles
    reasons = {
        name: f"{size} ranks do not divide its {n} heads" for name, n in heads.items() if n % size
    }
    calls = _calls(request, [name for name in heads if name not in reasons])
    for name in calls.read:
        reasons[name] = "the model reads its weights of attention, and no rank has all of them"
    chains = (c for c in roles.chains if not (c.by_entry and c.entry in reasons))
    return replace(
        roles,
        chains=tuple(
            replace(c, cross=True) if c.by_entry and c.entry in calls.crossing else c
            for c in chains
        ),
        notes=(
            *roles.notes,
            *(f"{name}: {why}: left whole under tp" for name, why in reasons.items()),
        ),
    )


def _calls(request: PlanRequest, names: list[str]) -> _Calls:
    """How these attentions are called. Without a sample nothing is known: where a forward then
    reads the weights of attention, it finds none."""
    calls = _Calls()
    if request.sample is None or not names:
        return calls
    mode = fake_mode()
    model = copy_without_elements(request.model, mode)
    for name in names:
        model.get_submodule(name).register_forward_hook(
            partial(calls.called, name), with_kwargs=True
        )
    try:
        with without_elements(mode), calls:
            output = model(**request.arguments())
        calls.see(output)
    except Exception:  # the rest of it is not seen; a trial compares the numbers
        pass
    return calls


class _Calls(TorchFunctionMode):
    """`read`: attentions whose weights of attention are read, or returned by the model; `crossing`:
    those whose keys or values are not what their queries are."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, tuple[str, Tensor]] = {}
        self.read: dict[str, None] = {}
        self.crossing = set[str]()

    def called(self, name: str, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        if any(given.get(each) is not given.get("query") for each in ("key", "value")):
            self.crossing.add(name)
        if output[1] is not None:
            self._weights[id(output[1])] = name, output[1]

    def see(self, values: Any) -> None:
        found = (self._weights.get(id(t)) for t in tensors_in(values))
        self.read |= {each[0]: None for each in found if each is not None}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.see(tensors_read(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
