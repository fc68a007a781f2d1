"""Checks of options that several synchronisers have."""

from __future__ import annotations

from weft.core import require


def bucket_size(megabytes: float) -> int:
    """Bytes of a bucket of this many MiB."""
    require("sync.bucket_mb", megabytes, float, lambda x: x > 0, "a size above 0, in 2^20 bytes")
    return max(1, int(megabytes * 2**20))


def check_timeout(timeout_s: float) -> None:
    require(
        "sync.timeout_s", timeout_s, float, lambda x: 0 < x < 10**6, "a number of seconds above 0"
    )


def check_period(period: int, fragments: int, delay: int, timeout_s: float) -> None:
    """Check the options of a synchroniser that exchanges every `period` steps."""
    check_timeout(timeout_s)
    require("sync.period", period, int, lambda x: x >= 1, "a number of steps")
    require(
        "sync.fragments",
        fragments,
        int,
        lambda x: 1 <= x <= period,
        f"a number from 1 to period = {period}",
    )
    require(
        "sync.delay",
        delay,
        int,
        lambda x: 0 <= x < period,
        f"a number of steps below period = {period}",
    )
