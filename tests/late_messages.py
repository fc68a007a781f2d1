"""Messages that come late: every wait that is left out, and every buffer that is used too early,
shows in the numbers.

In `late_messages()` the operators of torch.distributed (`c10d::`, which weft, FSDP2, DTensor and
compiled graphs all end in) run on private buffers:

- What a collective writes is NaN, or the largest integer, until it is waited for.
- A message is read from the sender's tensor when the sender waits for it, or the receiver does,
  never before, and never if nobody holds its work any more; it is in the receiver's when that one
  has waited. New memory is NaN.
- What a collective reads must be the same when it is waited for as when it began.
- A work is never complete before it is waited for, and what another thread waits for takes longer.

No more than that can go wrong on any backend, and all of it may.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from weft._torch.modes import without_dispatch_modes
from weft.launch.thread_frame import thread_frame

WAIT_S = 0.02  # how much later other threads than the first go on
UP_S, DOWN_S = 0.02, 0.1  # how long a message travels to a higher rank, and to a lower one
POLLS = 10_000  # of one message, before who polls it does nothing else
# operator -> which argument is written, which is read
COLLECTIVES = {
    "allreduce_": (0, 0),
    "allreduce_coalesced_": (0, 0),
    "broadcast_": (0, 0),
    "reduce_": (0, 0),
    "_allgather_base_": (0, 1),
    "allgather_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "_reduce_scatter_base_": (0, 1),
    "reduce_scatter_": (0, 1),
    "reduce_scatter_tensor_coalesced_": (0, 1),
    "alltoall_base_": (0, 1),
    "alltoall_": (0, 1),
    "gather_": (0, 1),
    "scatter_": (0, 1),
}


@contextmanager
def late_messages() -> Iterator[None]:
    """In this context the process's messages come late. All ranks enter it together."""
    late, before = _LateKernels(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory
    kernels = {name: partial(late.collective, name) for name in COLLECTIVES}
    kernels |= {"send": late.send, "recv_": late.receive}
    try:
        with torch.library._scoped_library("c10d", "IMPL") as library:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that they take the place of others
                for name, kernel in kernels.items():
                    library.impl(name, kernel, "CPU")
            yield
            dist.barrier()  # not after an error: peers that are gone would be waited for
    finally:
        torch.use_deterministic_algorithms(before)


class _LateKernels:
    def __init__(self) -> None:
        self._kernels = {name: _kernel(name) for name in (*COLLECTIVES, "send", "recv_")}
        self._numbers: Counter[tuple[dist.ProcessGroup, str, int]] = Counter()
        # All stay alive: torch's part of a work does not hold Python's. And a kernel is called
        # under the GIL, for which gloo's threads wait when they are the last to leave a tensor.
        self._works: list[dist.Work] = []

    def collective(self, name: str, *args: Any) -> Any:
        to, source = COLLECTIVES[name]
        with _unseen():
            changed = [*args]
            changed[source] = tree_map(lambda t: t.data.clone(), args[source])
            if to != source:
                changed[to] = tree_map(lambda t: t.data.clone(), args[to])
            outputs = _Outputs(args[to], changed[to])
            inputs = _Inputs(args[source], changed[source], outputs)
            work = _work_of(self._kernels[name](*changed))
            self._works.append(work)
            outputs.poison()
        boxed = self._boxed(_LateWork(work, outputs, inputs))
        return (args[to], boxed) if _gives_tensors(name) else boxed

    def receive(self, tensors: list[Tensor], group: Any, source: int, tag: int) -> Any:
        """The sender hears when it is waited for."""
        number = self._count(group, "receive", source)
        with _unseen():
            outputs = _Outputs(tensors, [t.data.clone() for t in tensors])
            work = self._receive(outputs.private, group, source, 2 * number)
        ask = partial(
            self._send, [torch.zeros(1, dtype=torch.uint8)], group, source, 2 * number + 1
        )
        nothing = _Inputs((), (), outputs)
        return self._boxed(_LateWork(work, outputs, nothing, ask))

    def send(self, tensors: list[Tensor], group: Any, to: int, tag: int) -> Any:
        number = self._count(group, "send", to)
        send = partial(self._send, group=group, to=to, tag=2 * number)
        late = _LateSend([t.data for t in tensors], send)
        asked = partial(
            self._receive, [torch.zeros(1, dtype=torch.uint8)], group, to, 2 * number + 1
        )
        travel = UP_S if to > dist.ProcessGroup.unbox(group).rank() else DOWN_S
        caller = sys._getframe(1), threading.get_ident()
        arguments = asked, travel, [late], [caller], send, late.sent
        threading.Thread(target=_send_when, args=arguments, daemon=True).start()
        return late.boxed()

    def _count(self, group: Any, way: str, peer: int) -> int:
        key = dist.ProcessGroup.unbox(group), way, peer
        self._numbers[key] += 1
        return self._numbers[key]

    def _send(self, tensors: list[Tensor], group: Any, to: int, tag: int) -> dist.Work:
        return _work_of(self._kernels["send"](tensors, group, to, tag))

    def _receive(self, tensors: list[Tensor], group: Any, source: int, tag: int) -> dist.Work:
        return _work_of(self._kernels["recv_"](tensors, group, source, tag))

    def _boxed(self, work: dist.Work) -> Any:
        self._works.append(work)
        return work.boxed()


class _Outputs:
    """What the user has, and what is written in its place until it is waited for."""

    def __init__(self, given: Any, private: Any):
        self.given = [t.data for t in tree_leaves(given)]
        self.private: list[Tensor] = tree_leaves(private)

    def poison(self) -> None:
        for t in self.given:
            _poison(t)

    def deliver(self) -> None:
        for t, private in zip(self.given, self.private, strict=True):
            t.copy_(private)


class _Inputs:
    """What is read of the user's, apart from what lies in outputs."""

    def __init__(self, given: Any, copies: Any, outputs: _Outputs):
        written = {t.untyped_storage().data_ptr() for t in outputs.given}
        self._pairs = [
            (t.data, copy)
            for t, copy in zip(tree_leaves(given), tree_leaves(copies), strict=True)
            if t.untyped_storage().data_ptr() not in written
        ]

    def check(self) -> None:
        for now, then in self._pairs:
            if not bool(((now == then) | (now != now)).all()):
                raise RuntimeError("a message was changed before it was waited for")


class _LateWork(dist.Work):
    def __init__(
        self,
        work: dist.Work,
        outputs: _Outputs,
        inputs: _Inputs,
        ask: Callable[[], dist.Work] | None = None,
    ):
        super().__init__()
        self._under_way: Any = work, outputs, inputs, ask
        self._lock, self._polls = threading.Lock(), 0

    def is_completed(self) -> bool:
        self._polls += 1
        if self._polls > POLLS and self._under_way is not None:
            raise RuntimeError("a message is polled without end, and never waited for")
        return self._under_way is None

    def wait(self, timeout: Any = None) -> bool:
        with self._lock, _unseen():
            if self._under_way is None:
                return True
            work, outputs, inputs, ask = self._under_way
            asked = None if ask is None else ask()
            work.wait()
            if asked is not None:
                asked.wait()
            if threading.current_thread() is not threading.main_thread():
                time.sleep(WAIT_S)
            inputs.check()
            outputs.deliver()
            self._under_way = None
        return True


class _LateSend(dist.Work):
    def __init__(self, tensors: list[Tensor], send: Callable[[list[Tensor]], dist.Work]):
        super().__init__()
        self.tensors, self._send = tensors, send
        self.sent, self._lock = threading.Event(), threading.Lock()

    def is_completed(self) -> bool:
        return self.sent.is_set()

    def wait(self, timeout: Any = None) -> bool:
        with self._lock, _unseen():
            if not self.sent.is_set():
                self._send(self.tensors).wait()
                self.sent.set()
        return True


def _send_when(
    asked: Callable[[], dist.Work],
    travel_s: float,
    late: list[_LateSend],
    caller: list[tuple[FrameType, int]],
    send: Callable[[list[Tensor]], dist.Work],
    sent: threading.Event,
) -> None:
    """Send what is in the tensors when the receiver waits; nonsense, if the sender has let go of
    the work before it was `sent`: gloo loses such a message. `caller`: the frame that sends, and
    its thread, which have the work when that frame has ended. They and `late` come in lists, which
    are emptied: a thread holds its arguments to its end, and a frame all that its callers hold."""
    asked().wait()
    time.sleep(travel_s)
    while _runs(*caller[0]):
        time.sleep(UP_S)
    caller.clear()
    lost = [torch.empty_like(t) for t in late[0].tensors]
    held = weakref.ref(late.pop())
    work = held()
    if work is not None:
        work.wait()
    if sent.is_set():
        return  # a second message would wait for a receiver without end
    for t in lost:
        _poison(t)
    send(lost).wait()


def _runs(frame: FrameType, thread: int) -> bool:
    """Whether a frame of a thread has not ended yet."""
    now = thread_frame(thread)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


def _poison(t: Tensor) -> None:
    if t.is_floating_point() or t.is_complex():
        t.fill_(torch.nan)
    else:
        t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)


def _operator(name: str) -> Any:
    return getattr(torch.ops.c10d, name).default


def _gives_tensors(name: str) -> bool:
    return len(_operator(name)._schema.returns) == 2


def _kernel(name: str) -> Callable[..., Any]:
    """Torch's own for the CPU, whatever takes its place later."""
    operator = _operator(name)
    kernel = torch.library.get_kernel(operator, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    defaults = [argument.default_value for argument in operator._schema.arguments]
    return lambda *args: kernel.call_boxed(keys, *args, *defaults[len(args) :])


def _work_of(given: Any) -> dist.Work:
    """The work in what an operator returns: it alone, or after tensors."""
    return dist.Work.unbox(given[-1] if isinstance(given, tuple | list) else given)


@contextmanager
def _unseen() -> Iterator[None]:
    """By modes, and by autograd: no backend's copies are."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), without_dispatch_modes():
        yield
