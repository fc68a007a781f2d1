"""Whether the ranks of a layout fit the hosts."""

from __future__ import annotations

from weft.core import BackendChoice, Layout

from ..gate import ungated_error
from .findings import Finding, Host


def check_layout_fits(
    axes: str, hosts: list[Host], workers: int = 0, backend: BackendChoice = "auto"
) -> Finding:
    """Whether the layout's ranks, or a driver and its workers, fit these hosts, by the backend that
    the run asks for."""
    world, count = 1 + workers if workers else Layout.parse(axes).world, len(hosts)
    ranks, over = divmod(world, count)
    facts = {"layout": axes, "world": world, "hosts": count, "ranks_per_host": ranks}
    if workers:
        axes = "the driver with its workers"
    if workers and count > 1:
        error = ungated_error("[workers]", count)
        return Finding("layout", "wrong", error.problem, error.fix, facts)
    if over:
        fix = f"use {max(1, ranks) * count} ranks, or a number of hosts that divides {world}"
        return Finding(
            "layout",
            "wrong",
            f"{axes} has {world} ranks, which {count} hosts do not share evenly",
            fix,
            facts,
        )
    found = f"{axes} has {world} ranks" + (f", {ranks} on each host" if count > 1 else "")
    gpus = min(len(host.facts("gpus").get("gpus", ())) for host in hosts) if not workers else 0
    cores = min(host.facts("cores").get("usable", ranks) for host in hosts)
    if backend not in ("auto", "gloo") and (workers or gpus < ranks):
        here = "the driver and its workers run on the CPU"
        here = here if workers else f"it has {ranks}, and a host has {gpus}"
        problem = f"train.backend = {backend!r} takes a GPU for each rank of a host: {here}"
        fix = 'use train.backend = "gloo"' + (f", or {gpus * count} ranks" if gpus else "")
        return Finding("layout", "wrong", problem, fix, facts)
    if backend == "gloo":
        gpus = 0  # they are left alone
    if gpus >= ranks:
        return Finding("layout", "ok", f"{found}, a GPU for each, over NCCL", "", facts)
    if gpus:
        advice = f"only {gpus} GPUs on a host: it would run on the CPU; use {gpus * count} ranks"
        return Finding("layout", "note", found, advice, facts)
    if ranks > cores:
        advice = (
            f"{ranks} ranks share {cores} cores: enough to check numbers, slower than"
            f" {cores * count} ranks"
        )
        return Finding("layout", "note", found, advice, facts)
    return Finding("layout", "ok", f"{found}, over gloo on the CPU", "", facts)
