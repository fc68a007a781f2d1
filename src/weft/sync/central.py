"""central: the first replica alone holds the optimizer: it gathers gradients, updates, and sends
weights to all.

The old DataParallel way, kept to measure against: what goes through the first replica's link grows
linearly with N.
"""

from __future__ import annotations

from weft.core import Codec, SyncEveryStep

from ._options import bucket_size


def central(codec: Codec, bucket_mb: float = 25.0) -> SyncEveryStep:
    return SyncEveryStep("central", codec, "owners", servers=1, bucket_bytes=bucket_size(bucket_mb))


SYNCS = {"central": central}
