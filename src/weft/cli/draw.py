"""`weft draw`: draw pipeline schedules, collectives, what each rank holds, or a profiled step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError

from .options import LayoutOption, NoCode, exit_codes, key_values, load

# Options that one kind of picture has; --out and --json are of all.
OF_SCHEDULES = (
    "microbatches",
    "chunks",
    "forward",
    "backward",
    "weight",
    "update",
    "comm",
    "activation",
    "costs",
)
OF_COLLECTIVES = ("size", "bandwidth", "latency", "local")
OWN_OPTIONS = {
    "schedules": ("ranks", "settings", *OF_SCHEDULES),
    "--collective": ("ranks", "settings", *OF_COLLECTIVES),
    "--plan": ("layout", "settings", "no_code"),
    "--profile": (),
}


def draw(
    ctx: typer.Context,
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCHEDULE...", help="Names such as 1f1b, CSV files, or package.module:function."
        ),
    ] = None,
    collective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Draw a collective step by step instead, such as ring. Give several to compare.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help=(
                "Draw what each rank holds of each weight instead, and where ranks exchange, under"
                " a layout with tp."
            ),
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE.json",
            help=(
                "Draw the last step of a run's profile instead: computing and communication side by"
                " side, with the share that overlaps."
            ),
        ),
    ] = None,
    layout: LayoutOption = None,
    ranks: Annotated[
        int, typer.Option(help="Number of ranks of the pipeline or the collective.")
    ] = 4,
    microbatches: Annotated[int, typer.Option(help="Number of microbatches of one step.")] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Stages on each rank, for schedules with that option.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE",
            help="Set an option of the schedules or collectives, or a key of the run file.",
        ),
    ] = None,
    forward: Annotated[
        str,
        typer.Option(
            help=(
                "Seconds that one microbatch's forward takes on a rank, or a list with one number"
                " for each stage: 1,2,1,1."
            )
        ),
    ] = "1",
    backward: Annotated[
        str, typer.Option(help="Seconds of its backward for the gradient of the input.")
    ] = "1",
    weight: Annotated[
        str, typer.Option(help="Seconds of its backward for the gradients of the weights.")
    ] = "1",
    update: Annotated[
        str, typer.Option(help="Seconds of an optimizer step in an asynchronous schedule.")
    ] = "0",
    comm: Annotated[
        str,
        typer.Option(
            help=(
                "Seconds of a message to another rank, or a list with one number for each boundary"
                " between stages."
            )
        ),
    ] = "0",
    activation: Annotated[
        str,
        typer.Option(
            help=(
                "Bytes that one microbatch keeps on a rank, or a list with one number for each"
                " stage. 1 counts microbatches."
            )
        ),
    ] = "1",
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read these costs from a file of `weft train --trace`."),
    ] = None,
    size: Annotated[float, typer.Option(help="Bytes of the tensor of a collective.")] = 100e6,
    bandwidth: Annotated[
        str,
        typer.Option(
            help=(
                "Bytes per second that a rank sends, and gets, in a collective; or two numbers:"
                " within a node, between nodes."
            )
        ),
    ] = "25e9",
    latency: Annotated[
        str,
        typer.Option(
            help="Latency of a collective's message in seconds; or two numbers: within a node,"
            " between nodes."
        ),
    ] = "1e-5",
    local: Annotated[
        int, typer.Option(help="Number of ranks on each node; 0: all ranks are on one node.", min=0)
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write .svg; of schedules also .json (Perfetto, chrome://tracing) or .csv; of a"
                " profile also .json, which has only what is drawn."
            ),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    no_code: NoCode = False,
) -> None:
    """Simulate pipeline schedules, and draw them one under the other on one time axis; or draw
    collectives step by step, what each rank holds of a model, or what overlaps in a step."""
    with exit_codes():
        _check_options(ctx, schedules=schedules, collective=collective, plan=plan, profile=profile)
        if plan is not None:
            from . import draw_plan

            rows = draw_plan.make_rows(load(plan, settings, layout, no_code=no_code))
            _show(
                out,
                as_json,
                lambda path: draw_plan.write_plan(path, rows),
                lambda: draw_plan.plan_figures(rows),
                lambda: draw_plan.print_plan(rows),
            )
            return
        if profile is not None:
            from . import draw_overlap

            step = draw_overlap.read_profile(profile)
            _show(
                out,
                as_json,
                lambda path: draw_overlap.write_overlap(path, profile),
                lambda: draw_overlap.overlap_figures(step),
                lambda: draw_overlap.print_overlap(step),
            )
            return
        options = key_values(settings, "servers=2" if collective else "chunks=2")
        if collective:
            from weft.collectives import Links

            from . import draw_collectives as pictures

            links = Links(
                pictures.two_networks("--latency", _numbers("--latency", latency)),
                pictures.two_networks("--bandwidth", _numbers("--bandwidth", bandwidth)),
                local,
            )
            made = pictures.make_collectives(collective, ranks, size, links, options)
            _show(
                out,
                as_json,
                lambda path: pictures.write_collectives(path, made),
                lambda: pictures.collective_figures(made),
                lambda: pictures.print_collectives(made),
            )
            return
        from weft.core import ActionCosts

        from . import draw_schedules

        seconds = ActionCosts(
            forward_s=_numbers("--forward", forward),
            backward_s=_numbers("--backward", backward),
            weight_s=_numbers("--weight", weight),
            update_s=_numbers("--update", update),
            comm_s=_numbers("--comm", comm),
            activation_bytes=_numbers("--activation", activation),
        )
        if costs is not None:
            seconds = draw_schedules.read_costs(costs)
        if chunks is not None:
            options = {"chunks": str(chunks), **options}
        names = schedules or []
        for name in names:
            if ":" in name and not name.endswith(".csv"):
                from weft.pipeline import schedules as known
                from weft.train import resolve_callable

                known.register(resolve_callable(name, field="schedule"), name)
        drawn = draw_schedules.simulate_schedules(names, ranks, microbatches, options, seconds)
        _show(
            out,
            as_json,
            lambda path: draw_schedules.write_picture(path, drawn),
            lambda: draw_schedules.schedule_figures(drawn),
            lambda: draw_schedules.print_picture(drawn),
        )


def _check_options(ctx: typer.Context, **things: object) -> None:
    """Raises ConfigError unless one thing to draw is named, with options that are its own."""
    named = {key if key == "schedules" else f"--{key}": v for key, v in things.items() if v}
    if not named:
        fix = "name one, as in weft draw 1f1b, or give --collective ring"
        raise ConfigError("SCHEDULE", "", "nothing to draw", fix)
    drawn, *others = named
    if others:
        fix, value = "draw one after the other", named[others[0]]
        problem = f"cannot be drawn together with {drawn}"
        raise ConfigError(others[0], value if isinstance(value, list) else str(value), problem, fix)
    for param in ctx.command.params:
        name, owners = param.name or "", [k for k, own in OWN_OPTIONS.items() if param.name in own]
        source = ctx.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and owners and drawn not in owners:
            problem = f"applies only to {' and '.join(owners)}"
            raise ConfigError(param.opts[0], ctx.params[name], problem, "leave it out")


def _show(
    out: Path | None,
    as_json: bool,
    write: Callable[[Path], None],
    figures: Callable[[], str],
    show: Callable[[], None],
) -> None:
    """Write what --out names, and print the figures for --json; else the picture."""
    if out is not None:
        write(out)
    if as_json:
        typer.echo(figures())
    elif out is None:
        show()


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    """One number, or several between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            option, text, "is neither a number nor a list of numbers", "write 1.5 or 1,2,1,1"
        ) from None
    return found if len(found) > 1 else found[0]
