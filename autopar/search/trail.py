"""`Trail`: what became of the regions of a search, for `plan.search.trail` and `Plan.explain`.

Who closes a region says so: the planner of forms it does not try, trials of what they plan, enumerations of the numbers
of stages that estimates leave out. `Trail.table` merges rows, so that a plan keeps a table of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from autopar.errors import ConstraintError, InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.plan import Plan
from autopar.plan.trail import BOUNDED, IMPOSSIBLE, LEFT_OUT, PLANNED, TOO_LARGE, TrailRow, ranges_of
from autopar.search.clock import units_of
from autopar.search.outcome import Bounded, Impossible, LeftOut, Outcome, Planned, TooLarge
from autopar.solver.meter import Meter

#: Rows of a table at most.
MOST_ROWS = 60
#: Characters of a reason at most.
_MOST_CHARACTERS = 160


@dataclass(frozen=True)
class Region:
    """A set of plans. What is None or empty is free.

    Args:
        form: "one stage", "pipeline" or "branches".
        stages: ranges of their number, both ends included.
        microbatches: their numbers.
        schedule: its name.
        remat: what is recomputed.
        how: other parts of the form in words.
    """

    form: str
    stages: tuple[tuple[int, int], ...] = ()
    microbatches: tuple[int, ...] = ()
    schedule: str = ""
    remat: str = ""
    how: str = ""

    @staticmethod
    def of_stages(form: str, numbers: Iterable[int], microbatches: Sequence[int] = (), schedule: str = "") -> Region:
        """The region of some numbers of stages."""
        return Region(form, ranges_of(numbers), tuple(microbatches), schedule)


@dataclass(eq=False)
class Trail:
    """Closed regions, in order.

    Args:
        rows: of the table, not merged.
        untold: work units of regions that are still open, which no row has.
    """

    rows: list[TrailRow] = field(default_factory=list)
    untold: dict[Region, int] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Work units of all regions."""
        return sum(row.work for row in self.rows) + sum(self.untold.values())

    def worked(self, region: Region, work: int) -> None:
        """Takes note of work units that an open region took; the row that closes it has them."""
        self.untold[region] = self.untold.get(region, 0) + work

    def close(self, region: Region, outcome: Outcome, work: int = 0) -> None:
        """Takes note of what became of a region, and of the work units that it took."""
        r, work = region, work + self.untold.pop(region, 0)
        row = TrailRow(r.form, "", r.stages, r.microbatches, r.schedule, r.remat, r.how, work=work)
        self.rows.append(msgspec.structs.replace(row, **_fields_of(outcome)))

    def tried(
        self, region: Region, meter: Meter, limit_bytes: int, plan: Callable[[], Plan | Bounded]
    ) -> Plan | Bounded:
        """Plans a region and takes note of what becomes of it.

        Args:
            region: what is planned.
            meter: counts what it takes.
            limit_bytes: of a device.
            plan: plans it. Its errors are those of this.
        """
        before = units_of(meter)
        try:
            answer = plan()
        except (InfeasiblePlanError, MicrobatchError, ConstraintError, ScheduleError) as error:
            self.close(region, outcome_of(error, limit_bytes), units_of(meter) - before)
            raise
        if isinstance(answer, Bounded):
            self.close(region, answer, units_of(meter) - before)
            return answer
        planned = region if answer.num_stages == 1 else replace(region, schedule=answer.schedule)
        self.close(planned, Planned(answer.step_time), units_of(meter) - before)
        return answer

    def covered(self) -> set[int]:
        """Numbers of stages about which some row tells."""
        return {n for row in self.rows for first, last in row.stages for n in range(first, last + 1)}

    def table(self, most: int = MOST_ROWS) -> tuple[TrailRow, ...]:
        """The rows, merged by what differs until they are few.

        Args:
            most: rows.
        """
        rows = self._with_all_work()
        for merge in (_same, _but_microbatches, _but_details, _but_stages):
            rows = _merged(rows, merge)
            if len(rows) <= most:
                break
        return tuple(rows[:most])

    def _with_all_work(self) -> list[TrailRow]:
        """The rows, the first of each form with the work of its regions that were divided."""
        rows, left = list[TrailRow](), dict(self.untold)
        for row in self.rows:
            of_form = [region for region in left if region.form == row.form]
            rows.append(msgspec.structs.replace(row, work=row.work + sum(map(left.pop, of_form))))
        return rows

    def __reduce__(self) -> tuple[type[Trail], tuple[()]]:
        """Another process begins with no rows."""
        return Trail, ()


def outcome_of(error: Exception, limit_bytes: int) -> Outcome:
    """Outcome of the region that an error closes.

    Args:
        error: from planning it.
        limit_bytes: of a device.
    """
    fact = getattr(error, "fact", str(error))
    if isinstance(error, InfeasiblePlanError) and not isinstance(error.__cause__, ConstraintError | ScheduleError):
        missing = None if error.least_bytes is None else max(0, error.least_bytes - limit_bytes)
        return TooLarge(fact, missing)
    return Impossible(fact)


def _fields_of(outcome: Outcome) -> dict[str, object]:
    """Fields of a row that say an outcome."""
    if isinstance(outcome, Planned):
        planned = {"outcome": PLANNED, "seconds": outcome.step_s}
        return planned | {"estimate_s": outcome.estimate_s, "why": _short(outcome.by)} if outcome.by else planned
    if isinstance(outcome, Bounded):
        return {"outcome": BOUNDED, "least_s": outcome.least_s, "why": _short(outcome.by)}
    if isinstance(outcome, TooLarge):
        return {"outcome": TOO_LARGE, "missing_bytes": outcome.missing_bytes, "why": _short(outcome.where)}
    if isinstance(outcome, LeftOut):
        return {"outcome": LEFT_OUT, "why": _short(outcome.rule)}
    return {"outcome": IMPOSSIBLE, "why": _short(outcome.fact)}


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _merged(rows: Sequence[TrailRow], key: Callable[[TrailRow], tuple[object, ...]]) -> list[TrailRow]:
    """One row for each key, that which says most with the numbers and the work of all."""
    groups: dict[tuple[object, ...], list[TrailRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [_one(group) for group in groups.values()]


def _one(group: Sequence[TrailRow]) -> TrailRow:
    best = min(group, key=lambda row: row.rank)
    numbers = {n for row in group for first, last in row.stages for n in range(first, last + 1)}
    free = any(not row.stages for row in group)
    counts = sorted({n for row in group for n in row.microbatches})
    least = [row.least_s for row in group if row.least_s is not None]
    return msgspec.structs.replace(
        best,
        stages=() if free else ranges_of(numbers),
        microbatches=() if any(not row.microbatches for row in group) else tuple(counts),
        schedule=best.schedule if best.outcome == PLANNED or len({row.schedule for row in group}) == 1 else "",
        remat=best.remat if best.outcome == PLANNED or len({row.remat for row in group}) == 1 else "",
        how=best.how if best.outcome == PLANNED or len({row.how for row in group}) == 1 else "",
        least_s=min(least, default=None),
        work=sum(row.work for row in group),
        regions=sum(row.regions for row in group),
    )


def _same(row: TrailRow) -> tuple[object, ...]:
    return (row.form, row.outcome, row.stages, row.microbatches, row.schedule, row.remat, row.how)


def _but_microbatches(row: TrailRow) -> tuple[object, ...]:
    counts = row.microbatches if row.outcome == PLANNED else ()
    return (row.form, row.outcome, row.stages, counts, row.schedule, row.remat, row.how)


def _but_details(row: TrailRow) -> tuple[object, ...]:
    return (row.form, row.outcome, row.stages)


def _but_stages(row: TrailRow) -> tuple[object, ...]:
    return (row.form, row.outcome, row.stages if row.outcome == PLANNED else ())
