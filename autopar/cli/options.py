"""Options that several commands take, each written once, and values that click has no type for, as callbacks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import click

from autopar.errors import AutoparError

Option = Callable[[Any], Any]


class Seconds(click.FloatRange):
    """A finite number of seconds, 0 or more; click takes nan and inf for such."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        if not math.isfinite(seconds := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


SECONDS = Seconds()


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


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes from text as "40GB"."""
    from autopar.plan.text import parse_bytes  # here: help needs no plans

    try:
        return parse_bytes(value)
    except AutoparError as error:
        raise click.BadParameter(f"{value!r} is not a size; {error.remedy}", ctx, param) from error


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


def options(*parts: Option) -> Option:
    """One decorator for several; they are shown in the order given."""

    def decorate(function: Any) -> Any:
        for part in reversed(parts):
            function = part(function)
        return function

    return decorate


#: Which function, and with which arguments: ``arguments``, ``preset``, ``set_``.
target_options: Option = options(
    click.option(
        "--args",
        "arguments",
        default="example_args",
        show_default=True,
        metavar="ATTR",
        help="Attribute of the file that is, or returns, the tuple of arguments (arrays or shapes).",
    ),
    click.option("--preset", metavar="NAME", help="Preset of the file's build, where no FUNC is named."),
    click.option(
        "--set",
        "set_",
        metavar="NAME=VALUE",
        callback=overrides,
        multiple=True,
        help="A further argument of build. May be given several times.",
    ),
)

#: What to plan for: ``cluster_name``, ``nodes``.
cluster_options: Option = options(
    click.option(
        "--cluster",
        "cluster_name",
        metavar="NAME|FILE",
        help="Cluster to plan for; see `autopar clusters`.  [default: the devices of this process]",
    ),
    click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes of the cluster."),
)

#: The strategy: ``search``.
search_option: Option = click.option(
    "--search", metavar="NAME", help="Search strategy; see `autopar strategies`.  [default: alpa]"
)

#: The plan by its degrees of parallelism: ``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ``zero``, ``chunks``.
degree_options: Option = options(
    *(
        click.option(f"--{name}", type=click.IntRange(min=1), metavar="N", help=text)
        for name, text in (
            ("tp", "Devices that share the matrices of a layer (tensor parallelism)."),
            ("pp", "Pipeline stages."),
            ("dp", "Replicas that share the batch.  [default: the devices that the other degrees leave]"),
            ("cp", "Devices that share the tokens of an example (context parallelism)."),
            ("ep", "Devices, of those of --dp, that share experts."),
            ("chunks", "Chunks of each pipeline stage."),
        )
    ),
    click.option("--zero", type=click.IntRange(0, 3), metavar="N", help="ZeRO stage, 0 to 3."),
)

#: How time is divided, and what is not held: ``microbatches``, ``stages``, ``schedule``, ``remat``, ``offload``.
pipeline_options: Option = options(
    click.option(
        "--microbatches", metavar="N", callback=count_or_auto, help="Parts of the batch that run one after another."
    ),
    click.option(
        "--stages", metavar="N", callback=count_or_auto, help="Parts of the model, each on devices of its own."
    ),
    click.option("--schedule", metavar="NAME", help="Pipeline schedule; see `autopar schedules`."),
    click.option(
        "--remat",
        type=click.Choice(["auto", "none", "selective", "full"]),
        help="Recomputation in the backward pass of a stage.  [default: auto]",
    ),
    click.option(
        "--offload",
        type=click.Choice(["none", "auto", "layers", "update"]),
        help="What host memory holds: chosen (auto), stacks of layers, or state of the update.  [default: none]",
    ),
)

#: What changes values, and so is asked for: ``precision``, ``wire``.
precision_options: Option = options(
    click.option("--precision", metavar="DTYPE", help="Mixed precision of a float32 step: bf16 or f16."),
    click.option(
        "--wire",
        metavar="ROLE=FORMAT",
        callback=formats,
        multiple=True,
        help="Format in which gradients or weights are sent, as gradients=int8. May be given twice.",
    ),
)

#: When the search ends: ``time_limit``, ``effort``, ``exhaustive``.
time_option: Option = options(
    click.option(
        "--time-limit",
        type=SECONDS,
        metavar="S",
        help="Time limit of the search, in seconds; the best plan so far is taken.",
    ),
    click.option(
        "--effort",
        type=click.Choice(("quick", "default", "high", "exhaustive")),
        help="Budget of the search, in work units, and the gap at which it stops.  [default: default]",
    ),
    click.option("--exhaustive", is_flag=True, default=None, help="As --effort exhaustive."),
)

#: Limits on the answer and facts of the call: ``memory_limit``, ``mesh``, ``donate``.
limit_options: Option = options(
    click.option(
        "--memory-limit",
        metavar="SIZE",
        callback=size,
        help="Memory a device, as 40GB or 16GiB.  [default: that of the device]",
    ),
    click.option("--mesh", metavar="SIZES", callback=mesh_sizes, help="The only logical mesh to consider, as 2x4."),
    click.option(
        "--donate", metavar="N[,N]", callback=positions, help="Arguments whose memory the step may reuse, as 0."
    ),
)

#: Where roles cannot be told: ``batch``.
batch_option: Option = click.option(
    "--batch", metavar="N[,N]", callback=positions, help="Batch arguments, where roles are ambiguous."
)

#: No progress: ``quiet``.
quiet_option: Option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


def format_option(*forms: str) -> Option:
    """The option of the output's form: ``form``, one of ``forms``, the first unless given."""
    return click.option(
        "--format", "form", type=click.Choice(forms), default=forms[0], show_default=True, help="What is printed."
    )
