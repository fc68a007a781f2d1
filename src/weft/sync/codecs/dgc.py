"""dgc: Deep Gradient Compression (Lin et al. 2018): the largest elements of a sum of momenta.

u = momentum u + g; v = v + u; the largest of v are sent, and u and v are zero there from then on
(momentum correction and factor masking). Before, a rank's part of the mean gradient is clipped to
the norm `clip` / sqrt(ranks), bucket by bucket; how many things the mean is over is taken from the
step before, so the first step is not clipped. `density` falls from 1/4 to what is asked for over
the first `warmup` steps. The momentum is the codec's: the optimizer is to be SGD without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from weft.core import (
    AllGatherRequest,
    Codec,
    CodecState,
    Reduction,
    ReplicaView,
    RequestSize,
    Shapes,
    numel_of,
    require,
)

from ._sparse_message import ELEMENT_BYTES, largest_places, pack, unpack

FIRST = 0.25  # density of the first step of a warm-up


@dataclass(frozen=True)
class DGC(Codec):
    density: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    warmup: int = 0
    name = "dgc"

    def __post_init__(self) -> None:
        require(
            "sync.codec.density",
            self.density,
            float,
            lambda x: 0 < x <= 1,
            "a fraction above 0 and at most 1",
        )
        require(
            "sync.codec.momentum",
            self.momentum,
            float,
            lambda x: 0 <= x < 1,
            "a number from 0 to below 1",
        )
        require("sync.codec.warmup", self.warmup, int, lambda x: x >= 0, "a number of steps")
        if self.clip is not None:
            require(
                "sync.codec.clip",
                self.clip,
                float,
                lambda x: x > 0,
                "a norm above 0, or leave it out",
            )

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def keeps_residual(self) -> bool:
        return True

    def state(self, shapes: Shapes, like: Tensor, bucket: str = "") -> CodecState:
        steps = torch.zeros((), dtype=torch.int64)
        return {
            "momentum": torch.zeros_like(like),
            "residual": torch.zeros_like(like),
            "steps": steps,
        }

    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        momentum, residual = state["momentum"], state["residual"]
        if self.clip is not None and peers.scale is not None:
            x.mul_((self.clip / sqrt(peers.size) / (x.norm() * peers.scale)).clamp(max=1.0))
        momentum.mul_(self.momentum).add_(x)
        residual.add_(momentum)
        places = largest_places(residual, self.count(x.numel(), int(state["steps"])))
        state["steps"] += 1
        message = pack(residual, places)
        sent, _ = unpack(message)
        residual[places] -= sent.to(residual.dtype)  # zero, but for what float32 cannot hold of it
        momentum[places] = 0
        x.zero_()
        for values, each in map(unpack, (yield AllGatherRequest(message))):
            x.index_add_(0, each, values.to(x.dtype))

    def count(self, n: int, step: int) -> int:
        """Elements that are sent of n in a step."""
        density = self.density
        if step < self.warmup and density < FIRST:
            density = FIRST * (density / FIRST) ** (step / self.warmup)
        return min(n, max(1, round(density * n)))

    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        return [RequestSize("gather", ELEMENT_BYTES * self.count(numel_of(shapes), step), 1)]


CODECS = {"dgc": DGC}
