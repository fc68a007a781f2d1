"""Backward in two parts: B, the gradients of a stage's inputs, and W, those of its weights (Qi et
al. 2024).

    roots ──▶ mm ──▶ relu ──▶ mm ──▶ inputs        the path: nodes from which an input is reached
              │               │
              w1              w2                   branches: from a fork to weights alone

B runs the path, and keeps the gradient that reaches each fork. W calls each fork once more, for its
branches alone, and has autograd run these: nothing of the path. Each weight's gradient is
accumulated once, by autograd, in W: so a weight's hooks run as in one backward. Hooks on the path
run in B.

The backward of a compiled graph is one node, which computes all gradients at once: in B. W gets
those of its weights from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

from weft._torch.autograd import input_metadata, is_compiled_backward, run_backward

Grads = list[Tensor | None]
Start = tuple[GradientEdge, Tensor]  # where a backward begins, and with which gradient


def backward_inputs(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Grads, DeferredWeightGrad]:
    """B: the gradients of `inputs`, which are leaves (None where there is none), and W, to be run
    once.

    `grads`: of the roots; None is 1 for a scalar. Gradients are not accumulated in `inputs`; they
    may share storage. Where no input needs a gradient (a first stage), B is nothing and W the whole
    backward.
    """
    starts = [
        (get_gradient_edge(root), torch.ones_like(root) if grad is None else grad)
        for root, grad in zip(roots, grads, strict=True)
        if root.requires_grad
    ]
    needing = [x for x in inputs if x.requires_grad]
    if not needing:
        return [None] * len(inputs), DeferredWeightGrad([_ForkGroup([], starts)])
    graph = _BackwardGraph(starts, needing)
    groups = list(graph.groups(starts))
    through = [start for start in starts if start[0].node in graph.path]
    found: Sequence[Tensor | None] = [None] * len(needing)
    if through:
        for fork in (fork for group in groups for fork in group.forks):
            fork.listen()
        found = _engine(through, needing, retain_graph=True)
    answers = iter(found)
    return [next(answers) if x.requires_grad else None for x in inputs], DeferredWeightGrad(groups)


class DeferredWeightGrad:
    """W, still to be run: what it needs of the graph is kept until then, and let go of bit by bit
    while it runs."""

    def __init__(self, groups: list[_ForkGroup]):
        self._groups = groups[::-1]

    def run(self) -> None:
        """Accumulate the weights' gradients in their `.grad`, as `backward` would."""
        branches = [
            edge
            for group in self._groups
            for fork in group.forks
            for edge in fork.branches.values()
        ]
        with GraphExecGroup():  # checkpointed regions are recomputed once for all calls
            if branches:
                _wanting(branches, self._accumulate)
            else:
                self._accumulate()

    def _accumulate(self) -> None:
        while self._groups:
            group = self._groups.pop()
            starts = group.starts
            while group.forks:
                starts += group.forks.pop().run()
            if starts:
                _engine(starts)


# ---- the graph -----------------------------------------------------------------------------------


@dataclass
class _ForkNode:
    """A node of the path with branches: {which of the node's next: edge}. `reached`: its gradients,
    once it has run; `made`: what it has made of them, if it makes all at once."""

    node: Node
    branches: dict[int, GradientEdge]
    reached: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    made: list[Sequence[Tensor | None]] = field(default_factory=list)

    def listen(self) -> None:
        """Hooks, which live as long as the graph, that runs once."""
        if is_compiled_backward(self.node):
            self.node.register_hook(lambda made, _: self.made.append(made))
        else:
            self.node.register_prehook(self.reached.append)

    def run(self) -> list[Start]:
        """The gradients that its branches start from."""
        found = []
        for results in (*self.made, *(_call(self.node, grads) for grads in self.reached)):
            found += [
                (edge, grad)
                for i, edge in self.branches.items()
                if (grad := results[i]) is not None
            ]
        return found


@dataclass
class _ForkGroup:
    """Forks whose branches meet. `starts`: roots that lie on these branches."""

    forks: list[_ForkNode]
    starts: list[Start]


class _BackwardGraph:
    """What is reached from some edges. Nodes come in the order of a breadth-first walk, the same in
    every process."""

    def __init__(self, starts: Sequence[Start], inputs: Sequence[Tensor]):
        self.next: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self.parents: dict[Node, list[Node]] = {edge.node: [] for edge, _ in starts}
        parents, queue = self.parents, list(self.parents)
        for node in queue:
            self.next[node] = below = node.next_functions
            for child, _ in below:
                if child in parents:
                    parents[child].append(node)
                elif child is not None:
                    parents[child] = [node]
                    queue.append(child)
        above = [edge.node for edge in map(get_gradient_edge, inputs) if edge.node in parents]
        self.path = set(above)
        for node in above:
            for parent in parents[node]:
                if parent not in self.path:
                    self.path.add(parent)
                    above.append(parent)

    def groups(self, starts: Sequence[Start]) -> Iterator[_ForkGroup]:
        """All that is off the path, with the forks that lead to it: in connected parts, each of
        which can run alone."""
        seen: set[Node] = set()
        for first in self.next:
            if first in seen or first in self.path:
                continue
            seen.add(first)
            part, forks = [first], []
            for node in part:
                if node in self.path:
                    fork = _ForkNode(node, self._branches(node))
                    forks.append(fork)
                    around = [edge.node for edge in fork.branches.values()]
                else:
                    around = [
                        child for child, _ in self.next[node] if child is not None
                    ] + self.parents[node]
                for other in around:
                    if other not in seen:
                        seen.add(other)
                        part.append(other)
            off_path = set(part) - self.path
            yield _ForkGroup(forks, [start for start in starts if start[0].node in off_path])

    def _branches(self, fork: Node) -> dict[int, GradientEdge]:
        edges, path = self.next[fork], self.path
        return {
            i: GradientEdge(*edge)
            for i, edge in enumerate(edges)
            if edge[0] is not None and edge[0] not in path
        }


# ---- autograd ------------------------------------------------------------------------------------


def _engine(
    starts: Sequence[Start], inputs: Sequence[Tensor] = (), retain_graph: bool = False
) -> Grads:
    """The gradients of `inputs`; without these, accumulate those of all leaves."""
    edges, grads = zip(*starts, strict=True)
    return run_backward(edges, grads, inputs, retain_graph)


_leaf, _one = torch.zeros((), requires_grad=True), torch.ones(())
_leaf_edge = get_gradient_edge(_leaf)
_to_run: list[Callable[[], None]] = []
_leaf.register_hook(lambda _: _to_run.pop()())


def _wanting(edges: Sequence[GradientEdge], run: Callable[[], None]) -> None:
    """Call `run` where nodes that are called compute what flows over these edges, and nothing else.

    A node asks the backward that is under way what is wanted. This one begins and ends at a leaf of
    our own.
    """
    _to_run.append(run)
    run_backward((_leaf_edge,), (_one,), (_leaf_edge, *edges), accumulate=False)


def _call(node: Node, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What a node makes of its gradients, for each of its `next_functions`. No hooks."""
    if not isinstance(node, BackwardCFunction):
        return node(*grads)  # type: ignore[operator]
    whole = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if grad is None else grad
        for m, grad in zip(input_metadata(node), grads, strict=True)
    ]
    # a function written in Python answers for each argument of its forward: those that need
    # gradients are the nodes'
    answers = iter(
        [grad for grad, needed in zip(node.apply(*whole), node.needs_input_grad) if needed]
    )
    return [None if child is None else next(answers) for child, _ in node.next_functions]


__all__ = ["DeferredWeightGrad", "backward_inputs"]
