"""allreduce: gradients are summed by the backend's collectives, bucket by bucket in backward (Li et
al. 2020)."""

from __future__ import annotations

from weft.core import Codec, SyncEveryStep

from ._options import bucket_size


def allreduce(codec: Codec, bucket_mb: float = 25.0) -> SyncEveryStep:
    """`bucket_mb`: gradients that are reduced together, in 2^20 bytes."""
    return SyncEveryStep("allreduce", codec, bucket_bytes=bucket_size(bucket_mb))


SYNCS = {"allreduce": allreduce}
