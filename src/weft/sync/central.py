"""central: only the first replica holds the optimizer. It sums gradients, updates, and sends
weights to all.

This is the traffic of torch.nn.DataParallel, kept for comparison: what passes the first replica's
link grows linearly with the number of replicas.
"""

from __future__ import annotations

from weft.core import Codec, SyncEveryStep

from ._options import bucket_size


def central(codec: Codec, bucket_mb: float = 25.0) -> SyncEveryStep:
    return SyncEveryStep("central", codec, "owners", servers=1, bucket_bytes=bucket_size(bucket_mb))


SYNCS = {"central": central}
