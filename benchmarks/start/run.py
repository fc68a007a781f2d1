"""What a process holds while it starts a model bigger than itself: whole models beside shards.

    python benchmarks/start/run.py [drawn] [files] [table]

Each rank is a process of its own on the CPU. Its peak of resident memory, from before the model is
built until the engine stands, is read from the kernel; bytes of files from /proc/self/io.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import weft
from weft.launch import Pool
from weft.losses import next_token
from weft.models import decoder

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parts import Results, measure, parser  # noqa: E402

MB = 1e6
SIZE: dict[str, int] = {"vocab": 32000, "layers": 16, "dim": 2048, "heads": 16}
LAYOUTS = ("fsdp4", "tp4", "pp4", "dp2.fsdp2")


@dataclass(frozen=True)
class Started:
    """What one rank saw. All but `seconds` in MB."""

    peak: float
    shards: float
    largest: float
    read: float
    seconds: float


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


def read_mb() -> float:
    """What this process has read by system calls."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"]) / MB


def llama(folder: Path, tensors: Any = None) -> torch.nn.Module:
    """A transformers Llama of a directory, from its files or from these tensors."""
    from weft.nn import build_hf_model

    return build_hf_model(str(folder), {}, None, torch.device("cpu"), tensors=tensors)


def start(layout: str, whole: bool, build: Any, folder: Path | None) -> Started:
    """Build a model, and make its engine, on one rank."""
    if folder is not None:
        from transformers import LlamaForCausalLM  # noqa: F401
    engine_of(layout, False, partial(decoder, vocab=64, layers=2, dim=32, heads=4), None)  # imports
    before, read, began = peak_mb(), read_mb(), time.perf_counter()
    engine = engine_of(layout, whole, build, folder)
    seconds = time.perf_counter() - began
    held = [shard.tensor.nbytes / MB for shard in engine.state.weights()]
    params = [weight.shape for weight in engine.plan.weights]
    largest = max(torch.Size(shape).numel() for shape in params) * 4 / MB
    return Started(peak_mb() - before, sum(held), largest, read_mb() - read, seconds)


def engine_of(layout: str, whole: bool, build: Any, folder: Path | None) -> weft.Engine:
    if whole:
        torch.manual_seed(0)
        model = build() if folder is None else build(folder)
    elif folder is None:
        model = weft.deferred_init(build, 0)
    else:
        files = sorted(folder.glob("*.safetensors"))
        model = weft.deferred_init(partial(build, folder), 0, files)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    sample = {"input_ids": tokens}
    plan = weft.plan(model, layout, batch=16, accumulate=4, loss=next_token, sample=sample)
    return weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")


def rows_of(source: str) -> list[dict[str, Any]]:
    """The rank with the largest peak, of each layout and way to start."""
    drawn = partial(decoder, **SIZE)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) if source == "files" else None
        if folder is not None:
            with Pool(1) as pool:
                pool.run(save_llama, folder)
        for layout in LAYOUTS:
            for whole in (False, True):
                with Pool(4) as pool:  # new processes: a peak does not go down again
                    build = drawn if folder is None else llama
                    ranks = pool.run(start, layout, whole, build, folder, timeout=1800)
                most = max(ranks, key=lambda each: each.peak)
                rows.append({"layout": layout, "whole": whole, **asdict(most)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def save_llama(folder: Path) -> None:
    """Write a directory with the weights of a Llama of the same size, in bf16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZE["vocab"],
        hidden_size=SIZE["dim"],
        intermediate_size=5504,
        num_hidden_layers=SIZE["layers"],
        num_attention_heads=SIZE["heads"],
    )
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def tables(results: Results) -> tuple[list[str], bool]:
    lines, right = [], True
    for source, found in results.items():
        lines += [
            f"Weights {source}, `{found['command']}`:",
            "",
            "| layout | start | shards, MB | largest weight, MB | peak, MB | read, MB | s |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in found["runs"]:
            how = "whole model" if row["whole"] else "shards"
            figures = [f"{row[k]:.0f}" for k in ("shards", "largest", "peak", "read", "seconds")]
            lines.append(f"| `{row['layout']}` | {how} | {' | '.join(figures)} |")
            right &= row["whole"] or row["peak"] < 1.15 * (row["shards"] + 2 * row["largest"]) + 100
        lines.append("")
    return lines, right


def main() -> int:
    parts = {source: partial(rows_of, source) for source in ("drawn", "files")}
    return measure(HERE, parser(__doc__, parts).parse_args().parts, parts, tables)


if __name__ == "__main__":
    sys.exit(main())
