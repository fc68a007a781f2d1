"""parameter_server: servers share the parameters; workers push gradients and pull weights (Li et
al. 2014).

A server lives in each of the first `servers` replicas. Synchronous, every step has all gradients,
so it equals all-reduce. Asynchronous, with `staleness` above 0, workers do not wait for those that
are fewer steps behind (stale synchronous parallel, Ho et al. 2013), or with "none" for anyone.
"""

from __future__ import annotations

from weft.core import TIMEOUT_S, AsyncServers, Codec, ConfigError, SyncEveryStep, require

from ._options import bucket_size, check_timeout


def parameter_server(
    codec: Codec,
    servers: int = 1,
    staleness: int | str = 0,
    bucket_mb: float | None = None,
    timeout_s: float | None = None,
) -> SyncEveryStep | AsyncServers:
    """`servers`: the number of replicas over which parameters and optimizer state are sharded.
    `staleness`: steps that a replica may be ahead of the slowest one, or "none" for no bound.
    `timeout_s`: a replica that is silent for longer is left out."""
    require("sync.servers", servers, int, lambda x: x >= 1, "a number of replicas")
    if staleness != "none":
        require("sync.staleness", staleness, int, lambda x: x >= 0, 'a number of steps, or "none"')
    if staleness == 0:
        if timeout_s is not None:
            raise ConfigError(
                "sync.timeout_s", timeout_s, "every step waits for all replicas", "leave it out"
            )
        bucket_bytes = bucket_size(25.0 if bucket_mb is None else bucket_mb)
        return SyncEveryStep(
            "parameter_server", codec, "owners", servers=servers, bucket_bytes=bucket_bytes
        )
    if bucket_mb is not None:
        problem = "asynchronous servers get all gradients of a step in one message"
        raise ConfigError(
            "sync.bucket_mb", bucket_mb, problem, "leave it out, or use staleness = 0"
        )
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    check_timeout(timeout_s)
    return AsyncServers(
        "parameter_server",
        codec,
        servers,
        None if staleness == "none" else int(staleness),
        timeout_s,
    )


SYNCS = {"parameter_server": parameter_server}
