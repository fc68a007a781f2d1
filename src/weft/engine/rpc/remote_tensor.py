"""Tensors that live in another process: shape, dtype and device, without data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft._torch.modules import replace_buffers, replace_parameters
from weft._torch.tensors import make_empty_subclass, mark_parameter, without_function_overrides
from weft.core import UnsupportedModel, WorkerPlacement
from weft.pipeline import METADATA_FUNCTIONS, source_line, tensors_in


class RemoteTensor(Tensor):
    """Stands for a parameter or buffer, `about`, of a module that lives `at` another place. Reading
    it is refused."""

    about: str
    at: str

    @staticmethod
    def of(name: str, tensor: Tensor, at: str) -> RemoteTensor:
        made = make_empty_subclass(RemoteTensor, tensor, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            mark_parameter(made)
        made.about, made.at = name, at
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.about}, on {self.at})"

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with without_function_overrides():
            if func in METADATA_FUNCTIONS:
                return func(*args, **(kwargs or {}))
            return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        absent = next(t for t in tensors_in((args, kwargs or {})) if isinstance(t, RemoteTensor))
        raise UnsupportedModel(
            "workers",
            absent.about,
            f"is on {absent.at}, and is read by another process, at {source_line()}",
            "place the modules that use it together, or leave them to the driver",
        )


def drop_remote_weights(model: nn.Module, places: WorkerPlacement, here: str) -> None:
    """Drop every parameter and buffer of a model that lives elsewhere. What several places use, as
    a table of angles that no checkpoint holds, all of them keep."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    mine = {id(tensor) for name, tensor in named if places.of(name) == here}
    others = {
        id(tensor): RemoteTensor.of(name, tensor, places.of(name))
        for name, tensor in named
        if id(tensor) not in mine
    }
    for module in model.modules():
        replace_parameters(module, others)
        replace_buffers(module, others)
