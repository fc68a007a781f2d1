"""ForwardPath: the part of a recorded forward that is divided among pipeline stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from weft.core import TensorRef, UnsupportedModel, nearest

from .capture.graph import ForwardGraph
from .capture.structures import tensors_in


class ForwardPath:
    """The events of a forward that stages divide, and where each stage begins.

    A call that contains a split point is open. So are the calls of a module that keeps a tensor
    which others read, as a loss of its own: every stage runs its code, and keeps what came or a
    placeholder. The path has what open calls do directly, each a whole module call or a function,
    as far as it depends on weights or random numbers: every stage runs the rest by itself.

    `starts`: the event with which each stage but the first begins: the call of its point, or, of a
    point in `early`, what runs between the modules before it and this call. `last`: the last stage.
    `open_calls` and `nodes`: events. `weight_dependent`: tensors. `writers`: tensor -> the nodes
    that make or change it. `makers`: tensor -> the node that makes it.
    """

    def __init__(self, graph: ForwardGraph, points: Sequence[str], early: Collection[str] = ()):
        self.graph, self.points = graph, points
        self.early = frozenset(early).intersection(points)
        self.starts = self._find_starts()
        self.last = len(points)
        self.open_calls = {0} | {
            outer for start in self.starts for outer in self.enclosing_calls(start)
        }
        self._find_nodes(set())
        while kept := self._keeping():
            self.open_calls |= kept
            self._find_nodes(set())
        unseen = {n for n, t in enumerate(graph.tensors) if t.home and n not in self.writers}
        self.weight_dependent |= unseen

    def _find_nodes(self, counted: set[str]) -> None:
        """Find the nodes. All calls of the modules in `counted` are nodes, because some of them
        are."""
        self.nodes: list[int] = []  # what depends on weights: the rest is done again by every stage
        self.weight_dependent: set[int] = set()
        self.writers: dict[int, list[int]] = {}
        self.makers: dict[int, int] = {}
        for index, event in enumerate(self.graph.events):
            if event.parent not in self.open_calls or index in self.open_calls:
                continue
            if event.depends_on_weights(self.weight_dependent, self.graph.changed) or (
                event.call and event.name in counted
            ):
                self.nodes.append(index)
                self.weight_dependent |= {*event.made, *event.writes}
                self.makers |= dict.fromkeys(event.made, index)
                for number in (*event.made, *sorted(event.writes)):
                    self.writers.setdefault(number, []).append(index)
        called = {self.graph.events[i].name for i in self.nodes if self.graph.events[i].call}
        if called != counted:
            self._find_nodes(called)

    def is_returned(self, number: int) -> bool:
        """Whether the node that makes a tensor returns it."""
        return TensorRef(number) in tensors_in(self.graph.events[self.makers[number]].output)

    def _keeping(self) -> set[int]:
        """Nodes that are calls of modules which keep a tensor that is read outside of them."""
        events, tensors = self.graph.events, self.graph.tensors
        leaves = tensors_in(events[0].output)
        read = {n for index in self.nodes for n in events[index].reads}
        read |= {leaf.number for leaf in leaves if isinstance(leaf, TensorRef)}
        makers = {
            self.makers[n]
            for n in read & self.makers.keys()
            if not tensors[n].home and not self.is_returned(n)
        }
        makers |= {i for i in self.nodes if events[i].keeps}
        names = {events[i].name for i in makers if events[i].call and not events[i].within}
        return {i for i in self.nodes if events[i].call and events[i].name in names}

    def _find_starts(self) -> list[int]:
        calls: dict[str, list[int]] = {}
        for index in self.graph.calls():
            calls.setdefault(self.graph.events[index].name, []).append(index)
        starts: list[int] = []
        for point in self.points:
            name = self.graph.names.get(point)
            if not name:
                hint = nearest(point, [n for n in calls if n])
                raise UnsupportedModel("pipeline.cut", point, "the model has no such module", hint)
            if name not in calls:
                raise UnsupportedModel(
                    "pipeline.cut",
                    point,
                    "the forward never calls it",
                    nearest(point, [n for n in calls if n]),
                )
            if len(calls[name]) > 1 and not self.graph.parts_weights(calls[name][0]):
                lines = ", ".join(dict.fromkeys(self.graph.events[i].line for i in calls[name]))
                raise UnsupportedModel(
                    "pipeline.cut",
                    point,
                    f"the forward calls it {len(calls[name])} times, at {lines}",
                    "name a module that is called once",
                )
            if starts and calls[name][0] <= starts[-1]:
                before = self.points[len(starts) - 1]
                raise UnsupportedModel(
                    "pipeline.cut",
                    point,
                    f"it does not run after {before}, which is named before it",
                    "name the modules in the order in which they run, each once",
                )
            self._check_reachable(point, calls[name][0])
            starts.append(calls[name][0])
        return [
            self._before_call(start) if point in self.early else start
            for point, start in zip(self.points, starts, strict=True)
        ]

    def _before_call(self, start: int) -> int:
        """The first event after the last call with weights that precedes a call beside it."""
        events, index = self.graph.events, start
        while index - 1 > events[start].parent:
            before = index - 1
            while events[before].parent != events[start].parent:
                before = events[before].parent
            if events[before].call and events[before].weights:
                break
            index = before
        return index

    def enclosing_calls(self, index: int) -> list[int]:
        """The calls that contain an event, innermost first."""
        found = []
        while (index := self.graph.events[index].parent) >= 0:
            found.append(index)
        return found

    def _check_reachable(self, point: str, start: int) -> None:
        event = self.graph.events[start]
        inside = [self.graph.events[i] for i in self.enclosing_calls(start)]
        held = next(
            (e for e in inside if e.within),
            event if event.within not in ("", "checkpoint") else None,
        )
        if held is not None:
            what = (
                "torch.utils.checkpoint"
                if held.within in ("checkpoint", "CheckpointFunction")
                else held.within
            )
            raise UnsupportedModel(
                "pipeline.cut",
                point,
                f"it runs inside {what}, called at {held.line}: `{held.text}`",
                "cut outside of it; if it is recomputation, use train.recompute instead"
                " of the model's own",
            )

    def stage_of(self, index: int) -> int:
        return bisect_right(self.starts, index)

    def first_stage(self, number: int) -> int:
        """The stage that makes a tensor, or changes it first."""
        return self.stage_of(
            self.writers[number][0] if number in self.writers else self.graph.tensors[number].birth
        )

    def tensor_name(self, number: int) -> str:
        """The name of a tensor for error messages."""
        if number in self.makers:
            maker = self.graph.events[self.makers[number]]
            places = [
                p for p, leaf in enumerate(tensors_in(maker.output)) if leaf == TensorRef(number)
            ]
            if maker.call and places:
                return f"output {places[0]} of {maker.name}"
        return self.graph.tensors[number].name

    def refusal(self, stage: int, problem: str, fix: str) -> UnsupportedModel:
        """An error about the boundary before this stage."""
        return UnsupportedModel("pipeline.cut", self.points[stage - 1], problem, fix)
