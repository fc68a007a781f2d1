"""`weft draw`: simulate and draw pipeline schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core import ConfigError

from .options import exit_codes, key_values


def draw(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE...", help="Names such as 1f1b, CSV files, or package.module:function."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Number of microbatches of one step.")] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Stages on each rank, for schedules with that option.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Set an option of the schedules."),
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
    measured: Annotated[
        Path | None,
        typer.Option(
            "--costs", metavar="FILE", help="Read these costs from a file of `weft train --trace`."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write .svg, .json (Perfetto, chrome://tracing) or .csv."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate pipeline schedules, and draw them one under the other on one time axis."""
    with exit_codes():
        from weft.core import ActionCosts

        from . import draw_schedules

        options = {
            **({} if chunks is None else {"chunks": str(chunks)}),
            **key_values(settings, "chunks=2"),
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
            costs = draw_schedules.read_costs(measured)
        for name in schedules:
            if ":" in name and not name.endswith(".csv"):
                from weft.pipeline import schedules as known
                from weft.train import resolve_callable

                known.register(resolve_callable(name, field="schedule"), name)
        drawn = draw_schedules.simulate_schedules(schedules, ranks, microbatches, options, costs)
        if out is not None:
            draw_schedules.write_picture(out, drawn)
        if as_json:
            typer.echo(draw_schedules.schedule_figures(drawn))
        elif out is None:
            draw_schedules.print_picture(drawn)


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    """One number, or several between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            option, text, "neither a number nor a list of numbers", "write 1.5 or 1,2,1,1"
        ) from None
    return found if len(found) > 1 else found[0]
