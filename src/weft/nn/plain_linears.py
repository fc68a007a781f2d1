"""Which linears compute what nn.Linear computes, and so can run on a part of their weight."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .role_types import is_conv1d

_IN, _OUT = 6, 4  # features of the weight that a module is tried with


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear that makes x W^T + b (Conv1D of Hugging Face: x W + b) and
    nothing more. A class with a forward of its own is told by what it makes of some numbers."""
    if is_conv1d(module):
        return True
    if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    own = (*module.named_parameters(), *module.named_buffers())
    if {name for name, _ in own} - {"weight", "bias"} or any(True for _ in module.children()):
        return False
    draw = torch.Generator().manual_seed(0)
    options = {"generator": draw, "dtype": torch.float64, "device": "cpu"}
    x, weight = torch.randn(2, 3, _IN, **options), torch.randn(_OUT, _IN, **options)
    bias = torch.randn(_OUT, **options) if module.bias is not None else None
    tried = copy.copy(module)
    held = {"weight": weight, "bias": bias}
    tried._parameters = {n: t if t is None else nn.Parameter(t, False) for n, t in held.items()}
    try:
        with torch.no_grad():
            made = tried.forward(x)
    except Exception:  # whatever code of other people raises: it is no such linear
        return False
    want = F.linear(x, weight, bias)
    return isinstance(made, Tensor) and made.shape == want.shape and torch.allclose(made, want)
