"""What every module put out in a forward, and the gradient that came back to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._torch.autograd import in_backward
from weft._torch.tensors import is_in_transform, view_base, without_function_modes
from weft._torch.trees import tree_leaves
from weft.engine import whole_of
from weft.nn import GateBias, find_experts, routing_arguments
from weft.parallel import AttentionCall, BoundaryShape, GateQuery, RoutingCall, SequenceInput
from weft.pipeline import PlaceholderTensor


@dataclass
class ActivationRecorder:
    """Per module: one tensor per call of its forward, and one per gradient of its output,
    microbatch by microbatch.

    `forward` and `backward` name the modules in the order in which these came, one entry per
    tensor; `beside`: by number, what calls put out after that tensor, if it is no larger;
    `reached`: the places in `forward` to which backward came; `needing`: those of calls
    that got a tensor which needs a gradient; `giving`: of those whose output does. `cores`: calls
    of attention. `calls`: how often each module was called; `shapes`: of what entered and left each
    time; `entered`: every tensor that did. `called_again`, `left_again`: in backward, by a model
    that checkpoints its own blocks; such a forward may end within a module.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    beside: dict[int, dict[str, list[Tensor]]] = field(default_factory=dict)
    crossings: dict[str, BoundaryShape] = field(default_factory=dict)
    shapes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)
    entered: dict[str, list[SequenceInput]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    called_again: Counter[str] = field(default_factory=Counter)
    left_again: Counter[str] = field(default_factory=Counter)
    forward: list[str] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)
    needing: set[int] = field(default_factory=set)
    giving: set[int] = field(default_factory=set)
    backward: list[str] = field(default_factory=list)
    cores: list[AttentionCall] = field(default_factory=list)
    routings: list[RoutingCall] = field(default_factory=list)
    asked: list[GateQuery] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # the modules that run now, the innermost last
    # when the forward first asked for a gradient that came to what a module put out, by that module
    # and the innermost that ran, in this order: how often each module had been called, and all that
    # ran
    at_gradient: dict[tuple[str, str], tuple[Counter[str], frozenset[str]]] = field(
        default_factory=dict
    )

    def ask(self, what: str, size: int) -> None:
        """A gate asks this of all tokens."""
        if in_backward():
            return  # a recomputed forward
        self.asked.append(GateQuery(self.inside[-1], what, size))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, eager: bool = False) -> None:
        """`scaled_dot_product_attention` is called with these, or `eager` attention."""
        if in_backward():
            return  # a recomputed forward
        needs_grad = any(x.requires_grad for x in (query, key, value))
        self.cores.append(
            AttentionCall(
                self.inside[-1],
                tuple(map(int, query.shape)),
                tuple(map(int, key.shape)),
                tuple(map(int, value.shape)),
                needs_grad,
                eager,
            )
        )


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a module's arguments or output; none inside of a function
    transform."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and not is_in_transform(value) else None
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def _others(output: Any, first: Tensor) -> list[Tensor]:
    """What a module puts out after its first floating-point tensor, of that size or smaller."""
    return [
        t
        for t in tree_leaves(output, Tensor)
        if t is not first
        and t.is_floating_point()
        and t.numel() <= first.numel()
        and not isinstance(t, PlaceholderTensor)
    ]


@contextmanager
def record_activations(
    model: nn.Module, samples: int, now: Callable[[], tuple[str, int]] = lambda: ("", 0)
) -> Iterator[ActivationRecorder]:
    """Record forwards and backwards of `samples` samples each. `now`: which kind of action runs, on
    which microbatch.

    In a recomputed forward, and where a backward goes over nodes again for the weights (W), nothing
    is recorded.
    """
    trace = ActivationRecorder()
    handles = []
    experts = {each.module: each for each in find_experts(model)}
    places: dict[int, int] = {}  # id of a recorded tensor -> its microbatch
    called_at: dict[str, list[int]] = {}  # places of a module's calls in `forward`
    came = Counter[int]()  # how often backward came to each

    def keep(
        record: dict[str, list[Tensor]], names: list[str], name: str, tensor: Tensor | None
    ) -> None:
        kind, microbatch = now()
        if kind == "W" or tensor is None:  # backward came by, and had no gradient
            return
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
        places[id(local)] = microbatch
        record.setdefault(name, []).append(local)
        names.append(name)

    def after(name: str, args: tuple, kwargs: dict, output: Any) -> None:
        out = first_tensor(output)
        if out is None or isinstance(out, PlaceholderTensor):
            return  # another stage's
        entered = first_tensor((*args, *kwargs.values()))
        needs = entered is not None and entered.requires_grad
        if in_backward():  # recomputation
            trace.left_again[name] += 1
            if at := called_at.get(name):  # its graph may be the one that backward follows
                watch(name, at.pop(), needs, args, kwargs, output)
            return
        if now()[0] in ("ahead", "trial"):
            return  # runs again
        if out.is_leaf and out.requires_grad:
            return  # received from another stage, which records it
        keep(trace.outputs, trace.forward, name, out)
        for number, other in enumerate(_others(output, out)):
            keep(trace.beside.setdefault(number, {}), [], name, other)
        shape = (0,) if entered is None else tuple(entered.shape)
        trace.shapes.setdefault(name, []).append((shape, tuple(out.shape)))
        given = tree_leaves((args, kwargs), Tensor)
        for x in (x for x in given if whole_of(x) is None):  # which no rank has to be sent
            needed = x.requires_grad and out.requires_grad
            found = SequenceInput(name, tuple(x.shape), x.itemsize, needed)
            trace.entered.setdefault(name, []).append(found)
        if name in experts:
            tokens, index, weights = routing_arguments(experts[name].names, args, kwargs)
            made = tokens.requires_grad or any(
                p.requires_grad for p in model.get_submodule(name).parameters()
            )
            needs_grad = tokens.requires_grad, weights.requires_grad, made
            trace.routings.append(RoutingCall(name, index.clone(), tokens.shape[1], needs_grad))
        batched = _sample_dim(out, samples) is not None
        before = trace.crossings.get(name)
        needing, giving = (before.needing or 0, before.giving or 0) if before else (0, 0)
        trace.crossings[name] = BoundaryShape(
            None if entered is None else _per_sample(entered, samples),
            _per_sample(out, samples),
            bool(needing),
            batched or (entered is not None and _sample_dim(entered, samples) is not None),
            samples,
            bool(giving),
            needing,
            giving,
            differentiated=before.differentiated if before else (0, 0),
            asked=before.asked if before else 0,
            further=_further((*args, *kwargs.values()), entered, samples),
        )
        place = len(trace.forward) - 1
        called_at.setdefault(name, []).append(place)
        if any(x.requires_grad for x in given):
            trace.needing.add(place)
        if out.requires_grad:
            trace.giving.add(place)
        watch(name, place, needs, args, kwargs, output)
        # what leaves as it came has the gradient of all its uses, also those beside the module
        if out.requires_grad and all(out is not x for x in given):
            out.register_hook(partial(back, name))

    @torch.compiler.disable
    def watch(name: str, place: int, needs: bool, args: tuple, kwargs: dict, output: Any) -> None:
        """Learn whether backward comes to a call, also if its output is changed in place."""
        given = {id(x) for t in tree_leaves((args, kwargs), Tensor) for x in (t, view_base(t))}
        for tensor in tree_leaves(output, Tensor):
            base = view_base(tensor)
            for each in (tensor,) if base is None or id(base) in given else (tensor, base):
                if not each.requires_grad:
                    continue
                passes = count(1)
                each.register_hook(partial(come, name, place, needs, passes))
                if each.grad_fn is not None:
                    through = partial(asked, name, place, needs, passes, each.output_nr)
                    each.grad_fn.register_prehook(through)
        entered = first_tensor((*args, *kwargs.values()))
        if entered is not None and entered.requires_grad:
            entered.register_hook(partial(follow, name, True, False))

    def come(name: str, place: int, needs: bool, passes: Iterator[int], grad: Tensor) -> None:
        """Backward comes to a call: once, but for models that solve in backward (deep equilibrium,
        Bai et al. 2019) or ask for gradients in the forward. `passes`: of the tensor by which it
        comes."""
        if not in_forward():
            count_pass(name, place, needs, passes, grad)
            return
        by = name, trace.inside[-1] if trace.inside else ""
        if by not in trace.at_gradient:
            trace.at_gradient[by] = Counter(trace.calls), frozenset(trace.inside)

    def asked(
        name: str,
        place: int,
        needs: bool,
        passes: Iterator[int],
        number: int,
        grads: tuple[Tensor | None, ...],
    ) -> None:
        """The same for a gradient that the forward asks for, and that goes through the call:
        one by what the call puts out ends there."""
        grad = grads[number]
        if grad is not None and in_forward():
            count_pass(name, place, needs, passes, grad)

    def count_pass(name: str, place: int, needs: bool, passes: Iterator[int], grad: Tensor) -> None:
        if next(passes) <= came[place]:
            return  # by another tensor of this call
        came[place] += 1
        trace.reached.add(place)
        crossing = trace.crossings[name]
        needing, giving = (crossing.needing or 0) + needs, (crossing.giving or 0) + 1
        trace.crossings[name] = replace(
            crossing,
            needs_grad=bool(needing),
            gives_grad=True,
            needing=needing,
            giving=giving,
            asked=crossing.asked + in_forward(),
        )
        follow(name, False, False, grad)

    def follow(name: str, entry: bool, forward: bool, grad: Tensor | None) -> None:
        """A gradient has come to what enters a call, or leaves it. If the forward has asked for it,
        backward may come to the gradient in turn. `forward`: that gradient has gone the way of the
        forward, as every second derivative does, so the next goes back."""
        if grad is not None and grad.requires_grad:  # a remote backward gives None
            grad.register_hook(partial(differentiate, name, entry, not forward))

    def differentiate(name: str, entry: bool, forward: bool, grad: Tensor) -> None:
        crossing = trace.crossings[name]
        enters, leaves = crossing.differentiated
        if forward:
            crossing = replace(crossing, differentiated=(enters + entry, leaves + (not entry)))
        elif entry:
            crossing = replace(crossing, needing=(crossing.needing or 0) + 1)
        else:
            crossing = replace(crossing, giving=(crossing.giving or 0) + 1)
        trace.crossings[name] = crossing
        follow(name, entry, forward, grad)

    def in_forward() -> bool:
        """Whether a forward runs, so that it asks for the gradients that come."""
        kind, _ = now()
        # a stage's forward is left before the modules around it end
        return kind == "F" or (not kind and bool(trace.inside))

    def back(name: str, grad: Tensor) -> None:
        if not in_forward():
            keep(trace.gradients, trace.backward, name, grad)

    def seen(name: str, args: tuple, kwargs: dict, output: Any) -> None:
        with without_function_modes():  # what records is no part of the forward
            after(name, args, kwargs, output)

    def enter(name: str) -> None:
        trace.inside.append(name)
        if in_backward():
            trace.called_again[name] += 1
        elif now()[0] not in ("ahead", "trial"):
            trace.calls[name] += 1

    def leave() -> None:
        trace.inside.pop()

    for name, module in model.named_modules():
        if isinstance(module, GateBias):
            trace.asked.append(GateQuery(name, "bias", module.state.shape[1]))
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(module.register_forward_hook(lambda *_: leave(), always_call=True))
        handles.append(
            module.register_forward_hook(
                lambda _, a, k, o, name=name: seen(name, a, k, o), with_kwargs=True
            )  # type: ignore[misc]
        )
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
        for record in (
            trace.outputs,
            trace.gradients,
            *trace.beside.values(),
        ):  # a schedule takes microbatches in an order of its own
            for tensors in record.values():
                tensors.sort(key=lambda tensor: places[id(tensor)])


def _further(
    given: tuple[Any, ...], first: Tensor | None, samples: int
) -> tuple[BoundaryShape, ...]:
    """Of the tensors given, each once, those beside the first that need a gradient."""
    tensors = {id(x): x for x in given if isinstance(x, Tensor) and x.requires_grad}
    return tuple(
        BoundaryShape(
            _per_sample(x, samples), None, True, _sample_dim(x, samples) is not None, samples
        )
        for x in tensors.values()
        if x is not first
    )


def _sample_dim(tensor: Tensor, samples: int) -> int | None:
    """The dim that counts samples: the first, or the second of [positions, samples, features]."""
    if tensor.shape[:1] == (samples,):
        return 0
    later = tensor.ndim == 3 and tensor.shape[1] == samples and tensor.shape[2] != samples
    return 1 if later else None


def _per_sample(tensor: Tensor, samples: int) -> tuple[int, ...]:
    dim = _sample_dim(tensor, samples)
    return tuple(n for i, n in enumerate(tensor.shape) if i != dim)
