"""Whether every host reaches free ports of every other, which gloo and NCCL need beside the
rendezvous port."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from .findings import Finding
from .host_rendezvous import HostGroup
from .network import listening

PORTS = 3  # of each host: a firewall may let some pass
PATIENCE_S = 5.0
AT_ONCE = 32

Reached = Mapping[str, Mapping[str, str]]  # host -> host that it does not reach -> why


def ports(circle: HostGroup) -> Finding:
    """Every host connects to some free ports of every other, at the address by which it came."""
    with ExitStack() as stack:
        address = circle.members[circle.number][1]
        servers = [stack.enter_context(listening(address)) for _ in range(PORTS)]
        told = circle.share("ports", [server.getsockname()[1] for server in servers])
        with ThreadPoolExecutor(
            AT_ONCE
        ) as threads:  # who listens need not accept: the system answers for it
            places = [
                (n, circle.members[n][1], port)
                for n in told
                if n != circle.number
                for port in told[n]
            ]
            seen = list(threads.map(lambda place: (place[0], _problem(*place[1:])), places))
        own = {str(number): why for number, why in seen if why}
        results = circle.share("reached", own)  # nobody leaves before all have tried
    return ports_finding(
        {
            circle.name(n): {circle.name(int(other)): why for other, why in found.items()}
            for n, found in results.items()
        }
    )


def _problem(address: str, port: int) -> str | None:
    """Why that port cannot be reached; None if it can."""
    try:
        socket.create_connection((address, port), PATIENCE_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return None


def ports_finding(reached: Reached) -> Finding:
    """What each host does not reach, and why."""
    pairs = [(a, b, why) for a, others in reached.items() for b, why in others.items()]
    facts = {"hosts": list(reached), "unreachable": [list(pair) for pair in pairs]}
    if not pairs:
        return Finding(
            "ports",
            "ok",
            f"each of {len(reached)} hosts reaches free ports of every other",
            "",
            facts,
        )
    a, b, why = pairs[0]
    found = f"{a} does not reach {b} ({why})"
    common = set.intersection(*({a, b} for a, b, _ in pairs))
    if len(pairs) > 1:
        found += f", and so {len(pairs) - 1} more" + (
            f", all from or to {common.pop()}" if len(common) == 1 else ""
        )
    advice = (
        "open all TCP ports between the hosts (firewall, security group), and check that each"
        " has a route to all others"
    )
    return Finding("ports", "wrong", found, advice, facts)
