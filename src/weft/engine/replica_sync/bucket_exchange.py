"""Reduces gradient buckets between replicas while backward goes on.

What a codec asks for begins as soon as its bucket is full. Collectives of one group must begin in
the same order on all ranks: round k of every reduction runs in the k-th group (`lanes`), and begins
after that of the bucket before. Messages from one rank to another have no such groups and no way to
ask whether they came, so they have a thread that runs one reduction after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.fsdp import ReduceScatter
from weft._torch.modes import dispatch_modes, without_function_modes
from weft.core import (
    REPLICA_AXIS,
    Codec,
    CodecState,
    Plan,
    Reduction,
    ReplicaView,
    RequestSize,
    Shapes,
    SyncEveryStep,
    UnsupportedModel,
)
from weft.parallel import Mesh

from ..fsdp_units import FSDPUnits, ScheduledUnit
from .transports import BackendTransport, OwnerTransport, RingTransport

Wire = RingTransport | OwnerTransport | BackendTransport


@dataclass(frozen=True)
class BucketMessage:
    """What is reduced together: `flat` [n] holds tensors of these shapes, one after the other;
    `owner` sums it, where the synchroniser has owners."""

    name: str
    flat: Tensor
    shapes: Shapes
    owner: int = 0


class BucketExchange:
    """The reductions of one engine's parcels over its replicas, and what their codec keeps from
    step to step."""

    def __init__(self, sync: SyncEveryStep, mesh: Mesh, parcels: Sequence[BucketMessage]):
        self._codec, self._parcels = sync.codec, parcels
        self._peers = sync.replica_view(mesh.size(REPLICA_AXIS), mesh.index(REPLICA_AXIS))
        self.scale: Tensor | None = None  # as of Peers
        self.states: list[CodecState] = [
            sync.codec.state(p.shapes, p.flat, p.name) for p in parcels
        ]
        self._polled: PolledExchange | None = None
        self._threaded: ThreadedExchange | None = None
        self._wires: list[RingTransport | OwnerTransport] = []
        if sync.route == "backend":
            self._polled = PolledExchange(BackendTransport(mesh.lanes), mesh.device)
            return
        self._threaded = ThreadedExchange()
        group, *rings = mesh.lanes
        if sync.route == "ring":
            self._wires = [RingTransport(group, rings or [group])] * len(parcels)
        else:
            self._wires = [OwnerTransport(group, p.owner) for p in parcels]

    def launch(self, number: int, after: dist.Work | None) -> None:
        """Begin to sum a parcel, when `after` is done. All replicas launch in the same order."""
        parcel = self._parcels[number]
        if parcel.flat.numel() == 0:  # on all its replicas
            return
        peers = replace(self._peers, scale=self.scale, bucket=parcel.name)
        reduction = self._codec.reduce(parcel.flat, self.states[number], parcel.shapes, peers)
        if self._polled is not None:
            self._polled.launch(reduction, after)
        elif self._threaded is not None:
            self._threaded.launch(reduction, self._wires[number], after)

    def asks(self, step: int) -> list[list[RequestSize]]:
        """What each parcel's codec asks for in a step."""
        return [
            self._codec.asks(p.shapes, self._peers, p.flat.element_size(), step)
            for p in self._parcels
        ]

    def advance(self) -> None:
        """Go on with what has arrived."""
        if self._polled is not None:
            self._polled.advance()

    def finish(self) -> None:
        """Wait for all: the parcels hold their sums, where a synchroniser has owners on these."""
        if self._polled is not None:
            self._polled.finish()
        if self._threaded is not None:
            self._threaded.finish()

    def spread(self, number: int, flat: Tensor) -> None:
        """Begin to send what its owner has in `flat`, like the parcel, to all other replicas."""
        wire = self._wires[number]
        assert self._threaded is not None and isinstance(wire, OwnerTransport)
        self._threaded.submit(lambda: wire.spread(flat))


class FSDPReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of one unit's gradients, through a codec."""

    def __init__(self, codec: Codec, unit: ScheduledUnit, like: Tensor):
        """`like`: the gradients of all the unit's parameters, as FSDP2 lays them out for it."""
        self._codec, self._unit, self._numel = codec, unit.name, like.numel()
        self._bucket = unit.trained[0]
        self.state = codec.state([tuple(like.shape)], like, self._bucket)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM
        peers = ReplicaView(group.size(), group.rank(), sharded=True, bucket=self._bucket)
        if "residual" in self.state and input_tensor.numel() != self._numel:
            raise UnsupportedModel(
                "sync.codec",
                self._codec.name,
                f"a parameter of {self._unit or 'the root'} got no gradient, so the codec's error"
                " feedback has another size than the gradients",
                "use it without feedback, or a model whose parameters all get a gradient in every"
                " step",
            )
        wire = BackendTransport([group])
        for work in _rounds(
            self._codec.scatter(input_tensor, output_tensor, self.state, peers), wire
        ):
            work.wait()
        return None


def codec_scatters(plan: Plan, units: FSDPUnits) -> dict[str, FSDPReduceScatter]:
    """Unit -> its reduce-scatter through the plan's codec, which FSDP2 then uses; empty where FSDP2
    reduces gradients as they are."""
    found: dict[str, FSDPReduceScatter] = {}
    if plan.fsdp_uses_codec and plan.sync is not None:
        for unit in units:
            like = unit.reduced()
            if like is not None:
                found[unit.name] = FSDPReduceScatter(plan.sync.codec, unit, like)
                unit.module.set_custom_reduce_scatter(found[unit.name])
    return found


class PolledExchange:
    """Reductions over the backend's collectives. Those under way go on at every call."""

    def __init__(self, wire: BackendTransport, device: torch.device):
        self._wire = wire
        self._flying: list[_InflightReduction] = []
        # on CUDA a stream of its own waits for the work, in the order of buckets, and the host does
        # not
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, reduction: Reduction, after: dist.Work | None) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                if after is not None:
                    after.wait()
                for work in _rounds(reduction, self._wire):
                    work.wait()
            return
        self._flying.append(_InflightReduction(_rounds(reduction, self._wire), after))
        self.advance()

    def advance(self) -> None:
        """Go on with what has arrived."""
        before: _InflightReduction | None = None
        for flight in self._flying:
            while flight.arrived() and (
                before is None or before.landed or before.round > flight.round
            ):
                flight.go_on()
            before = flight
        while self._flying and self._flying[0].landed:
            del self._flying[0]

    def finish(self) -> None:
        """Wait for all."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        while self._flying:
            self._flying[0].wait()
            self.advance()


class _InflightReduction:
    """One reduction under way."""

    def __init__(self, rounds: Generator[dist.Work, None, None], after: dist.Work | None):
        self._rounds, self._work = rounds, after
        self.round, self.landed = 0, False

    def arrived(self) -> bool:
        return not self.landed and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def go_on(self) -> None:
        self.wait()  # done, but for an error that is to be raised
        try:
            self._work = next(self._rounds)
            self.round += 1
        except StopIteration:
            self.landed = True


def _rounds(reduction: Reduction, wire: BackendTransport) -> Generator[dist.Work, None, None]:
    answer, lane = None, 0
    while True:
        try:
            # who overrides functions of a model is not to change what messages are made of
            with without_function_modes():
                ask = reduction.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            return
        work, answer = wire.start(ask, lane)
        lane += 1
        yield work


class ThreadedExchange:
    """Reductions over messages between ranks, one after the other in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-exchange")
        self._running: list[Future[None]] = []

    def launch(self, reduction: Reduction, wire: Wire, after: dist.Work | None) -> Future[None]:
        return self.submit(lambda: run_reduction(reduction, wire, after))

    def submit(self, task: Callable[[], None]) -> Future[None]:
        modes = dispatch_modes()  # who watches this thread's operators watches those too

        def run() -> None:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(torch.no_grad())
                task()

        self._running = [
            future for future in self._running if not future.done() or future.exception()
        ]
        self._running.append(self._thread.submit(run))
        return self._running[-1]

    def finish(self) -> None:
        """Wait for all."""
        running, self._running = self._running, []
        for future in running:
            future.result()


def run_reduction(reduction: Reduction, wire: Wire, after: dist.Work | None) -> None:
    """Run a reduction to its end. Blocks."""
    if after is not None:
        after.wait()
    answer = None
    while True:
        try:
            ask = reduction.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            return
        answer = wire.answer(ask)
        if answer is None:  # another rank's to know
            reduction.close()
            return
