"""Record one forward of a model as a ForwardGraph.

Nothing is compiled and no Python is replayed: functions are seen through a TorchFunctionMode, and
module calls as they happen, so any forward can be recorded. A model on the meta device runs on
FakeTensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from weft._torch.autograd import forwards_of_functions
from weft._torch.modules import intercept_calls, original_call
from weft._torch.tensors import (
    NEEDS_ELEMENTS,
    FakeTensor,
    fake_mode,
    make_fake,
    quiet_fake_tensors,
    storage_id,
    whole_tensor,
    without_function_modes,
)
from weft.core import InputRef, NeedsData, OpaqueRef, ParamRef, TensorRef, UnsupportedModel

from .derived_tensors import DerivedTensors
from .functions import (
    GROUPED_MM,
    METADATA_FUNCTIONS,
    RANDOM_FUNCTIONS,
    count_draws,
    function_name,
    tensors_read,
)
from .graph import (
    UNSEEN_BY_TORCH,
    WRITTEN_BY_EVERY_STAGE,
    ForwardGraph,
    GraphNode,
    ParamInfo,
    TensorInfo,
    containers_of,
)
from .model_copy import copy_with_tensors, is_parameter, run_op_without_data
from .source_lines import CHECKPOINT, checks_arguments, source_line, source_text, user_frames
from .structures import PLAIN_TYPES, arguments, map_tensors, tensors_in, tensors_inside
from .unread_outputs import unread_outputs

_SETS_DATA = frozenset({Tensor.data.__set__})  # type: ignore[attr-defined]


def trace_forward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    profile: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
) -> ForwardGraph:
    """Record one forward of `model` on these arguments, in training mode (modules frozen in
    evaluation mode stay so).

    The model is not changed and its forward not edited. If any parameter is on the meta device, the
    forward runs without data; then a forward that reads an element of a tensor into Python cannot
    be recorded.

    Args:
        model: What runs.
        inputs: Its keyword arguments.
        profile: The number of further runs in which module calls are timed; needs a model with
            data.
        loss: Of the model's output; it runs once, to see what it uses.

    Raises:
        UnsupportedModel: The forward cannot be recorded.
    """
    abstract = any(p.is_meta for p in model.parameters())
    if abstract and profile:
        raise UnsupportedModel(
            "cut",
            "time",
            "a model on the meta device cannot be timed",
            "plan with the real model, or cut by flops",
        )
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    if abstract:
        mode = fake_mode()
        traced = copy_with_tensors(
            model,
            lambda t: make_fake(mode, t, device) if t.is_meta or is_parameter(t) else t.clone(),
        )
    else:
        traced = copy_with_tensors(model, lambda t: t if is_parameter(t) else t.clone())
    if not model.training:
        traced.train()
    inputs = map_tensors(dict(inputs), lambda t: t.to(device))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        trace = _ForwardTracer(traced)
        try:
            with quiet_fake_tensors():
                output = trace.run(inputs)
                unread = frozenset() if loss is None else unread_outputs(output, loss)
        except NEEDS_ELEMENTS as problem:
            raise NeedsData(
                "model",
                type(model).__name__,
                f"its forward reads elements of a tensor into Python at {trace.line}:"
                f" `{trace.text}`",
                "plan with the real model, not on the meta device",
            ) from problem
        clock = tuple(_clock(traced, inputs, device) for _ in range(profile))
    finished = trace.finish(model)
    calls = len(finished.calls())
    if any(len(run) != calls + 1 for run in clock):
        raise UnsupportedModel(
            "cut",
            "time",
            "its forward calls different modules each time",
            "cut by flops or by parameters",
        )
    return dataclasses.replace(finished, clock=clock, unread=unread)


def _clock(model: nn.Module, inputs: Mapping[str, Any], device: torch.device) -> tuple[float, ...]:
    begun: list[float] = []

    def tick() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun.append(time.perf_counter())

    def handler(module: nn.Module) -> Callable:
        call = original_call(module)

        def timed(*args: Any, **kwargs: Any) -> Any:
            tick()
            return call(*args, **kwargs)

        return timed

    with intercept_calls([(m, handler(m)) for m in model.modules()]):
        model(**inputs)
    tick()
    return tuple(t - begun[0] for t in begun)


class _Flops(TorchDispatchMode):
    """Counts floating-point operations of the matrix products that it sees."""

    total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with without_function_modes():  # no stage sees it, if no function mode did
            out = run_op_without_data(func, args, kwargs or {})
        packet = func._overloadpacket
        if packet is GROUPED_MM:
            self.total += 2.0 * out.numel() * args[0].shape[-1]
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*(t.shape for t in args[:3]))
        return out


class _ForwardTracer(TorchFunctionMode):
    """Records what a forward does. A tensor is tracked once it depends on weights or buffers, or a
    call returned it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.state = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.buffers = {n for n, _ in model.named_buffers()}
        # what a view, or `.data`, has of a weight or buffer
        named = (*model.named_parameters(), *model.named_buffers())
        self.homes = {storage_id(t): n for n, t in named}
        self.modules = dict(model.named_modules())
        self._functions = forwards_of_functions()
        self.events: list[GraphNode] = []
        self.tensors: list[TensorInfo] = []
        self.numbers: dict[int, int] = {}  # id of a tensor -> its number
        # by number; ids and storages stay theirs while the trace lasts
        self.alive: list[Tensor] = []
        self.sharing: dict[int, list[int]] = {}  # storage -> the tensors on it
        # storage of an untracked tensor that was written to -> the number it got
        self.dirty: dict[int, int] = {}
        self.given: set[int] = set()  # storages of what the model is called with
        self.derived = DerivedTensors()
        self.open: list[int] = []
        self.began: list[int] = []  # how many tensors there were when these calls began
        self.changed: set[str] = set()
        self.flops = _Flops()
        self.line, self.text = "?", ""

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """What the model returns."""
        self.given = {storage_id(t) for t in tensors_in(inputs)}
        self.derived.add(inputs, ())
        handlers = [(module, self._handler(name, module)) for name, module in self.modules.items()]
        with intercept_calls(handlers), self.flops, self:
            output = self.model(**inputs)
        for name, buffer in self.model.named_buffers():
            number = self.numbers.get(id(buffer))
            # a new tensor in the place of the old
            if id(buffer) not in self.state and number is not None:
                self.changed.add(name)
                for index in self._around(self.tensors[number].birth):
                    self.events[index].buffers[name] = None
        return output

    def _around(self, index: int) -> Iterator[int]:
        """An event and the calls that contain it."""
        while index >= 0:
            yield index
            index = self.events[index].parent

    def finish(self, model: nn.Module) -> ForwardGraph:
        every = dict(model.named_modules(remove_duplicate=False))
        first = {module: name for name, module in model.named_modules()}
        names: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        # an autograd function makes its results differentiable when it is done
        made = [
            dataclasses.replace(t, differentiable=a.requires_grad)
            for t, a in zip(self.tensors, self.alive)
        ]
        return ForwardGraph(
            tuple(self.events),
            tuple(made),
            {n: ParamInfo(tuple(names[id(p)]), p.numel()) for n, p in model.named_parameters()},
            frozenset(self.changed),
            {name: first[module] for name, module in every.items()},
            containers_of(self.model),
        )

    # ---- module calls ----

    def _handler(self, name: str, module: nn.Module) -> Callable:
        call = original_call(module)

        def handler(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, call, args, kwargs)

        return handler

    def _call(self, name: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        for _, t in arguments(args, kwargs):
            known = id(t) in self.numbers or id(t) in self.state or storage_id(t) in self.dirty
            if t.requires_grad and not known:
                self._number(t, max(len(self.events) - 1, 0), UNSEEN_BY_TORCH)
        index, first, flops = self._begin(name, True), len(self.tensors), self.flops.total
        event = self.events[index]
        self.open.append(index)
        self.began.append(first)
        try:
            out = call(*args, **kwargs)
        finally:
            self.open.pop()
            self.began.pop()
        given = [t for _, t in arguments(args, kwargs)]
        if _makes_unseen(out, {*map(id, given)} | self.state.keys(), self.numbers):
            for t in filter(self._is_tracked, (*given, *self.modules[name].parameters())):
                self._reads(event, t, index)
        event.output = self._describe(out, index, args, kwargs)
        self._finish(event, first, flops)
        return out

    # ---- functions ----

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            return func(*args, **kwargs)
        read = tensors_read(func, args, kwargs)
        for call in self.derived.calls(read, self.numbers).difference(self.open):
            self.events[call].keeps = True
        reads = [t for t in read if self._is_tracked(t)]
        if not reads and func not in RANDOM_FUNCTIONS:
            out = self._light(func, args, kwargs)
            self.derived.follow(read, out, self.open)
            return out
        index = self._begin(function_name(func), False)
        first, flops = len(self.tensors), self.flops.total
        event = self.events[index]
        self.line, self.text = event.line, event.text
        for t in reads:
            self._reads(event, t, index)
        before = [(at, t, t._version, t.shape) for at, t in arguments(args, kwargs)]
        beside = (self.sharing.get(storage_id(t), ()) for _, t, _, _ in before)
        constant = {n for numbers in beside for n in numbers if not self.alive[n].requires_grad}
        out = func(*args, **kwargs)
        event.random = func in RANDOM_FUNCTIONS
        event.draws = count_draws(func, args, kwargs)
        written = [(at, t) for at, t, version, _ in before if t._version != version]
        if func in _SETS_DATA and id(args[0]) in self.state:
            written.append((InputRef(0, 0), args[0]))
        event.changed = tuple(at for at, _ in written)
        event.reshapes = any(t.shape != shape for _, t, _, shape in before)
        for at, t in written:
            self._writes(event, at, t, index)
        event.differentiates = {n for n in constant & event.writes if self.alive[n].requires_grad}
        # their kernels update statistics without a trace
        if func in (F.batch_norm, F.instance_norm):
            self._statistics(func, args, kwargs)
        kept = {id(t) for _, t, version, _ in before if t._version == version}
        # what is returned as it came may be another tensor at other types: `x.float()`
        out = map_tensors(out, lambda t: t.view_as(t) if id(t) in kept else t)
        event.output = self._describe(out, index, args, kwargs)
        event.reads_into_python = not tensors_in(out) and not event.changed
        event.checks = event.reads_into_python and checks_arguments()
        self._finish(event, first, flops)
        return out

    def _light(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that reads no tracked tensor but may write to a weight or buffer."""
        touched = [
            (self.homes[storage_id(t)], t, t._version)
            for _, t in arguments(args, kwargs)
            if storage_id(t) in self.homes
        ]
        out = func(*args, **kwargs)
        for name, t, version in touched:
            if t._version != version:
                self._changes(name)
        return out

    def _changes(self, name: str) -> None:
        """Note that the running calls change this weight or buffer."""
        self.changed.add(name)
        for index in self.open:
            self._uses(self.events[index], name)

    def _uses(self, event: GraphNode, name: str) -> None:
        (event.buffers if name in self.buffers else event.weights)[name] = None

    def _is_tracked(self, t: Tensor) -> bool:
        # a FakeTensor that no tracked function made is what an ordinary tensor is with data
        known = id(t) in self.numbers or id(t) in self.state or t.requires_grad
        if known or type(t) not in (Tensor, FakeTensor):
            return True
        return bool(self.dirty) and storage_id(t) in self.dirty

    def _reads(self, event: GraphNode, t: Tensor, index: int) -> None:
        name = self.state.get(id(t))
        if name is not None:
            self._uses(event, name)
        elif id(t) not in self.numbers:
            written = self.dirty.get(storage_id(t))
            event.reads.add(self._number(t, index, UNSEEN_BY_TORCH) if written is None else written)
        else:
            event.reads.add(self.numbers[id(t)])

    def _writes(self, event: GraphNode, at: InputRef, t: Tensor, index: int) -> None:
        name = self.state.get(id(t))
        if name is not None:
            self.changed.add(name)
            return
        home = self.homes.get(storage_id(t))
        if home is not None:
            self._changes(home)
            self._uses(event, home)
        if id(t) not in self.numbers:
            if home is not None:
                return
            if storage_id(t) not in self.dirty:
                self.dirty[storage_id(t)] = self._number_local(event, at, t, index)
        event.writes |= set(self.sharing[storage_id(t)])  # a view changes with its base

    def _statistics(self, func: Callable, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        if bound.get("training", bound.get("use_input_stats", func is F.instance_norm)):
            for key in ("running_mean", "running_var"):
                name = self.state.get(id(bound.get(key)))
                if name is not None:
                    self.changed.add(name)

    # ---- both ----

    def _begin(self, name: str, call: bool) -> int:
        parent = self.open[-1] if self.open else -1
        self.events.append(
            GraphNode(name, call, parent, source_line(), source_text(), self._within(call))
        )
        return len(self.events) - 1

    def _within(self, call: bool) -> str:
        """The autograd function or checkpoint between this event and the innermost module call."""
        found, own = "", call
        for frame in user_frames():
            if frame.f_code is _ForwardTracer._call.__code__:
                if not own:
                    break
                own = False
            elif (name := self._functions.get(frame.f_code)) is not None:
                return name
            elif frame.f_code.co_filename == CHECKPOINT:
                found = "checkpoint"
        return found

    def _finish(self, event: GraphNode, first: int, flops: float) -> None:
        event.end = len(self.events) - 1
        event.made = range(first, len(self.tensors))
        event.flops = self.flops.total - flops
        outer = self.events[event.parent] if event.parent >= 0 else None
        if outer is None:
            return
        began = self.began[-1]
        outer.reads |= {n for n in event.reads if n < began}
        outer.writes |= {n for n in event.writes if n < began}
        outer.weights |= event.weights
        outer.buffers |= event.buffers
        outer.random |= event.random

    def _number(self, t: Tensor, index: int, home: str = "") -> int:
        number = self.numbers[id(t)] = len(self.tensors)
        event = self.events[index]
        # what is met in the model's own forward first has no line where it was made
        name = f"`{event.text}` at {event.line}" if index else "a tensor"
        self.tensors.append(
            TensorInfo(name, index, tuple(t.shape), t.dtype, t.requires_grad, storage_id(t), home)
        )
        self.sharing.setdefault(storage_id(t), []).append(number)
        self.alive.append(t)
        return number

    def _number_local(self, event: GraphNode, at: InputRef, t: Tensor, index: int) -> int:
        """Number the tensor that every stage makes, of which `t` may be a view: it is written to
        for the first time."""
        base = whole_tensor(t)
        own = base.untyped_storage().nbytes() == base.numel() * base.element_size()
        number = self._number(base, index, WRITTEN_BY_EVERY_STAGE)
        if own and storage_id(t) not in self.given:
            event.filled[number] = at
            self.tensors[number] = dataclasses.replace(self.tensors[number], local=True)
        return number

    def _describe(self, out: Any, index: int, args: tuple, kwargs: dict) -> Any:
        """The structure with references in place of its tensors."""
        came = {id(t): at for at, t in arguments(args, kwargs)}
        event = self.events[index]

        def stand_in(t: Tensor) -> TensorRef | InputRef | ParamRef:
            if id(t) in came:
                return came[id(t)]
            if id(t) in self.state:
                return ParamRef(self.state[id(t)])
            if id(t) not in self.numbers:
                self._number(t, index)
            return TensorRef(self.numbers[id(t)])

        handed = {id(part): place for place, part in [*enumerate(args), *kwargs.items()]}

        def other(part: Any) -> Any:
            if isinstance(part, PLAIN_TYPES):
                return part
            event.hidden |= {
                self.numbers[id(t)] for t in tensors_inside(part) if id(t) in self.numbers
            }
            return OpaqueRef(type(part).__name__, handed.get(id(part)))

        return map_tensors(out, stand_in, other)


def _makes_unseen(out: Any, came: Collection[int], seen: Collection[int]) -> bool:
    """Whether a call returns what no function was seen to make, as within vmap: it may read all
    that it was given, and all weights of its module."""
    made = (id(t) for t in tensors_in(out) if t.requires_grad)
    return any(t not in came and t not in seen for t in made)
