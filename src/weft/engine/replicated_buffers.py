"""Buffers that every rank keeps, and in which ranks with different samples could come to
differ."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    Plan,
)
from weft.parallel import (
    TOKEN_AXES,
    Mesh,
)


class ReplicatedBuffers:
    """Those of a model's state, less the statistics that the plan synchronises and those that other
    stages keep (`absent`)."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, absent: set[str]):
        self._mesh, self._model = mesh, model
        self._names = (
            _unsynced_buffers(model, plan, absent) if plan.layout.active_axes(*TOKEN_AXES) else []
        )

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each buffer that is broadcast at the start of a step."""
        return [buffer.nbytes for buffer in self._held()]

    def _held(self) -> list[Tensor]:
        """As they are now: a forward may put another tensor in the place of one."""
        return [self._model.get_buffer(name) for name in self._names]

    def refresh(self) -> None:
        """Every replica starts a step from the first one's buffers, as one device would have one
        set of them."""
        group = self._mesh.group(*TOKEN_AXES)
        if group is not None:
            for buffer in self._held():
                dist.broadcast(buffer, group=group, group_src=0)


def _unsynced_buffers(model: nn.Module, plan: Plan, absent: set[str]) -> list[str]:
    kept = model.state_dict(keep_vars=True).keys()
    synced = {f"{name}." for name in plan.batchnorms}
    return [
        name
        for name, buffer in model.named_buffers()
        if name in kept - absent
        and not buffer.is_complex()
        and f"{name.rpartition('.')[0]}." not in synced
    ]
