"""Writes what was measured as the hardware sheet of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..cost.hardware import GIB, LOCAL, Device, Era, Hardware, Tier
from .collective_skew import LayoutTiming, skew_s
from .collectives import CollectiveTiming, OverlapSample
from .compute import MemoryBandwidth, SmallOpTiming, TimedWork
from .decoder_blocks import DecoderTiming, left_over
from .fixed_overhead import FixedOverhead
from .robust_fit import FittedLine, fit_line

ERA = "eager"


@dataclass(frozen=True)
class Machine:
    """`ranks` processes with a device each: a GPU, or a CPU's cores divided among them."""

    ranks: int
    threads: int
    kind: str
    title: str
    memory_bytes: float


@dataclass(frozen=True)
class Measurements:
    """All that was measured; FLOPs or bytes beside seconds. `others`: the most that other programs
    had of the processors' time in one part."""

    machine: Machine
    matmuls: dict[str, list[TimedWork]]
    attention: tuple[list[TimedWork], list[TimedWork]]
    streams: MemoryBandwidth
    small: SmallOpTiming
    decoders: list[DecoderTiming]
    update: TimedWork
    collectives: list[CollectiveTiming]
    beside: OverlapSample | None
    floor: FixedOverhead
    skew_timings: list[LayoutTiming]
    others: float


def sheet(seen: Measurements) -> Hardware:
    """Rates of products follow rate * F / (F + half) (F: FLOPs of one); the rate of attention is
    the median of sizes, and that of a network a line's slope. What goes with operations and with
    bytes is, on a CPU, what a decoder's products and attention leave over, and what goes with
    collectives is what layouts that have many take more. The peak of the dtype that the era is
    fitted to is the best rate seen or fitted; those of others are such that the era's share of them
    is what they reached."""
    machine, small = seen.machine, (seen.small.forward_s + seen.small.backward_s) / 2
    cpu = machine.kind == "cpu"
    main = "fp32" if cpu or "bf16" not in seen.matmuls else "bf16"
    products = {dtype: _beyond(times, small * cpu) for dtype, times in seen.matmuls.items()}
    forward, backward = (
        median(each.amount / each.seconds for each in times) for times in seen.attention
    )
    best = max(
        products[main].rate,
        forward,
        backward,
        *(each.amount / each.seconds for each in seen.matmuls[main]),
    )
    share = products[main].rate / best
    moved = _beyond(seen.streams.activations, small * cpu).rate
    memory_bps = max(seen.streams.memory_bps, moved)
    era = Era(
        matmul=share,
        matmul_flops=products[main].half,
        uneven=1.0,
        ragged=1.0,
        attention=forward / best,
        attention_backward=backward / best,
        memory=moved / memory_bps,
        launch_s=small,
        waits=float(cpu),
        link=1.0,
        network=1.0,
        hidden=1.0,
        contention=_contention(seen.beside),
        fixed_s=seen.floor.step_s,
        context_gib=seen.floor.process_bytes / GIB,
        communicator_gib=0.0 if cpu else Era().communicator_gib,
        reserved=1.0 if cpu else Era().reserved,
    )
    device = Device(
        memory_gib=machine.memory_bytes / GIB,
        memory_bps=memory_bps,
        host_bps=seen.streams.host_bps,
        flops={dtype: product.rate / share for dtype, product in products.items()} | {main: best},
    )
    made = Hardware(
        name=LOCAL,
        title=machine.title,
        source="weft calibrate",
        kind=machine.kind,
        notes=_notes(seen),
        device=device,
        tiers=(_tier(seen),),
        eras={ERA: era},
    )
    if not cpu:  # operations queue up, and a decoder of these sizes is all launches
        return made
    found = left_over(seen.decoders, made, era)
    era = era.model_copy(update={"launch_s": found.fixed_s, "traffic": moved / found.rate})
    era = era.model_copy(update={"meet_s": skew_s(seen.skew_timings, made, era)})
    return made.model_copy(update={"eras": {ERA: era}})


def _beyond(times: list[TimedWork], launch_s: float) -> FittedLine:
    """The line less the launch, which is counted by itself."""
    found = fit_line([each.amount for each in times], [each.seconds for each in times])
    return FittedLine(max(0.0, found.fixed_s - launch_s), found.rate)


def _tier(seen: Measurements) -> Tier:
    """Of each kind of collective seconds = hops * latency + bytes sent / rate: the rate of the
    fastest, the share of it that others reach, and the median latency."""
    ranks = seen.machine.ranks
    if ranks == 1:
        return Tier(name="itself", devices=1, bps=seen.streams.host_bps, latency_s=0.0)
    found: dict[str, FittedLine] = {}
    for kind in dict.fromkeys(each.kind for each in seen.collectives):
        here = [each for each in seen.collectives if each.kind == kind]
        found[kind] = fit_line(
            [e.sent_bytes for e in here], [e.seconds for e in here], [float(e.hops) for e in here]
        )
    best = max(one.rate for one in found.values())
    return Tier(
        name="host",
        devices=ranks,
        bps=best,
        latency_s=median(one.fixed_s for one in found.values()),
        reaches={kind: one.rate / best for kind, one in found.items()},
    )


def _contention(beside: OverlapSample | None) -> float:
    """By which part of its own time a sum that is hidden lengthens what hides it."""
    if beside is None:
        return 0.0
    return max(0.0, beside.both_s - beside.compute_s) / beside.sum_s


def _notes(seen: Measurements) -> str:
    machine, update = seen.machine, seen.update
    each = f"{machine.ranks} processes at once" if machine.ranks > 1 else "one process"
    threads = f", {machine.threads} threads each" if machine.kind == "cpu" else ""
    return f"{each}{threads}; AdamW takes {update.seconds / update.amount * 1e9:.3g} ns a parameter"
