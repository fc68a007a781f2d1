"""Which optimizers may update a shard, and optimizer state that exists before the first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from weft.core import (
    ConfigError,
    Divides,
    Plan,
)
from weft.parallel import (
    axis_table,
)

Optimizers = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

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


def check_optimizer(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer that needs whole tensors where the plan shards them. Raises
    ConfigError."""
    cut = axis_table().dividing(Divides.STATE, Divides.FEATURES, Divides.VOCABULARY)
    sharded = plan.layout.active_axes(*cut)
    if sharded and not isinstance(optimizer, ELEMENTWISE):
        raise ConfigError(
            "optimizer.name",
            type(optimizer).__name__,
            f"it needs whole tensors, and {plan.layout} shards them over {' and '.join(sharded)}",
            "use dp, or one of " + ", ".join(cls.__name__ for cls in ELEMENTWISE),
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
    with_state = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    for name, p in params.items():
        if name not in with_state:  # no gradient ever came
            optimizer.state.pop(p, None)


def scale_grads(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, those of one device and dtype together."""
    by_kind: dict[tuple, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        torch._foreach_mul_(tensors, factor.to(device, dtype))
