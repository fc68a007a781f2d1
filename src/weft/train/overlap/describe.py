"""What pictures of a profiled step say in words."""

from __future__ import annotations

from weft.pipeline import seconds_text, share_text

from .profiled_step import ProfiledRank, ProfiledStep

OTHER = "outside of forward and backward"


def headline(step: ProfiledStep) -> str:
    """Which step, and how long it took."""
    return f"step {step.number}, {len(step.ranks)} ranks: {seconds_text(step.stop_s)}"


def comm_line(rank: ProfiledRank, label: str) -> str:
    """How often and how long something communicates, and how much of that beside computing."""
    took, beside = rank.comm_s(label), rank.overlapped_s(label)
    share = share_text(beside, took)
    return f"{len(rank.comms[label])} x {label}: {seconds_text(took)}, overlapped {share}"
