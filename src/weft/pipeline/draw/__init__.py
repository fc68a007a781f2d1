"""Timelines to look at: in the terminal, as SVG, and in Perfetto or chrome://tracing. Pure text; no
torch.

Each takes [(label, timeline), ...] and draws them one under the other on one time axis: schedules
side by side, or a measured run under the predicted one.
"""

from __future__ import annotations

from .perfetto import perfetto
from .svg import svg
from .terminal import text

__all__ = ["perfetto", "svg", "text"]
