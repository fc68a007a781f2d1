"""Prints a line of weft's own among the output of a run. No torch."""

from __future__ import annotations

import sys

from weft.core import LINES, printable, translate


def log_line(text: str) -> None:
    """On stderr, at once."""
    print(f"weft: {printable(translate(text), LINES)}", file=sys.stderr, flush=True)
