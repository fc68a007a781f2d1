"""bf16, fp16: gradients summed in 16 bits.

Encoding is off by at most 2^-8 (bf16) or 2^-11 (fp16, within 6e-5 .. 65504) of each element, and
every addition on the way by as much of the sum. What fp16 cannot hold becomes infinite, never zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core import (
    AllReduceRequest,
    Codec,
    CodecState,
    ReduceScatterRequest,
    Reduction,
    ReplicaView,
    RequestSize,
    Shapes,
    numel_of,
    require,
)


@dataclass(frozen=True)
class Cast(Codec):
    name: str  # type: ignore[misc]
    dtype: torch.dtype
    feedback: bool = False

    def __post_init__(self) -> None:
        require("sync.codec.feedback", self.feedback, bool, lambda _: True, "true or false")

    @property
    def keeps_residual(self) -> bool:
        return self.feedback

    def state(self, shapes: Shapes, like: Tensor, bucket: str = "") -> CodecState:
        return {"residual": torch.zeros_like(like)} if self.feedback else {}

    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        x.copy_((yield AllReduceRequest(self._short(x, state))))

    def scatter(self, x: Tensor, out: Tensor, state: CodecState, peers: ReplicaView) -> Reduction:
        out.copy_(
            (yield ReduceScatterRequest(self._short(x, state).view(peers.size, -1), sums=True))
        )

    def _short(self, x: Tensor, state: CodecState) -> Tensor:
        if not self.feedback:
            return x.to(self.dtype)
        x.add_(state["residual"])
        short = x.to(self.dtype)
        torch.sub(x, short, out=state["residual"])
        return short

    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        return [RequestSize("sum", numel_of(shapes), 2)]

    def scatter_asks(self, n: int, peers: ReplicaView, itemsize: int) -> list[RequestSize]:
        return [RequestSize("sum_scatter", n, 2)]


def _with_name(name: str, dtype: torch.dtype) -> Callable[..., Cast]:
    def make(feedback: bool = False) -> Cast:
        return Cast(name, dtype, feedback)

    return make


CODECS = {"bf16": _with_name("bf16", torch.bfloat16), "fp16": _with_name("fp16", torch.float16)}
