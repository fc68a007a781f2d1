"""Sends tokens to the ranks of their experts, and back.

A module that holds experts is called with tokens [n, dim], which experts each goes to [n, k], and
with which weights [n, k]. Where its experts are spread over ranks, every rank sends each token to
the ranks of its experts, each rank runs the module's own forward with what has come to those it
has, and sends that back, where it is weighted and summed. While tokens travel an expert that all of
them use runs, if the model has one; in backward, while their gradients do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._torch.autograd import in_backward
from weft._torch.modules import original_call, redirect_calls
from weft.core import CommTimer, ExpertDispatch
from weft.nn import count_choices, routing_arguments


@dataclass
class ExpertCommStats:
    """What the ranks of `group` have exchanged for experts: bytes that this one has sent to others,
    for how long."""

    group: dist.ProcessGroup | None
    sent_bytes: int = 0
    came_bytes: int = 0  # from all, this one too
    clock: CommTimer = field(default_factory=CommTimer)


class _AsyncAllToAll:
    """Rows [n, dim] to ranks, `sent[r]` of them to rank r, of which `received[r]` come."""

    def __init__(self, sent: list[int], received: list[int], traffic: ExpertCommStats):
        self._sent, self._received, self._traffic = sent, received, traffic
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, x: Tensor, back: bool) -> None:
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        group, x = self._traffic.group, x.contiguous()
        assert group is not None
        out = x.new_empty((sum(received), *x.shape[1:]))
        counts = _training()
        if counts:
            self._traffic.sent_bytes += (len(x) - sent[group.rank()]) * x[:1].numel() * x.itemsize
            self._traffic.came_bytes += out.nbytes
            self._traffic.clock.begin()
        work = dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
        assert work is not None
        self._under_way = work, x, out

    def wait(self) -> Tensor:
        """What has come."""
        assert self._under_way is not None
        (work, _, out), self._under_way = self._under_way, None
        with self._traffic.clock.waiting() if _training() else nullcontext():
            work.wait()
        return out


def _training() -> bool:
    """Whether a gradient is to be, or is, computed."""
    return torch.is_grad_enabled() or in_backward()


class _StartAllToAll(torch.autograd.Function):
    """Rows set out on a trip, and a token is given for them. What runs before they `_Arrive` runs
    meanwhile, and so it is in backward with the token's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _AsyncAllToAll) -> Tensor:
        ctx.trip = trip
        trip.start(x, back=False)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.wait(), None


class _WaitAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _AsyncAllToAll) -> Tensor:
        ctx.trip = trip
        return trip.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(grads[0], back=True)
        return grads[0].new_zeros(()), None


def dispatch_tokens(
    forward: Callable[..., Tensor],
    params: Sequence[Tensor],
    experts: int,
    traffic: ExpertCommStats,
    beside: Callable[[], None],
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """`forward` of a module that has its part of the experts in `params`: [n, dim], int [n, k], [n,
    k] -> [n, dim]. A choice below 0 is nobody's. `beside` runs while tokens travel."""
    assert traffic.group is not None
    size = traffic.group.size()
    each, k = experts // size, index.shape[-1]
    wanted = index.reshape(-1)
    counted = count_choices(wanted, experts)
    counts = counted[1:].view(size, each)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=traffic.group)
    none, *sizes = torch.cat([counted[:1], counts.sum(1), coming.sum(1)]).tolist()
    sent, received = sizes[:size], sizes[size:]
    order = torch.argsort(wanted, stable=True)[none:]  # by expert, so by rank
    rows = order // k
    trip = _AsyncAllToAll(sent, received, traffic)
    token = _StartAllToAll.apply(tokens[rows], trip)
    beside()
    here: Tensor = _WaitAllToAll.apply(token, trip)
    # from every rank they come in the order of experts
    mine = torch.arange(each, device=index.device).repeat(size).repeat_interleave(coming.flatten())
    ones = torch.ones(len(mine), 1, dtype=weights.dtype, device=weights.device)
    made = forward(here, mine.unsqueeze(1).to(index.dtype), ones, *rest, **named)
    if not len(here):  # as on one device, experts that no token chose have a gradient, of zeros
        made = made + sum(p.reshape(-1)[:1].sum() * 0.0 for p in params)
    trip = _AsyncAllToAll(received, sent, traffic)
    back: Tensor = _WaitAllToAll.apply(_StartAllToAll.apply(made, trip), trip)
    factors = weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(tokens).index_add(0, rows, (back * factors).to(tokens.dtype))


class _OverlappedModule:
    """A module of a mixture that takes what the mixture does: it is called while tokens travel, and
    when the mixture calls it, it gives what it made then. If it is called before, or with something
    else, it is as it always was."""

    def __init__(self, mixture: nn.Module, module: nn.Module):
        self._call = original_call(module)
        self._entered: tuple[Tensor, int] | None = (
            None  # and how often it had been changed in place
        )
        self._made: Tensor | None = None
        redirect_calls(module, self._called)
        mixture.register_forward_pre_hook(self._enter)
        mixture.register_forward_hook(lambda *_: self._forget(), always_call=True)

    def run(self) -> None:
        if self._entered is not None:
            self._entered = self._entered[0], self._entered[0]._version
            self._made = self._call(self._entered[0])

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        made, entered = self._made, self._entered
        self._forget()
        if made is not None and entered is not None and len(args) == 1 and not kwargs:
            x, version = entered
            if args[0] is x and x._version == version:
                return made
        return self._call(*args, **kwargs)

    def _enter(self, mixture: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered = (args[0], 0) if args and isinstance(args[0], Tensor) else None

    def _forget(self) -> None:
        self._entered = self._made = None


def shard_experts(
    model: nn.Module, name: str, dispatch: ExpertDispatch, traffic: ExpertCommStats
) -> None:
    """Let a module that holds its part of the experts be called as if it held all."""
    if traffic.group is None:
        return
    module = model.get_submodule(name)
    forward, early = module.forward, lambda: None
    if dispatch.beside:
        early = _OverlappedModule(
            model.get_submodule(name.rpartition(".")[0]), model.get_submodule(dispatch.beside)
        ).run

    def call(*args: Any, **kwargs: Any) -> Tensor:
        held, given = [*module.parameters()], routing_arguments(dispatch.names, args, kwargs)
        named = {key: value for key, value in kwargs.items() if key not in dispatch.names}
        return dispatch_tokens(
            forward, held, dispatch.experts, traffic, early, *given, *args[3:], **named
        )

    module.forward = call  # type: ignore[method-assign]
