"""``autopar verify``."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import print_json, progress
from autopar.cli.target import load, parse_target, user_code
from autopar.plan import Plan


@click.command(cls=Command, name="verify")
@click.argument("function", metavar="FILE.py:FUNC")
@click.option(
    "--target",
    "device",
    metavar="T",
    required=True,
    help="Target of the compiler: cpu, cpu:N, tpu:v5p:4x4x4, or cuda:h100:8x8 (nodes x devices).",
)
@click.option("--plan", "plan_file", metavar="plan.json", help="A plan to verify.  [default: plan for the target]")
@options.target_options
@options.search_option
@options.pipeline_options
@options.precision_options
@options.limit_options
@options.format_option("text", "json", "html")
@click.option("--strict", is_flag=True, help="Exit with 1 where compiled and predicted differ.")
@options.quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    function: str,
    device: str,
    plan_file: str | None,
    arguments: str,
    preset: str | None,
    set_: dict[str, Any],
    form: str,
    strict: bool,
    quiet: bool,
    **asked: Any,
) -> None:
    """Compile a plan with the XLA compiler of its devices and compare.

    The devices need not be there; the compiler has to be installed (pip install 'autopar[tpu]' or
    'autopar[cuda12-aot]'; cpu needs nothing). Shown are the collectives, the memory and the fusions of the compiled
    program against what the plan predicts.
    """
    wanted = parse_target(function)
    plan = None if plan_file is None else Plan.load(plan_file)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with progress(quiet) as say, user_code(wanted):
        say("loading jax")
        planning, aot = import_module("autopar.cli.planning"), import_module("autopar.lower.aot")
        target = planning.parsed(aot.parse_target, device, "--target")
        target.check_installed()
        request = planning.PlanRequest(arguments, preset, set_, target.cluster(), **asked)
        say(f"loading {wanted.place}")
        fn, values = planning.function_and_arguments(load(wanted), wanted, request)
        if plan is None:
            plan = planning.make_plan(fn, values, request, say)
        say(f"compiling for {target.text}")
        verification = import_module("autopar.api.verify").verify(
            plan, planning.decorated(fn, request), *values, target=target.text
        )
    if form == "json":
        print_json(verification.to_dict())
    else:
        click.echo(verification._repr_html_() if form == "html" else str(verification))
    if strict and not verification.ok:
        ctx.exit(1)
