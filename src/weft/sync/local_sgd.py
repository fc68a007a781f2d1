"""local_sgd: each replica steps alone; every `period` steps the weights are averaged (Stich 2019;
Lin et al. 2020).

With a period of 1 and plain SGD it equals all-reduce.
"""

from __future__ import annotations

from weft.core import TIMEOUT_S, Codec, LocalSteps

from ._options import check_period


def local_sgd(
    codec: Codec, period: int = 10, fragments: int = 1, delay: int = 0, timeout_s: float = TIMEOUT_S
) -> LocalSteps:
    """`fragments`: parts of the model that take turns. `delay`: steps that an exchange may take
    while training continues. `timeout_s`: a replica for which the others wait longer is left
    out."""
    check_period(period, fragments, delay, timeout_s)
    return LocalSteps(
        "local_sgd", codec, period, fragments=fragments, delay=delay, timeout_s=timeout_s
    )


SYNCS = {"local_sgd": local_sgd}
