"""Calculon: `Llm(application).compile(system, execution).run(system)`, with its own systems/*.json.

As in its own validation (calculon llm-validation): tensor parallel on the first network, the rest
on the second where they leave a node; unfused activations; `rs_ag` with its all-gathers done again
for sequence parallelism. No overlap of data parallelism: with it, steps without a pipeline come out
longer than without (5.5 s for 2.9 s in the first run of SC'21's Table 1, where 3.5 s were
measured).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from driver import GIB, Cannot, Predict, drive, only

SYSTEMS = {"A100-SXM4-80GB": "a100_80g", "H100-SXM5-80GB": "h100_80g_nvl8"}
RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
ROOM_GIB = 1e6  # it gives no time for what it holds not to fit, so fitting is judged here


def make(checkout: Path) -> Predict:
    from calculon import System
    from calculon.llm import Llm

    files = {
        name: json.loads((checkout / f"systems/{file}.json").read_text())
        for name, file in SYSTEMS.items()
    }
    systems: dict[tuple[str, float], Any] = {}

    def system(name: str, nic_bps: float) -> Any:
        if (name, nic_bps) not in systems:
            config = json.loads(json.dumps(files[name]))
            config["networks"][1]["bandwidth"] = nic_bps / 1e9
            config["mem1"]["GiB"] = ROOM_GIB
            systems[name, nic_bps] = System(config)
        return systems[name, nic_bps]

    def predict(run: Any) -> tuple[float, float]:
        only(
            run,
            accelerator=SYSTEMS,
            gated=[False],
            experts=[1],
            cp=[1],
            zero=[0, 1],
            recompute=RECOMPUTE,
            dtype=["fp16", "bf16"],
            kv_heads=[1, run.heads],
        )
        if run.flash and run.recompute == "none":
            raise Cannot("attention that keeps no scores")
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
        far = int(run.devices > 8)
        execution = Llm.Execution.from_json(
            {
                "num_procs": run.devices,
                "tensor_par": run.tp,
                "pipeline_par": run.pp,
                "data_par": run.dp,
                "tensor_par_net": int(run.tp > 8),
                "pipeline_par_net": far,
                "data_par_net": far,
                "batch_size": run.batch,
                "microbatch_size": run.microbatch,
                "datatype": "float16",
                "fused_activation": False,
                "attention_type": "multihead" if run.kv_heads == run.heads else "multiquery",
                "activation_recompute": RECOMPUTE[run.recompute],
                "pipeline_interleaving": run.chunks,
                "optimizer_sharding": run.zero == 1 and run.dp > 1,
                "tensor_par_comm_type": "rs_ag" if run.sequence else "ar",
                "tensor_par_overlap": "none",
                "seq_par_ag_redo": run.sequence and run.recompute != "full",
                "data_par_overlap": False,
                "weight_offload": False,
                "activations_offload": False,
                "optimizer_offload": False,
                "training": True,
            }
        )
        model = Llm(application, logging.getLogger())
        machine = system(run.accelerator, run.nic_bps)
        model.compile(machine, execution)
        model.run(machine)
        return model.get_total_time(), model.get_mem_tier1_cap_req() / GIB

    return predict


if __name__ == "__main__":
    drive(make)
