"""``autopar compare``."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import PAGES, check_folder, print_json, print_section, progress, write_file
from autopar.cli.plan import chosen_cluster
from autopar.cli.target import load, parse_target, user_code
from autopar.cluster import Cluster
from autopar.report.sections import Section
from autopar.search.baselines import all_degrees, degrees_text
from autopar.search.compare import STANDARD, Budget, Comparison, Named, compare_problem
from autopar.search.problem_data import load_problem


@click.command(cls=Command, name="compare")
@click.argument("target", metavar="FILE.py:FUNC")
@click.option("--search", metavar="A,B,C", help="Strategies.  [default: alpa,data-parallel,zero1,zero3,megatron]")
@click.option(
    "--degrees",
    is_flag=True,
    help="Compare plans by their degrees: all of tp, pp, dp and ZeRO stage that are not given.",
)
@options.degree_options
@click.option(
    "--time-limit",
    type=options.SECONDS,
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds for one mesh.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Choices for one mesh, where they are counted.")
@click.option("--seed", "seeds", type=int, multiple=True, metavar="N", help="May be given several times.  [default: 0]")
@options.target_options
@options.cluster_options
@options.pipeline_options
@options.precision_options
@options.limit_options
@options.batch_option
@click.option("-o", "--output", metavar="FILE.html", help="Write the table as a page, whose columns can be sorted.")
@options.format_option("text", "json")
@options.quiet_option
def command(
    target: str,
    search: str | None,
    degrees: bool,
    time_limit: float,
    steps: int | None,
    seeds: tuple[int, ...],
    arguments: str,
    preset: str | None,
    set_: dict[str, Any],
    cluster_name: str | None,
    nodes: int | None,
    output: str | None,
    form: str,
    quiet: bool,
    **asked: Any,
) -> None:
    """Rank search strategies on a function.

    Every strategy plans the function under the same budget; nothing is run. Shown are the predicted step time of its
    plan, how much slower that is than the best, the spread over seeds, memory, the price of a million tokens where
    the cluster file has one, and how long planning took. The JSON has the best cost against time of every search. The
    function, its arguments and the cluster are given as to `autopar plan`. With --degrees every degree of tensor,
    pipeline and data parallelism is planned with each ZeRO stage; degrees that are given, as --tp 8, stay as they
    are. A file of `autopar.search.save_problem` (.json, .json.gz) in place of FILE.py:FUNC needs no jax.
    """
    if output is not None:
        check_page(output)
    budget = Budget(time_limit, steps, seeds or (0,))
    if target.endswith((".json", ".json.gz")):
        check_problem_options(click.get_current_context())
        problem = load_problem(target)
        names = searched(search, degrees=False)
        with progress(quiet) as say:
            show(compare_problem(problem, names, budget, say), form, output)
        return
    wanted = parse_target(target)
    cluster = chosen_cluster(cluster_name, nodes)
    if cluster is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with progress(quiet) as say, user_code(wanted):
        say("loading jax")
        planning, api = import_module("autopar.cli.planning"), import_module("autopar.api.compare")
        request = planning.PlanRequest(arguments, preset, set_, cluster, **asked)
        say(f"loading {wanted.place}")
        function, values = planning.function_and_arguments(load(wanted), wanted, request)
        if request.degrees and not degrees:
            raise click.UsageError("--tp and the other degrees need --degrees here; `autopar plan` takes them alone")
        names = searched(search, degrees)
        for name in names:
            planning.check_strategy(name)
        plain, plan_options = planning.options_of(function, replace(request, **dict.fromkeys(planning.DEGREES)))
        if degrees:
            alone = plan_options.num_microbatches == 1
            every = all_degrees(plan_options.cluster or Cluster.local(), request.degrees, one_microbatch=alone)
            names = (*names, *((degrees_text(manual), manual) for manual in every))
        comparison = api.compare_with(plain, values, plan_options, names, budget, say)
    show(comparison, form, output)


def searched(search: str | None, degrees: bool) -> tuple[Named, ...]:
    """Names of strategies that are compared: those that were given, else the search next to degrees, or `STANDARD`."""
    if search is not None:
        return tuple(n for n in search.split(",") if n)
    return ("alpa",) if degrees else STANDARD


def check_problem_options(ctx: click.Context) -> None:
    """Raises click.UsageError where an option of functions was given for a file that holds a problem."""
    of_command = ("target", "search", "time_limit", "steps", "seeds", "output", "form", "quiet")
    for p in ctx.command.params:
        given = p.name and ctx.get_parameter_source(p.name) is click.core.ParameterSource.COMMANDLINE
        if given and p.name not in of_command:
            raise click.UsageError(f"{p.opts[0]} is for functions: a saved problem has it")


def check_page(output: str) -> None:
    """Raises click.BadParameter unless a page can be written to ``output``."""
    if not output.endswith(PAGES):
        raise click.BadParameter(f"{output!r} is not a page: its name ends in .html", param_hint="-o")
    check_folder(output)


def show(comparison: Comparison, form: str, output: str | None) -> None:
    """Prints a comparison as text or as JSON, and writes it as a page to ``output`` unless that is None."""
    title = f"{comparison.program} on {comparison.cluster}"
    columns = comparison.columns()
    section = Section(title, columns, comparison.rows(), (0, *range(2, len(columns) - 1)))
    if output is not None:
        write_file(output, import_module("autopar.report.page").tables_page(title, [section]))
    if form == "json":
        print_json(comparison.to_dict())
    else:
        print_section(section)
