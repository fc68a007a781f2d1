"""Whether something has the form of a loss, before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.core import ConfigError, function_of_partial

FIX = (
    "name a function of (output, batch) that returns (sum, weight), such as"
    " weft.losses:classification, mse, next_token or causal_lm; docs/losses.md shows how to"
    " write one"
)


def check_loss(loss: Callable[..., Any], field: str = "loss", value: object = None) -> None:
    """Refuse what cannot be a loss: a class, a function of other arguments, torch's own losses,
    which take (input, target). `value`: how the user names it; default: its own name.

    Raises:
        ConfigError: it cannot be a loss.
    """
    bare = function_of_partial(loss)
    if inspect.isclass(bare):
        problem = "is a class, not a loss"
    elif not _takes_output_and_batch(loss, bare):
        problem = "does not take (output, batch), as a loss does"
    else:
        return
    name = getattr(bare, "__name__", type(bare).__name__)
    raise ConfigError(field, name if value is None else value, problem, FIX)


def _takes_output_and_batch(loss: Callable[..., Any], bare: Any) -> bool:
    """Whether two arguments can be given; in a library whose losses' second argument is known, also
    whether it is that."""
    made_by = getattr(bare, "__module__", None) or type(bare).__module__
    library = made_by.partition(".")[0] in ("torch", "weft")
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        given = signature.bind(None, None).arguments
    except ValueError:  # a function in C without a signature
        return not library
    except TypeError:
        return False
    return not library or "batch" in given
