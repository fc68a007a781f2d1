"""Split a model into pipeline stages along its recorded forward.

`split_stages` makes a Staging of a ForwardGraph: what each stage runs, and which tensors cross
between stages. `weft.engine` runs the stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.core import (
    ParamRef,
    PathNode,
    Stage,
    Staging,
    TensorRef,
    UnsupportedModel,
    Value,
)

from .capture.graph import WRITTEN_BY_EVERY_STAGE, ForwardGraph, GraphNode
from .capture.structures import (
    numbers_in,
    tensors_in,
    unknown_classes,
)
from .forward_path import ForwardPath


def split_stages(
    graph: ForwardGraph,
    points: Sequence[str],
    blocks: Collection[str] = (),
    early: Collection[str] = (),
) -> Staging:
    """The stages of a model, and what crosses between them.

    Args:
        graph: One recorded forward of the model (`trace_forward`).
        points: The modules with whose calls the second and later stages begin, by name, in the
            order in which they run.
        blocks: Modules that count their own dropout masks.
        early: Those of the points whose stages begin with the functions before the call.

    Raises:
        UnsupportedModel: The model cannot be split there; names the line of its code.
    """
    return _StageSplitter(ForwardPath(graph, points, early)).staging(blocks)


class ReadsValue(UnsupportedModel):
    """A forward that reads an activation into Python. Wherever it is cut, another value of it may
    take another path than the plan has."""


class _StageSplitter:
    """Derives stages, and the values that cross between them, from a path."""

    def __init__(self, path: ForwardPath):
        self.path, self.graph = path, path.graph

    def staging(self, blocks: Collection[str]) -> Staging:
        used = self._used()
        events, stages = self.graph.events, range(self.path.last + 1)
        for index in self.path.nodes:
            self._check(events[index], self.path.stage_of(index))
        needed = self._needed_values()
        stages_made = tuple(self._stage(stage) for stage in stages)
        self._check_buffers(stages_made)
        position = {index: place for place, index in enumerate(self.path.nodes)}
        turned = {n: i for i, event in enumerate(events) for n in event.differentiates}
        versions: dict[tuple[int, int], list[int]] = {}
        for stage in stages:
            for number in sorted(needed[stage]):
                earlier = [w for w in self.path.writers[number] if self.path.stage_of(w) < stage]
                version = earlier[-1]
                versions.setdefault((version, number), []).append(stage)
        values = []
        for (version, number), targets in sorted(versions.items()):
            t = self.graph.tensors[number]
            takes = t.differentiable and turned.get(number, -1) <= events[version].end
            unread = takes and not self._reaches_loss(number, targets, used)
            values.append(
                Value(
                    (number, position[version]),
                    self.path.tensor_name(number),
                    self.path.stage_of(version),
                    tuple(targets),
                    t.shape,
                    t.dtype,
                    takes and not unread,
                    unread,
                )
            )
        quiet = {
            i
            for start in self.graph.calls()
            if events[start].name in blocks
            for i in range(start, events[start].end + 1)
        }
        items = tuple(self._item(index, quiet, blocks) for index in self.path.nodes)
        functions = {
            b for i in self.path.nodes if not events[i].call for b in events[i].buffers
        } & self.graph.changed
        around = tuple(dict.fromkeys(events[i].name for i in sorted(self.path.open_calls)))
        return Staging(
            stages_made,
            tuple(values),
            items,
            around,
            self._copied_values(needed),
            frozenset(functions),
            self.path.early,
        )

    def _reaches_loss(self, number: int, stages: Collection[int], used: set[int]) -> bool:
        """Whether the loss may use a tensor, or what one of these stages computes with it."""
        nodes = (index for index in used if self.path.stage_of(index) in stages)
        returned = number in self._returned() and self.path.last in stages
        return returned or any(number in self.graph.events[index].reads for index in nodes)

    def _returned(self) -> set[int]:
        """The tensors that the model returns, and its loss uses."""
        root, places = self.graph.events[0], self.graph.unread
        leaves = enumerate(tensors_in(root.output))
        returned = {at.number for p, at in leaves if isinstance(at, TensorRef) and p not in places}
        return returned | root.hidden

    def _used(self) -> set[int]:
        """The nodes on which the loss may depend. What a model computes last, and uses nowhere, is
        none: it needs its inputs, and gives them no gradient."""
        tensors, storages, found = self.graph.tensors, set[int](), set[int]()
        storages |= {tensors[n].storage for n in self._returned()}
        for index in reversed(self.path.nodes):
            event = self.graph.events[index]
            if any(tensors[n].storage in storages for n in (*event.made, *event.writes)):
                found.add(index)
                storages |= {tensors[n].storage for n in event.reads}
        unseen = (t for n, t in enumerate(tensors) if t.home and n not in self.path.writers)
        return {*self.path.nodes} if any(t.storage in storages for t in unseen) else found

    def _item(self, index: int, quiet: Collection[int], blocks: Collection[str]) -> PathNode:
        event = self.graph.events[index]
        leaves = tensors_in(event.output)
        draws = sum(
            self.graph.events[i].draws for i in range(index, event.end + 1) if i not in quiet
        )
        names = tuple(
            self.path.tensor_name(leaf.number) if isinstance(leaf, TensorRef) else ""
            for leaf in leaves
        )
        differentiable = tuple(
            isinstance(at, TensorRef) and self.graph.tensors[at.number].differentiable
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
            self.path.stage_of(index),
            event.line,
            event.output,
            names,
            differentiable,
            made,
            event.changed,
            tuple(event.filled.items()),
            bool(numbers_in(event.output)),
            draws,
            tuple(
                each.name
                for each in self.graph.events[index : event.end + 1]
                if each.call and each.name in blocks
            ),
            () if event.call else tuple(sorted(event.reads)),
            tuple(sorted(event.writes)),
            () if event.call else tuple(event.weights),
            event.within != "",
        )

    def _stage(self, stage: int) -> Stage:
        events = self.graph.events
        inside = [events[i] for i in self.path.nodes if self.path.stage_of(i) == stage]
        if not inside:
            after = f" before {self.path.points[stage]}" if stage < self.path.last else ""
            point = self.path.points[max(stage - 1, 0)]
            raise UnsupportedModel(
                "pipeline.cut", point, f"stage {stage} would do nothing{after}", "cut elsewhere"
            )
        modules = tuple(dict.fromkeys(e.name for e in inside if e.call))
        used = {name for e in inside for name in e.weights}
        if stage == self.path.last:  # what the model returns of its weights, the loss may read
            returned = tensors_in(events[0].output)
            used |= {at.name for at in returned if isinstance(at, ParamRef)} & {*self.graph.weights}
        # a weight that the sample did not reach (an expert that no token chose) is where its module
        # is
        reached = {name for i in self.path.nodes for name in events[i].weights}
        used |= {
            name
            for name, weight in self.graph.weights.items()
            if name not in reached
            and any(n.startswith(f"{m}.") for n in weight.names for m in modules)
        }
        buffers = {b for e in inside for b in e.buffers} & self.graph.changed
        first = self.graph.names[self.path.points[stage - 1]] if stage else next(iter(modules), "")
        ordered = tuple(name for name in self.graph.weights if name in used)
        return Stage(stage, first, modules, ordered, tuple(sorted(buffers)))

    # ---- what crosses ----

    def _needed_values(self) -> list[set[int]]:
        """For each stage, the tensors that it needs from earlier stages."""
        needed: list[set[int]] = [set() for _ in range(self.path.last + 1)]
        for index in self.path.nodes:
            for number in sorted(self.graph.events[index].reads & self.path.weight_dependent):
                self._need(number, self.path.stage_of(index), index, needed)
        root = self.graph.events[0]
        for leaf in tensors_in(root.output):
            if isinstance(leaf, TensorRef) and leaf.number in self.path.weight_dependent:
                self._need(leaf.number, self.path.last, 0, needed)
        for number in sorted(root.hidden & self.path.weight_dependent):
            if self.path.first_stage(number) < self.path.last:
                kind = next(iter(unknown_classes(root.output)), "object")
                raise self.path.refusal(
                    self.path.last,
                    f"the model returns {self.path.tensor_name(number)} of an earlier stage inside"
                    f" a {kind}",
                    "return tensors in tuples, dicts or dataclasses (Hugging Face: use_cache ="
                    " False, in model.config and in the configurations inside of it)",
                )
        return needed

    def _need(self, number: int, stage: int, reader: int, needed: list[set[int]]) -> None:
        t, event = self.graph.tensors[number], self.graph.events[reader]
        use = f"used at {event.line}: `{event.text}`" if reader else "returned by the model"
        born, name = self.path.makers.get(number), self.path.tensor_name(number)
        if born is not None and not t.home and not self.path.is_returned(number):
            maker = self.graph.events[born]
            raise self.path.refusal(
                max(stage, 1),
                f"{name} leaves {maker.name} (called at {maker.line}) otherwise than by its return"
                f" value, and is {use}",
                f"return it from {maker.name}",
            )
        if self.path.first_stage(number) >= stage or number in needed[stage]:
            return
        if event.name == "grad" and not event.call:  # torch.autograd's
            raise self.path.refusal(
                stage,
                f"{event.line} asks for a gradient through modules of several stages:"
                f" `{event.text}`",
                "use dp, fsdp or tp",
            )
        if (t.home and not self._is_local(number)) or born is None:
            why = t.home or WRITTEN_BY_EVERY_STAGE
            at = self.path.writers.get(number, [t.birth])[0]
            where = self.graph.events[at]
            line = f" ({where.line}: `{where.text}`)" if at else ""
            raise self.path.refusal(
                stage,
                f"{name} {why}{line}, and is {use}",
                "make a new tensor with a PyTorch function instead, or cut after its last use",
            )
        maker = self.graph.events[born]
        if maker.within not in ("", "checkpoint"):
            raise self.path.refusal(
                stage,
                f"{name} is made inside the autograd function {maker.within}, and is {use}",
                "put that function into a module and cut outside of it",
            )
        needed[stage].add(number)

    def _is_local(self, number: int) -> bool:
        """Whether every stage makes a tensor and sees it changed first: it can write into it what
        came."""
        t = self.graph.tensors[number]
        return t.local and t.birth in self.path.nodes

    def _copied_values(self, needed: list[set[int]]) -> frozenset[tuple[int, int]]:
        copied = set()
        for index in self.path.nodes:
            event, stage = self.graph.events[index], self.path.stage_of(index)
            changed = sorted(event.writes & needed[stage])
            storages = [self.graph.tensors[n].storage for n in changed]
            if len(set(storages)) < len(storages):
                one, other = (self.path.tensor_name(n) for n in changed[:2])
                raise self.path.refusal(
                    stage,
                    f"{one} and {other} share memory, and {event.line} changes it in place:"
                    f" `{event.text}`",
                    "write it without changing a tensor in place",
                )
            copied |= {(stage, n) for n in changed}
        return frozenset(copied)

    # ---- what cannot be cut ----

    def _check(self, event: GraphNode, stage: int) -> None:
        if stage == self.path.last:
            return
        if event.reads_into_python and not event.call:
            value = (
                ", ".join(
                    self.path.tensor_name(n)
                    for n in sorted(event.reads & self.path.weight_dependent)
                )
                or "a weight"
            )
            raise ReadsValue(
                "pipeline.cut",
                self.path.points[stage],
                f"{event.line} reads {value} into Python: `{event.text}`, and every later stage"
                " runs this line without that value",
                "give the distribution validate_args=False, or cut before it is made"
                if event.checks
                else "read it inside of a module that is not cut, or cut before it is made",
            )
        if event.reshapes and not event.call:
            raise self.path.refusal(
                stage + 1,
                f"{event.line} changes a tensor's shape in place: `{event.text}`",
                "use the function without the underscore",
            )
        kinds = unknown_classes(event.output)
        if kinds:
            raise self.path.refusal(
                stage + 1,
                f"{event.name} (called at {event.line}) returns an object of class {kinds[0]}, "
                "which weft cannot follow",
                "return tensors in tuples, dicts or dataclasses",
            )

    def _check_buffers(self, stages: Sequence[Stage]) -> None:
        seen: dict[str, int] = {}
        for stage in stages:
            changed = (name for name in stage.weights if name in self.graph.changed)
            for name in (*stage.buffers, *changed):
                if name in seen:
                    weight = name in self.graph.weights
                    kind = "weight" if weight else "buffer"
                    instead = "change it outside" if weight else "give each use its own buffer"
                    raise self.path.refusal(
                        stage.index,
                        f"the {kind} {name} is changed by the forward, and stages {seen[name]} and "
                        f"{stage.index} use it",
                        f"cut elsewhere, or {instead}",
                    )
                seen[name] = stage.index
