"""ring: weft's own ring all-reduce over point-to-point messages (Patarasuk & Yuan 2009), chunked
and pipelined.

Reduce-scatter, then all-gather: each rank sends 2 (N-1)/N of a tensor, whatever N is. With `local`
replicas on a host, hierarchical: a ring inside a host sums a part on each rank, one ring for each
part runs across hosts, and the ring inside gathers: between H hosts goes 2 (H-1)/H of the tensor in
all.
"""

from __future__ import annotations

from weft.core import Codec, SyncEveryStep, require

from ._options import bucket_size


def ring(codec: Codec, local: int = 1, bucket_mb: float = 25.0) -> SyncEveryStep:
    """`local`: neighbouring replicas that share a host; 1: one ring of all."""
    require("sync.local", local, int, lambda x: x >= 1, "the number of replicas on a host")
    return SyncEveryStep("ring", codec, "ring", local=local, bucket_bytes=bucket_size(bucket_mb))


SYNCS = {"ring": ring}
