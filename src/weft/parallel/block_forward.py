"""What runs in the place of a repeated block's forward: it names the place of dropout, and computes
the block again in backward where the plan says so. The block's own forward may be compiled; what
differs between blocks, and from step to step, happens here, outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from weft._torch.autograd import REENTRANT, in_backward, recomputation, rerun_by
from weft._torch.modes import function_modes
from weft.core import ActivationSharding, Layout, Plan, UnsupportedModel
from weft.nn import Randomness, may_drop, place_of

from .activation_offload import ActivationOffload
from .direct_forward import own_forward, set_own_forward

Forward = Callable[..., Any]
WITHOUT_SEQUENCE = "use tp without sequence"


class BlockForward:
    """Replaces `module.forward` of one block.

    Args:
        module: the block.
        name: its name in the model, from which the keys of its dropout masks follow.
        activation_sharding: how activations are cut where it begins.
        randomness: gives dropout its masks.
        recomputed: whether backward computes the block again.
        layout: the axes, which errors name.
        offload: keeps in the host's memory what the block saves for backward; None: it stays.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        activation_sharding: ActivationSharding,
        randomness: Randomness,
        recomputed: bool,
        layout: Layout,
        offload: ActivationOffload | None = None,
    ):
        self._module, self._name, self._randomness = module, name, randomness
        self._activation_sharding = activation_sharding
        self._recomputed, self._layout, self._offload = recomputed, layout, offload
        self._forward: Forward = own_forward(module)
        self._compiled: Forward | None = None
        self._leaves: list[tuple[dict[str, Any], str]] = []  # where compiled parameters stand
        self._in_use: Callable[[], bool] = lambda: False
        update_wrapper(self, self._forward)

    def compile(self, compiler: Callable[[Forward], Forward], in_use: Callable[[], bool]) -> None:
        """Compile the block's own forward by `compiler(forward)`; it runs where `in_use()`."""
        self._compiled, self._in_use = compiler(self._forward), in_use
        modules = self._module.modules()
        self._leaves = [(m._parameters, leaf) for m in modules for leaf in m._parameters]

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        offload = self._offload
        if offload is None or not torch.is_grad_enabled() or self._randomness.repeated:
            return self._call(*args, **kwargs)
        if rerun_by() or in_backward():
            raise UnsupportedModel(
                "train.offload_activations",
                self._name,
                "it is inside torch.utils.checkpoint, which keeps the input on the device",
                'leave that out and set train.recompute = "full"',
            )
        with offload.block(self._module):
            return self._call(*args, **kwargs)

    @torch.compiler.disable(recursive=False)
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        again = self._randomness.call_of(self._name)
        recomputed = self._recomputed and torch.is_grad_enabled()
        # a block inside the model's own checkpoint is computed again anyway
        if not recomputed or _call_of_checkpoint() is not self._randomness.own_call:
            return self._run(again, *args, **kwargs)
        names, count = tuple(kwargs), len(args)

        randomness, modes = self._randomness, function_modes()

        def run(*flat: Any) -> Any:
            own_call, randomness.own_call = randomness.own_call, _call_of_checkpoint()
            try:
                keywords = dict(zip(names, flat[count:], strict=True))
                return self._run(again, *flat[:count], **keywords)
            finally:
                randomness.own_call = own_call

        outside, randomness.recomputed = randomness.recomputed, True
        try:
            return checkpoint(
                run,  # positions alone are saved by the hooks of saved tensors
                *args,
                *kwargs.values(),
                use_reentrant=False,
                early_stop=False,
                context_fn=lambda: (
                    contextlib.nullcontext(),
                    _RecomputeContext(self._module, modes, randomness),
                ),
            )
        finally:
            randomness.recomputed = outside

    @torch.compiler.disable(recursive=False)
    def _run(self, again: int, *args: Any, **kwargs: Any) -> Any:
        randomness = self._randomness
        outside, outer = (randomness.place, randomness.calls), randomness.again
        randomness.move_to(place_of(self._name, again))
        randomness.again = again
        randomness.activation_sharding = self._activation_sharding
        if self._activation_sharding == "sequence":
            check_single_gradient(self._layout, self._name, WITHOUT_SEQUENCE, args, kwargs)
        if randomness.in_use:
            _make_key(randomness)
        outer_compiled, randomness.compiled = randomness.compiled, self._compiled is not None
        forward, drops = self._forward, randomness.in_use and not randomness.recomputed
        if randomness.compiled and drops and rerun_by():
            raise rerun_in_graph(self._name)
        if self._compiled is not None and self._in_use():
            forward = self._compiled
            with self._without_wider_gradients():
                out = forward(*args, **kwargs)
        else:
            out = forward(*args, **kwargs)
        # calls between blocks are counted apart: a block may be elsewhere
        randomness.move_to(*outside)
        randomness.again, randomness.compiled = outer, outer_compiled
        return out

    @contextlib.contextmanager
    def _without_wider_gradients(self) -> Iterator[None]:
        """torch.compile takes no parameter in bf16 whose gradient is in float32."""
        held = []
        for parameters, leaf in self._leaves:
            p = parameters[leaf]
            if p is not None and p.grad is not None and p.grad.dtype != p.dtype:
                held.append((p, p.grad))
                p.grad = None
        try:
            yield
        finally:
            for p, grad in held:
                p.grad = grad


@torch.compiler.disable
def _call_of_checkpoint() -> object:
    now = recomputation()
    return None if now is None else now.call


@torch.compiler.disable
def _make_key(randomness: Randomness) -> None:
    """Before a graph, and in none: a module that its user compiled has graphs of its own, and a key
    follows from numbers that change with every step."""
    randomness.make_key()


class _RecomputeContext:
    """A further forward of a module: in backward, where function modes are off, they are on again,
    each once, as some are still on in a backward in two parts; running statistics were updated by
    the first one, and blocks inside were called as often as before it. A backward in two parts
    enters it twice."""

    def __init__(self, module: nn.Module, modes: list[TorchFunctionMode], randomness: Randomness):
        self._norms, self._modes = [m for m in module.modules() if isinstance(m, _BatchNorm)], modes
        self._randomness, self._passes = randomness, dict(randomness.passes)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        before = [(buffer, buffer.clone()) for norm in self._norms for buffer in norm.buffers()]
        self._stack.callback(lambda: [buffer.copy_(value) for buffer, value in before])
        active = function_modes()
        for mode in self._modes:
            if mode not in active:
                self._stack.enter_context(mode)
        self._randomness.repeated = True
        passes, self._randomness.passes = self._randomness.passes, dict(self._passes)
        self._stack.callback(setattr, self._randomness, "passes", passes)

    def __exit__(self, *error: object) -> None:
        self._randomness.repeated = False
        self._stack.close()


def wrap_blocks(
    plan: Plan, model: nn.Module, randomness: Randomness, offload: ActivationOffload | None = None
) -> None:
    """Put a BlockForward in the place of each block's forward: for dropout, recomputation, slices
    of the sequence, compilation and offloading. Without any of these a block's own forward does.

    Args:
        plan: this rank's part of a plan.
        model: the model after it is sharded.
        randomness: gives dropout its masks.
        offload: keeps in the host's memory what blocks save for backward; None: it stays.
    """
    interiors = {
        step.module: step.activation_sharding
        for step in plan.steps
        if step.activation_sharding is not None
    }
    randomness.dropped = plan.dropped
    recomputed = set(plan.recomputed())
    for name in plan.blocks:
        module, sharding = model.get_submodule(name), interiors.get(name) or "whole"
        again = name in recomputed
        forward = BlockForward(module, name, sharding, randomness, again, plan.layout, offload)
        set_own_forward(module, forward)
    parted = plan.layout.active_axes(*plan.token_axes) or plan.accumulate > 1
    for name in plan.chosen if parted else ():
        for module in filter(may_drop, model.get_submodule(name).modules()):  # a list is not called
            module.register_forward_pre_hook(partial(_count_chosen, randomness, 1))
            module.register_forward_hook(partial(_count_chosen, randomness, -1), always_call=True)
    for name in plan.counted:
        module = model.get_submodule(name)
        module.forward = _forward_with_own_count(module, name, randomness)  # type: ignore[method-assign]


def _count_chosen(randomness: Randomness, change: int, *_: object) -> None:
    randomness.chosen += change


def _forward_with_own_count(module: nn.Module, name: str, randomness: Randomness) -> Forward:
    """A module's forward, whose dropout masks are the same wherever in the order of the others it
    comes."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        outside = randomness.place, randomness.calls
        own_count, randomness.own_count = randomness.own_count, True
        randomness.move_to(place_of(name, randomness.again))
        out = forward(*args, **kwargs)
        randomness.own_count = own_count
        randomness.move_to(*outside)
        return out

    return run


def check_single_gradient(layout: Layout, module: str, fix: str, args: tuple, kwargs: dict) -> None:
    """Refuse a second tensor that needs a gradient: used on a part of activations, it would get a
    part of the sum. `fix`: what the error says to do. Raises UnsupportedModel."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, (tuple, list)) else (value,):
            needs = isinstance(each, Tensor) and each.requires_grad
            if needs and not any(each is other for other in found):  # queries may be keys, too
                found.append(each)
    if len(found) > 1:
        raise UnsupportedModel(
            "layout",
            str(layout),
            f"more than one tensor that needs a gradient enters {module}, and only the gradient of"
            " the first is summed over ranks",
            fix,
        )


def rerun_dropout(dropout: object, rerun: str) -> UnsupportedModel:
    """The error for dropout in a module that the model itself runs again in backward. `rerun`: by
    what."""
    fix = 'leave that out and set train.recompute = "full"'
    if rerun == REENTRANT:
        fix = 'pass use_reentrant=False, or leave that out and set train.recompute = "full"'
    return UnsupportedModel(
        "dropout",
        dropout,
        f"it is inside {rerun}, and the recomputed forward would draw another dropout mask",
        fix,
    )


def rerun_in_graph(dropout: object) -> UnsupportedModel:
    """The error for dropout under torch.utils.checkpoint where a graph computes it."""
    return UnsupportedModel(
        "dropout",
        dropout,
        "it is inside torch.utils.checkpoint, in or around a block that train.compile compiles, and"
        " the graph would not draw the same mask again",
        'leave that out and set train.recompute = "full", or set train.compile = "off"',
    )


def rerun_attention(layout: Layout, rerun: str) -> UnsupportedModel:
    """The error for attention to other ranks' positions in a module that the model runs again in
    backward. `rerun`: by what."""
    return UnsupportedModel(
        "layout",
        str(layout),
        f"attention is inside {rerun}, and the recomputed forward would attend to the positions of"
        " this rank alone",
        'leave that out and set train.recompute = "full"',
    )
