"""Gradient all-reduce in buckets, each launched as soon as backward has filled it (Li et al. 2020).

Buckets are launched in one fixed order on every rank, which is what NCCL needs. Gradients of parameters that FSDP2
stores are known only after it has reduced them: their buckets (partial sums over `tp`) are filled at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..mesh import Mesh
from ..plans import Plan


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds (an empty shard stays an empty tensor)."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class Bucket:
    group: dist.ProcessGroup
    params: list[nn.Parameter]
    late: bool
    flat: Tensor
    views: list[Tensor]
    waiting: int = 0
    work: dist.Work | None = None
    reached: set[int] = field(default_factory=set)  # parameters that this step's backward has given a gradient


class Reducer:
    """Sums gradients over the axes that the plan says, for the parameters of one engine."""

    def __init__(self, plan: Plan, params: dict[str, nn.Parameter], mesh: Mesh):
        self.buckets: list[Bucket] = []
        self._next = 0
        self._sync = False
        for axes, names in plan.buckets():
            members = [params[name] for name in names]
            late = isinstance(members[0], DTensor)
            group = mesh.group(*axes)
            assert group is not None
            flat = torch.zeros(
                sum(local(p).numel() for p in members), dtype=members[0].dtype, device=local(members[0]).device
            )
            views, offset = [], 0
            for p in members:
                size = local(p).numel()
                views.append(flat[offset : offset + size].view(local(p).shape))
                offset += size
            bucket = Bucket(group, members, late, flat, views)
            self.buckets.append(bucket)
            if not late:
                for i, p in enumerate(members):
                    p.register_post_accumulate_grad_hook(lambda p, b=bucket, i=i: self._ready(b, i))  # type: ignore[misc]

    def begin(self, first: bool, last: bool) -> None:
        """A microbatch begins: in the first one gradients are cleared, in the last one they are reduced."""
        self._sync, self._next = last, 0
        for bucket in self.buckets:
            bucket.waiting, bucket.work = len(bucket.params), None
            if first:
                bucket.reached.clear()
            if first and not bucket.late:
                bucket.flat.zero_()
                for p, view in zip(bucket.params, bucket.views, strict=True):
                    p.grad = view  # backward adds in place: the bucket is the gradient, there is no second copy

    def _ready(self, bucket: Bucket, i: int) -> None:
        bucket.reached.add(i)
        if not self._sync:
            return
        bucket.waiting -= 1
        while (
            self._next < len(self.buckets)
            and self.buckets[self._next].waiting == 0
            and not self.buckets[self._next].late
        ):
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    def finish(self) -> list[tuple[Bucket, int]]:
        """Reduce what is left and wait. Returns the parameters that this rank's backward did not reach."""
        for bucket in self.buckets:
            if bucket.late:
                bucket.flat.zero_()
                for i, (p, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
                    if p.grad is not None:
                        bucket.reached.add(i)
                        view.copy_(local(p.grad))
            if bucket.work is None:
                self._launch(bucket)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            for p, view in zip(bucket.params, bucket.views, strict=True):
                if bucket.late and p.grad is not None:
                    local(p.grad).copy_(view)
        return [(b, i) for b in self.buckets for i in range(len(b.params)) if i not in b.reached]

    def drop_unused(self, missing: list[tuple[Bucket, int]], mesh: Mesh) -> None:
        """Leave no gradient where no rank's backward reached a parameter, as on one device. All ranks call it."""
        for bucket in self.buckets:
            gone = {i for b, i in missing if b is bucket}
            used = torch.tensor(
                [i not in gone for i in range(len(bucket.params))], dtype=torch.int32, device=mesh.device
            )
            dist.all_reduce(used, group=bucket.group)
            for p, count in zip(bucket.params, used.tolist(), strict=True):
                if count == 0:
                    p.grad = None
