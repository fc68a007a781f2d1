"""Autograd: whether a backward runs, and a backward below torch.autograd's own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.overrides import TorchFunctionMode

_CHECKPOINT = "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether this thread runs a backward, as when a forward is recomputed. No public function
    tells."""
    return torch._C._current_graph_task_id() != -1


def forwards_of_functions() -> dict[CodeType, str]:
    """The code of the forward of each autograd function that is defined -> its class's name.

    A frame with that code tells that the function runs. `Function.apply` has a frame of its own
    only before torch 2.14.
    """
    found: dict[CodeType, str] = {}
    for cls in _functions():
        code = getattr(cls.forward, "__code__", None)  # type: ignore[attr-defined]
        if code is not None:
            found.setdefault(code, cls.__name__)  # a class before those that inherit it
    return found


def _functions() -> Iterator[type]:
    """Every autograd function that is defined, a class before those that inherit it."""
    classes: list[type] = torch.autograd.Function.__subclasses__()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        yield cls


@contextmanager
def around_functions(begin: Callable[[str], Any], end: Callable[[], Any]) -> Iterator[None]:
    """Inside of this context: `begin` is called with the name of each autograd function that is
    neither torch's nor weft's, before its forward, and `end` after it.

    Their forwards are replaced, and not `apply`, which a module may have looked up before.
    """
    before = {cls: vars(cls)["forward"] for cls in _functions() if _is_of_others(cls)}

    def watched(name: str, forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin(name)
            try:
                return forward(*args, **kwargs)
            finally:
                end()

        return run

    for cls in before:
        cls.forward = staticmethod(watched(cls.__name__, cls.forward))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, forward in before.items():
            cls.forward = forward  # type: ignore[attr-defined]


@contextmanager
def watch_backward() -> Iterator[list[str]]:
    """Inside of this context: the autograd functions that are neither torch's nor weft's and run,
    by name, and the hooks that are given to the gradients of tensors."""
    found: list[str] = []
    with around_functions(found.append, lambda: None), _HookWatch(found):
        yield found


def _is_of_others(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in ("torch", "weft") and "forward" in vars(cls)


class _HookWatch(TorchFunctionMode):
    def __init__(self, found: list[str]):
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self._found.append("register_hook")
        return func(*args, **(kwargs or {}))


def rerun_by() -> str:
    """What runs this forward, and may run it again in backward: torch.utils.checkpoint, or an
    autograd function whose forward calls a module, as that of a reversible network does. "" if
    nothing does.

    Torch lets one set hooks of saved tensors, but not ask for them. Without gradients, as in
    functions and in the older kind of checkpoint (`use_reentrant=True`), only the stack tells.
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        checkpoint = hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook")
        return _CHECKPOINT if checkpoint else ""
    frame, called, functions = sys._getframe(), False, forwards_of_functions()
    while frame.f_back is not None:
        frame = frame.f_back
        code, name = frame.f_code, str(frame.f_globals.get("__name__"))
        if code.co_name == "forward" and name == _CHECKPOINT:
            return _CHECKPOINT
        if called and code in functions and name.partition(".")[0] not in ("torch", "weft"):
            return functions[code]
        called = called or code is nn.Module._call_impl.__code__
    return ""


def run_backward(
    edges: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[Any] = (),
    retain_graph: bool = False,
    accumulate: bool | None = None,
) -> list[Tensor | None]:
    """The gradients of `inputs`; without these, accumulate those of all leaves.

    `torch.autograd.grad` does the same with checks that cost more than a small branch, and does not
    sum a gradient over the dims that were broadcast.

    Args:
        edges: where the backward begins.
        grads: the gradient at each edge.
        inputs: tensors or edges whose gradients are wanted.
        retain_graph: whether the graph can be walked again.
        accumulate: add to `.grad` of leaves; default: where no inputs are given.
    """
    into_leaves = not inputs if accumulate is None else accumulate
    return _engine_run_backward(  # type: ignore[return-value]
        tuple(edges), tuple(grads), retain_graph, False, tuple(inputs), True, into_leaves
    )


def is_compiled_backward(node: Node) -> bool:
    """Whether a node is the backward of a compiled graph, which computes all its gradients at once,
    whichever are wanted. Only the name of its class tells."""
    return node.name() == "CompiledFunctionBackward"


def input_metadata(node: Node) -> Sequence[Any]:
    """Shape, dtype and device of each gradient that a node takes, for nodes of Python functions.
    Torch's documentation of Node does not list it."""
    return node._input_metadata  # type: ignore[attr-defined]
