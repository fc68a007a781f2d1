"""weft in a loop of your own: a plan, an engine, and a plain `for`.

    python examples/own_loop.py  # one process
    torchrun --nproc-per-node 2 examples/own_loop.py --layout fsdp2  # two, half the shards each
    torchrun --nproc-per-node 2 examples/own_loop.py --layout pp2  # two, half the layers each

Any layout works: the batches, and so the losses, are the same.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

import weft
from weft.data import Loader, collate, stdlib
from weft.losses import next_token
from weft.models import decoder


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument(
        "--layout", default="dp1", help='as in "dp2", "fsdp2.tp2", "tp2+sequence"'
    )
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--batch", type=int, default=16, help="samples per step, over all ranks")
    arguments.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    options = arguments.parse_args()

    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group()

    torch.manual_seed(0)
    model = decoder(dim=128, layers=2, heads=4, seq_len=128)
    data = stdlib(seq_len=128)
    sample = collate([data[0], data[1]])  # what a pipeline is cut along
    plan = weft.plan(
        model,
        options.layout,
        batch=options.batch,
        accumulate=options.accumulate,
        loss=next_token,
        sample=sample,
    )
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    engine = weft.Engine(model, plan, optimizer=optimizer, loss=next_token, clip=1.0)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        print(plan)

    # which part of every batch is this process's
    part = {
        "accumulate": options.accumulate,
        "data_rank": engine.data_rank,
        "data_size": engine.data_size,
    }
    loader = Loader(data, options.batch, seed=0, **part)
    for batch in islice(loader, options.steps):
        result = engine.step(batch)
        if first and engine.steps_done % 10 == 0:
            print(
                f"step {engine.steps_done}: loss {result.loss:.3f}, gradient norm"
                f" {result.grad_norm:.3f}",
                flush=True,
            )

    held_out = Loader(
        stdlib(seq_len=128, split="val"), options.batch, seed=0, shuffle=False, **part
    )
    result = engine.evaluate(next(held_out))
    if first:
        print(f"held out: loss {result.loss:.3f}")
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
