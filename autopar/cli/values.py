"""Values of options that click has no type for, as callbacks."""

from __future__ import annotations

import ast
import re
from typing import Any

import click


def mesh_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Mesh sizes from the text of an option, as (2, 4) from ``2x4``."""
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", value):
        raise click.BadParameter(f"{value!r} is not a mesh; write sizes as 8 or 2x4", ctx, param)
    return tuple(int(n) for n in value.split("x"))


def positions(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Positions of arguments from the text of an option, as (0, 1) from ``0,1``."""
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", value):
        raise click.BadParameter(f"{value!r} is not a list of positions; write them as 0 or 0,1", ctx, param)
    return tuple(int(n) for n in value.split(","))


def count_or_auto(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """A number of 1 or more, or "auto"."""
    if value is None or value == "auto":
        return value
    if not re.fullmatch(r"[1-9][0-9]*", value):
        raise click.BadParameter(f"{value!r} is neither a number of 1 or more nor 'auto'", ctx, param)
    return int(value)


def formats(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Formats by role of ``ROLE=FORMAT``; None where none is given."""
    wrong = [text for text in values if not re.fullmatch(r"\w+=\w+", text)]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not ROLE=FORMAT, as gradients=int8", ctx, param)
    return dict(text.split("=") for text in values) or None


def overrides(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Names and values of ``NAME=VALUE``: the value as Python writes it, else a word."""
    overrides_given: dict[str, Any] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", ctx, param)
        try:
            overrides_given[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides_given[name] = value
    return overrides_given


def trace_or_picture(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A file for a trace (.json) or a picture (.svg); other endings stand for formats that are not written."""
    ending = value[value.rfind(".") :].lower() if value and "." in value.rpartition("/")[2] else ""
    if ending and ending not in (".json", ".svg", ".trace"):
        raise click.BadParameter(f"{value!r} ends in {ending}; a trace ends in .json, a picture in .svg", ctx, param)
    return value
