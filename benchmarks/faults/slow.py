"""Windows of the standard library's source that take their time to come, so that there is some in
which to fail."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from weft.train.data import stdlib


class Slow:
    def __init__(self, split: str = "train", seq_len: int = 16, wait_s: float = 0.004):
        self.inner, self.wait_s = stdlib(split=split, seq_len=seq_len), wait_s
        self.vocab = self.inner.vocab

    def __len__(self) -> int:
        return min(len(self.inner), 4096)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.wait_s)
        found: Any = self.inner[index]
        return found
