"""Reads and writes files of folders that others may have written to. No torch.

Such a folder may hold anything under a name that weft knows: a pipe that nobody writes to, a
device without an end, a link to a file of somebody else.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_TEXT_BYTES = 1 << 26  # of a file that a person writes


def read_file(path: str | Path, most: int = MOST_TEXT_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError, also if it is another thing than that, or has
    more than `most` bytes."""
    try:
        # a pipe is opened at once, and not when somebody writes to it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a name with a zero byte
        raise OSError(errno.EINVAL, str(error)) from None
    with open(handle, "rb") as file:
        check_regular(file.fileno())
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, of {most} that it may have")
        return file.read(most)


def check_regular(handle: int) -> None:
    """Raises OSError unless this open file is a regular one."""
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"is {_KINDS.get(kind, 'another thing')}, and no regular file")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: where that fails, what was there before stays. A link in
    its place is replaced, and not followed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def append_file(path: Path, text: str) -> None:
    """Add to the end of a file, made where there is none. Raises OSError, also if a link is in its
    place."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
        check_regular(file.fileno())
        file.write(text)


def printable(text: str, also: str = "") -> str:
    """The text with everything escaped that a terminal would obey and not show, but for the
    characters of `also`."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in also else each.encode("unicode_escape").decode()
        for each in text
    )


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
