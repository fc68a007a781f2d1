"""What is said of a token for which a table of the model has no row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from weft.core import DataError
from weft.engine import TrainingEngine
from weft.nn import IGNORED, model_arguments


@contextmanager
def refuse_unknown_tokens(engine: TrainingEngine, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Around a step. A lookup that fails is a DataError if the model is called with a token for
    which its largest table has no row."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of range" not in str(error) and "out of bounds" not in str(error):
            raise
        whole = {weight.name: weight.shape for weight in engine.global_plan.weights}
        tables = [
            (whole[f"{name}.weight"][0], name)
            for name, module in engine.model.named_modules()
            if isinstance(module, nn.Embedding) and f"{name}.weight" in whole
        ]
        given = model_arguments(engine.sequence.inputs, dict(batch))
        given = {key: entry for key, entry in given.items() if isinstance(entry, Tensor)}
        for key, entry in given.items() if tables else ():
            tokens = next(iter(given.values()))  # others of its shape may be tokens too
            if entry.is_floating_point() or not entry.numel() or entry.shape != tokens.shape:
                continue
            rows, name = max(tables)
            odd = entry[((entry < 0) & (entry != IGNORED)) | (entry >= rows)]
            if odd.numel():
                raise unknown_token(key, int(odd[0]), name, rows) from error
        raise


def unknown_token(entry: str, token: int, table: str, rows: int) -> DataError:
    """The refusal of a token for which a table has no row."""
    problem = f"{table} has {rows} rows, for tokens from 0 to {rows - 1}"
    fix = f"give the model a vocabulary of at least {token + 1}, or correct the data"
    return DataError(f"batch[{entry!r}]", token, problem, fix if token >= 0 else "correct the data")
