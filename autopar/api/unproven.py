"""Plans from files that somebody may have changed: they run once they are proven, or are refused.

`verify_unproven` proves what can be proven before a plan is lowered; `carried_out` refuses what goes wrong after.
Plans of searches, and of files with the digest of their content, are neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autopar.errors import AutoparError, PlanMismatchError
from autopar.frontend import Traced
from autopar.lower.program import plan_tables
from autopar.plan import Plan
from autopar.sharding.verify_plan import verify_arguments, verify_plan, wrong_entry


def verify_unproven(plan: Plan, traced: Traced, donated: Sequence[int]) -> None:
    """Raises PlanMismatchError, with the path of the first wrong entry, unless a plan is right about a function.

    Stages of pipelines are proven when they are lowered.

    Args:
        plan: any.
        traced: the function, in the form that the plan is of.
        donated: numbers of the arguments that the caller gives up.
    """
    if not plan.unproven:
        return
    if plan.num_stages == 1:
        verify_plan(traced.graph, plan.content, plan_tables(plan))
    else:
        verify_arguments(traced.graph, plan.content)
    given_up = {traced.arguments[n][0] for n in donated}
    for n, path in enumerate(plan.content.donated):
        if path not in given_up:
            raise wrong_entry(f"plan.donated[{n}]", f"{path!r} is not donated")


@contextmanager
def carried_out(plan: Plan) -> Iterator[None]:
    """Within it an error of lowering or compiling an unproven plan is one of the plan."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        if not plan.unproven:
            raise
        raise PlanMismatchError(
            f"the plan cannot be carried out: {type(error).__name__}: {error}",
            cause="its file is older, was changed by hand, or damaged",
            remedy="plan again, or undo the change",
        ) from error
