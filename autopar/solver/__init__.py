"""Choice problems (integer programs of one strategy for each node) and what solves them."""

from autopar.solver.base import Solver, SolverError
from autopar.solver.contest import decode_contest, read_contest
from autopar.solver.evaluate import fits, is_feasible, objective, peak_bytes, usage_profile
from autopar.solver.exhaustive import ExhaustiveSolver
from autopar.solver.highs import HighsSolver
from autopar.solver.memory import least_memory
from autopar.solver.presolve import Reduction, reduce_problem
from autopar.solver.problem import ChoiceProblem, Edge, Node, ProblemError, Usage, with_allowed
from autopar.solver.solution import Solution, Status
from autopar.solver.solve import solve, solve_relaxed, solver_named, solvers

__all__ = [
    "ChoiceProblem",
    "Edge",
    "ExhaustiveSolver",
    "HighsSolver",
    "Node",
    "ProblemError",
    "Reduction",
    "Solution",
    "Solver",
    "SolverError",
    "Status",
    "Usage",
    "decode_contest",
    "fits",
    "is_feasible",
    "least_memory",
    "objective",
    "peak_bytes",
    "read_contest",
    "reduce_problem",
    "solve",
    "solve_relaxed",
    "solver_named",
    "solvers",
    "usage_profile",
    "with_allowed",
]
