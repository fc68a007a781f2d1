"""A table as text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def text_table(
    rows: Sequence[Sequence[str]], left: Container[int] | None = None, gap: str = "  "
) -> list[str]:
    """The lines of a table. Columns are flush right but for `left` (None: all of them). A Chinese
    character is as wide as two others."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]

    def flush(place: int, cell: str) -> str:
        blanks = " " * (widths[place] - cell_len(cell))
        return cell + blanks if left is None or place in left else blanks + cell

    return [gap.join(flush(*each) for each in enumerate(row)).rstrip() for row in rows]
