"""The bare script that start-up is measured against: `torchrun --nproc-per-node 2 bare.py OUT
KEY=NUMBER ...`.

One optimizer step of plain DDP; rank 0 then writes the loss to the file OUT. Keys: batch, and
`work.build`'s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plain_ddp
import torch.distributed as dist
import work


def first_step(batch: int, **size: int) -> float:
    trainer = plain_ddp.trainer(work.build(**size), work.adamw, clip=1.0)
    rows = work.rows_of(
        work.batch_of(work.Text(size["seq_len"]), batch, 0), dist.get_rank(), dist.get_world_size()
    )
    return trainer.step(rows).item()


def main(out: str, *pairs: str) -> None:
    dist.init_process_group("gloo")
    loss = first_step(**{key: int(value) for key, value in (pair.split("=") for pair in pairs)})
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
