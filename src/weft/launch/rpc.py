"""Remote procedure calls between the processes of a run, beside their process group.

Whoever can connect to a process may call any function in it: torch.distributed.rpc trusts its
network. So all processes are on one host, and listen at its loopback alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from weft._torch.c10d import default_store

from .environment import AGENT, master_address, on_one_host
from .gate import LOOPBACK, is_loopback, ungated_error
from .rendezvous import Rendezvous, interface_of
from .watchdog import Watchdog

_SCHEME = "weft"


def check_one_host() -> None:
    """Raises ConfigError where the ranks of this run are on several hosts."""
    # others than weft may have made the process group, and say where it meets alone
    host, port = master_address()
    if on_one_host() or (AGENT not in os.environ and is_loopback(Rendezvous(host, port).address())):
        return
    raise ungated_error("MASTER_ADDR", host)


@contextmanager
def rpc_session(names: Sequence[str]) -> Iterator[None]:
    """The processes of the default process group can call one another, by these names, in rank
    order. Nothing times out: a connection that breaks is an error, and `train.hang_s` is for what
    hangs. Raises ConfigError where they are on several hosts."""
    check_one_host()
    rank, world = dist.get_rank(), dist.get_world_size()
    name = interface_of(LOOPBACK)
    if name is not None:  # whatever the environment says of other networks
        os.environ["TP_SOCKET_IFNAME"] = name
    patience = default_store().timeout  # else torch sets the store another one
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://", rpc_timeout=patience.total_seconds()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own way to use a process group
        with Watchdog(None) as start, start.starting():
            rpc.init_rpc(names[rank], rank=rank, world_size=world, rpc_backend_options=options)
    rpc._set_rpc_timeout(0)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            rpc.shutdown(
                graceful=False
            )  # peers that are gone would be waited for; left alone it aborts the process
        raise
    rpc.shutdown()  # when all are done


def _meet(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """At the store of the process group."""
    store = default_store()
    yield dist.PrefixStore("weft/rpc", store), dist.get_rank(), dist.get_world_size()


register_rendezvous_handler(_SCHEME, _meet)
