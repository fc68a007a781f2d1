"""Split a model into pipeline stages along its recorded forward.

`split_stages` makes a Staging of a ForwardGraph: what each stage runs, and which tensors cross
between stages. `weft.engine` runs the stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from weft.core import (
    PathNode,
    Stage,
    Staging,
    TensorRef,
    UnsupportedModel,
    Value,
    nearest,
)

from .capture.graph import ForwardGraph, GraphNode
from .capture.structures import (
    numbers_in,
    tensors_in,
    unknown_classes,
)

# ---- planning ------------------------------------------------------------------------------------


def split_stages(
    chart: ForwardGraph, points: Sequence[str], blocks: Collection[str] = ()
) -> Staging:
    """The stages of a charted model. Each but the first begins with the call of one of `points`,
    modules by name in the order in which they run. `blocks`: modules that count their own dropout
    masks. Raises CannotCut.
    """
    return _StageSplitter(chart, points).staging(blocks)


class _StageSplitter:
    """The path: what the model's open calls (those that contain a cut) do directly, each a whole
    call or a function."""

    def __init__(self, chart: ForwardGraph, points: Sequence[str]):
        self.chart, self.points = chart, points
        self.starts = self._starts()
        self.last = len(points)
        self.open = {0} | {outer for start in self.starts for outer in self._around(start)}
        self._follow(set())
        unseen = {n for n, t in enumerate(chart.tensors) if t.home and n not in self.writers}
        self.tainted |= unseen

    def _follow(self, counted: set[str]) -> None:
        """Find the path. All calls of the modules `counted` are on it, since some of them are."""
        self.path: list[int] = []  # what depends on weights: the rest is done again by every stage
        self.tainted: set[int] = set()
        self.writers: dict[int, list[int]] = {}
        self.born: dict[int, int] = {}
        for index, event in enumerate(self.chart.events):
            if event.parent not in self.open or index in self.open:
                continue
            if event.heavy(self.tainted, self.chart.changed) or (
                event.call and event.name in counted
            ):
                self.path.append(index)
                self.tainted |= {*event.made, *event.writes}
                self.born |= dict.fromkeys(event.made, index)
                for number in (*event.made, *sorted(event.writes)):
                    self.writers.setdefault(number, []).append(index)
        called = {self.chart.events[i].name for i in self.path if self.chart.events[i].call}
        if called != counted:
            self._follow(called)

    # ---- points ----

    def _starts(self) -> list[int]:
        calls: dict[str, list[int]] = {}
        for index in self.chart.calls():
            calls.setdefault(self.chart.events[index].name, []).append(index)
        starts: list[int] = []
        for point in self.points:
            name = self.chart.names.get(point)
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
            if len(calls[name]) > 1:
                lines = ", ".join(dict.fromkeys(self.chart.events[i].line for i in calls[name]))
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
                    f"it runs no later than {before}, which is named before it",
                    "name the modules in the order in which they run, each once",
                )
            self._check_reachable(point, calls[name][0])
            starts.append(calls[name][0])
        return starts

    def _around(self, index: int) -> list[int]:
        """The calls that an event is in, innermost first."""
        found = []
        while (index := self.chart.events[index].parent) >= 0:
            found.append(index)
        return found

    def _check_reachable(self, point: str, start: int) -> None:
        event = self.chart.events[start]
        inside = [self.chart.events[i] for i in self._around(start)]
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
                "cut outside of it; of recomputation, leave it to weft instead of the model",
            )

    # ---- stages ----

    def stage(self, index: int) -> int:
        return bisect_right(self.starts, index)

    def _refuse(self, stage: int, problem: str, fix: str) -> UnsupportedModel:
        """About the boundary before this stage."""
        return UnsupportedModel("pipeline.cut", self.points[stage - 1], problem, fix)

    def staging(self, blocks: Collection[str]) -> Staging:
        events, stages = self.chart.events, range(self.last + 1)
        for index in self.path:
            self._check(events[index], self.stage(index))
        needed = self._needed()
        stages_made = tuple(self._stage(stage) for stage in stages)
        self._check_buffers(stages_made)
        position = {index: place for place, index in enumerate(self.path)}
        versions: dict[tuple[int, int], list[int]] = {}
        for stage in stages:
            for number in sorted(needed[stage]):
                version = [w for w in self.writers[number] if self.stage(w) < stage][-1]
                versions.setdefault((version, number), []).append(stage)
        values = []
        for (version, number), targets in sorted(versions.items()):
            t = self.chart.tensors[number]
            values.append(
                Value(
                    (number, position[version]),
                    self.name(number),
                    self.stage(version),
                    tuple(targets),
                    t.shape,
                    t.dtype,
                    t.differentiable,
                )
            )
        quiet = {
            i
            for start in self.chart.calls()
            if events[start].name in blocks
            for i in range(start, events[start].end + 1)
        }
        items = tuple(self._item(index, quiet) for index in self.path)
        functions = {
            b for i in self.path if not events[i].call for b in events[i].buffers
        } & self.chart.changed
        around = tuple(dict.fromkeys(events[i].name for i in sorted(self.open)))
        return Staging(
            stages_made, tuple(values), items, around, self._copied(needed), frozenset(functions)
        )

    def _item(self, index: int, quiet: Collection[int]) -> PathNode:
        event = self.chart.events[index]
        leaves = tensors_in(event.output)
        dropouts = sum(
            self.chart.events[i].dropouts for i in range(index, event.end + 1) if i not in quiet
        )
        names = tuple(
            self.name(leaf.number) if isinstance(leaf, TensorRef) else "" for leaf in leaves
        )
        differentiable = tuple(
            isinstance(at, TensorRef) and self.chart.tensors[at.number].differentiable
            for at in leaves
        )
        made = tuple(
            p
            for p, leaf in enumerate(leaves)
            if isinstance(leaf, TensorRef) and leaf.number in event.made
        )
        return PathNode(
            event.name,
            event.call,
            self.stage(index),
            event.line,
            event.output,
            names,
            differentiable,
            made,
            event.changed,
            bool(numbers_in(event.output)),
            dropouts,
        )

    def _stage(self, stage: int) -> Stage:
        events = self.chart.events
        inside = [events[i] for i in self.path if self.stage(i) == stage]
        if not inside:
            after = f" before {self.points[stage]}" if stage < self.last else ""
            point = self.points[max(stage - 1, 0)]
            raise UnsupportedModel(
                "pipeline.cut", point, f"stage {stage} would do nothing{after}", "cut elsewhere"
            )
        modules = tuple(dict.fromkeys(e.name for e in inside if e.call))
        used = {name for e in inside for name in e.weights}
        # a weight that the sample did not reach (an expert that no token chose) is where its module
        # is
        reached = {name for i in self.path for name in events[i].weights}
        used |= {
            name
            for name, weight in self.chart.weights.items()
            if name not in reached
            and any(n.startswith(f"{m}.") for n in weight.names for m in modules)
        }
        buffers = {b for e in inside for b in e.buffers} & self.chart.changed
        first = self.chart.names[self.points[stage - 1]] if stage else next(iter(modules), "")
        ordered = tuple(name for name in self.chart.weights if name in used)
        return Stage(stage, first, modules, ordered, tuple(sorted(buffers)))

    # ---- what crosses ----

    def name(self, number: int) -> str:
        """Of a tensor, for people."""
        if number in self.born:
            maker = self.chart.events[self.born[number]]
            places = [
                p for p, leaf in enumerate(tensors_in(maker.output)) if leaf == TensorRef(number)
            ]
            if maker.call and places:
                return f"output {places[0]} of {maker.name}"
        return self.chart.tensors[number].name

    def _needed(self) -> list[set[int]]:
        """Of each stage, the tensors that it needs as earlier stages leave them."""
        needed: list[set[int]] = [set() for _ in range(self.last + 1)]
        for index in self.path:
            for number in sorted(self.chart.events[index].reads & self.tainted):
                self._need(number, self.stage(index), index, needed)
        root = self.chart.events[0]
        for leaf in tensors_in(root.output):
            if isinstance(leaf, TensorRef) and leaf.number in self.tainted:
                self._need(leaf.number, self.last, 0, needed)
        for number in sorted(root.hidden & self.tainted):
            if self._first(number) < self.last:
                kind = next(iter(unknown_classes(root.output)), "object")
                raise self._refuse(
                    self.last,
                    f"the model returns {self.name(number)} of an earlier stage inside a {kind}",
                    "return tensors in tuples, dicts or dataclasses (Hugging Face:"
                    " model.config.use_cache = False)",
                )
        return needed

    def _first(self, number: int) -> int:
        """The stage that makes or first changes it."""
        return self.stage(
            self.writers[number][0] if number in self.writers else self.chart.tensors[number].birth
        )

    def _need(self, number: int, stage: int, reader: int, needed: list[set[int]]) -> None:
        if self._first(number) >= stage or number in needed[stage]:
            return
        t, event = self.chart.tensors[number], self.chart.events[reader]
        use = f"used at {event.line}: `{event.text}`" if reader else "returned by the model"
        born = self.born.get(number)
        if t.home or born is None:
            why = (
                t.home
                or "was made by code without weights, which every stage runs, and then changed in place"
            )
            where = self.chart.events[self.writers.get(number, [t.birth])[0]]
            raise self._refuse(
                stage,
                f"{self.name(number)} {why} ({where.line}: `{where.text}`), and is {use}",
                "make a new tensor with a PyTorch function instead, or cut after its last use",
            )
        maker = self.chart.events[born]
        if maker.within not in ("", "checkpoint"):
            raise self._refuse(
                stage,
                f"{self.name(number)} is made inside the autograd function {maker.within}, and is"
                f" {use}",
                "put that function into a module and cut outside of it",
            )
        if TensorRef(number) not in tensors_in(maker.output):
            raise self._refuse(
                stage,
                f"{self.name(number)} leaves {maker.name} (called at {maker.line}) otherwise than"
                f" by its return value, and is {use}",
                f"return it from {maker.name}, or cut after its last use",
            )
        needed[stage].add(number)

    def _copied(self, needed: list[set[int]]) -> frozenset[tuple[int, int]]:
        copied = set()
        for index in self.path:
            event, stage = self.chart.events[index], self.stage(index)
            changed = sorted(event.writes & needed[stage])
            storages = [self.chart.tensors[n].storage for n in changed]
            if len(set(storages)) < len(storages):
                one, other = (self.name(n) for n in changed[:2])
                raise self._refuse(
                    stage,
                    f"{one} and {other} share memory, and {event.line} changes it in place:"
                    f" `{event.text}`",
                    "write it without changing a tensor in place",
                )
            copied |= {(stage, n) for n in changed}
        return frozenset(copied)

    # ---- what cannot be cut ----

    def _check(self, event: GraphNode, stage: int) -> None:
        if stage == self.last:
            return
        if event.asks and not event.call:
            value = (
                ", ".join(self.name(n) for n in sorted(event.reads & self.tainted)) or "a weight"
            )
            raise self._refuse(
                stage + 1,
                f"{event.line} reads {value} into Python: `{event.text}`, and every later stage"
                " runs this line without that value",
                "read it inside of a module that is not cut, or cut before it is made",
            )
        if event.reshapes and not event.call:
            raise self._refuse(
                stage + 1,
                f"{event.line} changes a tensor's shape in place: `{event.text}`",
                "use the function without the underscore",
            )
        kinds = unknown_classes(event.output)
        if kinds:
            raise self._refuse(
                stage + 1,
                f"{event.name} (called at {event.line}) returns an object of class {kinds[0]}, "
                "which weft cannot follow",
                "return tensors in tuples, dicts or dataclasses",
            )

    def _check_buffers(self, stages: Sequence[Stage]) -> None:
        seen: dict[str, int] = {}
        for stage in stages:
            for name in stage.buffers:
                if name in seen:
                    raise self._refuse(
                        stage.index,
                        f"the buffer {name} is changed by the forward, and stages {seen[name]} and "
                        f"{stage.index} use it",
                        "cut elsewhere, or give each use its own buffer",
                    )
                seen[name] = stage.index
