"""The hardware sheet (TOML) of one accelerator: its peaks, its networks, and what software reaches
of them. Pure data; no torch.

Sheets lie in `hardware/`; the one of this machine is what `weft calibrate` writes. Of `--cluster
h100x64`, `h100` names the sheet. An era of which no runs are known is `like` that of another sheet,
but for what it states itself.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from weft.core import ConfigError, TomlTable, nearest, read_file, table_error, toml_refusal

SHEETS = Path(__file__).parents[1] / "hardware"
LOCAL = "local"  # the sheet that `weft calibrate` writes
GIB = 2.0**30
KEPT = 0.9  # of the memory that a card is sold with, at least so much is there

Share = Annotated[float, Field(gt=0, le=1.5)]
Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tuple = BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)  # of TOML's list


class LayerTiming(TomlTable):
    """[[eras.NAME.layers]] What layers of one shape took, as runs tell, beside what the era's
    constants say."""

    flops: Rate = Field(description="FLOPs of its forward for one sample")
    tokens: Rate = Field(description="tokens of one sample")
    samples: Rate = Field(description="samples of a microbatch on a rank")
    tp: Rate = Field(description="ranks that divide it")
    took: Rate = Field(description="times what the constants say")


class Era(TomlTable):
    """[eras.NAME] What one kind of software reaches of a device. Few numbers, so that few runs fit
    them."""

    matmul: Share = Field(default=0.75, description="of the peak, by large matmuls")
    matmul_flops: Count = Field(
        default=4e8, description="FLOPs of a matmul that reaches half of that"
    )
    uneven: Share = Field(default=0.7, description="of that, where a width is no multiple of 64")
    ragged: Share = Field(default=0.35, description="of that, where it is no multiple of 8")
    ragged_heads: Share = Field(
        default=0.35, description="of that, where a head's width is no multiple of 8"
    )
    eight: Share = Field(default=0.8, description="of that, where a matmul is in 8 bits")
    attention: Share = Field(default=0.5, description="of the peak, by a fused attention's forward")
    attention_backward: Share = Field(default=0.4, description="of the peak, by its backward")
    memory: Share = Field(default=0.8, description="of memory_bps, by what only moves data")
    traffic: Count = Field(
        default=1.0,
        description="the part of elementwise traffic that fusion leaves; over 1, it computes too",
    )
    launch_s: Count = Field(default=5e-6, description="the host's seconds for each kernel")
    waits: Count = Field(
        default=0.0,
        description=(
            "of launches and work, how much of the shorter adds to the longer: 1 if none queue"
        ),
    )
    link: Share = Field(default=0.78, description="of a tier's bandwidth within a node")
    network: Share = Field(default=0.85, description="of that between nodes")
    hidden: Count = Field(
        default=0.8, le=1, description="the most of the weights' traffic that compute hides"
    )
    contention: Count = Field(default=0.1, description="by how much what hides traffic slows down")
    meet_s: Count = Field(
        default=0.0, description="seconds that ranks lose at each collective until all are there"
    )
    fixed_s: Count = Field(
        default=0.02, description="seconds of each step for what goes with no size"
    )
    jitter: Count = Field(
        default=0.0, description="the growth of a step with the square root of log2(nodes)"
    )
    context_gib: Count = Field(
        default=1.5, description="memory that the allocator does not know of"
    )
    communicator_gib: Count = Field(
        default=0.6, description="more of it for each group of ranks, as NCCL's buffers are"
    )
    reserved: Rate = Field(default=1.04, description="what the allocator takes, over what it gives")
    layers: Annotated[tuple[LayerTiming, ...], Tuple] = Field(
        default=(), description="what runs tell of layers of one shape, beyond these constants"
    )


class Tier(TomlTable):
    """[[tiers]] One network, the innermost first."""

    name: str
    devices: int = Field(ge=0, description="devices that one such network joins; 0: any number")
    bps: Rate = Field(description="bytes per second of one device, each way")
    latency_s: Count = Field(description="seconds of one hop")
    reaches: dict[str, Share] = Field(
        default={},
        description=(
            "kind of collective, as in all_gather -> the share of that which it reaches, if not all"
        ),
    )


class Device(TomlTable):
    """[device]"""

    memory_gib: Rate = Field(description="GiB of one device, as its driver gives them")
    memory_bps: Rate = Field(description="bytes per second that one device reads and writes")
    host_bps: Rate = Field(description="bytes per second to the host's memory, each way")
    flops: dict[str, Rate] = Field(min_length=1, description="dtype -> peak per second, dense")


class Hardware(TomlTable):
    """One sheet."""

    name: str = Field(min_length=1)
    title: str
    source: str = Field(description="where these figures stand")
    kind: str = Field(description="torch's name for such a device")
    notes: str = ""
    device: Device
    tiers: Annotated[tuple[Tier, ...], Tuple]
    eras: dict[str, Era] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.tiers:
            raise table_error("has none", "write [[tiers]], at least one", tiers=[])
        for inner, outer in zip(self.tiers, self.tiers[1:]):
            if not inner.devices or (outer.devices and outer.devices <= inner.devices):
                raise table_error(
                    f"connects no more devices than {inner.name}",
                    "list inner ones first",
                    tiers=outer.name,
                )
        return self

    def peak(self, dtype: str) -> float:
        """FLOP/s of this dtype. Raises ConfigError where the sheet has none."""
        if dtype not in self.device.flops:
            fix = f"this sheet has {', '.join(self.device.flops)}"
            field = "precision.float8" if dtype == "fp8" else "precision.compute"
            raise ConfigError(field, dtype, f"{self.name} has no peak for it", fix)
        return self.device.flops[dtype]

    def era(self, name: str) -> Era:
        """Raises ConfigError."""
        if name not in self.eras:
            raise ConfigError(
                "--era", name, f"{self.name} has no such era of software", nearest(name, self.eras)
            )
        return self.eras[name]

    @property
    def node(self) -> int:
        """Devices of one node: those that the innermost network joins."""
        return self.tiers[0].devices or 1


class Cluster(TomlTable):
    """So many devices of one kind."""

    hardware: Hardware
    devices: int

    def __str__(self) -> str:
        return f"{self.hardware.name}x{self.devices}"

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.hardware.node)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`h100x64`; `local`, this machine with as many devices as it has, as it was measured; or a
        file in place of a name: `my.toml`, `my.tomlx64`. Raises ConfigError."""
        match = re.fullmatch(r"(.+?)(?:x([1-9][0-9]{0,8}))?", text.strip())
        if match is None:
            raise ConfigError("--cluster", text, "names no hardware", "write it as in h100x64")
        name, count = match.groups()
        own = name.endswith(".toml")
        first, _, rest = name.rpartition("x")
        if count is None and (first in sheet_names() or first.endswith(".toml")):
            raise ConfigError(
                "--cluster", text, f"{rest!r} is not a number of devices", f"write {first}x64"
            )
        sheet = read_sheet(Path(name)) if own else named_sheet(name)
        if count is None and name != LOCAL and not own:
            raise ConfigError(
                "--cluster", text, "does not say how many devices", f"write {name}x64"
            )
        return cls.of(sheet, int(count) if count else sheet.node)

    @classmethod
    def of(cls, hardware: Hardware, devices: int) -> Self:
        """Raises ConfigError for more devices than the sheet's networks join."""
        most = hardware.tiers[-1].devices
        if most and devices > most:
            fix = f"use at most {most}, or a sheet with one more [[tiers]]"
            raise ConfigError(
                "--cluster",
                f"{hardware.name}x{devices}",
                f"its networks connect at most {most} devices",
                fix,
            )
        return cls(hardware=hardware, devices=devices)


def sheet_names() -> list[str]:
    """The sheets that come with weft."""
    return sorted(path.stem for path in SHEETS.glob("*.toml"))


def local_sheet() -> Path:
    """Where `weft calibrate` writes what it measured, and `--cluster local` is read from: in the
    user's cache, as the XDG Base Directory Specification has it."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = named if named.is_absolute() else Path.home() / ".cache"
    return cache / "weft" / "hardware.toml"


def named_sheet(name: str) -> Hardware:
    """The sheet of this name, or of a card and its memory, as in a100-80. Raises ConfigError."""
    if name == LOCAL:
        if not local_sheet().exists():
            raise ConfigError(
                "--cluster",
                name,
                "this machine has not been measured",
                "run weft calibrate first, or name hardware, as in --cluster h100x8",
            )
        return read_sheet(local_sheet())
    if name in sheet_names():
        return _load_shipped(name)
    card = re.fullmatch(r"(.+)-([0-9]+)(?:gb?)?", name.lower())
    family = [] if card is None else _family(card[1])
    if card is None or not family:
        fix = nearest(name.lower(), [*sheet_names(), LOCAL])
        raise ConfigError("--cluster", name, "there is no such sheet", fix)
    for sheet in family:
        if KEPT * int(card[2]) < sheet.device.memory_gib <= int(card[2]):
            return sheet
    there = ", ".join(f"{sheet.name} ({sheet.device.memory_gib:g} GiB)" for sheet in family)
    problem = f"no hardware file describes {card[1]} with {card[2]} GB"
    raise ConfigError("--cluster", name, problem, f"use {there}")


def _family(card: str) -> list[Hardware]:
    """The sheets of a card in all its forms, the plain one first."""
    return [_load_shipped(name) for name in sheet_names() if f"{name}-".startswith(f"{card}-")]


@cache
def _load_shipped(name: str) -> Hardware:
    return read_sheet(SHEETS / f"{name}.toml")


def read_sheet(path: Path) -> Hardware:
    """Raises ConfigError for a file that is no sheet, with the key that is wrong."""
    try:
        return parse_sheet(read_file(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "hardware", str(path), f"cannot be read ({error})", "name a sheet"
        ) from None


def parse_sheet(text: str, where: str) -> Hardware:
    """The sheet in `text`; `where` it is from. Raises ConfigError."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("hardware", where, f"is not TOML: {error}", "correct that line") from None
    eras = table.get("eras")
    if isinstance(eras, dict):
        table["eras"] = {name: _inherit_profile(name, era, where) for name, era in eras.items()}
    try:
        return Hardware.model_validate(table)
    except ValidationError as error:
        raise toml_refusal(error, Hardware, f"sheet ({where})") from None


def _inherit_profile(name: str, era: Any, where: str) -> Any:
    """An era with what it does not state as the sheet has it that it is `like`; but layers, which
    runs told of."""
    if not isinstance(era, dict) or "like" not in era:
        return era
    like, field = era["like"], f"eras.{name}.like"
    if like not in sheet_names():
        raise ConfigError(
            field,
            like,
            f"there is no such sheet ({where})",
            nearest(str(like).lower(), sheet_names()),
        )
    theirs = tomllib.loads((SHEETS / f"{like}.toml").read_text(encoding="utf-8"))["eras"]
    if name not in theirs:
        raise ConfigError(
            field,
            like,
            f"that hardware file has no era {name} ({where})",
            f"it has {', '.join(theirs)}",
        )
    found = {**_inherit_profile(name, theirs[name], where), "layers": [], **era}
    del found["like"]
    return found
