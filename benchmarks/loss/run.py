"""Memory and time of weft's cross-entropy beside torch's, at large vocabularies.

    python benchmarks/loss/run.py [memory] [time]   # both by default; some 5 minutes on one core

Each part writes results/PART.json; the tables in README.md are then written anew from both.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

from weft.nn.deferred_logits import DeferringHeads
from weft.nn.losses import cross_entropy

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE / "README.md"
VOCAB, TOKENS, WIDTH = 131_072, 2048, 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECONDS = 1.0  # of each measurement of time, at least 5 turns
SHAPES = ((64, 256), (2048, 1024), (1024, 32_000), (256, VOCAB))  # tokens, vocabulary
AT_MOST = 1 / 8  # of whole logits in float32: memory of the head and the loss

Step = Callable[[], Any]


# ---- the sides -----------------------------------------------------------------------------------


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def weft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)[0]


class PlainVocabularyParallel(torch.autograd.Function):
    """Megatron-LM's form (Shoeybi et al. 2019) in plain torch: softmax in float32, two
    all-reduces."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        work = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
        maximum = work.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        work.sub_(maximum.unsqueeze(-1))
        mine = (labels >= first) & (labels < first + logits.size(-1))
        column = torch.where(mine, labels - first, 0).unsqueeze(-1)
        target = work.gather(-1, column).squeeze(-1).masked_fill_(~mine, 0)
        sums = torch.stack([work.exp_().sum(-1), target])
        dist.all_reduce(sums)
        work.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(work, column, mine)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        work, column, mine = ctx.saved_tensors
        work.scatter_add_(-1, column, -mine.unsqueeze(-1).to(work.dtype))
        return work.mul_(grads[0]).to(ctx.dtype), None, None


def loss_step(loss: Callable, dtype: torch.dtype, tokens: int, vocab: int) -> Step:
    """Forward and backward of a loss on logits that are there already."""
    logits = torch.randn(tokens, vocab, dtype=dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,))

    def step() -> None:
        logits.grad = None
        loss(logits, labels).backward()

    return step


def head_step(deferred: bool, dtype: torch.dtype, tokens: int, vocab: int) -> Step:
    """Forward and backward of head and loss, on hidden states."""
    head = nn.Linear(WIDTH, vocab, bias=False, dtype=dtype)
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens,))
    heads = DeferringHeads([head] if deferred else [], few=0)
    loss = weft_loss if deferred else torch_loss

    def step() -> None:
        hidden.grad = head.weight.grad = None
        with heads:
            logits = head(hidden)
        loss(logits, labels).backward()

    return step


def parallel_step(weft: bool, dtype: torch.dtype, tokens: int, vocab: int) -> Step:
    """The loss on this rank's words of the logits."""
    mesh, size, rank = DeviceMesh("cpu", [0, 1]), dist.get_world_size(), dist.get_rank()
    logits = torch.randn(tokens, vocab // size, dtype=dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        logits.grad = None
        if weft:
            whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
            weft_loss(whole, labels).backward()
        else:
            PlainVocabularyParallel.apply(logits, labels, rank * (vocab // size)).backward()

    return step


def parallel_head_step(dtype: torch.dtype, tokens: int, vocab: int) -> Step:
    """Head and loss of this rank's words."""
    mesh = DeviceMesh("cpu", [0, 1])
    head = nn.Linear(WIDTH, vocab // 2, bias=False, dtype=dtype)
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    heads = DeferringHeads([head], few=0)

    def step() -> None:
        hidden.grad = head.weight.grad = None
        with heads:
            logits = DTensor.from_local(head(hidden), mesh, [Shard(1)], run_check=False)
        weft_loss(logits, labels).backward()

    return step


# ---- measurement ---------------------------------------------------------------------------------


def peak_bytes(step: Step) -> int:
    """The most memory that torch holds at once in a step, beside what it held before: the second
    step's, so that nothing is counted that is made once."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


def in_turn(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Times of each, one after the other, for so long; every other turn the other way round."""
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    begin, turn = time.perf_counter(), 0
    while turn < 5 or _agreed(time.perf_counter() - begin) < seconds:
        for name in [*steps][:: -1 if turn % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            steps[name]()
            found[name].append(time.perf_counter() - start)
        turn += 1
    return found


def _agreed(seconds: float) -> float:
    """The same on all ranks, so that all end after the same turn."""
    if dist.is_initialized():
        dist.all_reduce(agreed := torch.tensor(seconds))
        return float(agreed) / dist.get_world_size()
    return seconds


def alone(function: Callable, *args: Any) -> Any:
    """What a function returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, args)


def pair(function: Callable, *args: Any) -> Any:
    """What a function returns on rank 0 of two processes of one group."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        jobs = [(function, args, rank, f"file://{folder}/meet") for rank in range(2)]
        return pool.starmap(_as_rank, jobs, chunksize=1)[0]


def _as_rank(function: Callable, args: tuple, rank: int, meet: str) -> Any:
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def memory_of(make: str, dtype: str, *args: Any) -> int:
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Step]] = {
        "torch": lambda: loss_step(torch_loss, DTYPES[dtype], TOKENS, VOCAB),
        "weft": lambda: loss_step(weft_loss, DTYPES[dtype], TOKENS, VOCAB),
        "torch, compiled": lambda: loss_step(
            torch.compile(torch_loss, fullgraph=True), DTYPES[dtype], TOKENS, VOCAB
        ),
        "weft, compiled": lambda: loss_step(
            torch.compile(weft_loss, fullgraph=True), DTYPES[dtype], TOKENS, VOCAB
        ),
        "torch head": lambda: head_step(False, DTYPES[dtype], TOKENS, VOCAB),
        "weft head": lambda: head_step(True, DTYPES[dtype], TOKENS, VOCAB),
        "torch parallel": lambda: parallel_step(False, DTYPES[dtype], TOKENS, VOCAB),
        "weft parallel": lambda: parallel_step(True, DTYPES[dtype], TOKENS, VOCAB),
        "weft parallel head": lambda: parallel_head_step(DTYPES[dtype], TOKENS, VOCAB),
    }
    return peak_bytes(makers[make]())


def measure_memory() -> list[dict[str, Any]]:
    whole, rows = TOKENS * VOCAB * 4, []
    for dtype in DTYPES:
        size = DTYPES[dtype].itemsize
        for make, share, weights in (
            ("torch", 1, False),
            ("torch, compiled", 1, False),
            ("weft", 1, False),
            ("weft, compiled", 1, False),
            ("torch parallel", 2, False),
            ("weft parallel", 2, False),
            ("torch head", 1, True),
            ("weft head", 1, True),
            ("weft parallel head", 2, True),
        ):
            peak = (pair if share == 2 else alone)(memory_of, make, dtype)
            made = size * (VOCAB // share + TOKENS) * WIDTH if weights else 0
            rows.append(
                {
                    "what": make,
                    "dtype": dtype,
                    "peak": peak / (whole / share),
                    "less gradients of weight and hidden states": (peak - made) / (whole / share),
                }
            )
            print(rows[-1], flush=True)
    return rows


def times_of(dtype: str, tokens: int, vocab: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    steps = {
        "torch": loss_step(torch_loss, DTYPES[dtype], tokens, vocab),
        "weft": loss_step(weft_loss, DTYPES[dtype], tokens, vocab),
        "torch, compiled": loss_step(
            torch.compile(torch_loss, fullgraph=True), DTYPES[dtype], tokens, vocab
        ),
        "weft, compiled": loss_step(
            torch.compile(weft_loss, fullgraph=True), DTYPES[dtype], tokens, vocab
        ),
    }
    return in_turn(steps, SECONDS)


def head_times(dtype: str, tokens: int, vocab: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    kinds = {"torch": False, "weft": True}
    return in_turn(
        {name: head_step(kind, DTYPES[dtype], tokens, vocab) for name, kind in kinds.items()},
        SECONDS,
    )


def parallel_times(dtype: str, tokens: int, vocab: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    kinds = {"torch": False, "weft": True}
    return in_turn(
        {name: parallel_step(kind, DTYPES[dtype], tokens, vocab) for name, kind in kinds.items()},
        SECONDS,
    )


def measure_time() -> list[dict[str, Any]]:
    rows = []
    for dtype in DTYPES:
        for tokens, vocab in SHAPES:
            cases = [("logits", alone(times_of, dtype, tokens, vocab))]
            cases.append(("logits of 2 ranks", pair(parallel_times, dtype, tokens, vocab)))
            if vocab == VOCAB:
                cases.append(("hidden states", alone(head_times, dtype, 4 * tokens, vocab)))
            for given, times in cases:
                base = times.pop("torch")
                for name, found in times.items():
                    ratios = [a / b for a, b in zip(found, base, strict=True)]
                    rows.append(
                        {
                            "given": given,
                            "dtype": dtype,
                            "tokens": tokens * (4 if given == "hidden states" else 1),
                            "vocabulary": vocab,
                            "what": name,
                            "torch_s": statistics.median(base),
                            "ratio": statistics.median(ratios),
                            "quartiles": statistics.quantiles(ratios)[::2],
                        }
                    )
                    print(rows[-1], flush=True)
    return rows


# ---- tables --------------------------------------------------------------------------------------


def memory_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| fwd + bwd of | dtype | peak | less the gradients of weight and hidden states |"
    yield "| --- | --- | ---: | ---: |"
    for row in rows:
        less = row["less gradients of weight and hidden states"]
        yield f"| {row['what']} | {row['dtype']} | {row['peak']:.3f} | {less:.3f} |"


def time_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| given | dtype | tokens x words | side | torch, ms | side / torch (quartiles) |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    for row in rows:
        low, high = row["quartiles"]
        yield (
            f"| {row['given']} | {row['dtype']} | {row['tokens']:,} x {row['vocabulary']:,} |"
            f" {row['what']} | {1e3 * row['torch_s']:.2f} |"
            f" {row['ratio']:.2f} ({low:.2f} - {high:.2f}) |"
        )


PARTS = {"memory": (measure_memory, memory_table), "time": (measure_time, time_table)}


def write_tables() -> None:
    text = README.read_text(encoding="utf-8").partition("<!-- results: written by run.py -->\n")
    lines = []
    for part, (_, table) in PARTS.items():
        path = RESULTS / f"{part}.json"
        if path.exists():
            lines += ["", *table(json.loads(path.read_text())["rows"])]
    README.write_text(text[0] + text[1] + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    RESULTS.mkdir(exist_ok=True)
    for part in sys.argv[1:] or PARTS:
        found = {
            "command": "python benchmarks/loss/run.py " + part,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rows": PARTS[part][0](),
        }
        (RESULTS / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
    write_tables()
    memory = RESULTS / "memory.json"
    heads = [
        row
        for row in json.loads(memory.read_text())["rows"]
        if row["what"].startswith("weft") and row["what"].endswith("head")
    ]
    return int(any(row["less gradients of weight and hidden states"] > AT_MOST for row in heads))


if __name__ == "__main__":
    sys.exit(main())
