"""Whether a device multiplies in float8."""

from __future__ import annotations

import torch

from weft.core import ConfigError, Float8Linears
from weft.parallel import import_torchao

# The least compute capability of CUDA: 8.9 multiplies with a scale for each factor, 9.0 also with
# one for each row.
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
AMD = ("gfx94", "gfx95")  # MI300, MI350


def check_float8(float8: Float8Linears | None, device: torch.device) -> None:
    """Refuse float8 on a device that does not multiply in it, or without torchao. Raises
    Refusal."""
    if float8 is None:
        return
    import_torchao("float8", float8)
    if float8.emulated:
        return
    name, needed = _name(device), CAPABILITY[float8.recipe]
    fix = "leave it out; weft verify --precision float8 emulates it on a CPU"
    if device.type != "cuda":
        raise ConfigError("precision.float8", float8.recipe, f"{name} has no float8", fix)
    if torch.version.hip is not None:
        kind = torch.cuda.get_device_properties(device).gcnArchName
        if not kind.startswith(AMD):
            problem = f"{name} ({kind}) has no float8: MI300 and later do"
            raise ConfigError("precision.float8", float8.recipe, problem, fix)
        return
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        wanted, has = (".".join(map(str, each)) for each in (needed, found))
        problem = f"it needs compute capability {wanted}, and {name} has {has}"
        if found >= CAPABILITY["tensorwise"]:
            fix = 'use "tensorwise"'
        raise ConfigError("precision.float8", float8.recipe, problem, fix)


def _name(device: torch.device) -> str:
    return "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
