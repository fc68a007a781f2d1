"""Labels communication in a profile: its kind, and the axes of the mesh that it runs over."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import record_function

from .collective_audit import Audit, unbox_group

COMM_PREFIX = "comm: "


class CommLabels(Audit):
    """Active around a profiled step. What a collective or a message does lies in a range with a
    label such as `comm: allreduce over dp`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        label = self._label(func, args)
        if label is None:
            return func(*args, **(kwargs or {}))
        with record_function(label):
            return func(*args, **(kwargs or {}))

    def _label(self, func: Any, args: tuple) -> str | None:
        namespace, name = getattr(func, "namespace", ""), None
        if namespace == "c10d":
            boxed = [unbox_group(a) for a in args if isinstance(a, torch.ScriptObject)]
            name = next((group.group_name for group in boxed if group is not None), None)
        elif namespace in ("_c10d_functional", "symm_mem") and args and isinstance(args[-1], str):
            name = args[-1]
        if name is None:
            return None
        kind = func._schema.name.split("::")[1].strip("_")
        return f"{COMM_PREFIX}{kind} over {self.mesh.axes_of(name) or 'all ranks'}"
