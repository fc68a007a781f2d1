"""Builds what [data] of a run file names: the dataset, batches of it, and the steps of its epochs.

What a user can get wrong in naming them is refused here, before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from weft.core import BlendConfig, ConfigError, DataError, RunConfig, SourceConfig

from . import conversations, data, token_stream
from .blend import Blend, check_sources
from .named_callables import call_named, resolve_callable, resolve_path, signature_of
from .sample_stream import Stream, first_samples
from .samples import named_samples


def build_dataset(run: RunConfig, split: str = "train") -> data.Dataset | Stream:
    """The dataset of [data] for the split "train" or "val"; a Stream of what is no map-style one.
    Raises ConfigError, DataError.

    A callable without a parameter `split` has only "train".
    """
    table = run.data
    made = _blend(run, table.blend, split) if table.blend else _source(run, table, split)
    if table.group_by_length and isinstance(made, Stream):
        problem = (
            "sorts samples by length, and an iterable's lengths are not known before they are read"
        )
        fix = "leave it out, or give one map-style dataset"
        raise ConfigError("data.group_by_length", table.group_by_length, problem, fix)
    if table.shuffle_buffer and not isinstance(made, Stream):
        problem = "is for iterables, and [data] has a map-style dataset, which is shuffled whole"
        raise ConfigError("data.shuffle_buffer", table.shuffle_buffer, problem, "leave it out")
    return made


def _blend(run: RunConfig, tables: Sequence[BlendConfig], split: str) -> Stream:
    sources = [_source(run, table, split) for table in tables]
    weights = [table.weight for table in tables]
    named = [
        table.build or table.text or table.hf or table.chat or table.stream for table in tables
    ]
    alike = run.data.collate is None
    check_sources(sources, [(f"data.blend.{place}", one) for place, one in enumerate(named)], alike)
    made = partial(Blend, sources, weights, run.train.seed)
    return Stream(made, name=("data.blend", f"{len(tables)} sources"), sample=made().sample)


def _source(run: RunConfig, table: SourceConfig, split: str) -> data.Dataset | Stream:
    """What one table names."""
    arguments = table.arguments
    positional: tuple = ()
    function: Callable[..., Any]
    named: tuple[str, object] = ("data.build", table.build)
    if table.stream is not None:
        name, function = "weft.data:stream", token_stream.stream
        positional = ([resolve_path(run, pattern) for pattern in table.stream],)
        named = ("data.stream", list(table.stream))
    elif table.text is not None:
        name, function = "weft.data:text", data.text
        positional = ([resolve_path(run, pattern) for pattern in table.text],)
    elif table.hf is not None:
        name, function = "weft.data:hf", data.hf
        positional = (resolve_path(run, table.hf),)
    elif table.chat is not None:
        name, function = "weft.data:chat", conversations.chat
        if isinstance(arguments.get("template"), str):
            arguments["template"] = resolve_path(run, arguments["template"])
        positional = ([resolve_path(run, pattern) for pattern in table.chat],)
    else:
        name = str(table.build)
        function = resolve_callable(name, run.folder, "data.build")
    if "tokenizer" in arguments and isinstance(arguments["tokenizer"], str):
        arguments["tokenizer"] = resolve_path(run, arguments["tokenizer"])
    if "split" in signature_of(function).parameters:
        arguments["split"] = split
    elif split != "train":
        fix = f"give {name} a parameter split, or set train.eval_every to 0"
        raise ConfigError("data.build", name, f"has no split {split!r}", fix)
    call = partial(call_named, function, name, "data", positional, arguments)
    made = call()
    if isinstance(made, Mapping) and any(isinstance(key, str) for key in made):
        problem, fix = f"returns a dict of {', '.join(map(str, made))}", "return one of these"
        raise ConfigError("data.build", name, problem, fix)
    if _is_stream(made):
        return Stream(call, table.entries, named)
    for method in ("__len__", "__getitem__"):
        if method not in dir(made):
            problem = f"returns {type(made).__name__}, which has no {method}"
            fix = "return a map-style dataset, or an iterable"
            raise ConfigError("data.build", name, problem, fix)
    return named_samples(made, table.entries)


def _is_stream(made: object) -> bool:
    """Whether it is read one sample after the other: torch's IterableDataset has a __getitem__
    that raises."""
    return isinstance(made, IterableDataset) or (
        "__iter__" in dir(made) and not {"__len__", "__getitem__"} <= {*dir(made)}
    )


def build_collate(run: RunConfig) -> data.Collate | None:
    """The function of the user's that makes a batch. Raises ConfigError, and it a DataError of what
    is no batch."""
    name = run.data.collate
    if name is None:
        return None
    function = resolve_callable(name, run.folder, "data.collate")

    def checked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        made = function(samples)
        rows = {
            key: [*value.shape[:1]] if isinstance(value, Tensor) else type(value).__name__
            for key, value in (made.items() if isinstance(made, Mapping) else {"": made}.items())
        }
        if any(found != [len(samples)] for found in rows.values()) or not rows:
            problem = f"returns first dims or types {rows} for {len(samples)} samples"
            fix = f"return a dict of tensors whose first dim is the samples, here {len(samples)}"
            raise DataError("data.collate", name, problem, fix)
        return dict(made)

    return checked


def count_steps(run: RunConfig) -> RunConfig:
    """The run with the steps of its `train.epochs`, if it has these. Raises ConfigError,
    DataError."""
    train = run.train
    if train.epochs is None:
        return run
    held = build_dataset(run)
    samples = held.size() if isinstance(held, Stream) else len(held)
    if samples is None:
        problem = "[data] names an iterable, whose length is not known"
        raise DataError("train.epochs", train.epochs, problem, "set train.steps in its place")
    batches = samples // train.batch
    if not (steps := round(train.epochs * batches)):
        problem = f"has no step: {samples} samples are {batches} batches of {train.batch}"
        fix = "use more epochs, a smaller batch, or more data"
        raise DataError("train.epochs", train.epochs, problem, fix)
    return run.with_steps(steps)


def sample_batch(run: RunConfig, held: data.Dataset | Stream, count: int = 2) -> dict[str, Tensor]:
    """A batch of the dataset's first samples; two are as few as batch norm accepts."""
    return cast_batch(run, (build_collate(run) or data.collate)(first_samples(held, count)))


def cast_batch(run: RunConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, in float64 if the model computes in float64."""
    if run.precision.compute != "fp64":
        return batch
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }
