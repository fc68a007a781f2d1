"""What torch must keep doing for weft._torch.tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import (
    NEEDS_ELEMENTS,
    FakeTensor,
    StorageWeakRef,
    fake_mode,
    forget_fakes,
    living_fakes,
    local_part,
    make_empty_subclass,
    make_fake,
    make_wrapper_tensor,
    mark_parameter,
    quiet_fake_tensors,
    storage_id,
    tensor_attributes,
    user_attributes,
    version_of,
    view_base,
    without_function_modes,
    without_function_overrides,
)
from weft.launch.local_workers import Pool


def test_a_fake_tensor_is_like_what_the_mode_would_make() -> None:
    mode, weight = fake_mode(), nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())
    made = make_fake(mode, weight)
    with mode:
        expected = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
    assert isinstance(made, FakeTensor) and isinstance(made, nn.Parameter)
    for x in (made, expected):
        assert (x.shape, x.stride(), x.dtype, x.device) == (
            weight.shape,
            weight.stride(),
            weight.dtype,
            weight.device,
        )
    assert made.requires_grad and not isinstance(make_fake(mode, weight.detach()), nn.Parameter)
    assert make_fake(mode, weight, torch.device("cuda")).device.type == "cuda"
    with mode:
        assert (made.t() @ torch.ones(2, 5, dtype=torch.bfloat16)).shape == (3, 5)


def test_a_fake_tensor_says_that_it_has_no_elements(caplog: pytest.LogCaptureFixture) -> None:
    mode = fake_mode()
    x = make_fake(mode, torch.ones(3))
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with caplog.at_level(logging.DEBUG, log.name), quiet_fake_tensors(), mode:
        assert log.disabled
        for ask in (lambda: x.sum().item(), lambda: x.nonzero()):
            with pytest.raises(NEEDS_ELEMENTS):
                ask()
    assert not log.disabled and not caplog.records


class Empty(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with without_function_overrides():
            return "seen" if func is torch.relu else func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_an_empty_tensor_of_a_subclass() -> None:
    like = torch.ones(3, 2, dtype=torch.float64).t()
    made = make_empty_subclass(Empty, like, requires_grad=True)
    assert type(made) is Empty and made.requires_grad
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert make_empty_subclass(Empty).shape == ()
    assert not isinstance(made, nn.Parameter)
    mark_parameter(made)
    assert isinstance(made, nn.Parameter)
    module = nn.Module()
    module.weight = made
    assert dict(module.named_parameters()) == {"weight": made}


def test_overrides_are_passed_by() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    plain, x = torch.ones(2), make_empty_subclass(Empty, torch.ones(2))
    assert torch.relu(x) == "seen"
    with without_function_overrides(), pytest.raises(NotImplementedError):
        torch.relu(x)
    with Mode():
        with without_function_modes():
            torch.relu(plain)
        assert not seen
        with without_function_overrides():
            torch.relu(plain)
        assert seen == [torch.relu]


def test_attributes_are_functions_that_modes_see() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    known = tensor_attributes()
    x = torch.ones(2)
    with Mode():
        x.shape, x.dtype, x.device, x.is_meta  # noqa: B018
    assert seen == [known[name] for name in ("shape", "dtype", "device", "is_meta")]


def test_views_share_a_storage_with_or_without_elements() -> None:
    for x in (torch.ones(4), torch.ones(4, device="meta"), make_fake(fake_mode(), torch.ones(4))):
        assert storage_id(x) == storage_id(x.view(2, 2)) != storage_id(x + 1)
    sparse = torch.ones(2, 2).to_sparse()
    assert storage_id(sparse) == -id(sparse)


def test_the_local_part_is_the_tensor_itself(pool: Pool) -> None:
    pool.run(local_part_of_a_dtensor, world=1)


def local_part_of_a_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info

    from weft._torch.tensors import forget_meshes

    x = torch.ones(2)
    made = DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])
    assert local_part(made).data_ptr() == x.data_ptr() and local_part(made) is local_part(made)
    forget_meshes()
    assert _get_python_sharding_prop_cache_info().currsize == 0


def test_a_module_of_fake_tensors_changes_its_dtype() -> None:
    """`Module.to` swaps FakeTensors, and refuses those that a mode has weak references to."""
    mode = fake_mode()
    with mode:
        model = nn.Linear(2, 3)
        forget_fakes(mode)
        right = nn.Parameter.__new__

        def made(cls, data=None, requires_grad=True):  # type: ignore[no-untyped-def]
            parameter = right(cls, data, requires_grad)
            forget_fakes(mode)
            return parameter

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Parameter, "__new__", made)
            model.double()
    assert model.weight.dtype == torch.float64 and isinstance(model.weight, FakeTensor)


def test_the_fake_tensors_that_live_are_found() -> None:
    mode = fake_mode()
    with mode:
        kept = [torch.ones(2)]
        torch.ones(3)
    assert [t.shape for t in living_fakes(mode)] == [(2,)]
    kept.clear()
    assert living_fakes(mode) == []


def test_attributes_of_users_and_no_others() -> None:
    with fake_mode():
        weight = nn.Parameter(torch.ones(2))
        weight.no_decay = True  # type: ignore[attr-defined]
    assert user_attributes(weight) == {"no_decay": True}
    plain = nn.Parameter(torch.ones(2))
    plain.group = 1  # type: ignore[attr-defined]
    assert user_attributes(plain) == {"group": 1}


def test_a_wrapper_tensor_has_no_memory_and_a_gradient() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return make_wrapper_tensor(Wrapped, (2, *x.shape), x.dtype, x.device)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0].sum(0)

    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            return torch.ones(3, dtype=torch.float64)

    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    made = Twice.apply(x)
    assert type(made) is Wrapped and made.shape == (2, 3) and made.dtype == torch.float64
    assert made.data_ptr() == 0 and made._version == 0
    made.backward(torch.ones(2, 3, dtype=torch.float64))
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]


def test_changes_in_place_are_counted_over_views() -> None:
    whole = torch.zeros(4)
    part, other = whole[1:], whole.detach()
    before = version_of(part)
    assert version_of(other) == version_of(whole) == before
    whole.add_(1)
    assert version_of(part) == version_of(other) == before + 1


def test_a_base_has_hooks_that_a_change_of_its_view_leaves() -> None:
    seen: list[str] = []
    y = nn.Linear(2, 2)(torch.ones(1, 3, 2))
    base = view_base(y)
    assert base is not None and view_base(base) is None
    y.register_hook(lambda _: seen.append("view"))
    base.register_hook(lambda _: seen.append("base"))
    y.relu_().sum().backward()
    assert seen == ["base"]


def test_a_weak_reference_tells_when_memory_is_free() -> None:
    whole = torch.zeros(4)
    view, ref = whole[1:], StorageWeakRef(whole.untyped_storage())
    del whole
    assert not ref.expired()
    del view
    assert ref.expired()
