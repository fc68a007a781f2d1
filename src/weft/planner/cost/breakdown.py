"""The named parts that an estimate is the sum of, each with its formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from weft.core import REPLICA_AXIS, STAGE_AXIS

from .layout_batch import Array

EXPOSED = "exposed"  # the last word of the name of a part that waits for an exchange


class TimePart(StrEnum):
    """The parts of a step's time that are named elsewhere; a value is what users read. Waits for
    an axis within each layer are named by `exposed_over`."""

    BUBBLE = "bubble"
    MESSAGES = f"{STAGE_AXIS} {EXPOSED}"
    GRADIENTS = f"{REPLICA_AXIS} {EXPOSED}"
    FSDP_REDUCE = f"fsdp reduce {EXPOSED}"
    FSDP_GATHER = f"fsdp gather {EXPOSED}"
    FSDP_FORWARD_GATHER = f"fsdp forward gather {EXPOSED}"
    FSDP_BACKWARD_GATHER = f"fsdp backward gather {EXPOSED}"
    HOST = f"host {EXPOSED}"
    ACCUMULATION = "accumulation"
    OPTIMIZER = "optimizer"
    FIXED = "fixed"
    STRAGGLERS = "stragglers"


class MemoryPart(StrEnum):
    """The parts of the most that a rank holds at once; a value is what users read."""

    WEIGHTS = "weights"
    GATHERED_WEIGHTS = "gathered weights"
    GRADIENTS = "gradients"
    DUMMY_GRADIENTS = "dummy gradients"  # Megatron's, for gradients that a fused matmul has summed
    OPTIMIZER = "optimizer"
    AVERAGES = "averages"  # of the weights
    SYNCHRONISER = "synchroniser"  # kept by a synchroniser or codec
    ACTIVATIONS = "activations"
    WORKING = "temporaries"  # logits, or temporaries of one backward
    UPDATE = "update"  # what the optimizer's step needs above what a backward did
    START = "start"  # what is held before the first step, above all that training holds


def exposed_over(axis: str) -> str:
    """The name of the part that waits for an axis."""
    return f"{axis} {EXPOSED}"


def waits_for(name: str) -> str | None:
    """The axis, or `host`, that the part of this name waits for; None: it waits for none."""
    words = name.split()
    return words[0] if words[-1] == EXPOSED else None


@dataclass(frozen=True)
class CostPart:
    """`value` of each choice, and the formula that gave it, with what its symbols stand for."""

    name: str
    value: Array
    formula: str
    symbols: Mapping[str, Array | float] = field(default_factory=dict)
