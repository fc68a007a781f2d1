"""Copies between a device and the host's memory, beside what the device computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Mark = TypeVar("Mark")


class HostCopies(ABC, Generic[Mark]):
    """Starts copies and does not wait for them. A Mark is a moment in the order of copies, for
    which the device can be told to wait; the host never waits.

    Args:
        device: where tensors are that are copied to the host.
    """

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def start_out(self, data: Tensor) -> Tensor:
        """A copy of `data` [bytes] in the host's memory, of what the device has been told to
        compute so far. `data` must stay as it is until a Mark after it has been waited for."""

    @abstractmethod
    def mark_out(self) -> Mark:
        """The moment when all copies to the host that have been started are done."""

    @abstractmethod
    def start_back(self, held: Sequence[Tensor], after: Mark) -> tuple[list[Tensor], Mark]:
        """Copies on the device of tensors that the host holds, and the moment when all of them are
        there. `after`: when the host has them. They must be held until that moment has been waited
        for: their memory is the device's to use again when they are freed."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Let the device compute nothing of what it is told from now on before this moment."""


class CudaCopies(HostCopies[torch.cuda.Event]):
    """Over a stream for each direction, to and from pinned memory.

    Memory of the device is taken from and given back to the stream that computes, which waits for
    a copy before it frees what the copy reads or writes. So no tensor needs `record_stream`, which
    would keep freed memory until the device, not the host, has come to that point.
    """

    def __init__(self, device: torch.device):
        # tensors tell their device with its number
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device(device.type, index))
        self._out, self._back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def start_out(self, data: Tensor) -> Tensor:
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
        return host

    def mark_out(self) -> torch.cuda.Event:
        return self._out.record_event()

    def start_back(
        self, held: Sequence[Tensor], after: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        here = [torch.empty(h.shape, dtype=h.dtype, device=self.device) for h in held]
        self._back.wait_event(after)
        # what had this memory before may still be computing
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            for device, host in zip(here, held, strict=True):
                device.copy_(host, non_blocking=True)
        return here, self._back.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


AnyCopies = HostCopies[Any]
