"""A line of weft's own, beside what a run prints. No torch."""

from __future__ import annotations

import sys


def log_line(text: str) -> None:
    """On stderr, at once."""
    print(f"weft: {text}", file=sys.stderr, flush=True)
