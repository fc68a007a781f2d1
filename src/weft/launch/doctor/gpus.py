"""The GPUs of this host, and whether each computes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from .findings import Finding

SIZE = 512  # of the square matrices that each multiplies
BUSY = 0.1  # the share of a GPU's memory, above which others use it


def gpus() -> Finding:
    """Count, kind, memory, peer access, and whether a product of matrices is right on each."""
    facts: dict[str, Any] = {
        "driver": _driver(),
        "torch_cuda": torch.version.cuda,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": [],
    }
    if torch.version.cuda and facts["driver"]:
        torch.cuda.init()  # raises why it cannot
    for index in range(torch.cuda.device_count()):
        facts["gpus"].append(_gpu(index))
    count = len(facts["gpus"])
    facts["no_peers"] = [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    return gpu_finding(facts)


def _gpu(index: int) -> dict[str, Any]:
    kind, device = torch.cuda.get_device_properties(index), torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(index)
    with torch.cuda.device(device):
        return {
            "name": kind.name,
            "memory_bytes": total,
            "free_bytes": free,
            "capability": f"{kind.major}.{kind.minor}",
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "problem": _check_matmul(device),
        }


def _check_matmul(device: torch.device) -> str | None:
    """What is wrong with a product of matrices on this device; None: nothing."""
    try:
        a = torch.linspace(-1, 1, SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE)
        here = a.to(device=device, dtype=torch.float32)
        error = ((here @ here).double().cpu() - a @ a).abs().max().item()
    except RuntimeError as raised:
        return str(raised).splitlines()[0]
    return None if error < 0.1 else f"a product of matrices is wrong by {error:g}"


def gpu_finding(facts: dict[str, Any]) -> Finding:
    """What follows from what was seen."""
    found, driver = facts["gpus"], facts["driver"]
    hidden = f" (CUDA_VISIBLE_DEVICES={facts['visible']})" if facts["visible"] is not None else ""
    if not found and driver and not facts["torch_cuda"]:
        advice = "this torch is built without CUDA: install the build for it, or runs go on the CPU"
        return Finding(
            "gpus",
            "wrong",
            f"the driver is installed ({driver}), and torch is built without CUDA",
            advice,
            facts,
        )
    if not found:
        return Finding(
            "gpus",
            "note",
            f"none{hidden}",
            "runs use gloo on the CPU, with one process for each rank",
            facts,
        )
    kinds = sorted(
        {(each["name"], each["memory_bytes"], each["capability"], each["bf16"]) for each in found}
    )
    shown = "; ".join(
        f"{sum(each['name'] == name and each['memory_bytes'] == total for each in found)} x {name},"
        f" {decimal(total)}, compute capability {capability}, {'bf16' if bf16 else 'no bf16'}"
        for name, total, capability, bf16 in kinds
    )
    shown += f"; driver {driver or 'unknown'}{hidden}"
    broken = [f"{index}: {each['problem']}" for index, each in enumerate(found) if each["problem"]]
    if broken:
        advice = (
            f"GPU {'; GPU '.join(broken)}. Leave it out with CUDA_VISIBLE_DEVICES, and see dmesg"
        )
        return Finding("gpus", "wrong", shown, advice, facts)
    notes = []
    busy = [
        index
        for index, each in enumerate(found)
        if each["free_bytes"] < (1 - BUSY) * each["memory_bytes"]
    ]
    if busy:
        notes.append(f"others use GPU {', '.join(map(str, busy))}: see nvidia-smi")
    if len(kinds) > 1:
        notes.append("the slowest kind sets the pace of all")
    if facts["no_peers"]:
        a, b = facts["no_peers"][0]
        notes.append(
            f"{len(facts['no_peers'])} pairs, as {a} and {b}, reach each other through host memory"
            " only: slower"
        )
    if not all(each["bf16"] for each in found):
        notes.append("bf16 is emulated: use fp16 or fp32")
    return Finding("gpus", "note" if notes else "ok", shown, "; ".join(notes), facts)


def _driver() -> str | None:
    """The version of NVIDIA's driver, on Linux."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else "of unknown version"
