"""How a model of transformers attends: by a kernel, or "eagerly", by a function of its own that it
hands to transformers' attention interface (capped scores, sinks, biases)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# (module, query [b, heads, q, d], key and value [b, kv heads, k, d], mask, options) -> (output,
# weights)
EagerAttention = Callable[..., tuple[Tensor, Any]]


def attention_kind(model: nn.Module) -> str:
    """How a model's configuration says that it attends: "sdpa", where nothing is said."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) or "sdpa"


def calls_interface(module: nn.Module) -> bool:
    """Whether a module's forward asks transformers' interface for its attention."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names


def attends_eagerly(model: nn.Module) -> bool:
    """Whether the attention of a model is its own, behind the interface."""
    return attention_kind(model) == "eager" and any(map(calls_interface, model.modules()))
