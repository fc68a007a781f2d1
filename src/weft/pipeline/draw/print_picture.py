"""Prints a picture as wide as the terminal, in colours if the terminal has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

PAGE = 120  # columns if there is no terminal


def print_for_terminal(picture: Callable[..., Text]) -> None:
    """Print the text that `picture(width=, colour=, ascii_only=)` makes for this terminal."""
    console = Console()
    columns = shutil.get_terminal_size((PAGE, 24)).columns
    coloured = console.color_system is not None and not console.no_color
    made = picture(width=columns, colour=coloured, ascii_only=console.options.ascii_only)
    console.print(made, soft_wrap=True, highlight=False)
