"""Cutting a model into pipeline stages along its forward, and running one stage, without editing
the forward.

`cut` makes a Staging of a Chart. `StageForward` runs a stage: the model's own forward runs from its
beginning, but the work of earlier stages is not done. What this stage needs from them was received,
and is put in where it would have been made; for the rest ghosts stand in. After the stage's last
work the forward is left. So a stage may be any stretch of any forward, and its own modules compute
on plain tensors.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.modules import (
    hook_ids,
    innermost_function_mode,
    intercept_calls,
    original_call,
    replace_parameters,
    wrap_hooks,
)
from weft._torch.tensors import storage_id
from weft.core import (
    InputRef,
    OpaqueRef,
    ParamRef,
    PathNode,
    Stage,
    Staging,
    TensorRef,
    UnsupportedModel,
    Value,
    nearest,
)

from .capture.graph import ForwardGraph, GraphNode
from .capture.hooks import (
    METADATA,
    RANDOM,
    argument,
    argument_at,
    is_weight,
    name_of,
    numbers_in,
    rebuild,
    source_line,
    tensors_in,
    tensors_read,
    unknown_classes,
)
from .capture.placeholder import PlaceholderTensor, Shapes, Skipped

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


# ---- running -------------------------------------------------------------------------------------


class _Stop(BaseException):
    """Leaves the forward after a stage's last work; not an Exception, so that no model catches
    it."""


class StageForward:
    """The forwards of some stages of `model`, which is changed in place: parameters that none uses
    become ghosts.

    `skipped(n)` is told of n dropout masks that an earlier stage draws.
    """

    def __init__(
        self,
        model: nn.Module,
        staging: Staging,
        stages: Sequence[int],
        skipped: Callable[[int], None] = lambda n: None,
    ):
        self.model, self.staging, self.skipped = model, staging, skipped
        self.shapes = Shapes(model)
        self.programs = {stage: _StageProgram(staging, stage) for stage in stages}
        self._handlers: list[tuple[nn.Module, Callable]] = []
        self._run: _StageExecution | None = None
        self._planned = {key for module in model.modules() for key in hook_ids(module)}
        self._drop(stages)

    def __call__(
        self, stage: int, inputs: Mapping[str, Any], received: Mapping[int, Tensor]
    ) -> tuple[dict[int, Tensor], Any]:
        """Run a stage on the model's keyword arguments. `received`: index in `staging.values` ->
        tensor, for all whose targets hold `stage`. Returns the tensors of the values that this
        stage makes, by the same index, and what the model returns on the last stage, else None.
        Raises CannotCut where the forward leaves the planned path.
        """
        if not self._handlers:  # modules may have been replaced since
            names = dict.fromkeys(item.name for item in self.staging.items if item.call)
            self._handlers = [
                (m, self._handler(name, m))
                for name in names
                for m in (self.model.get_submodule(name),)
            ]
            for module in map(self.model.get_submodule, self.staging.around):
                # hooks that came after planning (a sharded model's) are no part of the path
                wrap_hooks(module, self._quiet, self._planned)
        self._run = run = _StageExecution(self, self.programs[stage], received)
        output = None
        try:
            with intercept_calls(self._handlers), run:
                output = self.model(**inputs)
        except _Stop:
            output = None
        finally:
            self._run = None
        return run.finish(), output if stage == len(self.staging.stages) - 1 else None

    def _handler(self, name: str, module: nn.Module) -> Callable:
        call = original_call(module)

        def handler(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            assert run is not None
            return call(*args, **kwargs) if run.inside else run.module(name, call, args, kwargs)

        return handler

    def _quiet(self, hook: Callable) -> Callable:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None or run.inside:
                return hook(*args, **kwargs)
            run.inside = True
            try:
                result = hook(*args, **kwargs)
            finally:
                run.inside = False
            run.follow(args, result)
            return result

        return quiet

    def _drop(self, stages: Sequence[int]) -> None:
        used = {name for stage in self.staging.stages for name in stage.weights}
        kept = {name for stage in stages for name in self.staging.stages[stage].weights}
        ghosts = {
            id(p): PlaceholderTensor.of_weight(name, p, self.shapes.mode)
            for name, p in self.model.named_parameters()
            if name not in kept
            and (name in used or 0 not in stages)  # what no stage uses is the first one's
        }
        for module in self.model.modules():
            replace_parameters(module, ghosts)


class _StageProgram:
    """What one stage does along the path."""

    def __init__(self, staging: Staging, stage: int):
        self.stage, self.items = stage, staging.items
        last = stage == len(staging.stages) - 1
        own = [place for place, item in enumerate(staging.items) if item.stage == stage]
        self.end = (
            len(staging.items) + 1 if last else own[-1] + 1
        )  # the position at which the forward is left
        self.incoming = {v.key[0]: i for i, v in enumerate(staging.values) if stage in v.targets}
        self.outgoing: dict[int, list[int]] = {}
        for i, v in enumerate(staging.values):
            if v.source == stage:
                self.outgoing.setdefault(v.key[0], []).append(i)
        self.copied = {number for at, number in staging.copied if at == stage}
        self.buffers = staging.noted
        self.sent = {
            place: [
                (k, leaf.number)
                for k, leaf in enumerate(tensors_in(self.items[place].output))
                if isinstance(leaf, TensorRef) and leaf.number in self.outgoing
            ]
            for place in own
        }


class _StageExecution(TorchFunctionMode):
    """One forward of one stage: at each piece of work on the path, skip it or do it."""

    def __init__(self, owner: StageForward, program: _StageProgram, received: Mapping[int, Tensor]):
        super().__init__()
        self.owner, self.program, self.received = owner, program, received
        self.position = 0
        self.inside = False  # a module call that is done whole: nothing of ours is active
        self.placed: dict[int, Tensor] = {}
        self.sent: dict[int, Tensor] = {}
        self.tainted: dict[int, weakref.ref] = {}  # tensors that depend on weights
        self.dirty: set[int] = set()  # storages of others into which such a tensor was written
        self.buffers = {id(owner.model.get_buffer(name)) for name in program.buffers}

    def finish(self) -> dict[int, Tensor]:
        if self.position < min(self.program.end, len(self.program.items)):
            raise self._astray("its end")
        return {
            i: self.sent[number]
            for number, indices in self.program.outgoing.items()
            for i in indices
        }

    # ---- what the forward does ----

    def module(self, name: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        item = self._next(name, True)
        if item.stage < self.program.stage:
            return self._skip(item, name, args, kwargs)
        on_top = innermost_function_mode() is self
        self.inside = True
        if on_top:
            self.__exit__(None, None, None)
        try:
            out = call(*args, **kwargs)
        finally:
            self.inside = False
            if on_top:
                self.__enter__()
        return self._done(item, out, args, kwargs)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:  # below another mode of the model's own
            return func(*args, **kwargs)
        if func in METADATA or not self._heavy(func, args, kwargs):
            return func(*args, **kwargs)
        item = self._next(name_of(func), False)
        if item.stage < self.program.stage:
            return self._skip(item, func, args, kwargs)
        return self._done(item, func(*args, **kwargs), args, kwargs)

    def _heavy(self, func: Callable, args: tuple, kwargs: dict) -> bool:
        return func in RANDOM or any(self._is_tainted(t) for t in tensors_read(func, args, kwargs))

    def _is_tainted(self, t: Tensor) -> bool:
        ref = self.tainted.get(id(t))
        if (
            (ref is not None and ref() is t)
            or isinstance(t, PlaceholderTensor)
            or is_weight(t)
            or id(t) in self.buffers
        ):
            return True
        return bool(self.dirty) and storage_id(t) in self.dirty

    def _next(self, name: str, call: bool) -> PathNode:
        """The piece of work that comes now. Only here is the forward left: not where a context
        manager ends."""
        if self.position >= self.program.end:
            raise _Stop
        item = (
            self.program.items[self.position] if self.position < len(self.program.items) else None
        )
        if item is None or item.name != name or item.call is not call:
            raise self._astray(f"{name} at {source_line()}")
        return item

    def _astray(self, found: str) -> UnsupportedModel:
        items = self.program.items
        planned = "its end"
        if self.position < len(items):
            planned = f"{items[self.position].name} at {items[self.position].line}"
        return UnsupportedModel(
            "pipeline.cut",
            found,
            f"the forward took another path than when it was planned{self._mode()}, where {planned}"
            " came",
            "a forward that depends on data is cut only where every path passes: move the branch"
            " into one module",
        )

    def _mode(self) -> str:
        return "" if self.owner.model.training else " (in training mode; this is evaluation)"

    # ---- one piece of work ----

    def _done(self, item: PathNode, out: Any, args: tuple, kwargs: dict) -> Any:
        found = tensors_in(out)
        if len(found) != len(item.names):
            raise self._astray(
                f"{item.name} at {source_line()} with {len(found)} tensors, not {len(item.names)}"
            )
        for place in item.made:
            self._taint(found[place])
        for place, number in self.program.sent[self.position]:
            self.sent[number] = found[place]
        self._note_changed(item, args, kwargs)
        self.position += 1
        return out

    def _skip(self, item: PathNode, work: str | Callable, args: tuple, kwargs: dict) -> Any:
        if item.dropouts:
            self.owner.skipped(item.dropouts)
        self._note_changed(item, args, kwargs)
        self.position += 1
        skipped = Skipped(self.owner.shapes, work, args, kwargs)
        if type(item.output) is TensorRef:
            return self._place(item, item.output, skipped, 0)
        leaves = iter(enumerate(tensors_in(item.output)))

        def replace(_: Any) -> Any:
            place, leaf = next(leaves)
            if isinstance(leaf, TensorRef):
                return self._place(item, leaf, skipped, place)
            return (
                argument_at(leaf, args, kwargs) if isinstance(leaf, InputRef) else self._state(leaf)
            )

        def other(part: Any) -> Any:
            handed = isinstance(part, OpaqueRef) and part.argument is not None
            return argument(part.argument, args, kwargs) if handed else part

        # numbers may follow from shapes: they are those of this call
        return rebuild(skipped.result(item.name) if item.numbers else item.output, replace, other)

    def _place(self, item: PathNode, made: TensorRef, skipped: Skipped, place: int) -> Tensor:
        program, number = self.program, made.number
        if number in self.placed:
            return self.placed[number]
        index = program.incoming.get(number)
        if index is None:
            t: Tensor = skipped.ghost(item.names[place], place, item.differentiable[place])
        else:
            t = self.received[index].clone() if number in program.copied else self.received[index]
            self._taint(t)
            if number in program.outgoing:  # changed in place here, and passed on
                self.sent[number] = t
        self.placed[number] = t
        return t

    def _state(self, leaf: ParamRef) -> Tensor:
        module, _, key = leaf.name.rpartition(".")
        return getattr(self.owner.model.get_submodule(module), key)

    def follow(self, before: Any, after: Any) -> None:
        """What replaces a tensor depends on what that one did."""
        if after is not None and any(self._is_tainted(t) for t in tensors_in(before)):
            for t in tensors_in(after):
                self._taint(t)

    def _taint(self, t: Tensor) -> None:
        self.tainted[id(t)] = weakref.ref(t)

    def _note_changed(self, item: PathNode, args: tuple, kwargs: dict) -> None:
        for at in item.changed:
            t = argument_at(at, args, kwargs)
            if not self._is_tainted(t):
                self._taint(t)
                self.dirty.add(storage_id(t))


__all__ = ["StageForward", "split_stages"]
