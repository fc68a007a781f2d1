"""Which modules train in a step, and in a trial of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def training_modes(model: nn.Module) -> dict[str, bool]:
    """Name -> whether a module is in training mode in a step. One that is in evaluation mode in a
    model that is in training mode stays so, as a frozen tower."""
    return {name: m.training or not model.training for name, m in model.named_modules()}


def put_on_trial(model: nn.Module, modes: Mapping[str, bool], training: bool) -> None:
    """Let a model run as it is evaluated, or as in a step: but for batch norms, which have no
    variance of one sample, and use their running statistics.

    Args:
        model: what is tried.
        modes: as of `training_modes`.
        training: whether as in a step.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _BatchNorm) and module.running_mean is not None
        module.training = training and modes[name] and not tracks
