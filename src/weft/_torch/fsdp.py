"""What FSDP2 has no public way to be told: that a stage's forward ends before the root module's,
that a backward comes in parts, or within a forward, and that a view is changed in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from .tensors import view_base
from .trees import tree_leaves


def reduced_like(module: FSDPModule) -> Tensor | None:
    """A tensor like that of all gradients of a unit, padded as FSDP2 reduces them; None if the unit
    holds no parameters. A custom reduce-scatter sees it at its first call: too late to make the
    state of a codec."""
    groups = fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]
    if not groups:
        return None
    (group,) = groups
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    rows = sum(p.padded_sharded_param_size.numel() for p in trained)
    like = trained[0].sharded_param.to_local() if trained else torch.empty(0)
    return like.new_zeros(rows * group.mesh_info.shard_mesh_size)


def reduce_unused(module: FSDPModule, model: nn.Module, reached: Callable[[str], object]) -> None:
    """Reduce zeros for parameters of a unit that no gradient reached, as
    `set_reduce_scatter_unused_params` does, and tell which ones a gradient did reach, by their
    names in `model`. FSDP2 lets one set that, and not ask."""
    module.set_reduce_scatter_unused_params(True, recurse=False)
    names = {id(p): name for name, p in model.named_parameters()}
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
        group.post_backward = _telling(group, names, reached)


def _telling(
    group: Any, names: dict[int, str], reached: Callable[[str], object]
) -> Callable[..., None]:
    after = group.post_backward

    def post_backward(*unused: Any) -> None:
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is not None or param.unsharded_accumulated_grad is not None:
                reached(names[id(param.sharded_param)])
        after(*unused)

    return post_backward


def gather_for_views(unit: FSDPModule) -> None:
    """FSDP2 gathers a unit in backward by a hook on its outputs, and warns that a view which is
    changed in place afterwards loses that hook: hook the function that made the view's base, too,
    unless it ran before the unit. `unit`: what was given to `fully_shard`, or the first of it."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    entered, register = set[int](), state._register_pre_backward_hook

    def begin(grads: tuple[Tensor, ...]) -> None:
        state._pre_backward(grads[0])

    def register_all(output: Any) -> Any:
        for tensor in tree_leaves(output, Tensor):
            base = view_base(tensor)
            if base is not None and base.grad_fn is not None and id(base) not in entered:
                base.grad_fn.register_prehook(begin)
        entered.clear()
        return register(output)

    def noting(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            given = tree_leaves((args, kwargs), Tensor)
            entered.update(id(x) for t in given for x in (t, view_base(t)))
            return pre_forward(module, args, kwargs)

        return note

    # the forward's own hooks are FSDP2's, which a compiler does not follow
    state._register_pre_backward_hook = register_all
    for group in state._fsdp_param_groups:
        group.pre_forward = noting(group.pre_forward)


class ForwardGradients:
    """Keeps units whole from the first gradient that a forward asks for, as by
    `torch.autograd.grad`, until `release`, and reduces none of their gradients before. FSDP2 takes
    the end of that backward for the end of the step's, and frees weights that the rest of the
    forward reads, and the gradient of the gradient.

    `in_forward`: whether a forward runs.
    """

    def __init__(self, modules: Iterable[FSDPModule]):
        self.in_forward = self._kept = False
        for module in modules:
            for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
                self._watch(group)

    def release(self) -> bool:
        """No backward reads the weights any more. Returns whether units were kept: `end_backward`
        is due, or `reshard` if there was no backward."""
        kept, self._kept, self.in_forward = self._kept, False, False
        return kept

    def _watch(self, group: Any) -> None:
        pre_backward, post_backward, reshard, finalize = (
            group.pre_backward,
            group.post_backward,
            group.reshard,
            group.finalize_backward,
        )

        def begin(*args: Any) -> None:
            self._kept |= self.in_forward
            pre_backward(*args)

        def end(*unused: Any) -> None:
            if not (self.in_forward or self._kept):
                post_backward(*unused)

        def free() -> None:
            if not self._kept:
                reshard()

        def close() -> None:
            if not self._kept:
                finalize()
            else:  # what was gathered ahead, and that backward did not come to, is read later
                group._post_forward_indices.clear()

        group.pre_backward, group.post_backward, group.reshard = begin, end, free
        group.finalize_backward = close


def adopt_parameters(module: FSDPModule) -> None:
    """Tell a unit that other tensors lie in the place of its sharded parameters.

    `FSDPModule._apply` does it too, but changes buffers, and tears tied parameters apart.
    """
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
        for param in group.fsdp_params:
            param.reset_sharded_param()


def mark_idle(module: FSDPModule) -> None:
    """A unit's forward or backward is over, though its module did not say so by ending."""
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
        group._training_state = TrainingState.IDLE


def forget_forwards(module: FSDPModule) -> None:
    """No backward follows the forwards so far: the next one gathers ahead what others ran."""
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def forget_gathered_ahead(module: FSDPModule) -> None:
    """Nothing reads what a unit gathered ahead of its use."""
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
        group.finalize_backward()


def end_backward(root: FSDPModule) -> None:
    """Reduce what is due, as FSDP2 does when a backward of the root module ends."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]
