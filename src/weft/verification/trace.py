"""What every module put out in a forward, and the gradient that came back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comms import Crossing


@dataclass
class Trace:
    """Per module: one tensor per call of its forward, and one per gradient of its output.

    `forward` and `backward` name the modules in the order in which these came, one entry per tensor.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    crossings: dict[str, Crossing] = field(default_factory=dict)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a module's arguments or output."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


@contextmanager
def traced(model: nn.Module, samples: int) -> Iterator[Trace]:
    """Record one forward and backward of `samples` samples. In a recomputed forward nothing is recorded again."""
    trace = Trace()
    handles = []

    def after(name: str, args: tuple, kwargs: dict, output: Any) -> None:
        out = first_tensor(output)
        if out is None or torch._C._current_graph_task_id() != -1:  # a forward inside a backward: recomputation
            return
        local = out.to_local() if isinstance(out, DTensor) else out
        trace.outputs.setdefault(name, []).append(local.detach().clone())
        trace.forward.append(name)
        entered = first_tensor((*args, *kwargs.values()))
        batched = out.shape[:1] == (samples,)
        trace.crossings[name] = Crossing(
            None if entered is None else _per_sample(entered, samples),
            _per_sample(out, samples),
            entered is not None and entered.requires_grad,
            batched or (entered is not None and entered.shape[:1] == (samples,)),
        )
        if out.requires_grad:
            out.register_hook(lambda grad: _keep(trace, name, grad))

    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(lambda _, a, k, o, name=name: after(name, a, k, o), with_kwargs=True)  # type: ignore[misc]
        )
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _keep(trace: Trace, name: str, grad: Tensor) -> None:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    trace.gradients.setdefault(name, []).append(local.detach().clone())
    trace.backward.append(name)


def _per_sample(tensor: Tensor, samples: int) -> tuple[int, ...]:
    return tuple(tensor.shape[1:]) if tensor.shape[:1] == (samples,) else tuple(tensor.shape)
