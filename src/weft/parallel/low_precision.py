"""What a module needs so that its forward runs with parameters in bf16 or fp16, without autocast.

A tensor in float32 (a buffer, a user's constant) makes what it is added to float32, and a matmul
takes no two dtypes. So what enters the model, a block, or any module with parameters of its own is
cast to the dtype that is computed in, as FSDP2 does with what enters its units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core import DtypeRule
from weft.nn import BatchNorm


def cast_arguments(rule: DtypeRule, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is called with, in the dtype that is computed in."""
    return {key: _cast(rule, value) for key, value in arguments.items()}


def prepare_low_precision(model: nn.Module, rule: DtypeRule, blocks: Sequence[str]) -> list:
    """Add the casts to a model, in place, if the rule asks for copies. `blocks`: names of the
    repeated modules. Returns the handles of the hooks."""
    if not rule.low:
        return []
    handles = []
    for name, module in model.named_modules():
        if name in blocks or any(True for _ in module.parameters(recurse=False)):
            hook = partial(_cast_inputs, rule)
            # before a collective of the module's own: it is to send no float32
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        if isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm):
            # torch's has no kernel for weights in bf16 beside statistics in float32
            twin = BatchNorm.of(module, None)
            module.forward = partial(_batch_norm, module, twin)  # type: ignore[method-assign]
    return handles


@contextmanager
def low_precision(model: nn.Module, rule: DtypeRule, blocks: Sequence[str]) -> Iterator[None]:
    """Inside this context a model has these casts."""
    handles = prepare_low_precision(model, rule, blocks)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules() if handles else ():
            if isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm):
                del module.forward


def _cast(rule: DtypeRule, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(rule.computed(value.dtype))


def _cast_inputs(rule: DtypeRule, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(_cast(rule, value) for value in args), cast_arguments(rule, kwargs)


def _batch_norm(module: nn.Module, twin: BatchNorm, x: Tensor) -> Tensor:
    twin.training = module.training
    return twin.forward(x)
