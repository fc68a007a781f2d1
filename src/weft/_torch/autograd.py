"""Autograd: whether a backward runs, and a backward below torch.autograd's own functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.overrides import TorchFunctionMode

_CHECKPOINT = "torch.utils.checkpoint"
REENTRANT = "torch.utils.checkpoint with use_reentrant=True"  # the older kind


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


class Recomputation(NamedTuple):
    """A function that torch.utils.checkpoint runs (`use_reentrant=False`).

    `call`: of checkpoint, an object that can be a weak key. `backward`: which backward computes it
    again, None in the forward.
    """

    call: Any
    backward: Hashable | None


def recomputation() -> Recomputation | None:
    """The innermost function under torch.utils.checkpoint (`use_reentrant=False`) that runs here,
    None if there is none. Only the hooks of saved tensors that checkpoint sets tell."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    pack = inspect.unwrap(hooks[0])
    kind = getattr(pack, "__qualname__", "").partition(".")[0]
    if kind not in ("_checkpoint_hook", "_recomputation_hook"):
        return None
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if name != "self"}
    if kind == "_checkpoint_hook":
        return Recomputation(held["frame"], None)
    return Recomputation(held["target_frame_ref"](), held["gid"])


def hidden_checkpoints() -> int:
    """How many calls of torch.utils.checkpoint run here behind other hooks of saved tensors, as
    those of save_on_cpu, where `recomputation` does not see them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or recomputation() is not None:
        return 0
    found, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__")
        found += name == _CHECKPOINT and frame.f_code.co_name == "checkpoint"
    return found


def rerun_by() -> str:
    """What runs this forward, and may run it again in backward: torch.utils.checkpoint, or an
    autograd function whose forward calls a module, as that of a reversible network does. "" if
    nothing does.

    Without gradients, as in functions and in the older kind of checkpoint, only the stack tells.
    """
    if torch.is_grad_enabled():
        now = recomputation()
        return _CHECKPOINT if now is not None and now.backward is None else ""
    frame, called, functions = sys._getframe(), False, forwards_of_functions()
    while frame.f_back is not None:
        frame = frame.f_back
        code, name = frame.f_code, str(frame.f_globals.get("__name__"))
        if code.co_name == "forward" and name == _CHECKPOINT:
            return REENTRANT
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
