"""A difference between a run on ranks and the one-device run, and what counts as one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 1e-9  # in float64
SGD_LR = 0.1  # of the optimizer where roundings differ: a step is to be seen beside them

# (step, what, place among its kind), and what to say of it
Difference = tuple[tuple[int, str, int], str]


Calls = dict[str, list[Tensor]]  # module -> a tensor per call


@dataclass(frozen=True)
class Bounds:
    """The relative errors below which a layout equals one device. `activation`: of a module's
    output, and of its gradient. `small`: a gradient this much smaller than all gradients together
    is measured against that size; `typical`: so is a weight this much smaller than weights are.
    `precision`: what both are computed in."""

    loss: float = TOLERANCE
    gradient: float = TOLERANCE
    weight: float = TOLERANCE
    activation: float = TOLERANCE
    small: float = 1e-4
    typical: float = 1e-2
    precision: str = "float64"

    def __str__(self) -> str:
        if self == Bounds():
            return f"{TOLERANCE:g}"
        return (
            f"{self.loss:.2g} (loss), {self.gradient:.2g} (gradients), {self.weight:.2g} (weights)"
        )


ULP = 2.0**-8  # half the distance of neighbours in bf16: what one rounding may change
ULP16 = 2.0**-11  # the same in fp16
ULP8 = 2.0**-4  # the same in float8 with three bits of fraction (e4m3)
# A layout rounds other partial sums than one device. Errors of roundings that do not depend on one
# another add up as their squares do: a few ulp, in models of any depth that training can stand.
BOUNDS = {
    "fp64": Bounds(),
    "bf16": Bounds(ULP / 4, 8 * ULP, ULP / 4, 8 * ULP, small=0.1, typical=1.0, precision="bf16"),
    "fp16": Bounds(
        ULP16 / 4, 8 * ULP16, ULP16 / 4, 8 * ULP16, small=0.1, typical=1.0, precision="fp16"
    ),
    "float8": Bounds(
        ULP8 / 32, 4 * ULP8, ULP8 / 16, 4 * ULP8, small=0.1, typical=1.0, precision="float8"
    ),
}
