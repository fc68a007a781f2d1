"""What was seen of one module: its ops, the bytes that it keeps and sends, its parameters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from .model_work import Cut, Kind

BYTES = (
    "output_bytes",
    "reduced_bytes",
    "key_bytes",
    "query_bytes",
    "routed_bytes",
    "working_bytes",
)


COUNTS = ("reductions", "heads", "kv_heads", "experts")


@dataclass(frozen=True)
class OpKey:
    """Ops that are one Op. `size`: of a matmul, which of equal size are counted together."""

    kind: Kind
    cut: Cut
    core: bool
    backward: float
    size: tuple[int, ...] = ()


@dataclass
class OpTotals:
    """What ops of one key come to, for all samples. `full`: FLOPs without what a causal kernel
    leaves out."""

    flops: float = 0.0
    full: float = 0.0
    moved: float = 0.0
    saved: float = 0.0
    matmuls: int = 0
    kernels: int = 0
    names: dict[str, None] = field(default_factory=dict)

    def add(self, other: OpTotals) -> None:
        self.flops, self.full, self.moved = (
            self.flops + other.flops,
            self.full + other.full,
            self.moved + other.moved,
        )
        self.saved, self.matmuls = self.saved + other.saved, self.matmuls + other.matmuls
        self.kernels, self.names = self.kernels + other.kernels, self.names | other.names


@dataclass
class ModuleRecord:
    """One module of the chain: `sums` of its ops, `bytes` by what they are, `counts`, elements of
    its `params`, of these the `frozen` ones and those `in_int8`, and by the axes that store them
    those of `parts`."""

    name: str
    sums: dict[OpKey, OpTotals] = field(default_factory=lambda: defaultdict(OpTotals))
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    params: dict[Cut, int] = field(default_factory=lambda: defaultdict(int))
    frozen: dict[Cut, int] = field(default_factory=lambda: defaultdict(int))
    in_int8: dict[Cut, int] = field(default_factory=lambda: defaultdict(int))
    parts: dict[tuple[Cut, tuple[str, ...]], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    repeated: bool = False
    tied: bool = False

    def full(self) -> float:
        """FLOPs of forward and backward, without what a causal kernel leaves out or does again."""
        return sum(one.full * (1 + min(2.0, key.backward)) for key, one in self.sums.items())

    def hold(
        self, parameter: nn.Parameter, cut: Cut, stored: tuple[str, ...] | None = None
    ) -> None:
        """Counts the elements of a parameter that `cut` divides. `stored`: the axes over which a
        part has its rows; None: as others have them."""
        self.params[cut] += parameter.numel()
        if not parameter.requires_grad:
            self.frozen[cut] += parameter.numel()
        if parameter.dtype in (torch.int8, torch.uint8):  # two of NF4 a byte
            self.in_int8[cut] += parameter.numel()
        if stored is not None:
            counts = self.parts[cut, stored]
            counts[0] += parameter.numel()
            counts[1] += parameter.numel() * parameter.requires_grad

    def add(self, other: ModuleRecord) -> None:
        """Takes what was seen at another place."""
        for key, one in other.sums.items():
            self.sums[key].add(one)
        for name, size in other.bytes.items():
            self.bytes[name] += size
        for name, count in other.counts.items():
            self.counts[name] = (
                self.counts[name] + count if name == "reductions" else max(self.counts[name], count)
            )
