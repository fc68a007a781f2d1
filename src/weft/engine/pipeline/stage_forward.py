"""Run one stage of a model, without editing its forward.

The model's own forward runs from its beginning, but the work of earlier stages is skipped. What
this stage needs from them was received and is put in where it would have been made; placeholders
stand in for the rest. After the stage's last work the forward is left. So a stage may be any
stretch of any forward, and its own modules compute on plain tensors.

Modules on the path are called through handlers, and a function of a placeholder reaches the
placeholder. That is all that most forwards need; where one is not enough (`_sees_functions`), a
TorchFunctionMode sees the functions between module calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.modules import (
    call_with_own_class,
    hook_ids,
    innermost_function_mode,
    intercept_calls,
    replace_parameters,
    run_forward_hooks,
    wrap_hooks,
)
from weft._torch.tensors import StorageWeakRef, storage_id, whole_tensor, without_function_modes
from weft.core import (
    DtypeRule,
    InputRef,
    OpaqueRef,
    ParamRef,
    PathNode,
    Refusal,
    Staging,
    TensorRef,
    UnsupportedModel,
)
from weft.pipeline import (
    METADATA_FUNCTIONS,
    RANDOM_FUNCTIONS,
    PlaceholderTensor,
    SkippedShapes,
    SkippedWork,
    argument,
    argument_at,
    function_name,
    is_parameter,
    map_tensors,
    raised_in_torch,
    source_line,
    tensors_in,
    tensors_read,
)


class _Stop(BaseException):
    """Leaves the forward after the last work of a stage. It is not an Exception, so that no model
    catches it."""


class StageForward:
    """Runs the forwards of some stages of `model`, and changes it in place: parameters that none of
    them uses become placeholders. It runs on `device`.

    `skipped(n, blocks)` is called when an earlier stage draws n dropout masks and calls blocks that
    this one skips.
    """

    def __init__(
        self,
        model: nn.Module,
        staging: Staging,
        stages: Sequence[int],
        device: torch.device,
        skipped: Callable[[int, Sequence[str]], None] = lambda n, blocks: None,
        dtypes: DtypeRule = DtypeRule("fp32"),  # noqa: B008
    ):
        self.model, self.staging, self.skipped = model, staging, skipped
        self.device = device
        self.shapes = SkippedShapes(model, device, dtypes)
        kept = {name for stage in stages for name in staging.stages[stage].weights}
        self.programs = {stage: _StageProgram(staging, stage, kept) for stage in stages}
        self._handlers: list[tuple[nn.Module, Callable]] = []
        self._run: _StageExecution | None = None
        self._planned = {key for module in model.modules() for key in hook_ids(module)}
        self._drop(stages, kept)

    def __call__(
        self, stage: int, inputs: Mapping[str, Any], received: Mapping[int, Tensor]
    ) -> tuple[dict[int, Tensor], Any]:
        """Run a stage on the model's keyword arguments. `received`: index in `staging.values` ->
        tensor, for all values whose targets include `stage`. Returns the tensors of the values that
        this stage makes, by the same index, and the model's output on the last stage, else None.
        Raises UnsupportedModel if the forward leaves the planned path."""
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
            with intercept_calls(self._handlers), run.active():
                output = self.model(**inputs)
        except _Stop:
            output = None
        except Exception as error:
            line, values = raised_in_torch(error)
            absent = next((x for x in values if isinstance(x, PlaceholderTensor)), None)
            if absent is None or isinstance(error, Refusal):
                raise
            raise _does_not_run(absent.about, line, error) from error
        finally:
            self._run = None
        return run.finish(), output if stage == len(self.staging.stages) - 1 else None

    def _handler(self, name: str, module: nn.Module) -> Callable:
        call = call_with_own_class(module)

        def handler(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            assert run is not None
            if run.inside:
                return call(*args, **kwargs)
            out, skipped = run.module(name, call, args, kwargs)
            if skipped:  # a hook may keep the output for what comes later, and no more
                with suppress(UnsupportedModel), run.aside():
                    run_forward_hooks(module, self._planned, args, kwargs, out)
            return out

        return handler

    def _quiet(self, hook: Callable) -> Callable:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None or run.inside:
                return hook(*args, **kwargs)
            with run.aside():
                result = hook(*args, **kwargs)
            run.follow(args, result)
            return result

        return quiet

    def _drop(self, stages: Sequence[int], kept: Collection[str]) -> None:
        used = {name for stage in self.staging.stages for name in stage.weights}
        placeholders = {
            id(p): self.shapes.placeholder(name, p, self.device)
            for name, p in self.model.named_parameters()
            if name not in kept
            and (name in used or 0 not in stages)  # what no stage uses is the first one's
        }
        for module in self.model.modules():
            replace_parameters(module, placeholders)


class _StageProgram:
    """What one stage does along the path. `kept`: the weights that its rank has."""

    def __init__(self, staging: Staging, stage: int, kept: Collection[str]):
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
        self.own_functions = {place for place in own if not self.items[place].call}
        self.sees_functions = self._sees_functions(kept)
        # tensors that its own functions change in place before its first module call
        before = takewhile(lambda place: not self.items[place].call, own)
        self.changes = {number for place in before for number in self.items[place].writes}

    def _sees_functions(self, kept: Collection[str]) -> bool:
        """Whether functions between module calls have to be seen that no placeholder shows: of
        earlier stages, such as read other tensors, or change one in place; of this one, such as
        make what others receive."""
        if any(item.filled for item in self.items[: self.end]):
            return True
        if self.end < len(self.items) and not self.items[self.end].call:
            return True
        absent: set[int] = set()
        for place, item in enumerate(self.items[: self.end]):
            leaves = tensors_in(item.output)
            made = {leaf.number for leaf in leaves if isinstance(leaf, TensorRef)}
            if item.stage == self.stage:
                if not item.call and self.sent[place]:
                    return True
                continue
            if item.changed:
                return True
            if not item.call and not self._is_shown(item, absent, kept):
                return True
            absent |= made - self.incoming.keys()
        return False

    def _is_shown(self, item: PathNode, absent: Collection[int], kept: Collection[str]) -> bool:
        """Whether a function of an earlier stage comes to a placeholder, by what it reads."""
        placeholders = [number in absent for number in item.reads]
        placeholders += [name not in kept for name in item.weights]
        return any(placeholders) and not item.within


class _StageExecution:
    """One forward of one stage: at each piece of work on the path, skip it or do it."""

    def __init__(self, owner: StageForward, program: _StageProgram, received: Mapping[int, Tensor]):
        self.owner, self.program, self.received = owner, program, received
        # a mode around the forward would come before a placeholder, and replace its functions
        needed = program.sees_functions or innermost_function_mode() is not None
        self.mode = _FunctionsBetween(self) if needed else None
        # what a placeholder does with a function that reads it; a mode has seen that function
        self.skip = self.function if self.mode is None else None
        self.position = 0
        self.inside = False  # a module call that is done whole: nothing of ours is active
        self.placed: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}  # of received tensors, when they were placed
        self.sent: dict[int, Tensor] = {}
        self.tainted: dict[int, weakref.ref] = {}  # tensors that depend on weights
        # storages of others into which such a tensor was written; while there is a weak reference,
        # no other storage gets the address
        self.dirty: dict[int, StorageWeakRef] = {}
        self.buffers = {id(owner.model.get_buffer(name)) for name in program.buffers}

    def finish(self) -> dict[int, Tensor]:
        self._pass_unseen()
        if self.position < min(self.program.end, len(self.program.items)):
            raise self._astray("its end")
        values = self.owner.staging.values
        return {
            i: self.sent[number] if values[i].differentiable else self.sent[number].detach()
            for number, indices in self.program.outgoing.items()
            for i in indices
        }

    # ---- what the forward does ----

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this context the model's forward runs."""
        self.owner.shapes.skip = self.skip
        try:
            with self.mode or nullcontext():
                yield
        finally:
            self.owner.shapes.skip = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In this context nothing that runs is part of the path."""
        self.inside, self.owner.shapes.skip = True, None
        try:
            yield
        finally:
            self.inside, self.owner.shapes.skip = False, self.skip

    def module(self, name: str, call: Callable, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """(what a call of a module gives, whether an earlier stage runs it)."""
        item = self._next(name, True)
        if item.stage < self.program.stage:
            return self._skip(item, name, args, kwargs), True
        with self.aside(), self.mode.left() if self.mode is not None else nullcontext():
            out = call(*args, **kwargs)
        return self._done(item, out, args, kwargs), False

    def function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """What a function between module calls gives, whether it belongs to the path or not."""
        if func in METADATA_FUNCTIONS or not self._heavy(func, args, kwargs):
            return func(*args, **kwargs)
        if self.mode is None and self._is_own_turn():
            with self.aside():  # the placeholder refuses it
                return func(*args, **kwargs)
        item = self._next(function_name(func), False)
        if item.stage < self.program.stage:
            return self._skip(item, func, args, kwargs)
        return self._done(item, func(*args, **kwargs), args, kwargs)

    def _heavy(self, func: Callable, args: tuple, kwargs: dict) -> bool:
        return func in RANDOM_FUNCTIONS or any(
            self._is_tainted(t) for t in tensors_read(func, args, kwargs)
        )

    def _is_tainted(self, t: Tensor) -> bool:
        ref = self.tainted.get(id(t))
        if (
            (ref is not None and ref() is t)
            or isinstance(t, PlaceholderTensor)
            or is_parameter(t)
            or id(t) in self.buffers
        ):
            return True
        return bool(self.dirty) and storage_id(t) in self.dirty

    def _next(self, name: str, call: bool) -> PathNode:
        """The work that comes now. The forward is left only here, and never where a context manager
        ends."""
        self._pass_unseen()
        if self.position >= self.program.end:
            raise _Stop
        items = self.program.items
        item = items[self.position] if self.position < len(items) else None
        if item is None or item.name != name or item.call is not call:
            raise self._astray(f"{name} at {source_line()}")
        if item.stage == self.program.stage and self.versions:
            self._check_received()
        return item

    def _pass_unseen(self) -> None:
        """Go on over the functions of this stage, which run unseen without a mode."""
        if self.mode is None:
            while self.position in self.program.own_functions:
                self.position += 1

    def _check_received(self) -> None:
        """Refuse a function that changed a received tensor in place, and did so on its own stage
        already: on the planned path there is none."""
        for number, was in self.versions.items():
            if self.placed[number]._version != was and number not in self.program.changes:
                raise self._astray(f"a tensor changed in place before {source_line()}")
        self.versions = {}

    def _is_own_turn(self) -> bool:
        items = self.program.items
        return self.position >= len(items) or items[self.position].stage >= self.program.stage

    def _astray(self, found: str) -> UnsupportedModel:
        items = self.program.items
        planned = "its end"
        if self.position < len(items):
            planned = f"{items[self.position].name} at {items[self.position].line}"
        return UnsupportedModel(
            "pipeline.cut",
            found,
            f"the forward took another path than when it was planned{self._mode()}: the plan has"
            f" {planned} here",
            "cut only where every path of the forward passes: move the branch that depends on"
            " data into one module",
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
        self._fill(item, args, kwargs, {})
        self._note_changed(item, args, kwargs)
        self.position += 1
        return out

    def _skip(self, item: PathNode, work: str | Callable, args: tuple, kwargs: dict) -> Any:
        if item.draws or item.blocks:
            self.owner.skipped(item.draws, item.blocks)
        self._fill(item, args, kwargs, self.program.incoming)
        self._note_changed(item, args, kwargs)
        self.position += 1
        skipped = SkippedWork(self.owner.shapes, work, args, kwargs)
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
        return map_tensors(
            skipped.result(item.name) if item.numbers else item.output, replace, other
        )

    def _place(self, item: PathNode, made: TensorRef, skipped: SkippedWork, place: int) -> Tensor:
        program, number = self.program, made.number
        if number in self.placed:
            return self.placed[number]
        index = program.incoming.get(number)
        if index is None:
            t: Tensor = skipped.placeholder(item.names[place], place, item.differentiable[place])
        else:
            t = self.received[index].clone() if number in program.copied else self.received[index]
            self._taint(t)
            if number in program.outgoing:  # changed in place here, and passed on
                self.sent[number] = t
        if self.mode is None and index is not None and not t.is_inference():
            self.versions[number] = t._version
        self.placed[number] = t
        return t

    def _fill(self, item: PathNode, args: tuple, kwargs: dict, incoming: Mapping[int, int]) -> None:
        """Write what came into the tensors that every stage makes and earlier ones changed."""
        for number, at in item.filled:
            t = whole_tensor(argument_at(at, args, kwargs))
            if number in incoming:
                with torch.enable_grad():
                    t.copy_(self.received[incoming[number]])
            if number in self.program.outgoing:
                self.sent[number] = t

    def _state(self, leaf: ParamRef) -> Tensor:
        module, _, key = leaf.name.rpartition(".")
        return getattr(self.owner.model.get_submodule(module), key)

    def follow(self, before: Any, after: Any) -> None:
        """Mark the output of a hook as depending on weights if its input does."""
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
                key = storage_id(t)
                if key >= 0:  # below 0: no other tensor shares its memory
                    with without_function_modes():
                        self.dirty[key] = StorageWeakRef(t.untyped_storage())


def _does_not_run(absent: str, line: str, error: Exception) -> UnsupportedModel:
    """The refusal of a line that raises of another stage's tensor."""
    why = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
    problem = f"it is another stage's, and {line} does not run without it: {why}"
    fix = "put that line into a module that is not cut, or cut elsewhere"
    return UnsupportedModel("pipeline.cut", absent, problem, fix)


class _FunctionsBetween(TorchFunctionMode):
    """Shows a run the functions between module calls."""

    def __init__(self, run: _StageExecution):
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self.run.inside:  # below another mode of the model's own
            return func(*args, **(kwargs or {}))
        return self.run.function(func, args, kwargs or {})

    @contextmanager
    def left(self) -> Iterator[None]:
        """In this context the mode is not active, unless a mode of the model's own lies on it."""
        on_top = innermost_function_mode() is self
        if on_top:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if on_top:
                self.__enter__()
