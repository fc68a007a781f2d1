"""How busy the GPUs are, by the driver."""

from __future__ import annotations

import torch

from .metrics import highest_over_ranks


def why_unknown(device: torch.device) -> str | None:
    """Why this GPU's utilization cannot be read; None where it can be, and without a GPU."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.utilization(device)
    except ModuleNotFoundError:
        package = "amdsmi" if torch.version.hip else "nvidia-ml-py"
        return f"pip install {package}"
    except Exception as error:  # the driver's own errors, as of a part of a GPU
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


class GpuUse:
    """Of the GPUs of one run. All ranks call `line` together."""

    def __init__(self, device: torch.device):
        self._device, self._known = device, why_unknown(device) is None

    def line(self) -> dict[str, float]:
        """For metrics.jsonl: the share of the last moment (up to a second) in which the least busy
        GPU computed. Nothing without GPUs, or where some rank cannot read it."""
        if self._device.type != "cuda":
            return {}
        lowest = -highest_over_ranks(-self._percent())
        return {} if lowest < 0 else {"gpu_utilization": lowest / 100}

    def _percent(self) -> int:
        """-1 where it cannot be read."""
        try:
            return torch.cuda.utilization(self._device) if self._known else -1
        except Exception:  # the driver's own errors, as after its files were replaced
            self._known = False
            return -1
