"""Modules: calls that go elsewhere, parameters that are replaced, hooks that are wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import lru_cache, partial
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from .trees import tree_leaves, tree_map

_HANDLER = "_weft_call_handler"
_set_attribute = (
    object.__setattr__
)  # nn.Module's looks for parameters and buffers, at each call of a stage


class _InterceptedModule(nn.Module):
    """Base of the classes that `redirect_calls` gives to modules. It comes right before nn.Module,
    so a `__call__` of the module's own class still runs around the handler."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = vars(self).get(_HANDLER)
        if handler is None:  # torch.utils.checkpoint calls again when the class is back: no super()
            return nn.Module.__call__(self, *args, **kwargs)
        return handler(*args, **kwargs)


class _QuietSubclass:
    """Keeps the `__init_subclass__` of a module's class from running: transformers wraps `forward`
    there, once for each subclass."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _subclass(cls: Any, *bases: type, **methods: Callable[..., Any]) -> Any:
    def body(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods}

    return new_class(cls.__name__, (_QuietSubclass, *bases), {}, body)


@lru_cache(maxsize=1024)
def _intercepted_class(cls: Any) -> Any:
    made = _subclass(cls, *(() if cls is nn.Module else (cls,)), _InterceptedModule)
    made._own_class = cls
    return made


@lru_cache(maxsize=1024)
def _uncompiled_class(cls: Any) -> Any:
    @torch.compiler.disable
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super(made, self).__call__(*args, **kwargs)

    made = _subclass(cls, cls, __call__=call)
    return made


def leave_uncompiled(module: nn.Module) -> None:
    """From now on a compiled caller leaves its graph to call this module. Were `forward` disabled,
    or a handler of `redirect_calls`, torch would also compile what calls it, to an empty graph."""
    module.__class__ = _uncompiled_class(type(module))  # type: ignore[arg-type]


def redirect_calls(module: nn.Module, handler: Callable[..., Any]) -> None:
    """From now on `module(...)` calls `handler(...)` instead, and runs no hook by itself.

    The module's class is replaced by a subclass that overrides `__call__`, as
    `torch.distributed.fsdp.fully_shard` does. A forward hook is no substitute: it cannot keep
    the other hooks and the forward from running. `nn.Module.compile` is not touched.
    """
    vars(module)[_HANDLER] = handler
    if not isinstance(module, _InterceptedModule):
        _set_attribute(module, "__class__", _intercepted_class(type(module)))  # type: ignore[arg-type]


@contextlib.contextmanager
def intercept_calls(handlers: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside this context, calls of each module go to its handler, as after `redirect_calls`."""
    before = []
    for module, handler in handlers:
        before.append((module, type(module), vars(module).get(_HANDLER)))
        redirect_calls(module, handler)
    try:
        yield
    finally:
        for module, cls, earlier in reversed(before):
            if earlier is not None:
                vars(module)[_HANDLER] = earlier
                continue
            del vars(module)[_HANDLER]
            if type(module) is _intercepted_class(cls):  # a lazy module may have changed its class
                _set_attribute(module, "__class__", cls)


def original_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of this module does now. A handler uses it to run the module itself, and so has
    to get it before calls are redirected to the handler."""
    return vars(module).get(_HANDLER) or partial(nn.Module.__call__, module)


def call_with_own_class(module: nn.Module) -> Callable[..., Any]:
    """As `original_call`; meanwhile the module has its own class. A compiled forward is compiled
    again where the class of `self` differs, and in backward no call is intercepted."""
    call = original_call(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        intercepted: Any = type(module)
        own = vars(intercepted).get("_own_class", intercepted)
        _set_attribute(module, "__class__", own)
        try:
            return call(*args, **kwargs)
        finally:
            if type(module) is own:  # a lazy module may have changed its class
                _set_attribute(module, "__class__", intercepted)

    return run


def replace_parameters(module: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of this module's own parameters. `replacements`: id of the
    parameter -> the new tensor.

    Writes `Module._parameters`, so that the order of the parameters stays, and tensors of a
    subclass that only looks like `nn.Parameter` are taken. `setattr` would do for parameters.
    """
    _replace(module._parameters, replacements)


def replace_buffers(module: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of this module's own buffers, as `replace_parameters` does.
    `setattr` would do, but for tensors of a subclass that looks like `nn.Parameter`."""
    _replace(module._buffers, replacements)


def _replace(held: dict[str, Any], replacements: Mapping[int, Tensor]) -> None:
    held.update({leaf: replacements[id(t)] for leaf, t in held.items() if id(t) in replacements})


def replace_references(module: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of those that the module's other attributes refer to, alone
    or in lists, tuples and dicts, as the flat weights of nn.RNNBase are."""

    def change(value: Any) -> Any:
        return replacements.get(id(value), value)

    attributes = vars(module)
    for name in attributes.keys() - {"_parameters", "_buffers", "_modules"}:
        if any(id(t) in replacements for t in tree_leaves(attributes[name], Tensor)):
            attributes[name] = tree_map(change, attributes[name])


def hook_ids(module: nn.Module) -> set[int]:
    """The ids of the module's own forward and forward pre-hooks.

    Reads the hook dicts. Torch has no public way to list hooks.
    """
    return {*module._forward_pre_hooks, *module._forward_hooks}


def run_forward_hooks(
    module: nn.Module, ids: Set[int], args: tuple, kwargs: dict[str, Any], output: Any
) -> None:
    """Call the module's own forward hooks of these ids as after a call, whatever they return.

    Reads the hook dicts. Torch runs hooks with a call alone.
    """
    known = [key for key in module._forward_hooks if key in ids]  # in their order
    for key in known:
        hook: Callable[..., Any] = module._forward_hooks[key]
        with_kwargs = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        hook(module, args, *with_kwargs, output)


def wrap_hooks(
    module: nn.Module,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ignored: set[int],
) -> None:
    """Replace each forward and forward pre-hook whose id is not in `ignored` by `wrap(hook)`. Adds
    the ids to `ignored`.

    Writes the hook dicts, so that handles and the order of hooks stay valid. A public API to list
    and replace hooks would do.
    """
    hooks: dict[int, Callable[..., Any]]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # type: ignore[assignment]
        for key in hooks.keys() - ignored:
            hooks[key] = wrap(hooks[key])
            ignored.add(key)


def innermost_function_mode() -> Any:
    """The TorchFunctionMode that sees functions first, or None.

    Torch has no public way to ask for it.
    """
    return _get_current_function_mode()
