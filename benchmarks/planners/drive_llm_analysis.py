"""llm-analysis: `LLMAnalysis(...).training(...)`, with its own gpu_configs.

It asks for what a device reaches of its peaks. Where nothing was measured, its README names 0.5 of the FLOPs for
training, and 0.9 of the memory; both are used. It has no pipeline bubble, and says so.
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

    def predict(row: Any) -> tuple[float, float]:
        only(row, accelerator=GPUS, cp=[1], experts=[1], recompute=RECOMPUTE, dtype=["fp16", "bf16"])
        if row.tp > 8:
            raise Cannot("tp over more than a node")
        model = ModelConfig(
            name=row.id, num_layers=row.layers, n_head=row.heads, hidden_dim=row.hidden, vocab_size=row.vocab,
            max_seq_len=row.seq_len, num_key_value_heads=row.kv_heads, ffn_embed_dim=row.ffn,
            mlp_gated_linear_units=row.gated,
        )  # fmt: skip
        layout = ParallelismConfig(
            tp_size=row.tp, pp_size=row.pp, dp_size=row.dp if row.zero else 1, rdp_size=1 if row.zero else row.dp,
            sp_size=row.tp if row.sequence else 1,
        )  # fmt: skip
        found = LLMAnalysis(
            model, gpus[row.accelerator], DtypeConfig(), layout, flops_efficiency=FLOPS, hbm_memory_efficiency=MEMORY
        ).training(
            batch_size_per_gpu=row.microbatch, global_batch_size=row.batch, seq_len=row.seq_len, flash_attn=row.flash,
            activation_recomputation=ActivationRecomputation[RECOMPUTE[row.recompute]], ds_zero=DSZeRO(row.zero),
        )  # fmt: skip
        return found["latency_per_iter"], found["estimated_peak_memory_per_gpu"] / GIB

    return predict


if __name__ == "__main__":
    drive(make)
