"""Tensors in safetensors files, of which a process reads the bytes it needs and no others.

The safetensors library maps whole files into memory: a slice of columns then touches every page,
and all of them count as the process's memory. So the header is read here, as
https://github.com/huggingface/safetensors documents it, and elements with `os.preadv`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core import CheckpointError, Index, check_regular, index_shape

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MOST_HEADER_BYTES = 100_000_000  # as the safetensors library allows
MOST_ELEMENTS = 1 << 59  # of which torch can count the bytes


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: contiguous, from byte `start` on."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index | None = None) -> Tensor:
        """The elements at `index` (default: all). Reads their bytes alone. Raises CheckpointError
        if the file has become shorter."""
        index = index if index is not None else tuple(slice(0, n) for n in self.shape)
        found = torch.empty(index_shape(index), dtype=self.dtype)
        if not found.numel():
            return found
        joined = len(self.shape)  # dims from here on are contiguous in the file
        while joined and index_shape(index)[joined - 1] == self.shape[joined - 1]:
            joined -= 1
        joined = max(joined - 1, 0)
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        run = prod(index_shape(index)[joined:]) * self.dtype.itemsize
        into = memoryview(found.view(-1).view(torch.uint8).numpy())
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            starts = [range(part.start, part.stop) for part in index[:joined]]
            last = index[joined].start * strides[joined] if self.shape else 0
            for place, outer in enumerate(product(*starts)):
                first = last + sum(i * stride for i, stride in zip(outer, strides, strict=False))
                at = self.start + first * self.dtype.itemsize
                self._read_run(descriptor, into[place * run : (place + 1) * run], at)
        finally:
            os.close(descriptor)
        return found

    def _read_run(self, descriptor: int, into: memoryview, at: int) -> None:
        while into:
            count = os.preadv(descriptor, [into], at)
            if not count:
                raise _damaged(self.file, "ends too early")
            into, at = into[count:], at + count


def file_tensors(files: Iterable[Path]) -> dict[str, FileTensor]:
    """Name -> tensor of safetensors files; only their headers are read. Raises CheckpointError."""
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in found:
                raise _damaged(file, f"holds {name}, and so does {found[name].file.name}")
            found[name] = tensor
    return found


def _header(file: Path) -> dict[str, FileTensor]:
    try:
        # a pipe is opened at once, and not when somebody writes to it
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as (
            opened
        ):
            check_regular(opened.fileno())
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise _damaged(file, "is not a safetensors file, or ends in its header")
            header: Any = json.loads(opened.read(length))
            return {
                name: _tensor(file, name, entry, 8 + length, size)
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        raise _damaged(file, f"cannot be read ({problem})") from problem


def _tensor(file: Path, name: str, entry: Any, first: int, size: int) -> FileTensor:
    try:
        shape, (start, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        found = FileTensor(file, first + start, shape, DTYPES[entry["dtype"]])
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise _damaged(
            file, f"has an entry for {name} that cannot be read ({problem})"
        ) from problem
    possible = min(shape, default=0) >= 0 and prod(max(n, 1) for n in shape) <= MOST_ELEMENTS
    if start < 0 or not possible or stop - start != found.nbytes:
        raise _damaged(file, f"gives {name} {stop - start} bytes for {shape} {entry['dtype']}")
    if first + stop > size:
        raise _damaged(file, f"ends within {name}")
    return found


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError("weights", file.name, problem, "copy the file again")
