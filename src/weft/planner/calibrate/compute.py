"""Measures what one device computes while the others do the same: matmuls, attention, memory,
small ops, the optimizer.

Each function runs on every rank of a process group, and gives the same on all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core import DTYPES, time_once

from .rank_timer import RankTimer

LONGEST_S = 0.06  # of one product, or one forward: sizes grow until then
TOKENS, WIDTHS = (256, 1024, 4096), (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM, ATTENDED = 8, 64, 1024  # tokens of a batch, or those of one longer sequence
STREAM_BYTES = 1 << 27  # of one tensor: more than caches hold
ACTIVATIONS = tuple(1 << power for power in range(16, 27))  # elements
CHAIN, SMALL = 50, 16  # operations one after the other, on so many elements
LAYER = 512  # the optimizer steps over matrices of this width
LAYERS = 16


@dataclass(frozen=True)
class TimedWork:
    """So much work (FLOPs or bytes) in so many seconds."""

    amount: float
    seconds: float


@dataclass(frozen=True)
class SmallOpTiming:
    """Seconds of one small operation's forward, and of its backward."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MemoryBandwidth:
    """Bytes per second of tensors larger than caches; what operations of a block's activations
    take, by the bytes that they read and write; bytes per second to the host's memory."""

    memory_bps: float
    activations: list[TimedWork]
    host_bps: float


def matmuls(dtype: str) -> list[TimedWork]:
    """A linear's forward and both halves of its backward, as one product of their mean."""
    bench, found = RankTimer.here(), list[TimedWork]()
    for flops, tokens, width in sorted((2.0 * t * w**2, t, w) for t in TOKENS for w in WIDTHS):
        if found and flops * found[-1].seconds / found[-1].amount > LONGEST_S:
            break
        x, weight = _random(bench, dtype, tokens, width), _random(bench, dtype, width, width)

        def work(x: Tensor = x, weight: Tensor = weight) -> None:
            y = F.linear(x, weight)
            y @ weight
            y.T @ x

        found.append(TimedWork(flops, bench(work) / 3))
    return found


def attention() -> tuple[list[TimedWork], list[TimedWork]]:
    """Causal attention, forward and backward, in float32 on a CPU and bfloat16 on a GPU: of FLOPs,
    the causal half."""
    bench, forward, backward = RankTimer.here(), list[TimedWork](), list[TimedWork]()
    dtype = "bf16" if bench.device.type == "cuda" else "fp32"
    for length in SEQUENCES:
        batch = max(1, ATTENDED // length)
        flops = 2.0 * batch * HEADS * length * length * HEAD_DIM
        if forward and flops * forward[-1].seconds / forward[-1].amount > LONGEST_S:
            break
        q, k, v = (
            _random(bench, dtype, batch, HEADS, length, HEAD_DIM).requires_grad_() for _ in range(3)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.ones_like(y)

        def ahead(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def back(
            y: Tensor = y, grad: Tensor = grad, inputs: tuple[Tensor, ...] = (q, k, v)
        ) -> None:
            torch.autograd.grad(y, inputs, grad, retain_graph=True)

        forward.append(TimedWork(flops, bench(ahead)))
        backward.append(TimedWork(2.5 * flops, bench(back)))
    return forward, backward


def streams() -> MemoryBandwidth:
    """Copies of large tensors, and what a gated unit reads and writes in forward and backward:
    results are new tensors, which the allocator has to find, as in training."""
    bench = RankTimer.here()
    there, here = (torch.zeros(STREAM_BYTES // 4, device=bench.device) for _ in range(2))
    rate = 2 * STREAM_BYTES / bench(partial(there.copy_, here))
    host_bps = rate / 2
    if bench.device.type == "cuda":
        host = torch.empty(STREAM_BYTES // 4, pin_memory=True)
        host_bps = STREAM_BYTES / bench(partial(there.copy_, host, non_blocking=True))
    found: list[TimedWork] = []
    for elements in ACTIVATIONS:
        moved = 4.0 * elements * 20
        if found and moved * found[-1].seconds / found[-1].amount > LONGEST_S:
            break
        x, y = (torch.ones(elements, device=bench.device, requires_grad=True) for _ in range(2))
        grad = torch.ones(elements, device=bench.device)

        def work(x: Tensor = x, y: Tensor = y, grad: Tensor = grad) -> None:
            # forward 2 + 3 + 3 tensors; backward: the product 2 x 3, the unit 3, the sum of x's two
            # gradients 3
            torch.autograd.grad(F.silu(x) * y + x, (x, y), grad)

        found.append(TimedWork(moved, bench(work)))
    return MemoryBandwidth(rate, found, host_bps)


def launches() -> SmallOpTiming:
    """A chain of small operations with gradients: what each takes when there is hardly anything to
    compute."""
    bench = RankTimer.here()
    x = torch.ones(SMALL, device=bench.device, requires_grad=True)

    def chain() -> Tensor:
        y = x
        for _ in range(CHAIN):
            y = y * 0.5
        return y

    ahead = bench(chain)
    both = bench(lambda: chain().sum().backward())
    return SmallOpTiming(ahead / CHAIN, max(0.0, both - ahead) / CHAIN)


def update() -> TimedWork:
    """Parameters, and seconds of an AdamW step of them, made as `weft train` makes it."""
    bench = RankTimer.here()
    layers = [nn.Parameter(torch.zeros(LAYER, LAYER, device=bench.device)) for _ in range(LAYERS)]
    optimizer = torch.optim.AdamW(layers)
    for each in layers:
        each.grad = torch.ones_like(each)
    return TimedWork(LAYERS * LAYER * LAYER, bench(optimizer.step))


def dtypes() -> list[str]:
    """Those in which this device multiplies matrices."""
    bench, able = RankTimer.here(), []
    for name in DTYPES:
        a = _random(bench, name, 64, 64)
        try:
            time_once(partial(torch.mm, a, a), bench.device)
        except RuntimeError:
            continue
        able.append(name)
    return able


def _random(bench: RankTimer, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).to(DTYPES[dtype])
