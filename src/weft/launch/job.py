"""A cluster job: how many hosts, how many ranks on each, and what each host runs.

Nothing is started here. The file that a launcher writes runs `weft train` once on every host; that
process starts the ranks of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from weft.core import ConfigError, LayoutError, RunConfig

from .gate import ungated_error
from .rendezvous import parse_nodes

SAVE_S = 120  # from SIGTERM to the end: for the step that is being taken, and a checkpoint


@dataclass(frozen=True)
class Job:
    """A run on `least` to `most` hosts, with `ranks` on each. `given`: options of `weft train`, but
    those of hosts."""

    path: str
    run: RunConfig
    least: int
    most: int
    ranks: int
    given: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, run: RunConfig, hosts: str, given: Sequence[str] = ()) -> Self:
        """`hosts` is 4, or 2:4. Raises ConfigError; LayoutError if the layout's ranks do not divide
        over them."""
        least, most = parse_nodes(hosts)
        world = run.world
        if run.workers and most > 1:
            raise ungated_error("--nodes", hosts)
        if world % most:
            fits = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
            problem = f"the run has {world} ranks, which do not divide over {most} hosts"
            raise LayoutError(
                "--nodes", hosts, problem, f"use one of {fits} hosts at most, or another layout"
            )
        return cls(path, run, least, most, world // most, tuple(given))

    @property
    def elastic(self) -> bool:
        """Whether it goes on with fewer hosts."""
        return self.least < self.most

    @property
    def hosts(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    def check_gpus(self, gpus: int | None) -> None:
        """Raises ConfigError if a host has too few for its ranks, which would then run on its
        CPU."""
        if gpus is not None and gpus < self.ranks and not self.run.workers:
            problem = (
                f"a host has {self.ranks} ranks of {self.run.layout.axes}, and each needs its own"
                " GPU"
            )
            raise ConfigError("--gpus", gpus, problem, f"use {self.ranks}, or more hosts")

    def command(self, hosts: str, meeting: str) -> list[str]:
        """What each host runs: as many hosts as `hosts` says, which meet at `meeting`."""
        where = ["--nodes", hosts, "--rdzv", meeting, "--nproc", str(self.ranks)]
        return ["weft", "train", self.path, *where, "--auto-resume", *self.given]


def write_job(out: Path, text: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--out", str(out), f"cannot be written ({error})", "name another file"
        ) from None
