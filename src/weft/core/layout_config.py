"""[layout] of a run file. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, InstanceOf, PlainSerializer, field_validator

from .errors import LayoutError
from .layout import Layout
from .toml import TomlTable, table_error
from .unit_choice import BLOCKS, UNIT_CHOICES, parse_units

# a Layout, written as its text
LayoutValue = Annotated[InstanceOf[Layout], PlainSerializer(str, return_type=str)]


class LayoutConfig(TomlTable):
    """[layout]"""

    axes: LayoutValue = Field(
        default=Layout.single(), description='axes with their sizes, as in "dp2.tp2"'
    )
    elastic: bool | tuple[LayoutValue, ...] = Field(
        default=False,
        description=(
            "continue with fewer ranks when hosts are lost: true chooses a layout; a list names"
            " layouts, best first"
        ),
    )

    parts: dict[str, str] = Field(
        default={},
        description=(
            'glob of module names -> axes that divide its weights, as in "vision" = "fsdp"'
            " (docs/layouts.md); the first match applies"
        ),
    )
    fsdp_units: str | int | tuple[str, ...] = Field(
        default=BLOCKS,
        description=(
            'what fsdp gathers and frees together: "blocks": each by itself; "model": all at once;'
            ' k: k blocks in a row; or globs of modules, as in ["blocks.*.up", "head"]'
            " (docs/layouts.md)"
        ),
    )

    @field_validator("fsdp_units", mode="before")
    @classmethod
    def _parse_units(cls, value: object) -> object:
        if (units := parse_units(value)) is None:
            raise table_error("is not a choice of units", UNIT_CHOICES)
        return units

    @field_validator("axes", mode="before")
    @classmethod
    def _parse_axes(cls, value: object) -> object:
        return _parse_layout("layout.axes", value)

    @field_validator("elastic", mode="before")
    @classmethod
    def _parse_elastic(cls, value: object) -> object:
        if isinstance(value, bool):
            return value
        if (
            not isinstance(value, list | tuple)
            or not value
            or not all(isinstance(one, str | Layout) for one in value)
        ):
            raise table_error(
                "is neither true nor a list of layouts",
                'write true, or layouts as in ["dp3.tp2", "dp2.tp2"]',
            )
        return tuple(_parse_layout("layout.elastic", one) for one in value)


def _parse_layout(field: str, value: object) -> object:
    """The Layout of a text; anything else is left to pydantic. Raises LayoutError."""
    if not isinstance(value, str):
        return value
    try:
        return Layout.parse(value)
    except LayoutError as error:
        raise LayoutError(field, value, error.problem, error.fix) from None
