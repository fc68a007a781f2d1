"""Remote procedure calls between the processes of a run, beside their process group.

Whoever can connect to a process may call any function in it: torch.distributed.rpc trusts its
network. A process listens on the interface of the run, which on one host is the loopback
(`listen_at`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from weft._torch.c10d import default_store

from .environment import master_address, on_one_host
from .gate import LOOPBACK
from .rendezvous import Rendezvous, listen_at
from .watchdog import Watchdog

_SCHEME = "weft"


@contextmanager
def rpc_session(names: Sequence[str]) -> Iterator[None]:
    """The processes of the default process group can call one another, by these names, in rank
    order. Nothing times out: a connection that breaks is an error, and `train.hang_s` is for what
    hangs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # as when the process group was made, unless others than weft made it
    listen_at(LOOPBACK if on_one_host() else Rendezvous(*master_address()).address())
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
