"""Attention in Python, "eager", of the models of transformers: with capped scores, sinks or biases,
which no kernel of torch has. They call it through transformers' attention interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# (module, query [b, heads, q, d], key and value [b, kv heads, k, d], mask, options) -> (output,
# weights)
EagerAttention = Callable[..., tuple[Tensor, Any]]
_NAME = "eager_attention_forward"


def attention_kind(model: nn.Module) -> str:
    """How a model's configuration says that it attends: "sdpa", where nothing is said."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) or "sdpa"


def eager_attention(module: nn.Module) -> EagerAttention | None:
    """What a module hands to the interface as its own. None: it does not call the interface."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return forward.__globals__.get(_NAME) if code and _NAME in code.co_names else None


def attends_eagerly(model: nn.Module) -> bool:
    """Whether the attention of a model is its own, behind the interface."""
    return attention_kind(model) == "eager" and any(map(eager_attention, model.modules()))
