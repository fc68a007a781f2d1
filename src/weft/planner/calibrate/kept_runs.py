"""Which runs this machine has trained: an index of their run folders, beside the sheet that
`weft calibrate` writes. What they took stands in the folders."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from weft.core import METRICS, append_file, read_file, replace_file

from ..cost.card_sheet import sheet_of_card
from ..cost.hardware import LOCAL, Hardware, local_sheet
from .measure import processor

MOST = 100  # folders in the index
LATEST = 8  # of which a plan asks


def index() -> Path:
    """Where the index is."""
    return local_sheet().with_name("runs.jsonl")


def keep_run(folder: Path, device: torch.device) -> None:
    """Note a run that this machine has trained. A home that cannot be written keeps nothing."""
    cuda = device.type == "cuda"
    title = torch.cuda.get_device_name(device) if cuda else processor()
    line = {"folder": str(folder.resolve()), "kind": device.type, "device": title}
    with suppress(OSError):
        index().parent.mkdir(parents=True, exist_ok=True)
        before = _lines()
        if len(before) >= MOST:
            kept = [json.dumps(each) + "\n" for each in before[1 - MOST :]]
            replace_file(index(), "".join(kept))
        append_file(index(), json.dumps(line) + "\n")


def kept_runs(hardware: Hardware) -> list[Path]:
    """The run folders that are still there of runs on hardware of this sheet, the latest first."""
    found = [
        Path(line["folder"])
        for line in reversed(_lines())
        if _is_of(hardware, line["kind"], line["device"])
    ]
    return [folder for folder in dict.fromkeys(found) if (folder / METRICS).is_file()][:LATEST]


def _is_of(hardware: Hardware, kind: str, device: str) -> bool:
    if hardware.name == LOCAL:
        return hardware.kind == kind and hardware.title.startswith(device)
    return kind == "cuda" and sheet_of_card(device) == hardware.name


def _lines() -> list[dict[str, str]]:
    """Those of the index that are whole."""
    try:
        texts = read_file(index()).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            names = ("folder", "kind", "device")
            if isinstance(line, dict) and all(isinstance(line.get(name), str) for name in names):
                found.append(line)
    return found
