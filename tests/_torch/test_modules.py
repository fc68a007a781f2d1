"""What torch must keep doing for weft._torch.modules."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.modules import (
    call_with_own_class,
    hook_ids,
    innermost_function_mode,
    intercept_calls,
    original_call,
    redirect_calls,
    replace_buffers,
    replace_parameters,
    run_forward_hooks,
    wrap_hooks,
)


def test_a_redirected_call_runs_neither_hooks_nor_forward() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: seen.append("hook"))
    redirect_calls(module, lambda x: -x)
    x = torch.ones(1, 2)
    assert torch.equal(module(x), -x) and not seen
    assert isinstance(module, nn.Linear) and type(module).__name__ == "Linear"
    assert list(module.state_dict()) == ["weight", "bias"]


def test_interception_nests_and_leaves_no_trace() -> None:
    module, seen = nn.Linear(2, 2), []
    x, cls, before = torch.ones(1, 2), type(module), set(vars(module))
    expected = module(x)

    def handler(name: str):
        call = original_call(module)

        def handle(*args: Tensor) -> Tensor:
            seen.append(name)
            return call(*args)

        return handle

    with intercept_calls([(module, handler("outer"))]):
        with intercept_calls([(module, handler("inner"))]):
            assert torch.equal(module(x), expected)
        assert seen == ["inner", "outer"]
        module(x)
    assert seen == ["inner", "outer", "outer"]
    assert type(module) is cls and set(vars(module)) == before
    assert torch.equal(module(x), expected) and len(seen) == 3


def test_the_original_call_runs_hooks() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    call = original_call(module)
    with intercept_calls([(module, call)]):
        module(torch.ones(1, 2))
    assert seen == ["hook"]


class Tells(nn.Module):
    def forward(self) -> type:
        return type(self)


def test_a_call_with_the_own_class_takes_it_back_afterwards() -> None:
    module = Tells()
    with intercept_calls([(module, original_call(module))]):
        assert module() is not Tells
    with intercept_calls([(module, call_with_own_class(module))]):
        assert module() is Tells and type(module) is not Tells
        assert module() is Tells  # it was intercepted again
    assert type(module) is Tells
    lazy = nn.LazyLinear(2)
    with intercept_calls([(lazy, call_with_own_class(lazy))]):
        lazy(torch.ones(1, 3))
    assert type(lazy) is nn.Linear


def test_a_module_that_is_wrapped_after_redirection_stays_redirected() -> None:
    """fully_shard replaces the class of a module, too."""
    module = nn.Linear(2, 2)
    redirect_calls(module, lambda x: -x)
    module.__class__ = type("Wrapped", (module.__class__,), {})
    x = torch.ones(1, 2)
    assert torch.equal(module(x), -x)
    with intercept_calls([(module, original_call(module))]):
        assert torch.equal(module(x), -x)
    assert type(module).__name__ == "Wrapped"


def test_a_lazy_module_keeps_the_class_that_it_took() -> None:
    module = nn.LazyLinear(2)
    with intercept_calls([(module, original_call(module))]):
        module(torch.ones(1, 3))
    assert type(module) is nn.Linear


def test_compile_still_works_on_an_intercepted_module() -> None:
    class Block(nn.Module):  # torch compiles none of its own modules
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    module, seen = Block(), []
    module.compile(backend=lambda graph, _: seen.append("compiled") or graph.forward)
    with intercept_calls([(module, original_call(module))]):
        module(torch.ones(1, 2))
    assert seen == ["compiled"]


def test_a_copy_of_a_redirected_module_is_redirected() -> None:
    module = nn.Linear(2, 2)
    redirect_calls(module, lambda x: -x)
    x = torch.ones(1, 2)
    assert torch.equal(copy.deepcopy(module)(x), -x)


def test_tensors_are_replaced_in_their_places() -> None:
    module = nn.BatchNorm1d(2)
    weight, mean = nn.Parameter(torch.ones(2)), torch.ones(2)
    replace_parameters(module, {id(module.weight): weight})
    replace_buffers(module, {id(module.running_mean): mean})
    assert module.weight is weight and module.running_mean is mean
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_hooks_are_wrapped_once_and_can_still_be_removed() -> None:
    module, seen = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: seen.append("old"))
    known = hook_ids(module)
    late = module.register_forward_hook(lambda *_: seen.append("late"))

    def wrap(hook):
        def wrapped(*args):
            seen.append("wrapped")
            return hook(*args)

        return wrapped

    for _ in range(2):
        wrap_hooks(module, wrap, known)
    module(torch.ones(1))
    assert seen == ["old", "wrapped", "late"]
    late.remove()
    module(torch.ones(1))
    assert seen[3:] == ["old"]


def test_forward_hooks_run_without_a_call() -> None:
    module, seen = nn.Identity(), []
    for number in range(9):  # in order, as their ids in a set need not be
        module.register_forward_hook(lambda *_, n=number: seen.append(n))
    module.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    module.register_forward_hook(lambda *given: seen.append(given[2:]), with_kwargs=True)
    known = hook_ids(module)
    module.register_forward_hook(lambda *_: seen.append("late"))
    run_forward_hooks(module, known, (1,), {"a": 2}, 3)
    assert seen == [*range(9), ((1,), 3), ({"a": 2}, 3)]


def test_the_innermost_mode_is_known() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert innermost_function_mode() is None
    with Mode(), Mode() as inner:
        assert innermost_function_mode() is inner
