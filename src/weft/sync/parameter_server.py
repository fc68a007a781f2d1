"""parameter_server: servers share the parameters; workers push gradients and pull weights (Li et al. 2014).

A server lives in each of the first `servers` replicas. Every step has all gradients, so it equals all-reduce.
"""

from __future__ import annotations

from ..codecs import Codec
from ..errors import hold
from ..syncs import EachStep
from ._checks import bucket


def parameter_server(codec: Codec, servers: int = 1, bucket_mb: float = 25.0) -> EachStep:
    """`servers`: over how many replicas the parameters, and the optimizer's state, are spread."""
    hold("sync.servers", servers, int, lambda x: x >= 1, "a number of replicas")
    return EachStep("parameter_server", codec, "owners", servers=servers, bucket_bytes=bucket(bucket_mb))


SYNCS = {"parameter_server": parameter_server}
