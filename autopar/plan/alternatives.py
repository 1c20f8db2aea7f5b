"""Alternatives of a plan and their outcomes, from the trail of its search: `Plan.explain("stages")` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors.names import counted
from autopar.plan.content import PlanContent
from autopar.plan.text import bytes_text, seconds_text
from autopar.plan.trail import BOUNDED, PLANNED, TOO_LARGE, TrailRow, ranges_of, ranges_text, stages_text
from autopar.plan.types import Considered

#: What `Plan.explain` tells of the trail.
TOPICS = ("stages", "microbatches", "schedule", "mesh", "remat")


def outcome_text(row: TrailRow, best_s: float) -> str:
    """The outcome in words.

    Args:
        row: with the outcome.
        best_s: seconds of the chosen plan.
    """
    if row.outcome == PLANNED and row.seconds is not None:
        expected = "" if row.estimate_s is None else f", {seconds_text(row.estimate_s)} expected by {row.why}"
        several = len(row.microbatches) > 1 or sum(last - first + 1 for first, last in row.stages) > 1
        fastest = " the fastest" if several else ""
        return f"planned: {seconds_text(row.seconds)}{fastest}" + _more(row.seconds, best_s) + expected
    if row.outcome == BOUNDED:
        least = "" if row.least_s is None else f" at least {seconds_text(row.least_s)}{_more(row.least_s, best_s)}"
        return f"bounded:{least}, {row.why}" if least else f"bounded: {row.why}"
    if row.outcome == TOO_LARGE:
        short = "" if row.missing_bytes is None else f" by {bytes_text(row.missing_bytes)} a device"
        return f"too large{short}: {row.why}"
    return f"{row.outcome}: {row.why}"


def _more(seconds: float, best_s: float) -> str:
    return f" ({seconds / best_s - 1:+.1%})" if best_s > 0 and seconds != best_s else ""


@dataclass(frozen=True)
class TrailAnswer:
    """Answers of a trail.

    Args:
        rows: of it.
        step_s: seconds of the chosen plan.
    """

    rows: tuple[TrailRow, ...]
    step_s: float

    def text(self, topic: str, taken: Sequence[str]) -> str:
        """The outcome of each alternative.

        Args:
            topic: one of `TOPICS` but "mesh".
            taken: alternatives that the plan has.
        """
        lines = [f"{topic}: {', '.join(taken)} chosen, a step of {seconds_text(self.step_s)}", ""]
        by_text: dict[str, list[int | str]] = {}
        for key, row in self.best(topic):
            where = "" if topic == "stages" or row.form == "one stage" else f"{row.form}, "
            by_text.setdefault(where + self._line(topic, row), []).append(key)
        if topic == "stages":
            for row in self.rows:
                if row.form != "one stage" and not row.stages:
                    by_text.setdefault(self._line(topic, row), []).append(f"{row.form}, any number")
        for text, keys in by_text.items():
            numbers = [key for key in keys if isinstance(key, int)]
            name = ranges_text(ranges_of(numbers)) if numbers else ", ".join(map(str, keys))
            lines.append(f"  {name}: {text}")
        return "\n".join(lines)

    def best(self, topic: str) -> Iterator[tuple[int | str, TrailRow]]:
        """The most informative row of the trail for each alternative, in order."""
        keys = _keys_of(topic)
        known: dict[int | str, TrailRow] = {}
        for row in self.rows:
            for key in keys(row):
                if key not in known or row.rank < known[key].rank:
                    known[key] = row
        yield from sorted(known.items(), key=lambda item: (isinstance(item[0], str), item[0]))

    def _line(self, topic: str, row: TrailRow) -> str:
        details = [outcome_text(row, self.step_s)]
        if row.outcome in (PLANNED, TOO_LARGE):
            if topic != "stages" and row.stages and row.form != "one stage":
                details.append(f"{ranges_text(row.stages)} {'stage' if row.stages == ((1, 1),) else 'stages'}")
            if topic != "microbatches" and row.microbatches:
                counts = ranges_text(ranges_of(row.microbatches))
                details.append(f"{counts} {'microbatch' if row.microbatches == (1,) else 'microbatches'}")
            if topic != "schedule" and row.schedule not in ("", "none"):
                details.append(row.schedule)
            if topic != "remat" and row.remat not in ("", "none"):
                details.append(f"remat {row.remat}")
            details += [row.how] if row.how else []
        return ", ".join(details)


def _keys_of(topic: str) -> Callable[[TrailRow], Iterable[int | str]]:
    if topic == "stages":
        return lambda row: [n for first, last in row.stages for n in range(first, last + 1)]
    if topic == "microbatches":
        return lambda row: row.microbatches
    if topic == "schedule":
        return lambda row: [row.schedule] if row.schedule else []
    return lambda row: [row.remat] if row.remat else []


def topic_text(content: PlanContent, rows: tuple[TrailRow, ...], topic: str) -> str:
    """The outcome of each alternative of a plan.

    Args:
        content: of the plan.
        rows: the trail of its search.
        topic: one of `TOPICS`.
    """
    if topic == "mesh":
        return _meshes_text(content)
    remat = dict.fromkeys(s.form.remat for s in content.stages)
    of_plan: dict[str, Sequence[str]] = {
        "stages": [str(len(content.stages))],
        "microbatches": [str(content.num_microbatches)],
        "schedule": [content.schedule],
        "remat": list(remat),
    }
    if not rows:
        return f"{topic}: {', '.join(of_plan[topic])}; the plan has no trail of its search"
    return TrailAnswer(rows, content.step_time).text(topic, of_plan[topic])


def _meshes_text(content: PlanContent) -> str:
    """Logical meshes that were considered, of one stage or of each kind of stage of a pipeline."""
    by_text: dict[str, list[int]] = {}
    for number, part in enumerate(content.parts or (content,)):
        considered = sorted(part.search.considered, key=lambda c: (c.step_time is None, c.step_time or 0.0, c.name))
        shape = "x".join(str(size) for _, size in part.stages[0].mesh_axes)
        some = [f"  {c.name}: {_mesh_text(c)}" for c in considered]
        heading = f"mesh: {shape} chosen on {counted(len(part.stages[0].devices), 'device')}"
        by_text.setdefault("\n".join([heading, *some]), []).append(number)
    if not content.parts:
        return next(iter(by_text))
    return "\n\n".join(f"{stages_text(of)}, {text}" for text, of in by_text.items())


def _mesh_text(considered: Considered) -> str:
    if considered.step_time is None:
        return considered.note
    memory = "" if considered.peak_memory is None else f", {bytes_text(considered.peak_memory)} a device"
    return f"estimate {seconds_text(considered.step_time)}{memory}, {considered.note}"
