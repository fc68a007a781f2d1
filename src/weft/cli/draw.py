"""`weft draw`: draw pipeline schedules, or collectives step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError

from .options import exit_codes, key_values

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
            "--set", metavar="OPTION=VALUE", help="Set an option of the schedules or collectives."
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
        str, typer.Option(help="Seconds of a message of a collective before its bytes; likewise.")
    ] = "1e-5",
    local: Annotated[
        int, typer.Option(help="Neighbouring ranks of a node; 0: all are in one.", min=0)
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write .svg; of schedules also .json (Perfetto, chrome://tracing) or .csv.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate pipeline schedules, and draw them one under the other on one time axis; or draw
    collectives step by step, with what each rank holds, bytes and time."""
    with exit_codes():
        if collective and schedules:
            fix = "draw one after the other"
            raise ConfigError("--collective", collective, "stands beside schedules", fix)
        if not collective and not schedules:
            fix = "name one, as in weft draw 1f1b, or give --collective ring"
            raise ConfigError("SCHEDULE", "", "nothing to draw", fix)
        _refuse_others(ctx, OF_SCHEDULES if collective else OF_COLLECTIVES)
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
            if out is not None:
                pictures.write_collectives(out, made)
            if as_json:
                typer.echo(pictures.collective_figures(made))
            elif out is None:
                pictures.print_collectives(made)
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
        if out is not None:
            draw_schedules.write_picture(out, drawn)
        if as_json:
            typer.echo(draw_schedules.schedule_figures(drawn))
        elif out is None:
            draw_schedules.print_picture(drawn)


def _refuse_others(ctx: typer.Context, options: Sequence[str]) -> None:
    """Raises ConfigError for an option that has no meaning here."""
    for name in options:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            what = "schedules" if name in OF_SCHEDULES else "--collective"
            raise ConfigError(f"--{name}", ctx.params[name], f"is of {what} alone", "leave it out")


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    """One number, or several between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            option, text, "neither a number nor a list of numbers", "write 1.5 or 1,2,1,1"
        ) from None
    return found if len(found) > 1 else found[0]
