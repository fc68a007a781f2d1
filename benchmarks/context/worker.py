"""What runs in the ranks: attention over a sequence that they share, and a training step with its
memory."""

from __future__ import annotations

import resource
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from weft.engine.collective_audit import Audit
from weft.engine.context_parallel import ring_attention
from weft.engine.context_parallel.sequence import ContextParallel, SequenceBatchInfo
from weft.nn.dropout_rng import Randomness
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.parallel.mesh import Mesh

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def whole(length: int, repeats: int) -> list[float]:
    """Seconds of forward and backward of causal attention on one process."""
    torch.set_num_threads(1)
    query, key, value = _inputs(length)
    return _timed(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        repeats,
    )


def shared(layout: str, length: int, repeats: int) -> dict[str, Any]:
    """The same on the ranks of a layout: seconds, pairs of positions that this rank computes, bytes
    that it sends."""
    torch.set_num_threads(1)
    plan = weft.plan(nn.Linear(1, 1), layout, batch=1)
    mesh = Mesh(plan.layout, torch.device("cpu"))
    sequence = ContextParallel(plan, mesh, Randomness(0), (), ())
    sequence.now = SequenceBatchInfo(length)
    query, key, value = _inputs(length // sequence.size)
    pairs = 0
    counted = ring_attention.KeyBlocks.pairs

    def count(
        self: ring_attention.KeyBlocks, source: int, device: torch.device, fused: bool
    ) -> list:
        nonlocal pairs
        found = counted(self, source, device, fused)
        for _, _, queries, keys, mask in found:
            rows, columns = queries[1] - queries[0], keys[1] - keys[0]
            seen = rows * (rows + 1) // 2 if self.causal(queries, keys, mask) else rows * columns
            pairs += seen * query.shape[1] // len(mesh_heads)
        return found

    mesh_heads = range(mesh.size(*sequence.heads)) if sequence.heads else range(1)
    ring_attention.KeyBlocks.pairs = count  # type: ignore[method-assign]
    call = partial(sequence.attention, query, key, value, is_causal=True, enable_gqa=True)
    with Audit(mesh) as audit:
        call().sum().backward()
    ring_attention.KeyBlocks.pairs = counted  # type: ignore[method-assign]
    sent: dict[str, int] = {}
    for comm in audit.seen:
        sent[comm.kind] = sent.get(comm.kind, 0) + comm.nbytes
    return {
        "seconds": _timed(call, repeats),
        "pairs": pairs // 2,
        "sent": sent,
    }  # forward has them, and backward


def _inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, length, WIDTH, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _timed(call: Callable[[], Tensor], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats + 1):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        call().sum().backward()
        if dist.is_initialized():
            dist.barrier()
        times.append(time.perf_counter() - began)
    return times[1:]


class Live(TorchDispatchMode):
    """Bytes of tensors that operators have made and that still live; `peak`: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or not nbytes:
            return
        self._known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def trained(
    layout: str, length: int, size: dict[str, int], recompute: str = "none"
) -> dict[str, float]:
    """Bytes of a rank's activations at most in a training step, and the most that its process has
    had."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = decoder(**size, seq_len=length)
    plan = weft.plan(model, layout, batch=1, loss=next_token, recompute=recompute)
    engine = weft.Engine(model, plan, optimizer=_sgd, loss=next_token, device="cpu")
    batch = {"input_ids": torch.randint(0, size["vocab"], (1, length))}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    live, began = Live(), time.perf_counter()
    with live:
        engine.step(engine.local(batch))
    grads = sum(p.numel() * p.element_size() for p in model.parameters())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "activations": live.peak - grads,
        "process": most,
        "grown": most - before,
        "seconds": time.perf_counter() - began,
    }


def _sgd(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in params], lr=0.1)
