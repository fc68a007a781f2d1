"""Several sources as one: each sample comes from the source that is furthest behind its weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from weft.core import DataError

from .data import Dataset
from .sample_stream import Pass, Stream, fingerprint, first_samples, if_state_fits

END = object()  # of a pass
_TEXT = "Weft and warp, 1 2 30: naïve"  # tokenizers that make the same of it count as the same


class Blend:
    """An iterable without an end over sources, in the proportions of their weights.

    After n samples a source with the share w has given w * n of them, give or take one for each
    source. A map-style source is shuffled whole, in another order each time it is gone through. A
    Stream gives its own order, and is read again when it ends. An item is (number of the source,
    index or the Stream's item), of which `sample` makes a dict of tensors.

    Args:
        sources: map-style datasets and Streams.
        weights: of each source, above 0, in any unit.
        seed: seed of the orders.

    Example:
        >>> few, many = [{}] * 9, [{}] * 1000
        >>> items = iter(Blend([many, few], [3, 1], seed=0))
        >>> [next(items)[0] for _ in range(8)]
        [0, 0, 1, 0, 0, 0, 1, 0]
    """

    def __init__(self, sources: Sequence[Dataset | Stream], weights: Sequence[float], seed: int):
        self._sources, self._seed = sources, seed
        self._shares = [weight / sum(weights) for weight in weights]
        self._counts = [0] * len(sources)
        self._streams: dict[int, _Place] = {
            number: _Place(source)
            for number, source in enumerate(sources)
            if isinstance(source, Stream)
        }

    def __getattr__(self, name: str) -> Any:
        """What sources of text offer: their largest vocab, and how the first reads and writes."""
        if name == "vocab":
            return max(getattr(source, name) for source in self._sources)
        if name in ("encode", "decode"):
            return getattr(self._sources[0], name)
        raise AttributeError(name)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        orders: dict[int, tuple[int, np.ndarray]] = {}
        while True:
            taken = sum(self._counts) + 1
            behind = [s * taken - count for s, count in zip(self._shares, self._counts)]
            number = behind.index(max(behind))
            count, source = self._counts[number], self._sources[number]
            self._counts[number] += 1
            if isinstance(source, Stream):
                yield number, self._streams[number].take()
                continue
            epoch, place = divmod(count, len(source))
            if orders.get(number, (-1,))[0] != epoch:
                random = np.random.default_rng([self._seed, number, epoch])
                orders[number] = epoch, random.permutation(len(source))
            yield number, int(orders[number][1][place])

    def sample(self, item: tuple[int, Any]) -> dict[str, Tensor]:
        """A dict of tensors."""
        number, found = item
        if number in self._streams:
            return self._streams[number].stream.sample(found)
        source: Any = self._sources[number]
        return source[found]

    def state_dict(self) -> dict[str, Any]:
        """How far each source is."""
        places = {str(number): place.state() for number, place in self._streams.items()}
        return {"shares": self._shares, "counts": [*self._counts], "streams": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises DataError if it is that of other sources or weights."""
        then = [state.get("shares"), [*state.get("streams", ())]]
        if then != [self._shares, [str(number) for number in self._streams]]:
            problem = "has other sources or weights than it had when the run was stopped"
            fix = "resume with the blend of that run, or begin another one"
            raise DataError("data.blend", f"{len(self._sources)} sources", problem, fix)
        self._counts = [*state["counts"]]
        for number, place in state["streams"].items():
            self._streams[int(number)] = _Place(self._streams[int(number)].stream, **place)


class _Place:
    """Where one Stream of a blend stands: in a pass, after so many items. Its state is that before
    the last item, by which it is known whether that state restores it."""

    def __init__(
        self, stream: Stream, number: int = 0, taken: int = 0, before: Any = None, last: str = ""
    ):
        self.stream, self._number, self._taken = stream, number, taken
        self._before, self._last = before, last
        self._reading: Pass | None = None

    def state(self) -> dict[str, Any]:
        """What another one goes on from."""
        return {
            "number": self._number,
            "taken": self._taken,
            "before": self._before,
            "last": self._last,
        }

    def take(self) -> Any:
        """The next item."""
        if self._reading is None:
            self._reading = self._open()
        before = self._reading.state() if self._taken else None
        item = next(self._reading, END)
        if item is END:
            self._number, self._taken = self._number + 1, 0
            self._reading, before = self.stream.read(self._number), None
            item = next(self._reading, END)
            if item is END:
                raise DataError(*self.stream.name, "gives no sample", "name files that have some")
        self._taken, self._before, self._last = self._taken + 1, before, fingerprint([item])
        return item

    def _open(self) -> Pass:
        if self._before is not None:
            with if_state_fits():
                reading = self.stream.read(self._number, self._before)
                if fingerprint([*islice(reading, 1)]) == self._last:
                    return reading
        # without a state, or where it lacks something, all is read again
        reading = self.stream.read(self._number)
        for _ in islice(reading, self._taken):
            pass
        return reading


def check_sources(
    sources: Sequence[Dataset | Stream], names: Sequence[tuple[str, object]], alike: bool
) -> None:
    """Refuse sources that are empty, or whose samples cannot stand in one batch. `names`: of each,
    a key of the run file and its value; `alike`: shapes and dtypes are to be the same, as keys and
    tokenizers are. Raises DataError."""
    first = encoded = None
    for source, name in zip(sources, names, strict=True):
        found = first_samples(source, 1)
        if not found:
            raise DataError(*name, "gives no sample", "name data that has some")
        shapes = {
            key: f"{value.dtype} {[*value.shape]}" if alike else ""
            for key, value in found[0].items()
        }
        first = first or shapes
        if shapes != first:
            problem = f"a sample has {shapes}, and that of another source {first}"
            raise DataError(*name, problem, "give all sources the same keys, shapes and dtypes")
        if hasattr(source, "vocab") and hasattr(source, "encode"):  # tokens of text
            numbers = [*source.encode(_TEXT)]
            encoded = encoded or numbers
            if numbers != encoded:
                problem = "makes tokens by another tokenizer than another source does"
                raise DataError(*name, problem, "give all sources the same tokenizer")
