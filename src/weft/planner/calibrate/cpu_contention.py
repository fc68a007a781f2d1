"""How much other programs used the processors while something was measured. Known on Linux
alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STAT = Path(
    "/proc/stat"
)  # proc(5): of each processor user, nice, system, idle, iowait, irq, softirq, steal


@dataclass(frozen=True)
class CpuLoadSample:
    """Seconds that the processors which this process may use have worked, for anybody, and the
    time."""

    busy_s: float
    at_s: float

    @classmethod
    def now(cls) -> Self:
        try:
            lines = STAT.read_text(encoding="ascii").splitlines()
        except OSError:
            return cls(0.0, time.monotonic())
        mine = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        found = [list(map(int, words[1:9])) for line in lines if (words := line.split())[0] in mine]
        busy = sum(sum(each) - each[3] - each[4] for each in found)
        return cls(busy / os.sysconf("SC_CLK_TCK"), time.monotonic())

    def others(self, own_s: float) -> float:
        """Since then: of the processors' time, the share that they worked for others, and not
        `own_s`."""
        now = CpuLoadSample.now()
        spent = (now.at_s - self.at_s) * len(os.sched_getaffinity(0)) if now.busy_s else 0.0
        return max(0.0, now.busy_s - self.busy_s - own_s) / spent if spent else 0.0
