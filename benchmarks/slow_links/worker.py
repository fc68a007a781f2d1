"""One replica of one side of the comparison. `run.py` starts it on every host.

    worker.py SIDE STEPS EVAL_EVERY OUTPUT

Rank 0 writes JSON to OUTPUT: the seconds of each step of each replica, its training loss (the
replicas' mean), what had left the first host by the end of it in bytes, and every EVAL_EVERY steps
the validation loss, of those that step apart with the mean of their weights. Evaluating takes no
time of a step.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sides import SIDES, Side
from torch import Tensor, nn

import weft
from weft import sync
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.train.data import Loader, stdlib

BATCH, SEQ_LEN, LR = 12, 128, 1e-3  # samples of a step, over all replicas
EVAL_BATCHES = 10
BYTES = 16_000_000  # of the standard library

Batch = dict[str, Tensor]
Step, Evaluate = Callable[[Batch], Tensor], Callable[[Batch], float]


def model() -> nn.Module:
    """5 M parameters, byte by byte."""
    torch.manual_seed(0)
    return decoder(dim=256, layers=6, heads=8, seq_len=SEQ_LEN)


def main(name: str, steps: int, eval_every: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, side = dist.get_world_size(), SIDES[name]
    part = {"data_rank": dist.get_rank(), "data_size": size}
    data = Loader(stdlib(seq_len=SEQ_LEN, max_bytes=BYTES), BATCH, seed=0, **part)
    held = Loader(
        stdlib(seq_len=SEQ_LEN, max_bytes=BYTES, split="val"), BATCH, seed=0, shuffle=False, **part
    )
    validation = list(islice(held, EVAL_BATCHES))
    step, evaluate, replica = _weft(side, size) if side.weft is not None else _torch(side)
    times: list[float] = []
    losses: list[float] = []
    sent: list[int] = []
    evaluated: dict[int, float] = {}
    dist.barrier()
    for number, batch in enumerate(islice(data, steps), 1):
        began = time.perf_counter()
        loss = step(batch)
        times.append(time.perf_counter() - began)
        losses.append(float(loss))
        sent.append(_sent_bytes())
        if number % eval_every == 0:
            with _mean(replica) if side.apart else nullcontext():
                evaluated[number] = sum(evaluate(batch) for batch in validation) / len(validation)
        if number % eval_every == 0 or number == steps:
            _write(Path(output), (times, losses, evaluated), sent)
    dist.barrier()
    dist.destroy_process_group()


def _write(output: Path, own: tuple, sent: list[int]) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        times, losses, evaluated = zip(*every)
        train = [sum(each) / len(every) for each in zip(*losses)]
        val = {n: sum(each[n] for each in evaluated) / len(every) for n in evaluated[0]}
        output.write_text(
            json.dumps({"step_s": times, "sent_bytes": sent, "loss": train, "val_loss": val})
        )


@contextmanager
def _mean(replica: nn.Module) -> Iterator[None]:
    """The replica with the mean of all replicas' weights."""
    own = [p.detach().clone() for p in replica.parameters()]
    with torch.no_grad():
        for p in replica.parameters():
            dist.all_reduce(p)
            p.div_(dist.get_world_size())
    yield
    with torch.no_grad():
        for p, kept in zip(replica.parameters(), own):
            p.copy_(kept)


def _sent_bytes() -> int:
    """What has left this host."""
    found = re.search(
        rf"{os.environ['GLOO_SOCKET_IFNAME']}:\s*(.*)", Path("/proc/net/dev").read_text()
    )
    return int(found[1].split()[8]) if found else 0


def _weft(side: Side, size: int) -> tuple[Step, Evaluate, nn.Module]:
    assert side.weft is not None
    name, codec, options = side.weft
    replica = model()
    plan = weft.plan(
        replica,
        f"dp{size}",
        batch=BATCH,
        loss=next_token,
        sync=sync.make_sync(name, codec, **options),
    )
    adamw = partial(torch.optim.AdamW, lr=LR, fused=True)
    engine = weft.Engine(replica, plan, optimizer=adamw, loss=next_token, device="cpu")
    return (
        lambda batch: engine.step(batch).loss,
        lambda batch: float(engine.evaluate(batch).loss),
        replica,
    )


def _torch(side: Side) -> tuple[Step, Evaluate, nn.Module]:
    replica = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=side.bucket_mb)
    after = side.prepare(replica) if side.prepare is not None else (lambda: None)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=LR, fused=True)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        total, weight = next_token(replica(batch["input_ids"]), batch)
        loss = total / weight
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    @torch.no_grad()
    def evaluate(batch: Batch) -> float:
        total, weight = next_token(replica.module(batch["input_ids"]), batch)
        return float(total / weight)

    return step, evaluate, replica


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
