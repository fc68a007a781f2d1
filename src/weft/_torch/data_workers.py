"""What a process of a DataLoader knows of itself.

`torch.utils.data.get_worker_info` is public; that there be nothing to get is not. An argument of
DataLoader would replace it, by which an iterable dataset is told not to divide itself.
"""

from __future__ import annotations

from torch.utils.data import _utils


def hide_worker_info() -> None:
    """From now on `get_worker_info()` is None in this process, so that iterables (Hugging Face's,
    webdataset's) that take their part by it give all that they have."""
    _utils.worker._worker_info = None  # type: ignore[attr-defined]
