"""What torch must keep doing for weft._torch.fsdp."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch.fsdp import (
    ReduceScatter,
    adopt_parameters,
    end_backward,
    forget_forwards,
    mark_idle,
    reduced_like,
)
from weft._torch.modules import replace_parameters
from weft._torch.tensors import local_part


class Counting(ReduceScatter):
    """As torch's own, and the number of elements that came."""

    seen: list[int]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.seen.append(input_tensor.numel())
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def sharded() -> tuple[FSDPModule, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    model = nn.Linear(3, 5)
    model.load_state_dict(plain.state_dict())
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))), plain


def sizes() -> tuple[int, list[int]]:
    model, _ = sharded()
    reduce = Counting()
    reduce.seen = []
    model.set_custom_reduce_scatter(reduce)
    like = reduced_like(model)
    assert like is not None
    model(torch.ones(2, 3)).sum().backward()
    return like.numel(), reduce.seen


def test_gradients_are_as_large_as_is_said(pool: Any) -> None:
    for said, seen in pool.run(sizes, world=2):
        assert seen == [said]


def late() -> float:
    """The error of gradients that are reduced by hand after the backward."""
    model, plain = sharded()
    model.set_requires_gradient_sync(False)
    x = torch.full((2, 3), float(dist.get_rank() + 1))
    model(x).square().sum().backward()
    model.set_requires_gradient_sync(True)
    mark_idle(model)
    end_backward(model)
    model.reshard()
    for rank in range(dist.get_world_size()):
        (plain(torch.full((2, 3), rank + 1.0)).square().sum() / dist.get_world_size()).backward()
    errors = []
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        mine = want.grad.tensor_split(dist.get_world_size())[dist.get_rank()]
        rows = local_part(got.grad)
        chunk = -(-len(want) // dist.get_world_size())
        mine = want.grad[dist.get_rank() * chunk :][:chunk]
        errors.append(float((rows - mine).abs().max()))
    return max(errors)


def test_a_backward_can_be_ended_by_hand(pool: Any) -> None:
    assert max(pool.run(late, world=2)) < 1e-5


def replaced() -> tuple[list[float], list[float]]:
    """A unit on the meta device whose shards are given later, and a plain module."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    unit = fully_shard(model, mesh=mesh)
    fresh = {}
    for name, p in model.named_parameters():
        local = torch.empty_like(local_part(p), device="cpu")  # type: ignore[arg-type]
        start = dist.get_rank() * -(-5 // dist.get_world_size())
        local.copy_(plain.get_parameter(name).detach()[start : start + len(local)])
        whole = DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )  # type: ignore[attr-defined]
        fresh[id(p)] = nn.Parameter(whole.detach())
    replace_parameters(model, fresh)
    adopt_parameters(unit)
    x = torch.arange(6.0).view(2, 3)
    return unit(x).flatten().tolist(), plain(x).flatten().tolist()


def test_a_unit_takes_other_tensors_for_its_shards(pool: Any) -> None:
    for found, expected in pool.run(replaced, world=2):
        assert found == expected


class GatherCount(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.seen += "allgather" in func._schema.name
        return func(*args, **(kwargs or {}))


def gathers_of_backward(forget: bool) -> int:
    """After a forward that no backward follows, and one that it does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    units: list[FSDPModule] = [fully_shard(each, mesh=mesh) for each in (*model, model)]
    with torch.no_grad():
        model(torch.ones(2, 4))
    for unit in units if forget else ():
        forget_forwards(unit)
    total = model(torch.ones(2, 4, requires_grad=True)).sum()
    with GatherCount() as count:
        total.backward()
    return count.seen


def test_a_forward_without_a_backward_is_forgotten(pool: Any) -> None:
    assert pool.run(gathers_of_backward, True, world=2) == [2, 2]
    assert pool.run(gathers_of_backward, False, world=2) == [3, 3]  # else it were not needed
