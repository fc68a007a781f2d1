"""What runs in the ranks: experts that ranks share, and experts that each process has to itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.core.layout import Layout
from weft.engine.collective_audit import Audit
from weft.nn.models.moe import Experts

Batch = dict[str, Tensor]

EXPERTS, ACTIVE = 8, 2
WARMUP = 2  # rounds that are not measured


def beside(layout: str, dim: int, hidden: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Every rank takes steps on the same `tokens` tokens of its own with each side in turn:
    `layout`, `all` experts in this process, and the `part` of them that a rank of the layout has,
    with as many rows, from this process alone."""
    given, each = _batch(dim, tokens, 1.0), EXPERTS // Layout.parse(layout).world
    sides = {"all": (_engine("dp1", dim, hidden), given)}
    if each < EXPERTS:
        sides["part"] = _engine("dp1", dim, hidden, each), given | {"index": given["index"] % each}
        sides[layout] = _engine(layout, dim, hidden), given
    audited = {name: _audited(*side) for name, side in sides.items()}
    steps = _rounds(sides, rounds)
    return {name: audited[name] | steps[name] for name in sides}


def skewed(
    layout: str, factors: Sequence[float], dim: int, hidden: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Steps of one layout whose first rank is sent `factor` times the mean number of rows, with
    each factor in turn."""
    engine = _engine(layout, dim, hidden)
    batches = {str(factor): _batch(dim, tokens, factor) for factor in factors}
    audited = {factor: _audited(engine, batch) for factor, batch in batches.items()}
    steps = _rounds({factor: (engine, batch) for factor, batch in batches.items()}, rounds)
    return {factor: audited[factor] | steps[factor] for factor in batches}


class Layer(nn.Module):
    """x [b, s, dim], index int [b, s, k], weights [b, s, k] -> [b * s, dim]. Tokens and weights get
    gradients, as those of a model do."""

    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.experts = Experts(dim, hidden, experts)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, weights = (t.flatten(0, -2).detach().requires_grad_() for t in (x, weights))
        out: Tensor = self.experts(tokens, index.flatten(0, -2), weights)
        return out


class Still(torch.optim.Optimizer):
    """Changes nothing: what a step takes is forward and backward."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]):
        super().__init__([p for _, p in params], {})

    def step(self, closure: Any = None) -> None:
        pass


def _squares(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.square().sum(), output.new_tensor(float(output.numel()))


def _engine(layout: str, dim: int, hidden: int, experts: int = EXPERTS) -> weft.Engine:
    """The one place that knows how experts come to lie on ranks."""
    torch.manual_seed(0)
    model, world = Layer(dim, hidden, experts), Layout.parse(layout).world
    plan = weft.plan(model, layout, batch=world, loss=_squares)
    # an engine of one rank refuses a process that is one of several
    alone = (
        contextlib.nullcontext()
        if world > 1
        else mock.patch.object(dist, "is_initialized", return_value=False)
    )
    with alone:
        return weft.Engine(model, plan, optimizer=Still, loss=_squares, device="cpu")


def _batch(dim: int, tokens: int, factor: float) -> Batch:
    """This rank's sample: the experts of the first rank get `factor` times the mean number of its
    rows, those of the others the rest, each as many as its neighbour."""
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    rows, each = tokens * ACTIVE, EXPERTS // ranks
    first = factor * rows / ranks
    shares = [first / each] * each + [(rows - first) / max(1, EXPERTS - each)] * (EXPERTS - each)
    ends = torch.tensor([0.0, *shares], dtype=torch.float64).cumsum(0).round().long()
    # An expert's rows stand together, and are at most as many as tokens: none goes to one expert
    # twice.
    index = torch.arange(EXPERTS).repeat_interleave(ends.diff()).view(ACTIVE, tokens).T
    weights = torch.rand(tokens, ACTIVE, generator=generator)
    sample = {
        "x": torch.randn(tokens, dim, generator=generator),
        "index": index[torch.randperm(tokens, generator=generator)],
        "weights": weights / weights.sum(-1, keepdim=True),
    }
    return {key: value.unsqueeze(0) for key, value in sample.items()}


def _audited(engine: weft.Engine, batch: Batch) -> dict[str, Any]:
    """A step's loss, the bytes and the number of its all-to-alls, and the rows that come to this
    rank's experts."""
    with Clock() as clock, Audit(engine.mesh) as audit:
        loss = float(engine.step(batch).loss)
    sent = [comm.nbytes for comm in audit.seen if comm.kind.startswith("all_to_all")]
    if len(sent) != clock.calls:
        raise RuntimeError(
            f"the clock sees {clock.calls} of {len(sent)} all-to-alls: weft calls them another way"
        )
    counts = batch["index"].flatten().bincount(minlength=EXPERTS)
    if engine.plan.layout.world > 1:
        dist.all_reduce(counts)
    here = counts.view(engine.plan.layout.world, -1).sum(1)[engine.mesh.rank]
    return {"loss": loss, "sent": sum(sent), "calls": len(sent), "rows": int(here)}


def _rounds(
    sides: dict[str, tuple[weft.Engine, Batch]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Steps of all sides in turn, every other round in the other order. Of each step on this rank:
    seconds from a barrier to its end, seconds of them in exchanges, and the processor's seconds."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "exchange": [], "cpu": []} for name in sides
    }
    for turn in range(WARMUP + rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            engine, batch = sides[name]
            dist.barrier()
            with Clock() as clock:
                busy, began = time.process_time(), time.perf_counter()
                engine.step(batch)
                took, busy = time.perf_counter() - began, time.process_time() - busy
            if turn >= WARMUP:
                for key, value in (("seconds", took), ("exchange", clock.seconds), ("cpu", busy)):
                    found[name][key].append(round(value, 6))
    return found


class Clock:
    """Seconds in which all-to-alls hold this rank up, waiting for others and for a core among them,
    while it is entered."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def __enter__(self) -> Self:
        self._real = dist.all_to_all_single
        dist.all_to_all_single = self._call
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single = self._real

    def timed(self, call: Any, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            self.seconds += time.perf_counter() - began

    def _call(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        work = self.timed(self._real, *args, **named)
        return None if work is None else _Awaited(work, self)


class _Awaited:
    """An all-to-all under way beside other work: waiting for it counts, that work does not."""

    def __init__(self, work: dist.Work, clock: Clock):
        self._work, self._clock = work, clock

    def wait(self, *args: Any, **named: Any) -> Any:
        return self._clock.timed(self._work.wait, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
