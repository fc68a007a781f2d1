"""Backward in two parts: B, the gradients of a stage's inputs, and W, those of its weights (Qi et al. 2024).

    roots ──▶ mm ──▶ relu ──▶ mm ──▶ inputs        the path: nodes from which an input is reached
              │               │
              w1              w2                   a branch: what leads from the path to weights alone

B runs the path and keeps the gradient that reaches each node with a branch. W starts from these: it runs every such
node once more, for its branch alone, and none of the path. Both are calls of autograd, so streams, custom functions and
checkpointed regions (recomputed once in each part) are autograd's own affair. Each weight's gradient is accumulated
once, by autograd, in W: so a weight's hooks run as in one backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

Grads = list[Tensor | None]


def backward_inputs(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Grads, Deferred]:
    """B: the gradients of `inputs` (None where there is none), and W, to be run once.

    `grads`: of the roots; None is 1 for a scalar. Gradients are not accumulated in `inputs`; they may share storage.
    Where no input is reached (a first stage), the path ends at the weight that lies deepest.
    Tensor hooks on what a branch starts from run in both parts.
    """
    wanted = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root.requires_grad]
    starts = [(get_gradient_edge(root), torch.ones_like(root) if grad is None else grad) for root, grad in wanted]
    needing = [x for x in inputs if x.requires_grad]
    graph = _Graph([edge for edge, _ in starts])
    seeds = [edge.node for edge in map(get_gradient_edge, needing) if edge.node in graph.parents]
    deepest = None if seeds else graph.above_deepest_weight()
    path = graph.ancestors(seeds if deepest is None else [deepest])
    groups = _groups(graph, path, starts, deepest)
    deferred = Deferred([group for group in groups if group.leaves])
    found: Grads = [None] * len(needing)
    through = [(edge, grad) for edge, grad in starts if edge.node in path]
    if through:
        forks = [fork for group in groups for fork in group.forks]
        handles = [fork.node.register_prehook(fork.keep) for fork in forks if fork.clamped and fork.node is not deepest]
        asked = [fork for fork in forks if not fork.clamped or fork.node is deepest]
        edges = [GradientEdge(fork.node, i) for fork in asked for i in fork.outputs]
        try:
            got = torch.autograd.grad(
                [edge for edge, _ in through], [*needing, *edges], [grad for _, grad in through],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        finally:
            for handle in handles:
                handle.remove()
        found = list(got[: len(needing)])
        rest = iter(got[len(needing) :])
        for fork in asked:
            fork.grads = {i: next(rest) for i in fork.outputs}
    answers = iter(found)
    return [next(answers) if x.requires_grad else None for x in inputs], deferred


class Deferred:
    """W, still to be run: what it needs of the graph is kept until then, and let go of bit by bit while it runs."""

    def __init__(self, groups: list[_Group]):
        self._apart = [group for group in reversed(groups) if not group.tangled]
        self._tangled = [group for group in groups if group.tangled]

    def run(self) -> None:
        """Accumulate the weights' gradients in their `.grad`, as `backward` would."""
        retain = bool(self._tangled)  # their paths may go over nodes of the others
        with GraphExecGroup():
            while self._apart:
                group = self._apart.pop()
                if len(group.forks) > 1 or group.starts:
                    group.untie(retain)
                _accumulate([group], retain)
        if self._tangled:
            _accumulate(self._tangled, False)
            self._tangled = []


# ---- the graph ---------------------------------------------------------------------------------------------------


class _Graph:
    """What is reached from some edges. Nodes come in the order of a breadth-first walk, the same in every process."""

    def __init__(self, starts: Iterable[GradientEdge]):
        self.outputs: dict[Node, dict[int, None]] = {}  # which of a node's outputs are used
        for node, index, *_ in starts:
            self.outputs.setdefault(node, {})[index] = None
        self.parents: dict[Node, list[Node]] = {node: [] for node in self.outputs}
        self.children: dict[Node, list[Node]] = {}
        queue = list(self.parents)
        parents, outputs = self.parents, self.outputs
        for node in queue:
            below = []
            for child, index in node.next_functions:
                if child is None:
                    continue
                below.append(child)
                if child in parents:
                    parents[child].append(node)
                    outputs[child][index] = None
                else:
                    parents[child] = [node]
                    outputs[child] = {index: None}
                    queue.append(child)
            self.children[node] = below

    def ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """These and all nodes from which one of them is reached."""
        found = set(nodes)
        queue = list(found)
        for node in queue:
            for parent in self.parents[node]:
                if parent not in found:
                    found.add(parent)
                    queue.append(parent)
        return found

    def above_deepest_weight(self) -> Node | None:
        """The last node on the longest way from a root to a weight; None if a weight is a root or there is none."""
        waiting = {node: len(parents) for node, parents in self.parents.items()}
        depth = {node: 0 for node, count in waiting.items() if count == 0}
        above: dict[Node, Node] = {}
        queue = list(depth)
        for node in queue:
            for child in self.children[node]:
                if depth[node] + 1 > depth.get(child, 0):
                    depth[child], above[child] = depth[node] + 1, node
                waiting[child] -= 1
                if waiting[child] == 0:
                    queue.append(child)
        weights = [node for node in depth if _is_weight(node)]
        return above.get(max(weights, key=depth.__getitem__)) if weights else None


def _is_weight(node: Node) -> bool:
    return isinstance(node, torch._C._functions.AccumulateGrad)


@dataclass
class _Fork:
    """A node of the path with branches: `branches` are their first edges, `outputs` those of its outputs in use.

    Clamped: whatever else reaches the node in W, its gradients are those that B has seen.
    """

    node: Node
    outputs: list[int]
    branches: list[GradientEdge]
    clamped: bool = False
    grads: dict[int, Tensor | None] = field(default_factory=dict)

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = dict(enumerate(grads))

    def clamp(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(self.grads.get(i) for i in range(len(grads)))

    def starts(self) -> list[tuple[GradientEdge, Tensor]]:
        return [(GradientEdge(self.node, i), grad) for i, grad in self.grads.items() if grad is not None]


@dataclass(eq=False)
class _Group:
    """Forks whose branches meet, with the weights that these lead to. `starts`: edges of branches, with gradients.

    Tangled: the way from one fork to a weight may lead over another fork. Such groups run in one call, clamped, which
    goes over the path between its forks again.
    """

    forks: list[_Fork] = field(default_factory=list)
    starts: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    tangled: bool = False

    def untie(self, retain: bool) -> None:
        """Go from each fork to the first edges of its branches, of which it is the only parent."""
        for fork in [fork for fork in self.forks if not fork.clamped]:
            self.forks.remove(fork)
            starts = fork.starts()
            if starts:
                got = torch.autograd.grad(
                    [edge for edge, _ in starts], fork.branches, [grad for _, grad in starts],
                    retain_graph=retain, allow_unused=True,
                )  # fmt: skip
                self.starts += [(edge, grad) for edge, grad in zip(fork.branches, got) if grad is not None]


def _groups(
    graph: _Graph, path: set[Node], starts: list[tuple[GradientEdge, Tensor]], deepest: Node | None
) -> list[_Group]:
    """The forks of a path, those whose branches meet together; and the roots that are no part of the path."""
    group_of: dict[Node, _Group] = {}
    groups: dict[_Group, list[Node]] = {}  # with the nodes of their branches

    def explore(first: list[Node]) -> _Group:
        """The group of the branches that begin at these nodes, with all whose branches they meet."""
        group, nodes, queue = _Group(), [], list(first)
        for node in queue:
            met = group_of.get(node)
            if met is None:
                group_of[node] = group
                nodes.append(node)
                queue += graph.children[node]
                if _is_weight(node):
                    group.leaves.append(node.variable)
            elif met is not group:
                group.forks, group.starts = met.forks + group.forks, met.starts + group.starts
                group.leaves = met.leaves + group.leaves
                group_of.update(dict.fromkeys(groups[met], group))
                nodes += groups.pop(met)
        groups[group] = nodes
        return group

    for node, children in graph.children.items():
        if node in path:
            first = [child for child in children if child not in path]
            if first:
                edges = {(c, i): None for c, i in node.next_functions if c is not None and c not in path}
                fork = _Fork(node, sorted(graph.outputs[node]), [GradientEdge(*edge) for edge in edges])
                explore(first).forks.append(fork)
    for edge, grad in starts:
        if edge.node not in path:
            explore([edge.node]).starts.append((edge, grad))
    for group in groups:
        if len(group.forks) == 1 and not group.starts:
            group.forks[0].clamped = group.forks[0].node is deepest
            continue
        for fork in group.forks:  # below the deepest there is no path to go over
            if fork.node is deepest:
                fork.clamped = True
            elif any(set(graph.parents[edge.node]) != {fork.node} for edge in fork.branches):
                group.tangled = True
        if group.tangled:
            for fork in group.forks:
                fork.clamped = True
    return list(groups)


def _accumulate(groups: Sequence[_Group], retain: bool) -> None:
    """One backward over the branches of these groups, into their leaves."""
    forks = [fork for group in groups for fork in group.forks]
    starts = [start for group in groups for start in group.starts]
    starts += [start for fork in forks for start in fork.starts()]
    if not starts:
        return
    handles = [fork.node.register_prehook(fork.clamp) for fork in forks if fork.clamped]
    try:
        torch.autograd.backward(
            [edge for edge, _ in starts], [grad for _, grad in starts], retain_graph=retain,
            inputs=[leaf for group in groups for leaf in group.leaves],
        )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
