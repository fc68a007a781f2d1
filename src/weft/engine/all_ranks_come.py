"""Whether all ranks of a group come to the same place, of which some may wait inside of a
collective for others that have raised."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from weft._torch.c10d import default_store

PATIENCE_S = 10.0


def all_ranks_come(
    group: dist.ProcessGroup | None, place: str, patience_s: float = PATIENCE_S
) -> bool:
    """By the store in which ranks met, as a collective would wait without an end.

    Args:
        group: the ranks; None: this one alone.
        place: where; no other call of this group names it.
        patience_s: for how long the others are waited for.
    """
    if group is None:
        return True
    store = dist.PrefixStore(f"weft/{group.group_name}/{place}", default_store())
    ranks = dist.get_process_group_ranks(group)
    store.set(str(dist.get_rank()), "")
    try:
        store.wait([str(rank) for rank in ranks], timedelta(seconds=patience_s))
    except RuntimeError:
        return False
    return True
