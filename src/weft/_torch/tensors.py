"""Tensors: those without elements, tensor subclasses, and where a tensor's memory is."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._mode_utils import no_dispatch

from .forks import start_autograd_without_gpus

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# What an op on FakeTensors raises if its result depends on the values of their elements.
NEEDS_ELEMENTS = (DataDependentOutputException, DynamicOutputShapeException)


def fake_mode() -> FakeTensorMode:
    """A mode in which ops find shapes and dtypes alone, and ordinary tensors may join in.

    FakeTensorMode has no public name; tensors on the meta device lose their device.
    """
    start_autograd_without_gpus()
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A FakeTensor of this tensor's shape, strides and dtype, on `device` (default: its own), which
    is a parameter if the tensor is one.

    Calls the constructor of FakeTensor, ten times as fast as `mode.from_tensor`, which would do.
    """
    with no_dispatch():
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(mode, bare, tensor.device if device is None else device)
    if isinstance(tensor, nn.Parameter):
        mark_parameter(fake.requires_grad_(tensor.requires_grad))
    return fake


def forget_fakes(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to FakeTensors: `torch.utils.swap_tensors`, which `Module.to`
    uses for FakeTensors, takes none that has any."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def living_fakes(mode: FakeTensorMode) -> list[FakeTensor]:
    """The FakeTensors of this mode that somebody holds. Slow: it looks at all objects."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is FakeTensor and o.fake_mode is mode]


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Inside this context torch logs no traceback for an op that FakeTensors cannot run, and does
    not warn that `Module.to` looks at their data pointer.

    The name of the logger is private; torch has no option for it.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.disabled = before


def mark_parameter(tensor: Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true of a tensor of another class.

    Sets the attribute that the metaclass of nn.Parameter reads, as `nn.Parameter(subclass)` does
    to a detached copy. A public way to mark a tensor in place would do.
    """
    tensor._is_param = True  # type: ignore[attr-defined]


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody has registered a hook on this tensor. Torch has no public way to list
    them."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks) or bool(after)  # type: ignore[attr-defined]


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that a user has set on a tensor, such as those by which optimizers group
    parameters. Torch keeps its own, as `_is_param`, in the same dict."""
    own = _fake_attributes()
    return {key: value for key, value in vars(tensor).items() if key not in own}


@lru_cache(maxsize=1)
def _fake_attributes() -> frozenset[str]:
    with fake_mode():
        return frozenset((*vars(torch.empty(0)), "_is_param"))


def make_empty_subclass(
    cls: type[Tensor],
    like: Tensor | None = None,
    requires_grad: bool = False,
    device: torch.device | None = None,
) -> Any:
    """A tensor of class `cls` with no memory, and the shape, strides and dtype of `like` (default:
    a scalar), on `device` (default: that of `like`).

    `Tensor._make_wrapper_subclass` is what torch's own tutorial on subclasses uses; it has no
    public name.
    """
    if like is None:
        return Tensor._make_wrapper_subclass(cls, (), requires_grad=requires_grad)
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        like.stride(),
        dtype=like.dtype,
        device=like.device if device is None else device,
        requires_grad=requires_grad,
    )


def make_wrapper_tensor(
    cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A contiguous tensor of class `cls` with no memory, on which autograd works.

    `Tensor._make_wrapper_subclass` has no public name, see `make_empty_subclass`.
    """
    return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)


def tensor_attributes() -> dict[str, Any]:
    """Name -> what `__torch_function__` gets as `func` when a tensor's attribute is read.

    Lists the C type below Tensor. `torch.overrides.get_overridable_functions` misses some.
    """
    return {
        name: getattr(Tensor, name).__get__
        for name, member in vars(torch._C.TensorBase).items()
        if inspect.isgetsetdescriptor(member)
    }


def without_function_modes() -> AbstractContextManager[None]:
    """Inside this context functions go past every `__torch_function__`, of modes and subclasses.

    `torch.overrides` has no public name for it.
    """
    return torch._C.DisableTorchFunction()


def without_function_overrides() -> AbstractContextManager[None]:
    """Inside this context functions go past the `__torch_function__` of subclasses, not of modes.

    Torch's documentation of `__torch_function__` uses it under this private name.
    """
    return torch._C.DisableTorchFunctionSubclass()


def storage_id(tensor: Tensor) -> int:
    """A number that two tensors have in common if they share memory; it lasts as long as they do.
    Works without data too, where `untyped_storage().data_ptr()`, the public way, is 0."""
    try:
        with without_function_modes():
            return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or of a functorch transform
        return -id(tensor)  # no other tensor shares it


def is_in_transform(tensor: Tensor) -> bool:
    """Whether a function transform, such as `torch.vmap`, is at work on a tensor, which has no
    elements of its own after it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view; itself, if it is none. Torch has no public name for
    it."""
    return tensor if tensor._base is None else tensor._base


def version_of(tensor: Tensor) -> int:
    """How often operations have changed a tensor in place, or one that shares its memory as a view.
    Autograd compares it; torch has no public name for it."""
    return tensor._version


def view_base(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of. A change of the view in place takes its own node out of the graph
    of autograd, and the hooks on it, not those of its base. No public name tells."""
    return tensor._base


def local_part(tensor: DTensor) -> Tensor:
    """The rank's own part of a DTensor: the tensor itself, which autograd does not follow.

    `DTensor.to_local` returns a view that autograd follows.
    """
    return tensor._local_tensor


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone.

    DTensor caches by the mesh's value, and a later mesh may be equal. Torch has no public function
    that clears the cache.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
