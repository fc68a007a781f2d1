"""Does a model give its weights gradients that are not proportional to the output's?

A rank runs backward from the sum of its own losses, and gradients are divided by what counts in the
whole batch afterwards. So a loss that a model adds in its own backward, or a gradient that it clips
there, would have another share on each layout, and another than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

from torch import Tensor, nn

from weft._torch.autograd import watch_backward
from weft.core import UnsupportedModel

from .random_projection import size_of

SCALES = (2.0**-10, 2.0**10)  # a product with a power of two has no rounding
SMALL = 1e-3  # of all gradients: below it an error is relative to that
NONE = 1e-300


def find_own_gradient(
    model: nn.Module,
    forward: Callable[[], Any],
    backward: Callable[[float], Mapping[str, Tensor]],
    bound: float,
) -> UnsupportedModel | None:
    """The refusal of a model that has gradients of its own. Only autograd functions and hooks can
    make them: without such, one forward is all that runs.

    Args:
        model: in training mode.
        forward: runs it.
        backward: runs it forward and backward, from the same gradient of the output times this
            number. The projection of each parameter's gradient, by name.
        bound: relative error that counts as none.
    """
    with watch_backward() as own:
        forward()
    if not own and not any(m._backward_hooks for m in model.modules()):
        return None
    first, second = (
        {name: grad / scale for name, grad in backward(scale).items()} for scale in SCALES
    )
    total = sqrt(sum(float(size_of(grad)) ** 2 for grad in second.values()))
    errors = {
        name: float(size_of(first[name] - grad)) / max(float(size_of(grad)), SMALL * total, NONE)
        for name, grad in second.items()
    }
    worst = max(errors, key=errors.__getitem__, default="")
    return _refusal(model, worst) if errors.get(worst, 0.0) > bound else None


def _refusal(model: nn.Module, name: str) -> UnsupportedModel:
    problem = (
        f"the gradient of {name} is not proportional to that of the output: the model adds a loss"
        " in its backward, or clips gradients there, and weft divides gradients after backward by"
        " what counts in the whole batch"
    )
    fix = (
        "return what is added with the output and add it in the loss, or add it by"
        " weft.nn.with_loss; clip by weft's own clip"
    )
    return UnsupportedModel("model", type(model).__name__, problem, fix)
