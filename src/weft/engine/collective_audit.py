"""Records the collectives that really ran, at PyTorch's dispatcher, whether weft, FSDP2 or a
library called them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch.tensors import without_function_modes
from weft.parallel import Collective, Mesh

# operator -> (kind, which argument is the message)
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 0),
    "send": ("send", 0),
}
# the functional form of a collective -> its kind, which a compiler may follow by `_` or `_out`
_FUNCTIONAL_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
# matmuls that send by themselves (async tp), counted as the collectives that they replace
_FUSED_KINDS = {
    "fused_all_gather_matmul": "all_gather",
    "fused_matmul_reduce_scatter": "reduce_scatter",
}


class Audit(TorchDispatchMode):
    """Active around a step; `seen` lists its collectives on this rank, compiled ones too.

    Args:
        mesh: the process groups.
        now: what runs, as of an Engine. Forwards that count for nothing are left out.
    """

    supports_higher_order_operators = True  # they pass, as all operators do

    def __init__(self, mesh: Mesh, now: Callable[[], tuple[str, int]] = lambda: ("", 0)):
        super().__init__()
        self.mesh, self._now = mesh, now
        self.seen: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled, and its collectives come by."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self._now()[0] == "trial":
            pass
        elif getattr(func, "namespace", "") == "c10d":
            self._record(func, args)
        elif getattr(func, "namespace", "") == "_c10d_functional":
            self._record_functional(func, args)
        elif getattr(func, "namespace", "") == "symm_mem":
            self._record_fused(func, args)
        with without_function_modes():  # they have seen the function that this operator is of
            return func(*args, **(kwargs or {}))

    def _record_fused(self, func: Any, args: tuple) -> None:
        kind = _FUSED_KINDS.get(func._schema.name.split("::")[1])
        if kind is None:
            return
        axis = self.mesh.axes_of(str(args[-1])) or "(another group)"
        x, weight = args[:2]
        if kind == "all_gather":
            nbytes = _nbytes(x) * self.mesh.size(*axis.split("."))
        else:  # of x @ weight
            nbytes = _nbytes(x) // x.shape[-1] * weight.shape[-1]
        self.seen.append(Collective(kind, axis, nbytes, "", ""))

    def _record_functional(self, func: Any, args: tuple) -> None:
        name = func._schema.name.split("::")[1]
        name, coalesced = name.removesuffix("_out").removesuffix("_"), "_coalesced" in name
        kind = _FUNCTIONAL_KINDS.get(name.removesuffix("_coalesced"))
        if kind is None:  # a wait
            return
        axis = self.mesh.axes_of(str(args[-1])) or "(another group)"
        for message in args[0] if coalesced else args[:1]:
            # of a gather what comes counts, as in the form that writes into a tensor
            nbytes = _nbytes(message) * (args[1] if kind == "all_gather" else 1)
            self.seen.append(Collective(kind, axis, nbytes, "", ""))

    def _record(self, func: Callable, args: tuple) -> None:
        name = func._schema.name.split("::")[1]  # type: ignore[attr-defined]
        if name not in _KINDS:
            return
        kind, message = _KINDS[name]
        group = next(
            (
                unbox_group(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and unbox_group(a) is not None
            ),
            None,
        )
        axis = self.mesh.axes_of(group.group_name) if group is not None else None
        self.seen.append(
            Collective(kind, axis or "(another group)", _nbytes(args[message]), "", "")
        )


def unbox_group(value: torch.ScriptObject) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):
        return None


def _nbytes(message: Any) -> int:
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    return sum(_nbytes(part) for part in message)
