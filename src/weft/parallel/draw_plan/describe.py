"""What all pictures of a Plan say in words."""

from __future__ import annotations

from .rows import EdgeCrossing, HeldSlices, PlanPanel, PlanRow, PlanRows


def panel_name(panel: PlanPanel) -> str:
    """The blocks of a panel."""
    first, last = panel.modules[0], panel.modules[-1]
    if first == last:
        return first
    return f"{first} to {last}: {len(panel.modules)} blocks, each the same"


def legend(rows: PlanRows) -> list[str]:
    """What the words of a picture mean, of those that are in it."""
    every = [row for panel in rows.panels for row in panel.rows]
    cuts = {row.cut for row in every if isinstance(row, HeldSlices)}
    said = []
    if {row.letter for row in every if isinstance(row, EdgeCrossing)} & {"f", "g"}:
        said.append("f where a tensor enters, g where it leaves (Megatron-LM, Shoeybi et al. 2019)")
    if "columns" in cuts:
        said.append("columns: a rank makes some of a linear's outputs, from all of its inputs")
    if "rows" in cuts:
        said.append(
            "rows: a rank reads some of a linear's inputs, or some rows of a table; its output"
            " is a partial sum"
        )
    if any(isinstance(row, HeldSlices) and row.summed for row in every):
        said.append(
            "gradient summed: backward leaves a partial sum on each rank, and an"
            " all-reduce adds them"
        )
    lie = {row.after for row in every if isinstance(row, EdgeCrossing)}
    if "dim 1 cut" in lie:
        said.append("dim 1 cut: each rank has its slice of the positions")
    if rows.staged:
        said.append("Each group holds only the weights of its own stages.")
    return [*said, "Weights that are not shown are whole on every rank."]


def name_of(row: PlanRow) -> str:
    """The weight, or the operator with its module."""
    if isinstance(row, HeldSlices):
        return row.weight
    return f"{row.letter}  {row.module}" if row.letter else row.module


def fact(row: PlanRow) -> str:
    """Shape and cut of a weight; how a tensor lies that crosses an edge."""
    if isinstance(row, EdgeCrossing):
        way = "enters" if row.enters else "leaves"
        if row.before == row.after:
            return f"{way}: {row.after}"
        return f"{way}: {row.before}, then {row.after}"
    size = " x ".join(map(str, row.shape))
    dims = f" (dim {row.dim})" if row.cut in ("columns", "rows") else ""
    words = [size, row.cut + dims]
    words += ["stored whole"] if row.cut and row.stored_whole else []
    words += ["gradient summed"] if row.summed else []
    return ", ".join(filter(None, words))


def in_words(row: PlanRow) -> str:
    """All that a row shows."""
    return f"{name_of(row)}: {fact(row)}" + (
        f"; {'; '.join(row.said)}"
        if isinstance(row, HeldSlices)
        else f"; forward {row.forward}, backward {row.backward}"
    )
