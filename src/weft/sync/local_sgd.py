"""local_sgd: each replica steps alone; every `period` steps the weights are averaged (Stich 2019; Lin et al. 2020).

With a period of 1 and plain SGD it equals all-reduce.
"""

from __future__ import annotations

from ..codecs import Codec
from ..syncs import EachPeriod
from ._checks import hold_period


def local_sgd(codec: Codec, period: int = 10, fragments: int = 1, delay: int = 0) -> EachPeriod:
    """`fragments`: parts of the model that take turns. `delay`: steps that an exchange may take beside training."""
    hold_period(period, fragments, delay)
    return EachPeriod("local_sgd", codec, period, fragments=fragments, delay=delay)


SYNCS = {"local_sgd": local_sgd}
