"""Names of modules: which lies inside of which, and those of all blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is the other, or in it; all are in the root, which has no name."""
    return not outer or module == outer or module.startswith(outer + ".")


def glob_of_blocks(blocks: Iterable[str], name: str) -> str:
    """The glob of a module in every block, such as `layers.*.attention` for `layers.0.attention`;
    outside of the blocks its name."""
    block = next((block for block in blocks if is_inside(name, block)), name)
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", block) + name.removeprefix(block)
