"""SimuMax: `PerfLLM().configure(...).run_estimate()`, then its analysis of cost and of memory.

It ships no A100 with NVLink. Its docs (system.md) say to copy the nearest shipped system, and to
take the networks of the topology closest to the machine's: so this one is its a100_pcie, with its
tables of operators, and the networks of its B200, whose nodes are built alike, at the rates of an
A100's links. A B200 is as it ships.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driver import Cannot, Predict, drive, only

NVLINK_GBPS, NODE = 300, 8
A100, B200 = "A100-SXM4-80GB", "B200-SXM-180GB"
# of Transformer Engine on a B200: from 2.3 on gradients that are summed elsewhere have a stand-in
ENGINE = "2.10.0"
RECOMPUTE = {"none": None, "selective": "sdp_only", "full": "full_block"}


def make(checkout: Path) -> Predict:
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    shipped = checkout / "configs/system"
    nearest = json.loads((shipped / "a100_pcie.json").read_text())
    newest = json.loads((shipped / "b200_bf16_ceperm.json").read_text())
    systems: dict[Any, Any] = {B200: SystemConfig.init_from_dict(newest)}

    def system(nic_bps: float) -> Any:
        if nic_bps not in systems:
            networks = json.loads(json.dumps(newest["networks"]))
            rates = {
                "low_intra_node": NVLINK_GBPS,
                "high_intra_node": NVLINK_GBPS,
                "inter_node": NODE * nic_bps / 1e9,
            }
            for name, gbps in rates.items():  # between nodes, of a whole node
                networks[name]["bandwidth"]["gbps"] = gbps
            systems[nic_bps] = SystemConfig.init_from_dict(
                nearest | {"sys_name": "a100_sxm", "networks": networks}
            )
        return systems[nic_bps]

    def predict(run: Any) -> tuple[float, float]:
        newer = run.accelerator == B200
        only(
            run,
            accelerator=[A100, B200],
            cp=[1, 2] if newer else [1],
            experts=[1],
            zero=[0, 1],
            dtype=["fp16", "bf16"],
            recompute=RECOMPUTE,
        )
        ends = None  # layers of the first and of the last stage, where the others have more
        if run.layers % (run.pp * run.chunks):
            ends, odd = divmod(run.layers - -(-run.layers // run.pp) * (run.pp - 2), 2)
            if run.chunks > 1 or odd or ends < 1:
                raise Cannot("layers that the stages do not divide")
        mode = RECOMPUTE[run.recompute]
        strategy = StrategyConfig(
            seq_len=run.seq_len,
            micro_batch_size=run.microbatch,
            micro_batch_num=run.batch // (run.microbatch * run.dp),
            dtype=run.dtype,
            world_size=run.devices,
            tp_size=run.tp,
            cp_size=run.cp,
            pp_size=run.pp,
            ep_size=1,
            etp_size=1,
            enable_sequence_parallel=run.sequence,
            interleaving_size=run.chunks,
            pp_comm_async=run.chunks == 1,
            num_layers_in_first_pipeline_stage=ends,
            num_layers_in_last_pipeline_stage=ends,
            zero_state=run.zero,
            use_flash_sdp=run.flash,
            use_math_sdp=not run.flash,
            te_version=ENGINE if newer else None,
            enable_recompute=mode is not None,
            recompute_granularity=mode,
            recompute_layer_num=run.layers if mode else 0,
        )
        model = ModelConfig(
            hidden_size=run.hidden,
            head_num=run.heads,
            kv_head_num=run.kv_heads,
            head_size=run.hidden // run.heads,
            intermediate_size=run.ffn,
            layer_num=run.layers,
            vocab_size=run.vocab,
            use_swiglu=run.gated,
        )
        performance = PerfLLM()
        machine = systems[B200] if newer else system(run.nic_bps)
        performance.configure(strategy_config=strategy, model_config=model, system_config=machine)
        performance.run_estimate()
        tokens_per_s = performance.analysis_cost().data["throughput_per_accelerator"] * run.devices
        stages = performance.get_pp_stage_peak_mem(performance.analysis_mem(), "peak_mem", toG=True)
        return run.batch * run.seq_len / tokens_per_s, max(stages.values())

    return predict


if __name__ == "__main__":
    drive(make)
