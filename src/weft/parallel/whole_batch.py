"""What a loss over the whole batch requires of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from weft.core import ConfigError, Plan, Schedule
from weft.nn import accepts_sharded_logits, is_positionwise, is_whole_batch

from .axes import DATA_AXES, SEQUENCE_AXES
from .comm_queries import Collective


def plan_whole_batch(plan: Plan, loss: Callable[..., Any] | None) -> Plan:
    """The plan with what its loss asks for: nothing, unless it is marked `@whole_batch`.

    Raises:
        ConfigError: ranks share a sequence, replicas step by themselves, or a backward begins
            before the outputs of all microbatches are there.
    """
    if plan.whole_batch == (loss is not None and is_whole_batch(loss)):
        return plan
    if loss is None or plan.whole_batch:
        return replace(plan, whole_batch=False)
    name = getattr(loss, "__name__", type(loss).__name__)

    def refuse(problem: str, fix: str) -> ConfigError:
        return ConfigError(
            "loss", name, f"compares the samples of the whole batch, and {problem}", fix
        )

    if accepts_sharded_logits(loss) or is_positionwise(loss):
        other = "vocab_parallel" if accepts_sharded_logits(loss) else "positionwise"
        raise refuse(
            f"is marked {other} too: parts of each output would have to be gathered",
            "keep one of the two marks",
        )
    if shared := plan.layout.active_axes(*SEQUENCE_AXES):
        axis = ".".join(shared)
        raise refuse(f"under {axis} each rank has only a part of each sample", f"leave {axis} out")
    if plan.replicas_step_independently:
        assert plan.sync is not None
        raise refuse(
            f"with {plan.sync.name} each replica steps on its own samples",
            'use [sync] name = "allreduce", or fsdp in the place of dp',
        )
    schedule = plan.schedule
    if schedule.versions:
        raise refuse(
            f"{schedule.name} updates weights before all microbatches have gone forward",
            "use pp+gpipe, or accumulate = 1 and a synchronous schedule",
        )
    if plan.staging is not None and plan.accumulate > 1 and not _forwards_come_first(schedule):
        raise refuse(
            f"{schedule.name} begins backward before all {plan.accumulate} microbatches have gone"
            " forward",
            "use pp+gpipe, which keeps them all, or accumulate = 1",
        )
    made, data = replace(plan, whole_batch=True), plan.layout.active_axes(*DATA_AXES)
    note = f"{name} is one loss of the whole batch"
    note += f": outputs are gathered over {'.'.join(data)}" if data else ""
    note += "; each microbatch's forward runs twice" if made.runs_forward_twice else ""
    return replace(made, notes=(*plan.notes, note))


def _forwards_come_first(schedule: Schedule) -> bool:
    """Whether the last stage has the outputs of all microbatches before its first backward."""
    last = schedule.stages - 1
    order = [a.kind for a in schedule.order[schedule.placement[last]] if a.stage == last]
    forwards = order.count("F")
    return order[:forwards] == ["F"] * forwards


def whole_batch_comms(plan: Plan, rank: int, nbytes: Iterable[int]) -> Iterator[Collective]:
    """What the loss gathers once a step, on ranks of the last stage.

    Args:
        plan: the whole plan.
        rank: whose collectives.
        nbytes: of each tensor that the loss gets of all samples, in one batch.
    """
    axis = ".".join(plan.layout.active_axes(*DATA_AXES))
    if plan.whole_batch and axis and plan.schedule.stages - 1 in plan.stages(rank):
        yield from (Collective("all_gather", axis, n, "forward", "(loss)") for n in nbytes)
