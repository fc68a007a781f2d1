"""Which optimizers may update a shard, and optimizer state that exists before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from weft.core import (
    EXPERTS,
    CheckpointError,
    ConfigError,
    Divides,
    Plan,
    cuts_blocks,
    gradient_owners,
    whole_updates,
)
from weft.parallel import (
    axis_table,
)

Optimizers = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Kind = TypeVar("Kind", bound=type)

# What these compute for one element depends on that element alone, so a shard is updated as the
# whole tensor would be.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

# These treat each tensor by itself, as a whole: statistics of rows and columns, or a matrix.
WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Muon)

# Why no layout runs these, not even one device.
IMPOSSIBLE = {
    torch.optim.LBFGS: "its step computes the loss several times, and a step here has one backward",
    torch.optim.SparseAdam: "it takes sparse gradients alone, and gradients here are dense",
}


def elementwise(kind: Kind) -> Kind:
    """Mark an optimizer class whose update of an element depends on that element and its gradients
    alone. It then runs on shards of any layout.

    Example:
        @weft.optimizers.elementwise
        class SignSGD(torch.optim.Optimizer): ...
    """
    type.__setattr__(kind, "updates_each", "element")
    return kind


def whole_tensors(kind: Kind) -> Kind:
    """Mark an optimizer class whose update of a parameter depends on that parameter and its
    gradients alone, but on the whole of them: norms, rows, matrices. Where ranks hold parts of it,
    one of them gets the whole (docs/optimizers.md).

    Example:
        @weft.optimizers.whole_tensors
        class Lamb(torch.optim.Optimizer): ...
    """
    type.__setattr__(kind, "updates_each", "tensor")
    return kind


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that one is joined of; itself alone, if it is not joined."""
    return getattr(optimizer, "parts", (optimizer,))


def updates_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter by itself."""
    return all(
        is_elementwise(part)
        or _computes_as(part, WHOLE_TENSORS)
        or getattr(part, "updates_each", None) == "tensor"
        for part in parts_of(optimizer)
    )


def state_blocks(optimizer: torch.optim.Optimizer) -> Mapping[str, int]:
    """Names of state that has one entry for each block of a parameter's last dim -> how many
    elements a block has."""
    return getattr(optimizer, "blocks", {})


def needs_whole(
    optimizer: torch.optim.Optimizer, held: Mapping[str, nn.Parameter], plan: Plan
) -> frozenset[str]:
    """The parameters that the optimizer must see whole to update them: all of one that is not
    elementwise, and those that the plan cuts inside of blocks which its state has. `held`: what it
    has."""
    parts = [part for part in parts_of(optimizer) if not is_elementwise(part)]
    groups = [group for part in parts for group in part.param_groups]
    needed = {id(p) for group in groups for p in group["params"]}
    whole = {name for name, p in held.items() if id(p) in needed}
    if blocks := set(state_blocks(optimizer).values()):
        table, shapes = plan.params(), {w.name: w.shape for w in plan.weights}
        for name in held:
            placed = table[name].values()
            if any(cuts_blocks(plan, shapes[name], placed, block) for block in blocks):
                whole.add(name)
    return frozenset(whole)


def check_servers(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer of whole tensors where asynchronous servers hold parts of them. `plan`:
    of all ranks. Raises ConfigError."""
    if plan.sync is None or not plan.sync.asynchronous or not plan.replicas_step_independently:
        return
    one = plan.replica()
    # any parameter stands for those that a part of the optimizer has
    held = {w.name: nn.Parameter(torch.empty(0)) for w in one.weights if w.trainable}
    cut = whole_updates(one, held.keys())
    elements = all(is_elementwise(part) for part in parts_of(optimizer))
    if cut and (not elements or whole_updates(one, needs_whole(optimizer, held, one))):
        raise refused_by_servers(optimizer, plan)


def refused_by_servers(optimizer: torch.optim.Optimizer, plan: Plan) -> ConfigError:
    problem = f"it needs whole tensors, and under {plan.layout} each server holds only shards"
    fix = "use staleness = 0, a layout of replicas alone, or adamw"
    return ConfigError("optimizer.name", type(optimizer).__name__, problem, fix)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each element by itself."""
    marked = getattr(optimizer, "updates_each", None)
    return marked == "element" if marked else _computes_as(optimizer, ELEMENTWISE)


def _computes_as(optimizer: torch.optim.Optimizer, kinds: Iterable[type]) -> bool:
    """Whether an optimizer is of one of these classes, or of a subclass that leaves the step to
    it."""
    own = type(optimizer)
    base = next((kind for kind in kinds if issubclass(own, kind)), None)
    return base is not None and all(
        # torch wraps the step of each class that is made
        inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(base, name))
        for name in ("step", "_init_group")
        if hasattr(base, name)
    )


def refuse_kind(kind: type, value: object) -> None:
    """Refuse an optimizer that no layout runs. Raises ConfigError."""
    for impossible, why in IMPOSSIBLE.items():
        if issubclass(kind, impossible):
            fix = "use an optimizer that takes dense gradients once a step, such as adamw"
            raise ConfigError("optimizer.name", value, why, fix)


def check_optimizer(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer that needs what a rank does not have. Raises ConfigError."""
    name = type(optimizer).__name__
    refuse_kind(type(optimizer), name)
    if updates_tensors(optimizer):
        return
    divided = (
        Divides.STATE,
        Divides.FEATURES,
        Divides.VOCABULARY,
        Divides.EXPERTS,
        Divides.STAGES,
    )
    layout = plan.layout
    apart = [*layout.active_axes(*axis_table().dividing(*divided), EXPERTS)]
    apart += [plan.sync.name] if plan.sync is not None and gradient_owners(plan) else []
    if apart:
        raise ConfigError(
            "optimizer.name",
            name,
            f"it is not known to update each tensor by itself, and {layout} divides the parameters"
            f" over {' and '.join(apart)}",
            "mark its class @weft.optimizers.elementwise or @weft.optimizers.whole_tensors, or"
            ' write optimizer.updates_each = "element" or "tensor", if that is what it does; else'
            " use dp",
        )


def check_codec(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A codec with momentum of its own needs an optimizer without. Raises ConfigError."""
    codec = plan.sync.codec if plan.sync is not None and not plan.sync.plain else None
    if codec is None or not codec.has_momentum:
        return
    if type(optimizer) is not torch.optim.SGD or any(
        group["momentum"] for group in optimizer.param_groups
    ):
        raise ConfigError(
            "optimizer.name",
            type(optimizer).__name__,
            f"{codec.name} applies the momentum itself, and sends sums of many steps",
            "use sgd without momentum, or another codec",
        )


def number_state(value: object) -> bool:
    """Whether a piece of state is a number, such as a count of steps."""
    return type(value) in (int, float)


def make_state(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    saved: Collection[str],
    updates: Callable[[str], bool] = lambda name: True,
) -> None:
    """Make the state that an optimizer otherwise makes in its first step, to load a checkpoint
    into.

    Args:
        optimizer: the optimizer; its parameters do not change.
        params: its parameters by name.
        saved: names of the tensors in the checkpoint; only parameters with saved state get state.
        updates: whether this rank updates the parameter of this name.

    Raises:
        CheckpointError: The checkpoint has state that this optimizer does not keep.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    for name, p in params.items():
        if not updates(name):
            p.grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    held = [name.split("/") for name in saved if name.startswith("optimizer/")]
    with_state: dict[str, set[str]] = {}
    for _, name, key in held:
        with_state.setdefault(name, set()).add(key)
    for name, p in params.items():
        if name not in with_state:  # no gradient ever came
            optimizer.state.pop(p, None)
        elif updates(name) and (left := with_state[name] - optimizer.state.get(p, {}).keys()):
            kind = type(optimizer).__name__
            problem = f"the checkpoint has {min(left)} of {name}, which {kind} does not keep"
            fix = "resume with the optimizer and groups that wrote it, or begin another run"
            raise CheckpointError("optimizer", kind, problem, fix)


def match_strides(p: Tensor) -> None:
    """Let a gradient lie in memory as its parameter does: a fused step pairs their elements by
    their places in memory, and compares no strides."""
    grad = p.grad
    if grad is None or (p.is_contiguous() and grad.is_contiguous()) or p.stride() == grad.stride():
        return
    p.grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)


def scale_grads(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, those of one device and dtype together."""
    by_kind: dict[tuple, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        torch._foreach_mul_(tensors, factor.to(device, dtype))
