"""`weft launch`: write job files for a cluster, or train in the workers of Ray."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .commands import Command, CommandGroup
from .options import (
    LayoutOption,
    RunFile,
    Settings,
    exit_codes,
    load,
    repeated_options,
)

if TYPE_CHECKING:
    from weft.launch import Job

commands = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Run RUN.toml on a cluster.")

Hosts = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of hosts: 4, or 2:4 to continue with fewer.",
        show_default=False,
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of each host.")]
SharedOutput = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="The run folder, on a shared disk.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write to this file. Default: the terminal.")
]


@commands.command("slurm", cls=Command)
def slurm(
    path: RunFile,
    nodes: Hosts,
    time: Annotated[
        str | None, typer.Option(help="The time limit, as in 12:00:00 or 2-12.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="The partition. Default: that of SLURM.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="The account that is charged.")] = None,
    gpus: Gpus = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each host. Default: one for each rank.")
    ] = None,
    layout: LayoutOption = None,
    settings: Settings = None,
    output: SharedOutput = None,
    out: Out = None,
) -> None:
    """Write a script for sbatch. When the job is stopped it saves a checkpoint, returns to the
    queue, and continues."""
    with exit_codes():
        from weft.launch import slurm_script

        job = _job(path, nodes, layout, settings, output)
        _write(slurm_script(job, time, partition, account, gpus, cpus), out)


@commands.command("kubernetes", cls=Command)
def kubernetes(
    path: RunFile,
    nodes: Hosts,
    image: Annotated[
        str, typer.Option(help="A container image with weft and the run file.", show_default=False)
    ],
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/PATH", help="A PersistentVolumeClaim for the run folder."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The job's name. Default: the run file's.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="The namespace. Default: that of kubectl.")
    ] = None,
    gpus: Gpus = None,
    cpu: Annotated[str | None, typer.Option(help="CPUs of each host, as in 8 or 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each host, as in 64Gi.")] = None,
    layout: LayoutOption = None,
    settings: Settings = None,
    output: SharedOutput = None,
    out: Out = None,
) -> None:
    """Write a PyTorchJob for kubectl. Pods that are stopped save a checkpoint, start again, and
    continue."""
    with exit_codes():
        from weft.launch import kubernetes_manifest

        job = _job(path, nodes, layout, settings, output)
        _write(
            kubernetes_manifest(job, image, volume or [], name, namespace, gpus, cpu, memory), out
        )


@commands.command("ray", cls=Command)
def ray(
    path: RunFile,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of workers. Default: as many as the layout has ranks."),
    ] = None,
    layout: LayoutOption = None,
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run folder's latest checkpoint.")
    ] = False,
    output: SharedOutput = None,
) -> None:
    """Train in the workers of Ray Train, on the cluster of RAY_ADDRESS or on this machine. When one
    dies, all start again and continue."""
    with exit_codes():
        from weft.train import check_run

        from . import launch_ray, train_run

        run = load(path, settings, layout, output)
        if workers not in (None, run.world):
            raise train_run.world_size_error(run, "--workers", workers)
        check_run(run)
        launch_ray.run_on_ray(run, resume)


def _job(
    path: Path, hosts: str, layout: str | None, settings: list[str] | None, output: str | None
) -> Job:
    """A checked run, on hosts that can share its ranks."""
    from weft.launch import Job

    from . import train_run

    run = load(path, settings, layout, output)
    job = Job.of(str(path), run, hosts, repeated_options(settings, layout, output))
    train_run.check_hosts(run, job.least, job.most, job.ranks)
    return job


def _write(text: str, out: Path | None) -> None:
    from weft.launch import write_job

    typer.echo(text, nl=False) if out is None else write_job(out, text)
