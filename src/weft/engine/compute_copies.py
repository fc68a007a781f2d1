"""The rounded weights that a model computes with in bf16 and fp16, and the gradients they get."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._torch.modules import replace_parameters, replace_references
from weft._torch.tensors import user_attributes
from weft.core import Plan


class ComputeCopies:
    """Puts a rounded copy in the place of each parameter of `model` that is among `params`, this
    rank's masters. The optimizer and checkpoints know masters alone. Weights that FSDP2 gathers
    need no copy: it rounds what it gathers.

    `masters`, `filled`: by name, what the optimizer updates, and what backward leaves a gradient
    on. Autograd adds it up in the dtype in which gradients are summed.
    """

    def __init__(self, model: nn.Module, plan: Plan, params: Mapping[str, nn.Parameter]):
        rule, copies = plan.dtypes, dict[int, Tensor]()
        self.masters, self.filled = params, dict(params)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        # an asynchronous schedule takes gradients from weight versions of its own
        self._versions = bool(plan.schedule.versions)
        for name, master in params.items():
            if isinstance(master, DTensor) or rule.computed(master.dtype) == master.dtype:
                continue
            copy = rounded(master, plan)
            vars(copy).update(user_attributes(master))
            copies[id(master)], self.filled[name] = copy, copy
            self._pairs.append((master, copy))
        for module in model.modules() if copies else ():
            replace_parameters(module, copies)
            replace_references(module, copies)

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a forward: masters may have changed since the last one."""
        if self._pairs:
            masters, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(copies), list(masters))

    def begin(self) -> None:
        """A step begins: the weights are those of the masters, and have no gradients."""
        self.refresh()
        for _, copy in self._pairs:
            copy.grad = None

    def hand_over(self) -> None:
        """The masters get the gradients of their copies."""
        for master, copy in self._pairs if not self._versions else ():
            master.grad = None if copy.grad is None else copy.grad.to(master.dtype)


def rounded(master: Tensor, plan: Plan) -> nn.Parameter:
    """A copy of a weight in the dtype that is computed in."""
    rule = plan.dtypes
    low = master.detach().to(rule.computed(master.dtype), copy=True)
    copy = nn.Parameter(low, requires_grad=master.requires_grad)
    if copy.requires_grad:
        copy.grad_dtype = rule.reduced(master.dtype)
    return copy
