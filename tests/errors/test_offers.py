"""What users and other packages offer: each mistake is one typed error where it is registered or first taken."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint

import jax.numpy as jnp
import pytest

import autopar.schedule.registry as schedules
import autopar.search.registry as strategies
from autopar import compare, hooks, parallelize
from autopar.errors import AutoparError, ScheduleError
from autopar.schedule import Schedule, get
from autopar.search import alpa
from autopar.sharding import register_rule, unregister_rule
from autopar.solver import ExhaustiveSolver, SolverError, solve, solver_named
from tests.search.problems import f32, toy
from tests.solver.problems import random_problem

#: The module; the package has a function of that name.
SOLVE = import_module("autopar.solver.solve")
OPTIONS = {"time_limit_s": None, "start": None, "seed": 0}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Registrations of one test only."""
    monkeypatch.setattr(strategies, "_REGISTRY", strategies.built_in())
    monkeypatch.setattr(schedules, "_REGISTRY", schedules.built_in())


class Complete:
    name, presolves = "complete", True

    def solve(self, problem, *, time_limit_s=None, start=None, seed=0):
        return ExhaustiveSolver().solve(problem, time_limit_s=time_limit_s, start=start, seed=seed)


class WithoutPresolves:
    name = "old"
    solve = Complete.solve


class WithoutSolve:
    name, presolves = "no solve", False


class WithoutSeed(Complete):
    def solve(self, problem, *, time_limit_s=None, start=None):
        return None


class NamedByNumber(Complete):
    name = 3


class AnswersNothing(Complete):
    def solve(self, problem, **options):
        return None


class AnswersNothingToParts(AnswersNothing):
    presolves = False


class TakesAnArgument(Complete):
    def __init__(self, folder):
        self.folder = folder


#: (solver, words of the error)
WRONG_SOLVERS = [
    (WithoutPresolves, "has no presolves"),
    (WithoutSolve, "has no solve"),
    (WithoutSeed, r"solve of solver .* cannot be called with \(problem, time_limit_s=, start=, seed=\)"),
    (NamedByNumber, "name of solver .* is 3, not of type str"),
]


def of_package(monkeypatch, module, value, name="mine"):
    """Another package offers ``value`` of this file, as an entry point of any group."""
    point = EntryPoint(name, f"{__name__}:{value}" if ":" not in value else value, "autopar.any")
    monkeypatch.setattr(module, "entry_points", lambda **_: [point])


def stated(error, *words):
    """Every error has a cause and a remedy besides its fact."""
    assert error.cause and error.remedy
    assert all(word in str(error) for word in words)


@pytest.mark.parametrize(("solver", "words"), WRONG_SOLVERS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_solver_that_lacks_something(solver, words, monkeypatch):
    with pytest.raises(SolverError, match=words) as caught:
        solve(random_problem(0, 3), solver())
    stated(caught.value, "presolves (True or False)")
    of_package(monkeypatch, SOLVE, solver.__name__)
    with pytest.raises(SolverError, match=words):
        solver_named("mine")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("TakesAnArgument", r"cannot be called with \(\)"),
        ("OPTIONS", "cannot be called"),
        ("Missing", "cannot be loaded: AttributeError"),
        ("autopar_has_no_such_package:Solver", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_an_entry_point_that_makes_no_solver(value, words, monkeypatch):
    of_package(monkeypatch, SOLVE, value)
    with pytest.raises(SolverError, match=words) as caught:
        solver_named("mine")
    stated(caught.value)


@pytest.mark.parametrize("solver", [AnswersNothing, AnswersNothingToParts])
def test_a_solver_that_returns_no_solution(solver):
    """Presolve leaves a part of the problem to the second."""
    with pytest.raises(SolverError, match="returned None, not a Solution"):
        solve(random_problem(50), solver())


def test_a_complete_solver_of_another_package(monkeypatch):
    of_package(monkeypatch, SOLVE, "Complete")
    problem = random_problem(0, 3)
    assert solve(problem, solver_named("mine")).objective == solve(problem).objective


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("three", 3, "is 3, which cannot be called"),
        (3, alpa, "3 is no name of a search strategy"),
        ("", alpa, "'' is no name"),
        ("none", lambda: None, r"cannot be called with \(problem\)"),
        ("two", lambda problem, other: None, r"cannot be called with \(problem\)"),
    ],
    ids=["three", "a number for a name", "no name", "none", "two"],
)
def test_a_strategy_that_cannot_be_one(name, strategy, words):
    with pytest.raises(AutoparError, match=words) as caught:
        strategies.register(name)(strategy)
    stated(caught.value, "takes a Problem and returns a Plan")


def test_a_strategy_of_another_package_that_cannot_be_one(monkeypatch):
    of_package(monkeypatch, hooks, "OPTIONS")
    with pytest.raises(AutoparError, match="which cannot be called"):
        strategies.strategy_named("mine")
    of_package(monkeypatch, hooks, "Missing")
    with pytest.raises(AutoparError, match="cannot be loaded"):
        strategies.strategy_named("mine")


@pytest.mark.parametrize("of_call", [{}, {"num_stages": 2, "num_microbatches": 2}], ids=str)
def test_a_strategy_that_returns_no_plan(of_call):
    def step(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def nothing(problem):
        return None

    with pytest.raises(AutoparError, match="'nothing' returned None, not a Plan") as caught:
        parallelize(step, cluster=toy(4), search=nothing, **of_call).plan(f32(8, 8), f32(8, 8))
    stated(caught.value)
    with pytest.raises(AutoparError, match=r"cannot be called with \(problem\)"):
        parallelize(step, cluster=toy(4), search=lambda: None).plan(f32(8, 8), f32(8, 8))
    strategies.register("nothing")(nothing)
    (trial,) = compare(step, f32(8, 8), f32(8, 8), cluster=toy(4), search=("nothing",)).trials
    assert "returned None, not a Plan" in trial.failure


class NoSchedule:
    name = "no schedule"


class WithoutTable(Schedule):
    name = "without a table"


class TextChunks(Schedule):
    name, chunks = "chunks", "two"

    def table(self, num_stages, num_microbatches):
        return get("1f1b").table(num_stages, num_microbatches)


class TableOfNothing(Schedule):
    name = "nothing"

    def table(self):
        return None


class ReturnsNothing(Schedule):
    name = "returns nothing"

    def table(self, num_stages, num_microbatches):
        return None


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (3, "which cannot be called"),
        (NoSchedule, "the class NoSchedule, no subclass of Schedule"),
        (WithoutTable, "the class WithoutTable, has no table"),
    ],
    ids=["3", "no schedule", "without a table"],
)
def test_a_schedule_that_cannot_be_registered(factory, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        schedules.register("mine")(factory)
    stated(caught.value, "autopar.schedule.Schedule")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (TextChunks, "chunks of schedule 'mine' is 'two', not of type int"),
        (TableOfNothing, r"table of schedule 'mine' cannot be called with \(num_stages, num_microbatches\)"),
        (lambda: 3, "returned 3, not a Schedule"),
    ],
    ids=["chunks", "table", "3"],
)
def test_a_schedule_that_lacks_something(factory, words):
    schedules.register("mine")(factory)
    with pytest.raises(ScheduleError, match=words) as caught:
        get("mine")
    stated(caught.value)
    if isinstance(factory, type):
        with pytest.raises(ScheduleError, match=words.replace("'mine'", f"'{factory.__name__}'")):
            parallelize(lambda x: x, cluster=toy(4), schedule=factory())


def test_a_schedule_that_returns_no_table():
    def step(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    with pytest.raises(AutoparError, match="'returns nothing' returned None, not a Table") as caught:
        parallelize(step, cluster=toy(4), schedule=ReturnsNothing(), num_stages=2, num_microbatches=2).plan(
            f32(8, 8), f32(8, 8)
        )
    stated(caught.value)


@pytest.mark.parametrize("rule", [3, lambda: None, lambda op: None], ids=["3", "no arguments", "one argument"])
def test_a_rule_that_cannot_be_one(rule):
    with pytest.raises(AutoparError, match="sharding rule 'tanh'") as caught:
        register_rule("tanh", rule)
    stated(caught.value, "register_rule")


def test_a_rule_that_was_not_registered():
    with pytest.raises(AutoparError, match="no sharding rule is registered for 'tahn'") as caught:
        unregister_rule("tahn")
    assert isinstance(caught.value, KeyError)
    assert "tahn" in str(caught.value)
