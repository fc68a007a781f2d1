"""Which call of dropout a forward has come to, so that it gets that call's mask: calls are counted
in each block by itself, and by module where their order is another one on some layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.core import Plan
from weft.nn import Randomness
from weft.parallel import own_forward, set_own_forward

from .counter_random import place_of_module


def name_places(model: nn.Module, plan: Plan, randomness: Randomness) -> None:
    """Let `randomness` know where a forward of the model is."""
    randomness.dropped = plan.dropped
    for name in (*plan.blocks, *plan.counted):
        module = model.get_submodule(name)
        set_own_forward(module, _counted(own_forward(module), name, randomness))


def _counted(forward: Callable[..., Any], name: str, randomness: Randomness) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        outside = randomness.place, randomness.calls
        randomness.move_to(place_of_module(name, randomness.call_of(name)))
        found = forward(*args, **kwargs)
        randomness.move_to(*outside)
        return found

    return run
