"""All-reduce by servers: the first ranks each sum a part of the tensor for all, and send it back.

`central` has one server, through which everything passes: its traffic grows with the number of
ranks. A server is a worker too, as in `[sync] name = "parameter_server"` (Li et al. 2014).
"""

from __future__ import annotations

from weft.core import ConfigError

from ..algorithm import CollectiveAlgorithm, Message, Phase


def parameter_server(ranks: int, servers: int = 1) -> CollectiveAlgorithm:
    """`servers`: how many ranks share the tensor. Raises ConfigError."""
    return _served("parameter_server", ranks, servers)


def central(ranks: int) -> CollectiveAlgorithm:
    """All through rank 0, as in `nn.DataParallel`."""
    return _served("central", ranks, 1)


def _served(name: str, ranks: int, servers: int) -> CollectiveAlgorithm:
    if type(servers) is not int or not 1 <= servers <= ranks:
        fix = f"give a number from 1 to {ranks}"
        raise ConfigError("--set servers", servers, f"is not a number from 1 to {ranks}", fix)
    pairs = [(w, s) for s in range(servers) for w in range(ranks) if w != s]
    phases = (
        Phase("push", (tuple(Message(worker, s, s, "add") for worker, s in pairs),)),
        Phase("pull", (tuple(Message(s, worker, s, "copy") for worker, s in pairs),)),
    )
    formula = "2 x (latency + (p - 1) x size / servers / bandwidth)"
    symbols = {"servers": servers}
    return CollectiveAlgorithm(name, "all_reduce", ranks, servers, phases, formula, symbols)


ALGORITHMS = {"parameter_server": parameter_server, "central": central}
