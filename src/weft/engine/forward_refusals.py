"""The refusal of a model whose forward raises where it is cut: which module, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.core import EXPERTS, Plan, Refusal, UnsupportedModel, computes_whole_sequences
from weft.nn import module_calls
from weft.parallel import FEATURE_AXES, SEQUENCE_AXES, VOCABULARY_AXES

from .all_ranks_come import all_ranks_come
from .context_parallel.sequence import MaskOfOwnKeys, WholeSequence
from .microbatch import Batch
from .protocol import TrainingEngine
from .whole_role import MixesPositions, lines_that_leave_whole

CUTTING = (*FEATURE_AXES, *VOCABULARY_AXES, EXPERTS)


@contextmanager
def refuse_what_does_not_run(
    engine: TrainingEngine, trial: Callable[[Batch], None] | None, batch: Batch
) -> Iterator[None]:
    """Inside this context, an error in a forward of a model that is cut is a refusal, which names
    the module.

    Args:
        engine: runs the model.
        trial: whose refusal is told, if it refuses the model too: it tries what it advises. All
            ranks call it together.
        batch: what the model runs on.

    Raises:
        Refusal: the model does not run where it is cut.
    """
    plan = engine.plan
    with module_calls(engine.model) as inside:
        try:
            yield
        except Exception as problem:
            told = isinstance(problem, Refusal)
            if told and not isinstance(problem, MaskOfOwnKeys | MixesPositions):
                raise
            shared = plan.layout.active_axes(*SEQUENCE_AXES)
            if not inside or not (shared or plan.layout.active_axes(*CUTTING)):
                raise
            group = engine.mesh.group(*plan.layout.active_axes())
            if trial is not None and all_ranks_come(group, "trial"):
                engine.sequence.end()
                trial(batch)
            if isinstance(problem, MixesPositions):
                raise
            masked = isinstance(problem, MaskOfOwnKeys) or "meta" in _first_line(problem)
            alone = shared and not plan.layout.active_axes(*CUTTING)
            refusal = does_not_run_in_part if alone or (shared and masked) else does_not_run
            raise refusal(plan, inside[-1], problem) from problem


def refuse_without_attention(
    engine: TrainingEngine, trial: Callable[[Batch], None] | None, batch: Batch
) -> None:
    """After a step: refuse what a model that has called no attention computes otherwise where ranks
    share sequences. All ranks call it together.

    Args:
        engine: has run the model.
        trial: tells, and names the module.
        batch: what the model ran on.

    Raises:
        Refusal: the model mixes positions.
    """
    attends = not engine.sequence or engine.plan.staging is not None or engine.sequence.calls
    if trial is None or attends:
        return
    outside = WholeSequence(engine.sequence)
    outside.begin()
    trial(batch)
    outside.end()


def does_not_run(plan: Plan, module: str, cause: BaseException) -> UnsupportedModel:
    """The refusal of a model that raises in this module where it is sharded."""
    problem = f"the sharded model does not run: {_first_line(cause)}, in {module or 'the model'}"
    fix, shared = advice(plan, module), plan.layout.active_axes(*SEQUENCE_AXES)
    if shared:
        fix += f", or leave {' and '.join(shared)} out of the layout"
    return UnsupportedModel("layout", str(plan.layout), problem, fix)


def does_not_run_in_part(plan: Plan, module: str, cause: BaseException) -> MixesPositions:
    """The refusal of a model that raises in this module where ranks share sequences."""
    line, where, fix = _first_line(cause), module or "the model", "use dp or fsdp"
    if isinstance(cause, MaskOfOwnKeys):
        problem, fix = f"{cause.problem}, in {where}", f"{cause.fix}, or {fix}"
    elif "meta" in line:  # what stands for a mask
        problem = f"{where} computes with the attention mask, which is of other ranks' keys too"
    elif computes_whole_sequences(plan.steps, module):
        problem = f"{where} has whole sequences, and does not run with what else enters it, which"
        problem += f" is of this rank's positions alone: {line}"
    else:
        problem = f"{where} does not run on a part of the positions: {line}"
    return MixesPositions.of(plan.layout, problem, fix, module)


def has_no_backward_to_try(plan: Plan, cause: BaseException) -> UnsupportedModel:
    """The refusal of a model whose backward raises in the trial, also where it is whole."""
    problem = "weft tries this layout before the first step, where the model's backward raises:"
    problem += f" {_first_line(cause)}"
    return UnsupportedModel("layout", str(plan.layout), problem, "use dp or fsdp")


def _first_line(cause: BaseException) -> str:
    return next(iter(str(cause).splitlines()), "").rstrip(".") or type(cause).__name__


def advice(plan: Plan, module: str) -> str:
    """What to do where sharding does not suit a module."""
    lines = lines_that_leave_whole(plan, module)
    fix = f"leave it whole: write {lines} under [roles]" if lines else "use dp, fsdp or pp"
    if plan.layout.has_option("sequence"):
        # what is whole there computes on a part of the positions
        fix = f"use tp without sequence; if it is refused too, {fix}"
    if any(step.dispatch is not None for step in plan.steps):
        return (
            "experts must compute each token by itself, and give their number as"
            f" num_experts; {fix}"
        )
    return fix
