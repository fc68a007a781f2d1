"""llm-analysis: `LLMAnalysis(...).training(...)`, with its own gpu_configs.

It asks for what a device reaches of its peaks. Where nothing was measured, its README names 0.5 of
the FLOPs for training, and 0.9 of the memory; both are used. It has no pipeline bubble, and says
so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import GIB, Cannot, Predict, drive, only

GPUS = {
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "H100-SXM5-80GB": "h100-sxm-80gb",
}
FLOPS, MEMORY = 0.5, 0.9
RECOMPUTE = {"none": "NONE", "selective": "ATTN_COMPUTE", "full": "FULL"}


def make(checkout: Path) -> Predict:
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import (
        DtypeConfig,
        ModelConfig,
        ParallelismConfig,
        get_gpu_config_by_name,
    )

    gpus = {name: get_gpu_config_by_name(file) for name, file in GPUS.items()}

    def predict(run: Any) -> tuple[float, float]:
        only(
            run, accelerator=GPUS, cp=[1], experts=[1], recompute=RECOMPUTE, dtype=["fp16", "bf16"]
        )
        if run.tp > 8:
            raise Cannot("tp over more than a node")
        model = ModelConfig(
            name=run.id,
            num_layers=run.layers,
            n_head=run.heads,
            hidden_dim=run.hidden,
            vocab_size=run.vocab,
            max_seq_len=run.seq_len,
            num_key_value_heads=run.kv_heads,
            ffn_embed_dim=run.ffn,
            mlp_gated_linear_units=run.gated,
        )
        layout = ParallelismConfig(
            tp_size=run.tp,
            pp_size=run.pp,
            dp_size=run.dp if run.zero else 1,
            rdp_size=1 if run.zero else run.dp,
            sp_size=run.tp if run.sequence else 1,
        )
        found = LLMAnalysis(
            model,
            gpus[run.accelerator],
            DtypeConfig(),
            layout,
            flops_efficiency=FLOPS,
            hbm_memory_efficiency=MEMORY,
        ).training(
            batch_size_per_gpu=run.microbatch,
            global_batch_size=run.batch,
            seq_len=run.seq_len,
            flash_attn=run.flash,
            activation_recomputation=ActivationRecomputation[RECOMPUTE[run.recompute]],
            ds_zero=DSZeRO(run.zero),
        )
        return found["latency_per_iter"], found["estimated_peak_memory_per_gpu"] / GIB

    return predict


if __name__ == "__main__":
    drive(make)
