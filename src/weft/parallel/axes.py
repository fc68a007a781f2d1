"""The axes by what they divide, read from the strategies' traits."""

from __future__ import annotations

from weft.core import Divides, Plan, computes_whole_sequences

from .strategies import axis_table

DATA_AXES = axis_table().dividing(Divides.SAMPLES)  # over which the batch is divided
SEQUENCE_AXES = axis_table().dividing(Divides.POSITIONS)
TOKEN_AXES = DATA_AXES + SEQUENCE_AXES  # whose ranks compute with other tokens
FEATURE_AXES = axis_table().dividing(Divides.FEATURES)
VOCABULARY_AXES = axis_table().dividing(Divides.VOCABULARY)
EXPERT_AXES = axis_table().dividing(Divides.EXPERTS)  # by themselves; others by their option
SPREADING = tuple(axis for axis, t in axis_table().traits.items() if t.spreads_experts)
HEAD_AXES = axis_table().dividing(Divides.ATTENTION_HEADS)  # Ulysses
KEY_AXES = tuple(axis for axis in SEQUENCE_AXES if axis not in HEAD_AXES)  # keys and values travel
STATE_AXES = axis_table().dividing(Divides.STATE)


def batchnorm_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """Over whose ranks the statistics of a batch norm are summed: ranks that share sequences have
    the same tokens where it runs on whole ones."""
    return DATA_AXES if computes_whole_sequences(plan.steps, name) else TOKEN_AXES
