"""diloco: inner AdamW for `period` steps, then SGD with Nesterov momentum on the mean difference of
weights (Douillard et al. 2024).

Streaming (Douillard et al. 2025): `fragments` of the layers take turns, and an exchange takes
`delay` steps beside training, merged when it arrives.
"""

from __future__ import annotations

from weft.core import TIMEOUT_S, Codec, LocalSteps, require

from ._options import check_period


def diloco(
    codec: Codec,
    period: int = 20,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> LocalSteps:
    """`lr` and `momentum` are those of the outer steps. Other options are those of local_sgd."""
    check_period(period, fragments, delay, timeout_s)
    require("sync.lr", lr, float, lambda x: x > 0, "a number above 0")
    require("sync.momentum", momentum, float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    return LocalSteps("diloco", codec, period, lr, momentum, True, fragments, delay, timeout_s)


SYNCS = {"diloco": diloco}
