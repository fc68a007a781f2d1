"""What `weft draw --profile` does: reads a profile, and shows or writes what overlaps in a step."""

from __future__ import annotations

import json
from pathlib import Path

from weft.core import ConfigError
from weft.pipeline import print_for_terminal
from weft.train import (
    ProfiledStep,
    overlap_svg,
    overlap_text,
    own_tracks,
    read_profile,
    tracks_json,
)

from .picture_file import write_file


def write_overlap(path: Path, profile: Path) -> None:
    """The picture, or as .json what of the profile is drawn. Raises ConfigError."""
    if path.suffix == ".svg":
        write_file(path, overlap_svg(read_profile(profile)))
    elif path.suffix == ".json":
        write_file(path, tracks_json(own_tracks(profile)))
    else:
        raise ConfigError("--out", str(path), "not a file to draw in", "name a .svg or a .json")


def print_overlap(step: ProfiledStep) -> None:
    """Print the picture: as wide as the terminal, in colours where it has them."""
    print_for_terminal(lambda *, width, colour, **_: overlap_text(step, width=width, colour=colour))


def overlap_figures(step: ProfiledStep) -> str:
    """A JSON object: of each rank its communication."""
    return json.dumps(step.figures(), indent=2)
