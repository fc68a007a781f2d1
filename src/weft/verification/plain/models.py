"""The model that [model] build names, called with what the run file says and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def plain_model(name: str, arguments: Mapping[str, Any], seed: int) -> nn.Module:
    """`name`: "package.module:callable", whose module weft has imported before. `seed`: that its
    weights are drawn with."""
    module, _, place = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in place.split("."):
        function = getattr(function, part)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model: nn.Module = function(**arguments)
    return model
