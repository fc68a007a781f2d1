"""bmuf: blockwise model-update filtering (Chen & Huo 2016).

After a block of `period` steps, G = mean of the replicas' weights - the weights that the block
began with; D = momentum D + rate G; W = W + D. Nesterov: the next block begins with W + momentum D.
Momentum 0 and rate 1 are local SGD.
"""

from __future__ import annotations

from weft.core import TIMEOUT_S, Codec, LocalSteps, require

from ._options import check_period


def bmuf(
    codec: Codec,
    period: int = 10,
    momentum: float = 0.9,
    rate: float = 1.0,
    nesterov: bool = False,
    fragments: int = 1,
    delay: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> LocalSteps:
    """`momentum` and `rate` are those of the blocks; a momentum of about 1 - 1 / replicas is usual.
    Other options are those of local_sgd."""
    check_period(period, fragments, delay, timeout_s)
    require("sync.momentum", momentum, float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    require("sync.rate", rate, float, lambda x: x > 0, "a number above 0")
    require("sync.nesterov", nesterov, bool, lambda _: True, "true or false")
    return LocalSteps("bmuf", codec, period, rate, momentum, nesterov, fragments, delay, timeout_s)


SYNCS = {"bmuf": bmuf}
