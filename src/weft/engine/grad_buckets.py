"""Gradients summed in buckets, each launched as soon as backward has filled it (Li et al. 2020).

Buckets are launched in one fixed order on every rank, which is what NCCL needs: a stage's in the
order in which its last backward fills them, then those that are known only at the end: gradients
that FSDP2 has to reduce first (partial sums over `tp`), and those of weights that several stages
use.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._torch.tensors import local_part
from weft.core import (
    REPLICA_AXIS,
    Action,
    CommTimer,
    Plan,
    bucket_gradients,
)
from weft.parallel import Mesh

from .pipeline.runner import Span
from .replica_sync.bucket_exchange import BucketExchange, BucketMessage


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds (an empty shard stays an empty tensor)."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


@dataclass
class FilledBucket:
    group: dist.ProcessGroup  # of all ranks that it is summed over
    within: (
        dist.ProcessGroup | None
    )  # of those that the backend sums it over; None: of the synchroniser's alone
    params: list[nn.Parameter]
    stage: int | None  # None: reduced when all backwards are done
    stored: bool  # by FSDP2, whose gradients are copied in and out
    flat: Tensor
    views: list[Tensor]
    number: int | None  # among those that a synchroniser sums
    waiting: int = 0
    launched: bool = False
    work: dist.Work | None = None  # the backend's part of it
    reached: set[int] = field(
        default_factory=set
    )  # parameters that this step's backward has given a gradient


def _record(bucket: FilledBucket, work: dist.Work, trace: list[Span]) -> torch.futures.Future:
    """Add when this sum began and ended to the trace; done when that is in it."""
    action, began = Action("B", bucket.stage or 0, 0), time.perf_counter()
    return work.get_future().then(
        lambda _: trace.append(Span(action, began, time.perf_counter(), "reduce"))
    )


def _row_major(flat: Tensor, p: Tensor) -> Tensor:
    """A gradient [numel] in the parameter's shape."""
    return flat.view(local_tensor(p).shape)


def _as_in_memory(flat: Tensor, p: Tensor) -> Tensor:
    """The same, as the parameter lies in memory (`channels_last`, for instance) if without gaps."""
    strides = local_tensor(p).stride()
    dense = torch.empty_like(local_tensor(p)).stride() == strides
    return flat.as_strided(local_tensor(p).shape, strides) if dense else _row_major(flat, p)


class GradReducer:
    """Sums gradients over the axes that the plan says, for the parameters of one engine. `params`:
    those that backward fills."""

    def __init__(self, plan: Plan, params: dict[str, nn.Parameter], mesh: Mesh):
        self.clock, self._params = CommTimer(), params
        self.trace: list[Span] | None = None  # where sums are recorded, on CPUs
        self._recorded: list[torch.futures.Future] = []
        self.buckets: list[FilledBucket] = []
        self._ready_buckets: list[
            FilledBucket
        ] = []  # of the stage whose last backward runs, those not launched yet
        self._of: dict[nn.Parameter, tuple[FilledBucket, int]] = {}
        crossing: list[BucketMessage] = []
        # autograd holds its hooks where Python's collector does not see them: an engine that is
        # done with is to go
        here = weakref.ref(self)

        def accumulated(p: Tensor) -> None:
            reducer = here()
            if reducer is not None:
                reducer._on_accumulated(p)

        for bucket in bucket_gradients(plan):
            members = [params[name] for name in bucket.names]
            group = mesh.group(*bucket.axes, among=bucket.among)
            assert group is not None
            within: dist.ProcessGroup | None = group
            crosses = plan.uses_custom_dp_sync and REPLICA_AXIS in bucket.axes
            if crosses:
                within = mesh.group(
                    *(axis for axis in bucket.axes if axis != REPLICA_AXIS), among=bucket.among
                )
            flat = torch.zeros(
                sum(local_tensor(p).numel() for p in members),
                dtype=(
                    plan.dtypes.reduced(members[0].dtype)
                    if isinstance(members[0], DTensor)
                    else members[0].grad_dtype
                ),
                device=local_tensor(members[0]).device,
            )
            views, offset = [], 0
            for p in members:
                size = local_tensor(p).numel()
                part = flat[offset : offset + size]
                # a codec reads the rows of a matrix
                views.append(_row_major(part, p) if crosses else _as_in_memory(part, p))
                offset += size
            number = len(crossing) if crosses else None
            made = FilledBucket(
                group,
                within,
                members,
                bucket.stage,
                isinstance(members[0], DTensor),
                flat,
                views,
                number,
            )
            self.buckets.append(made)
            if number is not None:
                crossing.append(
                    BucketMessage(
                        bucket.names[0],
                        flat,
                        tuple(tuple(local_tensor(p).shape) for p in members),
                        bucket.owner,
                    )
                )
            for i, p in enumerate(members):
                self._of[p] = made, i
                if not made.stored or bucket.stage is not None:
                    p.register_post_accumulate_grad_hook(accumulated)
        sync = plan.gradient_sync
        self.exchange = BucketExchange(sync, mesh, crossing) if sync and crossing else None

    def begin(self) -> None:
        """A step begins: gradients are cleared."""
        for bucket in self.buckets:
            bucket.waiting, bucket.work, bucket.launched = len(bucket.params), None, False
            bucket.reached.clear()
            if not bucket.stored:
                bucket.flat.zero_()
                for p, view in zip(bucket.params, bucket.views, strict=True):
                    # backward adds in place: the bucket is the gradient, there is no second copy
                    p.grad = view

    def arm(self, stage: int) -> None:
        """The next backward is the last of this stage: what it fills is reduced while it runs."""
        self._ready_buckets = [bucket for bucket in self.buckets if bucket.stage == stage]

    def close(self, stage: int) -> None:
        """The last backward of this stage has ended: what it did not fill is reduced now."""
        self._ready_buckets = []
        for bucket in self.buckets:
            if bucket.stage == stage and not bucket.launched:
                self._launch(bucket)

    def _on_accumulated(self, p: Tensor) -> None:
        bucket, i = self._of[p]  # type: ignore[index]
        bucket.reached.add(i)
        if self.exchange is not None:
            self.exchange.advance()
        if not self._ready_buckets:
            return
        bucket.waiting -= 1
        while self._ready_buckets and self._ready_buckets[0].waiting == 0:
            self._launch(self._ready_buckets.pop(0))

    def _launch(self, bucket: FilledBucket) -> None:
        self.clock.begin()
        if bucket.stored:
            bucket.flat.zero_()
            for i, (p, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
                if p.grad is not None:
                    bucket.reached.add(i)
                    view.copy_(local_tensor(p.grad))
        bucket.launched = True
        if bucket.within is not None:
            bucket.work = dist.all_reduce(bucket.flat, group=bucket.within, async_op=True)
            if self.trace is not None and bucket.flat.device.type == "cpu":
                self._recorded.append(_record(bucket, bucket.work, self.trace))
        if bucket.number is not None and self.exchange is not None:
            self.exchange.launch(bucket.number, bucket.work)

    def finish(self) -> list[tuple[FilledBucket, int]]:
        """Reduce what is left and wait. Returns the parameters that this rank's backward did not
        reach."""
        for bucket in self.buckets:
            if not bucket.launched:
                self._launch(bucket)
        with self.clock.waiting():
            for bucket in self.buckets:
                if bucket.work is not None:
                    bucket.work.wait()
            if self.exchange is not None:
                self.exchange.finish()
        for recorded in self._recorded:
            recorded.wait()
        self._recorded.clear()
        for bucket in self.buckets:
            for p, view in zip(bucket.params, bucket.views, strict=True):
                if bucket.stored and p.grad is not None:
                    local_tensor(p.grad).copy_(view)
                elif bucket.stored and isinstance(p, DTensor):
                    # reached on another rank alone; where on none, drop_unused takes it away
                    p.grad = DTensor.from_local(
                        view.to(p.dtype, copy=True),
                        p.device_mesh,
                        p.placements,
                        run_check=False,
                        shape=p.shape,
                        stride=p.stride(),
                    )
        return [(b, i) for b in self.buckets for i in range(len(b.params)) if i not in b.reached]

    def spread(self, masters: Mapping[str, nn.Parameter]) -> None:
        """The weights of each owner on all replicas. All ranks call it. `masters`: what the
        optimizer updates."""
        assert self.exchange is not None
        master = {p: masters[name] for name, p in self._params.items()}
        flats = []
        with torch.no_grad():
            for bucket in (b for b in self.buckets if b.number is not None):
                assert bucket.number is not None
                flats.append(
                    torch.cat([local_tensor(master[p].detach()).reshape(-1) for p in bucket.params])
                )
                self.exchange.spread(bucket.number, flats[-1])
            with self.clock.waiting():
                self.exchange.finish()
            for bucket, flat in zip(
                (b for b in self.buckets if b.number is not None), flats, strict=True
            ):
                for p, part in zip(
                    bucket.params, flat.split([v.numel() for v in bucket.views]), strict=True
                ):
                    local_tensor(master[p].detach()).copy_(part.view(local_tensor(p).shape))

    def drop_unused(self, missing: list[tuple[FilledBucket, int]], mesh: Mesh) -> None:
        """Leave no gradient where no rank's backward reached a parameter, as on one device. All
        ranks call it."""
        for bucket in self.buckets:
            gone = {i for b, i in missing if b is bucket}
            used = torch.tensor(
                [i not in gone for i in range(len(bucket.params))],
                dtype=torch.int32,
                device=mesh.device,
            )
            dist.all_reduce(used, group=bucket.group)
            for p, count in zip(bucket.params, used.tolist(), strict=True):
                if count == 0:
                    p.grad = None
