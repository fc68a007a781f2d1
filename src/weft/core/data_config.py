"""The table [data] of a run file. Pure data; no torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from .toml import AS_TUPLE, CallableTable, Strings, exactly_one, table_error


class SourceConfig(CallableTable):
    """What of [data] says where samples come from, and of each table of [[data.blend]]."""

    build: str | None = Field(
        default=None,
        description=(
            '"package.module:callable" that returns a map-style dataset, or an iterable of samples'
            " (docs/data.md)"
        ),
    )
    text: Strings | None = Field(
        default=None, description='file names or patterns, as in ["corpus/*.txt"]'
    )
    hf: str | None = Field(
        default=None, description="a directory written by datasets' save_to_disk"
    )
    chat: Strings | None = Field(
        default=None,
        description=(
            'JSON lines files or patterns of conversations, as in ["answers/*.jsonl"], or a'
            " directory written by datasets' save_to_disk (docs/fine_tuning.md)"
        ),
    )
    stream: Strings | None = Field(
        default=None,
        description=(
            "JSON lines, parquet, csv, Arrow or text files or patterns of text that is read and"
            " tokenized during training (docs/data.md)"
        ),
    )
    entries: Strings | None = Field(
        default=None,
        description=(
            'names of the items of a sample that is a tuple or a single value, as in ["x", "label"]'
        ),
    )


class BlendConfig(SourceConfig):
    """A table of [[data.blend]]"""

    weight: float = Field(
        gt=0, description="its share of the samples, relative to the other sources"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        exactly_one(
            build=self.build, text=self.text, hf=self.hf, chat=self.chat, stream=self.stream
        )
        return self


class DataConfig(SourceConfig):
    """[data]"""

    blend: Annotated[tuple[BlendConfig, ...], AS_TUPLE] | None = Field(
        default=None,
        min_length=1,
        description=(
            "several sources: a list of tables, each with one of the keys above, its arguments and"
            " a weight (docs/data.md)"
        ),
    )
    shuffle_buffer: int = Field(
        default=0,
        ge=0,
        description=(
            "samples of an iterable that are shuffled together; 0: as they come. A map-style"
            " dataset is shuffled whole"
        ),
    )
    collate: str | None = Field(
        default=None,
        description=(
            '"package.module:callable" that makes a batch, a dict of tensors, from a list of'
            " samples (default: stack them)"
        ),
    )
    group_by_length: int = Field(
        default=0,
        ge=0,
        description=(
            "number of batches whose samples are sorted by length together, such as 50, so that"
            " the samples of a batch have similar lengths; 0: none. Validation batches are not"
            " sorted"
        ),
    )
    workers: int = Field(
        default=0,
        ge=0,
        description=(
            "processes of each rank that make batches ahead of the step; 0: the rank makes them"
        ),
    )
    prefetch: int | None = Field(
        default=None,
        gt=0,
        description="batches that each of `workers` makes ahead (default: 2)",
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        exactly_one(
            build=self.build,
            text=self.text,
            hf=self.hf,
            chat=self.chat,
            stream=self.stream,
            blend=self.blend,
        )
        for key, value in self.arguments.items() if self.blend else ():
            problem = "cannot stand beside blend, where each source has its own arguments"
            raise table_error(problem, "write it in the tables of [[data.blend]]", **{key: value})
        if self.group_by_length and self.collate is None:
            problem = (
                "needs samples of several lengths, and only data.collate can make batches of those"
            )
            raise table_error(
                problem,
                "set data.collate, or leave it out",
                group_by_length=self.group_by_length,
            )
        if self.prefetch is not None and not self.workers:
            problem = "applies only to data.workers, and there are none"
            raise table_error(
                problem, "set data.workers, as 2, or leave it out", prefetch=self.prefetch
            )
        return self
