"""What a model must not hold on any layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.jit import ScriptModule

from weft.core import UnsupportedModel

LAZY = nn.parameter.UninitializedParameter


def check_modules(model: nn.Module) -> None:
    """Refuse a model with modules that Python cannot reach into, with parameters that have no shape
    yet, with sparse tensors, or without a parameter that is trained."""
    for name, module in model.named_modules():
        if isinstance(module, ScriptModule):
            raise UnsupportedModel(
                "model",
                name or type(module).__name__,
                "is compiled by torch.jit, so weft can neither add hooks nor replace its weights",
                "hold the module itself, without torch.jit.script or torch.jit.trace around it;"
                " functions may be scripted",
            )
    lazy = next((n for n, p in model.named_parameters() if isinstance(p, LAZY)), None)
    if lazy is not None:
        raise UnsupportedModel(
            "model",
            lazy,
            "has no shape before the first forward",
            "run the model once on a batch in the function that builds it, or give the layer its"
            " sizes",
        )
    state = (*model.named_parameters(), *model.named_buffers())
    sparse = next((n for n, t in state if t.layout is not torch.strided), None)
    if sparse is not None:
        raise UnsupportedModel(
            "model",
            sparse,
            "is a sparse tensor, which weft can neither give to all ranks nor save",
            "register its indices and its values, and make it of them in the forward",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModel(
            "model",
            type(model).__name__,
            "none of its parameters is trainable",
            "set requires_grad on those that are to be trained",
        )
