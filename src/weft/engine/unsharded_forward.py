"""The forward of the whole model on every rank, with one block's weights in memory at a time: what
a sharded model is compared with before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._torch.modules import replace_parameters
from weft.core import DtypeRule, LocalShard
from weft.parallel import Mesh
from weft.pipeline import copy_with_tensors


class UnshardedForward:
    """A copy of a model, made before it is sharded, without weights.

    Args:
        model: the whole model; it may be on the meta device.
        blocks: names of the repeated modules. What they do not hold is gathered for the whole
            forward.
        dtypes: what the model computes in.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], dtypes: DtypeRule):
        self._model = copy_with_tensors(model, _without_data)
        self._blocks, self._dtypes = blocks, dtypes

    def run(
        self,
        forward: Callable[[nn.Module], Any],
        shards: Mapping[str, LocalShard],
        mesh: Mesh,
        group: dist.ProcessGroup | None,
    ) -> Any:
        """What `forward(model)` returns. All ranks call it together.

        Args:
            forward: calls the model once.
            shards: this rank's part of each weight that it holds. Of the ranks that hold the same
                part, one is the writer.
            mesh: where this rank computes.
            group: the ranks that hold all weights together.
        """
        blocks = {name: self._model.get_submodule(name) for name in self._blocks}
        owner: dict[Tensor, str] = {}
        for name, module in self._model.named_modules():
            inside = max((b for b in blocks if _inside(name, b)), key=len, default="")
            for p in module.parameters(recurse=False):
                owner[p] = inside if owner.get(p, inside) == inside else ""  # used by two: the root
        units: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *blocks)}
        for name, p in self._model.named_parameters():
            units[owner[p]].append((name, p))

        def gather(unit: str) -> dict[int, Tensor]:
            found = _gather(units[unit], shards, mesh.device, group)
            for whole in found.values():
                whole.data = whole.data.to(self._dtypes.computed(whole.dtype))
            return found

        handles = []
        for name, block in blocks.items():
            unit = _Unit(block, partial(gather, name))
            handles.append(block.register_forward_pre_hook(unit.before))
            handles.append(block.register_forward_hook(unit.after, always_call=True))
        root = _Unit(self._model, partial(gather, ""))
        root.before()
        try:
            return forward(self._model)
        finally:
            root.after()
            for handle in handles:
                handle.remove()


class _Unit:
    """Modules whose weights are there while one of them runs."""

    def __init__(self, module: nn.Module, gather: Callable[[], dict[int, Tensor]]):
        self._module, self._gather = module, gather
        self._empty: dict[int, Tensor] = {}

    def before(self, *_: Any) -> None:
        """Put weights in the place of tensors without elements."""
        empty = {id(p): p for p in self._module.parameters()}
        whole = self._gather()
        self._empty = {id(tensor): empty[key] for key, tensor in whole.items()}
        for module in self._module.modules():
            replace_parameters(module, whole)

    def after(self, *_: Any) -> None:
        """Let go of the weights."""
        for module in self._module.modules():
            replace_parameters(module, self._empty)
        self._empty = {}


def _inside(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")


def _gather(
    unit: Sequence[tuple[str, nn.Parameter]],
    shards: Mapping[str, LocalShard],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[int, Tensor]:
    """id of a parameter without elements -> the same with them, from all ranks' shards."""
    whole: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for _, p in unit):
        alike = [(name, p) for name, p in unit if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for _, p in alike), dtype=dtype, device=device)
        for (name, p), part in zip(alike, flat.split([p.numel() for _, p in alike]), strict=True):
            tensor, shard = part.view(p.shape), shards.get(name)
            if shard is not None and shard.writer:
                for local, position in shard.chunks:
                    tensor[position] = shard.tensor[local].to(device)
            whole[id(p)] = nn.Parameter(tensor, requires_grad=False)
        if group is not None:
            dist.all_reduce(flat, group=group)
    return whole


def _without_data(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.clone()
    return nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
