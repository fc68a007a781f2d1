"""allreduce: gradients are summed by the backend's collectives, bucket by bucket in backward (Li et al. 2020)."""

from __future__ import annotations

from ..codecs import Codec
from ..syncs import EachStep
from ._checks import bucket


def allreduce(codec: Codec, bucket_mb: float = 25.0) -> EachStep:
    """`bucket_mb`: gradients that are reduced together, in 2^20 bytes."""
    return EachStep("allreduce", codec, bucket_bytes=bucket(bucket_mb))


SYNCS = {"allreduce": allreduce}
