"""Which modules train in a step."""

from __future__ import annotations

from torch import nn


def training_modes(model: nn.Module) -> dict[str, bool]:
    """Name -> whether a module is in training mode in a step. One that is in evaluation mode in a
    model that is in training mode stays so, as a frozen tower."""
    return {name: m.training or not model.training for name, m in model.named_modules()}
