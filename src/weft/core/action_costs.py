"""ActionCosts: seconds and bytes of the actions of a schedule, per stage. Pure data; no torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from .errors import ConfigError

Number = float | Sequence[float]


@dataclass(frozen=True)
class ActionCosts:
    """Seconds and bytes of one microbatch in one stage. Each is one number for all stages, or one
    per stage.

    `forward_s`: of an F. `backward_s`: of a B whose W comes later, the gradient of the input.
    `weight_s`: of a W; a full backward takes both. `update_s`: of a U. `comm_s`: from the end of an
    action to the arrival of its result on another rank; one number, or one per pair of neighbouring
    stages (stages - 1); ranks compute while they send. `activation_bytes`: kept from an F to the
    end of its last backward, except for the share `freed_by_b` (0 to 1), which is freed at the end
    of its B. If they are all 1, live activations are counted.
    """

    forward_s: Number = 1.0
    backward_s: Number = 1.0
    weight_s: Number = 1.0
    update_s: Number = 0.0
    comm_s: Number = 0.0
    activation_bytes: Number = 1.0
    freed_by_b: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.freed_by_b <= 1:
            raise ConfigError(
                "costs.freed_by_b", self.freed_by_b, "not a fraction", "use a number from 0 to 1"
            )

    def each(self, field: str, count: int) -> tuple[float, ...]:
        """`count` numbers of this field, one per stage or boundary. Raises ConfigError unless all
        are 0 or more."""
        value = getattr(self, field)
        numbers = tuple(value) if isinstance(value, Sequence) else (value,) * count
        if len(numbers) != count:
            what = "boundaries" if field == "comm_s" else "stages"
            raise ConfigError(
                f"costs.{field}",
                value,
                f"{len(numbers)} numbers for {count} {what}",
                f"give one number, or {count}",
            )
        if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
            raise ConfigError(
                f"costs.{field}", value, "not a time or size", "use numbers of 0 or more"
            )
        return numbers

    def json(self) -> str:
        """JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `json` wrote. Raises ConfigError for any other text."""
        try:
            made = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                "costs", text[:40], f"not costs ({error})", "use a file that weft wrote"
            ) from None
        return made

    def shared(self, placement: Sequence[int]) -> Self:
        """Turn costs of a whole rank, where they are one number, into costs of its stages, which
        get equal parts.

        `placement` is stage -> rank. `comm_s`, which is the cost of a message, stays, and so does
        `activation_bytes` if it only counts.
        """
        on = Counter(placement)
        parts: dict[str, Any] = {
            field: tuple(value / on[rank] for rank in placement)
            for field in ("forward_s", "backward_s", "weight_s", "update_s", "activation_bytes")
            if not isinstance(value := getattr(self, field), Sequence)
            and (field, value) != ("activation_bytes", 1)
        }
        return replace(self, **parts)
