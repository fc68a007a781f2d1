"""Calls of modules in other processes over torch.distributed.rpc, and how their backward
completes.

Distributed autograd waits, in every process, for a gradient of each message that a forward has
sent; of a message whose tensors the loss does not need none would come, for ever. So a call's
answer has a token beside it, a small tensor that hangs on all that arrived and all that is
returned, and the loss hangs on every token: of every message gradients come by. Which of them the
loss needs is known before backward begins; the others end where they arrive, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from weft._torch.autograd import in_backward
from weft.core import UnsupportedModel, WeftError
from weft.nn import DrawPosition
from weft.pipeline import PLAIN_TYPES, map_tensors, other_leaves, tensors_in

Edge = tuple[Any, int]  # a node of the graph, and which of its outputs


@dataclass(frozen=True)
class ModuleCall:
    """One call of a placed module: where the program is, which the answer depends on beside the
    arguments."""

    module: str
    training: bool
    grad: bool
    step: int
    samples: tuple[int, int]  # of the microbatch: from, to
    position: DrawPosition
    number: int  # of the call in its microbatch
    modes: tuple[bool, ...]  # whether each module inside is training


@dataclass(frozen=True)
class CallAnswer:
    """`uses`: for each result with a gradient, which arguments with a gradient it is computed from.
    `position`: where random numbers are drawn next."""

    output: Any
    token: Tensor | None
    uses: list[list[bool]]
    position: DrawPosition


@dataclass(frozen=True)
class OpenCall:
    """A call whose backward is to come: its arguments and results that have gradients, as edges of
    the graph: a change in place gives a tensor another one."""

    arguments: list[Edge]
    results: list[Edge]
    token: Tensor
    uses: list[list[bool]]
    needed: list[bool]  # of the arguments: filled in before backward


class ModuleCalls:
    """The driver's. `count`, `sent_bytes` and `came_bytes` are of all calls so far, gradients
    included."""

    def __init__(self) -> None:
        self.count = self.sent_bytes = self.came_bytes = 0
        self.number = 0  # of the next call in its microbatch
        self._open: list[OpenCall] = []  # of this microbatch
        self.refused: UnsupportedModel | None = (
            None  # in a backward, which tells nobody why it failed
        )

    def begin(self) -> None:
        """A microbatch begins."""
        self.number = 0
        self._open.clear()

    def __call__(
        self, worker: str, function: Any, call: ModuleCall, args: tuple, kwargs: dict
    ) -> CallAnswer:
        """What `function(call, args, kwargs)` gives on this worker."""
        if in_backward():
            problem = "is called in backward, where the driver recomputes a forward"
            fix = "recompute inside of placed modules alone, or leave it to the driver"
            self.refused = UnsupportedModel("workers", call.module, problem, fix)
            raise self.refused
        args, kwargs = map_tensors(_check_structure(call.module, (args, kwargs)), _compact)
        arguments = [t for t in tensors_in((args, kwargs)) if t.requires_grad] if call.grad else []
        needed: list[bool] = []
        edges = [*map(edge, arguments)]
        if arguments:
            args, kwargs = _replaced((args, kwargs), _SendArguments.apply(needed, *arguments))
        found: CallAnswer | WeftError = await_answer(
            worker, rpc.rpc_async(worker, function, (call, args, kwargs), timeout=0)
        )
        if isinstance(found, WeftError):
            raise found
        back = tensors_in(found.output)
        results = [t for t in back if t.requires_grad]
        self.count, self.number = self.count + 1, self.number + 1
        self.sent_bytes += _nbytes(tensors_in((args, kwargs))) + _nbytes(results)
        self.came_bytes += _nbytes(back) + _nbytes(arguments)
        if found.token is not None:
            self._open.append(
                OpenCall(edges, [*map(edge, results)], found.token, found.uses, needed)
            )
        return found

    def root(self, loss: Tensor) -> Tensor:
        """The loss, in whose backward every call of this microbatch hears which of its results are
        needed."""
        if not self._open:
            return loss
        graph = BackwardGraph([edge(loss)])
        masks: list[Tensor] = []
        for call in reversed(self._open):
            needed = [t in graph for t in call.results]
            used = [[n and u for u in uses] for n, uses in zip(needed, call.uses, strict=True)]
            call.needed[:] = [any(column) for column in zip(*used, strict=True)] or [False] * len(
                call.arguments
            )
            graph.add([t for t, n in zip(call.arguments, call.needed, strict=True) if n])
            masks.insert(0, torch.tensor([0.0, *needed]))
        root: Tensor = _LossRoot.apply(loss, masks, *(call.token for call in self._open))
        return root


def await_answer(worker: str, future: Any) -> Any:
    """What a call gives. Raises the module's own error, or one that names the worker that does not
    answer."""
    try:
        return future.wait()
    except RuntimeError as error:
        if "On WorkerInfo(" in str(error):
            raise
        raise RuntimeError(
            f"worker {worker} does not answer: {str(error).splitlines()[0]}"
        ) from error


def make_answer(
    call: ModuleCall, output: Any, arrived: Sequence[Tensor], position: DrawPosition
) -> CallAnswer:
    """What a worker returns of a module's output. `arrived`: the arguments that get gradients."""
    output = map_tensors(_check_structure(call.module, output), _compact)
    own = [t for t in tensors_in(output) if t.requires_grad]
    if own and not call.grad:
        raise UnsupportedModel(
            "workers",
            call.module,
            "returns a weight where it is called without gradients",
            "let it return weight.detach() there, or leave it to the driver",
        )
    if not own and not arrived:
        return CallAnswer(output, None, [], position)
    graphs = (BackwardGraph([edge(each)] if arrived else []) for each in own)
    uses = [[edge(t) in graph for t in arrived] for graph in graphs]
    *leaving, token = _ReturnResults.apply(len(own), *own, *arrived)
    return CallAnswer(_replaced(output, leaving), token, uses, position)


@contextmanager
def check_unchanged(module: str, arguments: Any) -> Iterator[None]:
    """Refuse a module that changes its arguments: they are copies, and the driver's would stay as
    they were."""
    before = _marks(arguments)
    yield
    if _marks(arguments) != before:
        raise UnsupportedModel(
            "workers",
            module,
            "changes its arguments in place, which the driver would not see",
            "let it return what it changes, or leave it to the driver",
        )


def _marks(arguments: Any) -> list[Any]:
    return [*((id(t), t._version) for t in tensors_in(arguments)), *other_leaves(arguments)]


def edge(t: Tensor) -> Edge:
    """Where a tensor hangs in the graph now."""
    return t.grad_fn, t.output_nr


class BackwardGraph:
    """All that some tensors are computed from, in this process."""

    def __init__(self, roots: Sequence[Edge]):
        self._edges: set[Edge] = set()
        self._seen: set[Any] = set()  # which keeps them alive, and so themselves
        self.add(roots)

    def __contains__(self, edge: Edge) -> bool:
        return edge in self._edges

    def add(self, roots: Sequence[Edge]) -> None:
        waiting = [*roots]
        while waiting:
            node, place = waiting.pop()
            self._edges.add((node, place))
            if node is not None and node not in self._seen:
                self._seen.add(node)
                waiting += node.next_functions


class _SendArguments(torch.autograd.Function):
    """Arguments on their way to a worker; those that are not `needed` get no gradient."""

    @staticmethod
    def forward(ctx: Any, needed: list[bool], *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.needed = needed
        return tuple(t.view_as(t) for t in arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g if n else None for g, n in zip(grads, ctx.needed, strict=True))


class _ReturnResults(torch.autograd.Function):
    """`count` results of a module, and what arrived -> the results and a token."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count, ctx.arrived = count, len(tensors) - count
        return *(t.view_as(t) for t in tensors[:count]), torch.zeros(1 + count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *own, mask = grads
        needed = mask[1:].tolist()
        return (
            None,
            *(g if n else None for g, n in zip(own, needed, strict=True)),
            *[None] * ctx.arrived,
        )


class _LossRoot(torch.autograd.Function):
    """A loss that hangs on tokens; `masks` are their gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, masks: list[Tensor], *tokens: Tensor) -> Tensor:
        ctx.masks = masks
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *ctx.masks


def _replaced(structure: Any, replacements: Sequence[Tensor]) -> Any:
    """The structure with others in place of its tensors that have gradients."""
    each = iter(replacements)
    return map_tensors(structure, lambda t: next(each) if t.requires_grad else t)


def _check_structure(module: str, structure: Any) -> Any:
    """Refuse what would arrive as a copy that is not the same thing."""
    for part in other_leaves(structure):
        if not isinstance(part, PLAIN_TYPES):
            raise UnsupportedModel(
                "workers",
                module,
                f"its arguments or its result hold a {type(part).__name__}",
                "pass tensors, numbers and texts, in tuples, lists, dicts or dataclasses, or leave"
                " it to the driver",
            )
    return structure


def _compact(t: Tensor) -> Tensor:
    """A view is sent with all of its storage: then a copy of its part is."""
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _nbytes(values: Any) -> int:
    return sum(t.nbytes for t in values)
