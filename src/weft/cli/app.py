"""The command line. Everything that can be refused is refused in this process, before any other
starts.

Exit codes: 0 done; 1 a process died, or verification failed; 2 refused; 75 stopped by SIGTERM, and
saved; 130 interrupted.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core import STOPPED, ConfigError, Layout, Refusal, WeftError, nearest
from weft.launch import Rendezvous, launched_rank, note_error, parse_nodes

if TYPE_CHECKING:  # what brings torch with it is imported when a command runs: --help is to be fast
    from weft.core import RunConfig
    from weft.launch import Job

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the run file: train.steps=20."),
]


def main() -> None:
    """The entry point of the command `weft`."""
    app(prog_name="weft")


@app.callback()
def weft() -> None:
    """Lay any PyTorch model over any devices, and prove that the numbers are right."""


@app.command()
def train(
    path: RunFile,
    layout: Annotated[str | None, typer.Option(help="Axes and sizes, as in dp2.tp2.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of processes, of each host with --nodes: the layout's, if left out."
        ),
    ] = None,
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's latest checkpoint.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="The same, and begin if there is none.")
    ] = False,
    count: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="N|MIN:MAX",
            help="Number of hosts; this is to be started on each of them.",
        ),
    ] = None,
    meeting: Annotated[
        str | None,
        typer.Option(
            "--rdzv", metavar="HOST:PORT", help="Where hosts meet: one of them, or file:///path."
        ),
    ] = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="The run folder.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Draw what each stage did, under what was predicted.")
    ] = False,
) -> None:
    """Train the model of RUN.toml, in as many processes as its layout has ranks."""
    with _exit_codes():
        run = _load(path, settings, layout, output)
        if (count is None) != (meeting is None):
            given, value = ("--nodes", count) if meeting is None else ("--rdzv", meeting)
            lacks = (
                "does not say where they meet" if meeting is None else "does not say how many hosts"
            )
            raise ConfigError(given, value, lacks, "write --nodes 4 --rdzv HOST:PORT")
        if resume and auto_resume:
            raise ConfigError("--auto-resume", True, "is not --resume", "give one of them")
        if trace and run.workers:
            raise ConfigError(
                "--trace", trace, "shows stages, and [workers] has none", "leave it out"
            )

        if (
            count is not None
        ):  # before torch comes: each lost connection is a page of C++ stacks otherwise
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from . import train as command

        if count is None and nproc not in (None, run.world):
            raise command.world_size_error(run, "--nproc", nproc)
        if count is not None and meeting is not None:
            several, place = parse_nodes(count), Rendezvous.parse(meeting)
            arguments = [str(path), *itertools.chain(*(("--set", text) for text in settings or []))]
            for option, text in (("--layout", layout), ("--output", output)):
                arguments += [option, text] if text is not None else []
            arguments += ["--trace"] if trace else []
            stopped = command.train_as_host(
                run, several, nproc, place, None if auto_resume else resume, arguments
            )
        else:
            resume |= auto_resume and command.saved_step(run) is not None
            stopped = (command.train_here if launched_rank() is None else command.train_as_rank)(
                run, resume, trace
            )
        if stopped:
            raise typer.Exit(STOPPED)


@app.command()
def verify(
    path: RunFile,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="A layout to verify, may be repeated: RUN.toml's, if left out."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps after which weights are compared.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    world: Annotated[
        int | None, typer.Option(min=1, help="Verify every layout of this many ranks.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Show that loss, gradients and weights equal those of one device, and that the collectives are
    those predicted."""
    with _exit_codes():
        run = _load(path, settings, None, None)

        from weft.train import (
            check_run,
        )
        from weft.verification import exact_sync, result_table, verify_layouts

        layouts = list(layout or [])
        if world is not None:
            layouts += [axes for axes in _layouts(run, world) if axes not in layouts]
        layouts = layouts or [str(run.layout.axes)]
        check_run(run, layouts)
        if run.sync != exact_sync(run.sync):
            shown_as = exact_sync(run.sync)
            typer.echo(
                f"weft: [sync] {run.sync.name}, {run.sync.codec} changes numbers by design:"
                f" verified with {shown_as.name}, {shown_as.codec}",
                err=True,
            )
        shown = (
            (lambda result: None)
            if as_json
            else (lambda result: typer.echo(f"{result_table(result, steps)}\n"))
        )
        report = verify_layouts(run, layouts, steps, shown)
        typer.echo(report.json() if as_json else report.verdict())
        if not report.passed:
            raise typer.Exit(1)


@app.command()
def plan(
    path: RunFile,
    cluster: Annotated[
        str, typer.Option(help="Hardware and how many: h100x64, a sheet's file, or local.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            help="What is fixed: tp8.* or fsdp*+zero2.tp8; a whole layout is priced as it is."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    memory: Annotated[
        float | None,
        typer.Option("--max-memory", metavar="GIB", help="Use no more of a device's memory."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="Print every part of an estimate, with its formula."),
    ] = None,
    era: Annotated[
        str | None, typer.Option(help="The software to price: one of the sheet's eras.")
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Look beyond what is usual, such as tp within a node.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a run file with the best layout, for weft train."),
    ] = None,
    settings: Settings = None,
) -> None:
    """Find the fastest layouts of RUN.toml that fit on a cluster, and say why others are not."""
    with _exit_codes(), _uncollected():
        run = _load(path, settings, None, None)

        from weft.planner import (
            explain_json,
            explain_row,
            plan_for_cluster,
            row_figures,
            write_run_file,
        )

        report, laid = plan_for_cluster(run, cluster, layout, era, memory, wide, explain, top)
        row = report.explained
        if out is not None:
            write_run_file(laid, out)
        if as_json:
            more = (
                {}
                if row is None
                else {"explained": row_figures(row) | {"parts": explain_json(row)}}
            )
            typer.echo(json.dumps(report.json(top) | more))
        elif row is not None:
            typer.echo(explain_row(row))
        else:
            typer.echo(report.text(top))
            name = f"{path.stem}-{report.question.cluster.hardware.name}.toml"
            fits = report.best.fits
            again = (
                f"to train so: the same with --out {name}, then weft train {name}" if fits else ""
            )
            written = (
                f"written: {out}{f'; now weft train {out}' if fits else ', which does not fit'}"
            )
            if said := again if out is None else written:
                typer.echo(f"\n{said}")


@app.command()
def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="A run to look at.", show_default=False),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N", help="Hosts that look together, each started so.")
    ] = None,
    rdzv: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where they meet: a port of one.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder to look at: RUN.toml's output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine, or at several and the ways between them, and say what will work."""
    with _exit_codes():
        if (nodes is None) != (rdzv is None):
            raise ConfigError(
                "--nodes", nodes, "goes with --rdzv", "give both: --nodes 3 --rdzv host0:29400"
            )

        from weft.core import __version__
        from weft.launch import DoctorRequest, RunChecks, report_doctor

        from .doctor_run_check import check_run_file, checkpoint_size

        checks = RunChecks(check_run_file, checkpoint_size)
        asked = DoctorRequest(__version__, path, folder, run_checks=checks)
        if nodes is not None and rdzv is not None:
            asked = replace(asked, hosts=parse_nodes(nodes), meeting=Rendezvous.parse(rdzv))
        if not report_doctor(asked, as_json):
            raise typer.Exit(1)


@app.command()
def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Write the sheet there: to where --cluster local reads, if left out.",
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--fit", metavar="RUNS.csv", help="Fit an era's constants to measured runs instead."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --fit: the sheet, as in h100x64.")
    ] = None,
    era: Annotated[
        str | None, typer.Option(help="With --fit: the era, weft's own if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine, for weft plan --cluster local and for what weft train predicts."""
    with _exit_codes():
        if (runs is None) != (cluster is None) or (runs is None and era is not None):
            given, value = ("--fit", runs) if runs is not None else ("--cluster", cluster or era)
            raise ConfigError(
                given,
                str(value),
                "--fit goes with --cluster",
                "write --fit RUNS.csv --cluster h100x64",
            )

        from weft.planner import report_calibrate, report_fit

        if runs is not None and cluster is not None:
            report_fit(runs, cluster, era, out, as_json)
        else:
            report_calibrate(out, as_json)


@app.command()
def draw(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE...", help="Names such as 1f1b, CSV files, or package.module:function."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of one step.")] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Stages per rank, of schedules that have that option.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Set an option of the schedules."),
    ] = None,
    forward: Annotated[
        str,
        typer.Option(
            help="Seconds of a microbatch's forward on a rank, or a list per stage: 1,2,1,1."
        ),
    ] = "1",
    backward: Annotated[
        str, typer.Option(help="The same of its backward, for the gradient of the input.")
    ] = "1",
    weight: Annotated[
        str, typer.Option(help="The same of its backward, for the weights' gradients.")
    ] = "1",
    update: Annotated[
        str, typer.Option(help="The same of an asynchronous schedule's optimizer step.")
    ] = "0",
    comm: Annotated[
        str, typer.Option(help="Seconds of a message to another rank, or a list per boundary.")
    ] = "0",
    activation: Annotated[
        str,
        typer.Option(
            help=(
                "Bytes that a microbatch keeps on a rank, or a list per stage. 1 counts"
                " microbatches."
            )
        ),
    ] = "1",
    measured: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="Costs that `weft train --trace` wrote."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write .svg, .json (Perfetto, chrome://tracing) or .csv."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate schedules of a pipeline, and draw them one under the other."""
    with _exit_codes():
        from weft.core import ActionCosts

        from . import draw as command

        options = {
            **({} if chunks is None else {"chunks": str(chunks)}),
            **_pairs(settings, "chunks=2"),
        }
        costs = ActionCosts(
            forward_s=_numbers("--forward", forward),
            backward_s=_numbers("--backward", backward),
            weight_s=_numbers("--weight", weight),
            update_s=_numbers("--update", update),
            comm_s=_numbers("--comm", comm),
            activation_bytes=_numbers("--activation", activation),
        )
        if measured is not None:
            costs = command.read_costs(measured)
        for name in schedules:
            if ":" in name and not name.endswith(".csv"):
                from weft.pipeline.schedules import register
                from weft.train import (
                    resolve_callable,
                )

                register(resolve_callable(name, field="schedule"), name)
        drawn = command.simulate_schedules(schedules, ranks, microbatches, options, costs)
        if out is not None:
            command.write_picture(out, drawn)
        if as_json:
            typer.echo(command.schedule_figures(drawn))
        elif out is None:
            command.print_picture(drawn)


@app.command()
def simulate(
    path: RunFile,
    layout: Annotated[
        str | None, typer.Option(help="Axes and sizes, as in dp128.tp8: RUN.toml's, if left out.")
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="Devices, as in h100x1024; local, this machine as it was measured.",
            show_default=False,
        ),
    ] = "local",
    era: Annotated[
        str | None, typer.Option(help="The sheet's kind of software, as in compiled.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DEVICE=]FACTOR",
            help="A device that takes so many times as long; anywhere, without =.",
        ),
    ] = None,
    slow_link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=FACTOR", help="A link of this axis with 1/FACTOR of its bandwidth."
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of a device's time of a step, as a share.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.")] = 0,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Between failures of one device.")
    ] = None,
    node_mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Between failures of one node.")
    ] = None,
    checkpoint: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="For which a checkpoint stops training.")
    ] = None,
    storage: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Or at which all ranks together write one, beside training, from a copy.",
        ),
    ] = None,
    restart: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="From a failure until training goes on: 300, if left out."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="weak|strong", help="More replicas: the batch grows with them, or stays."
        ),
    ] = None,
    to: Annotated[int | None, typer.Option(help="Devices up to which --scale goes.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write .svg, .html, .json (Perfetto) or .csv."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    settings: Settings = None,
) -> None:
    """Simulate a step of RUN.toml on a cluster: slow devices, failures, replicas that wait or not,
    more devices."""
    with _exit_codes():
        run = _load(path, settings, layout, None)

        from weft.planner import (
            SimulateRequest,
            make_scenario,
            parse_scale_mode,
            parse_slow,
            parse_slow_link,
            print_report,
            report_json,
            require_unique,
            simulate_scenario,
            write_report,
        )

        asked = SimulateRequest(
            slow=require_unique(map(parse_slow, slow or []), "--slow"),
            links=require_unique(map(parse_slow_link, slow_link or []), "--slow-link"),
            jitter=jitter,
            seed=seed,
            mtbf_h=mtbf,
            node_mtbf_h=node_mtbf,
            checkpoint_s=checkpoint,
            storage_gbps=storage,
            restart_s=restart,
            every=run.checkpoint.every,
            scale=parse_scale_mode(scale),
            to=to,
        )
        found = simulate_scenario(make_scenario(run, cluster, era), asked)
        if out is not None:
            write_report(out, found)
        if as_json:
            typer.echo(report_json(found))
        elif out is None:
            print_report(found)


# ---- weft checkpoint -----------------------------------------------------------------------------

files = typer.Typer(
    no_args_is_help=True, help="Look at checkpoints; take weights to Hugging Face and back."
)
app.add_typer(files, name="checkpoint")

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run folder.", show_default=False)
]
AtStep = Annotated[int | None, typer.Option(help="The step: the latest one's, if left out.")]


@files.command()
def show(
    folder: RunFolder,
    step: AtStep = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a run's checkpoints hold."""
    with _exit_codes():
        from weft.checkpoint import describe_checkpoint, listing_text

        found = describe_checkpoint(folder, step)
        typer.echo(json.dumps(found) if as_json else listing_text(found, tensors))


@files.command()
def export(
    folder: RunFolder,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="A directory that does not exist.")
    ],
    step: AtStep = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16: the checkpoint's, if left out.")
    ] = None,
) -> None:
    """Write a run's weights as a directory that transformers' from_pretrained loads."""
    with _exit_codes():
        from weft.train import DTYPES, export_weights

        if dtype is not None and dtype not in DTYPES:
            raise ConfigError("--dtype", dtype, "is no dtype", nearest(dtype, DTYPES))
        found = export_weights(folder, to, step, dtype)
        typer.echo(
            f"step {found.step}: {found.tensors} tensors, {found.nbytes:,} B, in {found.files}"
            f" files -> {to}"
        )


@files.command("import")
def bring_in(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="What save_pretrained wrote.", show_default=False)
    ],
    run_file: Annotated[
        Path, typer.Option("--run", metavar="RUN.toml", help="The run that is to begin with it.")
    ],
    settings: Settings = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="The run folder.")] = None,
) -> None:
    """Write a transformers directory's weights as step 0 of a run: weft train RUN.toml --resume
    begins with them."""
    with _exit_codes():
        from weft.train import import_weights

        run = _load(run_file, settings, None, output)
        found = import_weights(source, run)
        typer.echo(
            f"{found.tensors} tensors, {found.nbytes:,} B -> {run.output}; begin: weft train"
            f" {run_file} --resume"
        )


# ---- weft launch ---------------------------------------------------------------------------------

clusters = typer.Typer(no_args_is_help=True, help="Run RUN.toml on a cluster.")
app.add_typer(clusters, name="launch")

AxesOf = Annotated[str | None, typer.Option("--layout", help="Axes and sizes, as in dp2.tp2.")]
Hosts = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX", help="Hosts: 4, or 2:4 to go on with fewer.", show_default=False
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of each host.")]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="The run folder, which all hosts see.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where to write: to the terminal, if left out.")
]


@clusters.command("slurm")
def launch_slurm(
    path: RunFile,
    nodes: Hosts,
    time: Annotated[
        str | None, typer.Option(help="The time limit, as in 12:00:00 or 2-12.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="The partition: SLURM's default, if left out.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    gpus: Gpus = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each host: one per rank, if left out.")
    ] = None,
    layout: AxesOf = None,
    settings: Settings = None,
    output: Output = None,
    out: Out = None,
) -> None:
    """Write a file for sbatch: it saves when it is stopped, goes back to the queue, and goes on."""
    with _exit_codes():
        from weft.launch import slurm_script

        job = _job(path, nodes, layout, settings, output)
        _written(slurm_script(job, time, partition, account, gpus, cpus), out)


@clusters.command("kubernetes")
def launch_kubernetes(
    path: RunFile,
    nodes: Hosts,
    image: Annotated[
        str, typer.Option(help="A container image with weft and the run file.", show_default=False)
    ],
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/PATH", help="A PersistentVolumeClaim, for the run folder."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The job's name: the run file's, if left out.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="The namespace: kubectl's, if left out.")
    ] = None,
    gpus: Gpus = None,
    cpu: Annotated[str | None, typer.Option(help="CPUs of each host, as in 8 or 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each host, as in 64Gi.")] = None,
    layout: AxesOf = None,
    settings: Settings = None,
    output: Output = None,
    out: Out = None,
) -> None:
    """Write a PyTorchJob for kubectl: pods that are stopped save, start again, and go on."""
    with _exit_codes():
        from weft.launch import kubernetes_manifest

        job = _job(path, nodes, layout, settings, output)
        _written(
            kubernetes_manifest(job, image, volume or [], name, namespace, gpus, cpu, memory), out
        )


@clusters.command("ray")
def launch_ray(
    path: RunFile,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers: the layout's ranks, if left out.")
    ] = None,
    layout: AxesOf = None,
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's latest checkpoint.")
    ] = False,
    output: Output = None,
) -> None:
    """Train in the workers of Ray Train, at RAY_ADDRESS or here: when one dies all are started
    anew, and go on."""
    with _exit_codes():
        from weft.train import (
            check_run,
        )

        from . import launch_ray as raytrain, train as command

        run = _load(path, settings, layout, output)
        if workers not in (None, run.world):
            raise command.world_size_error(run, "--workers", workers)
        check_run(run)
        raytrain.run_on_ray(run, resume)


def _job(
    path: Path, hosts: str, layout: str | None, settings: list[str] | None, output: str | None
) -> Job:
    """A run that has passed weft's own checks, on hosts that can share its ranks."""
    from weft.launch import Job

    from . import train as command

    run = _load(path, settings, layout, output)
    options = [
        ("--layout", layout),
        *(("--set", text) for text in settings or []),
        ("--output", output),
    ]
    given = [word for option, text in options if text is not None for word in (option, text)]
    job = Job.of(str(path), run, hosts, given)
    command.check_hosts(run, job.least, job.most, job.ranks)
    return job


def _written(text: str, out: Path | None) -> None:
    from weft.launch import write_job

    typer.echo(text, nl=False) if out is None else write_job(out, text)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """An error that weft raises on purpose is one message, and not a traceback."""
    try:
        yield
    except WeftError as error:
        joined = launched_rank()
        if (
            joined is None or joined[0] == 0 or not isinstance(error, Refusal)
        ):  # all ranks refuse alike
            typer.echo(f"weft: {error}", err=True)
        note_error(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("weft: interrupted", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which is a quarter of the time of a command that imports much and
    soon ends."""
    before = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # the process's own last collection is the longest
    try:
        yield
    finally:
        if before:
            gc.enable()


def _load(
    path: Path, settings: list[str] | None, layout: str | None, output: str | None
) -> RunConfig:
    from weft.core import load_run

    overrides = _pairs(settings, "train.steps=20")
    for key, text in (("layout.axes", layout), ("output", output)):
        if text is not None:
            overrides[key] = json.dumps(text)  # a string, even if it reads like a number
    return load_run(path, overrides)


def _pairs(settings: list[str] | None, example: str) -> dict[str, str]:
    """Key -> value of what --set was given."""
    pairs = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError("--set", setting, "has no =", f"write --set {example}")
        pairs[key.strip()] = value.strip()
    return pairs


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    """One number, or several between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            option, text, "neither a number nor a list of numbers", "write 1.5 or 1,2,1,1"
        ) from None
    return found if len(found) > 1 else found[0]


def _layouts(run: RunConfig, world: int) -> list[str]:
    """Every layout of `world` ranks, with at most one option per axis, on which this run can be
    laid."""
    from weft.parallel import registry
    from weft.train import (
        build_dataset,
        build_skeleton,
        plan_without_weights,
        with_layout,
    )

    bare, train, choices = build_skeleton(run), build_dataset(run), []
    for axis, strategies in registry().items():
        options = ["", *(f"+{option}" for strategy in strategies for option in strategy.OPTIONS)]
        sizes = [size for size in range(2, world + 1) if world % size == 0]
        choices.append(["", *(f"{axis}{size}{option}" for size in sizes for option in options)])
    found, refused = [], None
    for chosen in itertools.product(*choices):
        axes = ".".join(filter(None, chosen)) or "dp1"
        if Layout.parse(axes).world != world:
            continue
        try:
            plan_without_weights(with_layout(run, axes), bare, train)
            found.append(axes)
        except Refusal as error:
            refused = error
            typer.echo(f"weft: left out {axes}: {error}", err=True)
    if refused is not None and not found:
        raise refused
    return found
