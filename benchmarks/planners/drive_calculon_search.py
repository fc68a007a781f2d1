"""Calculon's own search: what it says of a layout with the best of the switches that weft has no
word for. Those are the overlap of data parallelism, the network of each axis, and whether gathers
of sequence parallelism run again.

`OptimalExecution.search` goes over them for one layout, as `llm-optimal-execution` does for all.
Nothing rests in host memory, tensor parallelism does not overlap, activations are fused.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from drive_calculon import RECOMPUTE, ROOM_GIB, SYSTEMS
from driver import GIB, Cannot, Predict, drive, only

EVERY = 10**6  # of the executions of a layout


def make(checkout: Path) -> Predict:
    from calculon import System
    from calculon.llm import Llm
    from calculon.llm.optimal_execution import OptimalExecution

    def system(name: str, room_gib: float | None) -> Any:
        config = json.loads((checkout / f"systems/{SYSTEMS[name]}.json").read_text())
        config["mem2"]["GiB"] = 0
        config["mem1"]["GiB"] = room_gib or config["mem1"]["GiB"]
        return System(config)

    def predict(run: Any) -> tuple[float, float]:
        only(run, accelerator=SYSTEMS, recompute=RECOMPUTE, gated=[False], experts=[1], cp=[1])
        only(run, zero=[0, 1])
        if run.pp > 1 and run.layers % (run.pp * run.chunks):
            raise Cannot("stages that are not of equal size")
        application = Llm.Application(
            {
                "hidden": run.hidden,
                "feedforward": run.ffn,
                "seq_size": run.seq_len,
                "attn_heads": run.heads,
                "attn_size": run.hidden // run.heads,
                "num_blocks": run.layers,
            }
        )

        def executions(room_gib: float | None) -> list[Any]:
            found = []
            for how in ("rs_ag",) if run.sequence else ("ar", "p2p_rs_ag"):
                made = OptimalExecution.search(
                    debug=False,
                    top_n=EVERY,
                    layers=False,
                    num_procs=run.devices,
                    max_batch_size=run.batch,
                    datatype="float16",
                    app=copy.deepcopy(application),
                    syst=system(run.accelerator, room_gib),
                    tp=run.tp,
                    pp=run.pp,
                    dp=run.dp,
                    ppint=run.chunks,
                    batch_size=run.batch,
                    activation_recompute=RECOMPUTE[run.recompute],
                    optimizer_sharding=run.zero == 1 and run.dp > 1,
                    tensor_par_comm_type=how,
                    fused_acts=[True],
                    mbs_break=False,
                    allow_tp_overlap=False,
                    allow_dp_overlap=True,
                )
                found += [one for one in made[0] if one[1]["microbatch_size"] == run.microbatch]
            return sorted(found, key=lambda one: -one[0])

        found = executions(None) or executions(ROOM_GIB)
        if not found:
            raise Cannot("no execution")
        rate, _, stats = found[0]
        return run.batch / rate, stats["proc_mem_tier1_cap_req"] / GIB

    return predict


if __name__ == "__main__":
    drive(make)
