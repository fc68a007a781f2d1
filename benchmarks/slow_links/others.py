"""One replica of torchft's DistributedDataParallel, in a Python that has torchft and need not have
weft.

    others.py SIDE STEPS EVAL_EVERY OUTPUT

Only times and bytes: its losses are those of DDP. Arguments and OUTPUT as of worker.py. Rank 0 runs
the lighthouse.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2] / "src")
)  # of weft, the model alone: it asks for torch

from weft.nn.models import decoder

BATCH, SEQ_LEN, LR, LIGHTHOUSE = 12, 128, 1e-3, 29600


def main(steps: int, output: str) -> None:
    torch.set_num_threads(1)
    rank, size, first = (
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        os.environ["MASTER_ADDR"],
    )
    own = re.search(
        r"inet ([\d.]+)", os.popen(f"ip -4 -o addr show {os.environ['GLOO_SOCKET_IFNAME']}").read()
    )
    assert own is not None
    lighthouse = (
        LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE}", min_replicas=size) if rank == 0 else None
    )
    store = dist.TCPStore(own[1], 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=size,
        load_state_dict=lambda _: None,
        state_dict=dict,
        replica_id=f"replica{rank}",
        store_addr=own[1],
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{first}:{LIGHTHOUSE}",
        hostname=own[1],
        init_sync=False,
        timeout=timedelta(minutes=2),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(
        manager, decoder(vocab=256, dim=256, layers=6, heads=8, seq_len=SEQ_LEN)
    )
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    times, losses, sent = [], [], []
    for _ in range(steps):
        tokens = torch.randint(0, 256, (BATCH // size, SEQ_LEN + 1))
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        sent.append(_sent_bytes())
    assert manager.num_participants() == size, "not all replicas took part"
    if rank == 0:
        found = {"step_s": [times], "sent_bytes": sent, "loss": losses, "val_loss": {}}
        Path(output).write_text(json.dumps(found))
        time.sleep(3)  # the others may still ask
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    os._exit(0)


def _sent_bytes() -> int:
    """What has left this host."""
    found = re.search(
        rf"{os.environ['GLOO_SOCKET_IFNAME']}:\s*(.*)", Path("/proc/net/dev").read_text()
    )
    return int(found[1].split()[8]) if found else 0


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[4])
