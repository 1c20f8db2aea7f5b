"""A plan as logical axis rules, as Flax and MaxText take them: (logical name of a dim, mesh axes that split it).

`flax.linen.logical_axis_rules` and MaxText's ``logical_axis_rules`` map names of dims to mesh axes. A plan decides for
each tensor by itself, so that it can be said in such rules only where dims of one name are split in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import PlanMismatchError
from autopar.ir import Layout
from autopar.plan.content import PlanContent
from autopar.plan.groups import input_groups

Rule = tuple[str, str | tuple[str, ...] | None]


def axis_rules(c: PlanContent, names: Mapping[str, Sequence[str | None]] | None, stage: int = 0) -> list[Rule]:
    """Rules for the arguments of one stage.

    Args:
        c: the plan.
        names: for paths of arguments, or ends of paths, the logical name of each dim (None: a dim without a name, which
            must be whole); None names each dim by its path and number, as ``params['w']:0``.
        stage: its number.

    Raises:
        PlanMismatchError: a path is not in the plan or has another number of dims; dims of one name are split over
            different axes; or a dim without a name is split.
    """
    rules: dict[str, tuple[tuple[str, ...], str]] = {}
    for path, dims, labels in _named(c, names, stage):
        if len(labels) != len(dims):
            raise PlanMismatchError(f"{path} has {len(dims)} dims; {len(labels)} names are given: {tuple(labels)}")
        for d, (axes, label) in enumerate(zip(dims, labels, strict=True)):
            if label is None:
                if axes:
                    raise PlanMismatchError(
                        f"dim {d} of {path} is split over {'+'.join(axes)} and has no logical name",
                        remedy="a name for it, or a constraint that keeps it whole",
                    )
                continue
            known, first = rules.setdefault(label, (axes, path))
            if known != axes:
                raise PlanMismatchError(
                    f"dims called {label!r} have two splits: over {'+'.join(known) or 'nothing'} in {first}, over "
                    f"{'+'.join(axes) or 'nothing'} in {path}",
                    cause="a plan decides for each tensor; rules decide for each name",
                    remedy="different names for the two, or constraints= that make them the same",
                )
    return [(label, _said(axes)) for label, (axes, _) in rules.items()]


def _named(
    c: PlanContent, names: Mapping[str, Sequence[str | None]] | None, stage: int
) -> list[tuple[str, tuple[tuple[str, ...], ...], Sequence[str | None]]]:
    inputs = [i for i in c.inputs if i.stage == stage]
    if names is None:
        groups = input_groups(inputs)
        dims = [Layout.parse(g.first.layout).dims for g in groups]
        return [(g.name, k, [f"{g.name}:{d}" for d in range(len(k))]) for g, k in zip(groups, dims, strict=True)]
    named = []
    for end, labels in names.items():
        matching = [i for i in inputs if i.path.endswith(end)]
        if not matching:
            raise PlanMismatchError(
                f"the plan has no argument {end!r}", remedy="one of: " + ", ".join(i.path for i in inputs[:5])
            )
        named += [(i.path, Layout.parse(i.layout).dims, labels) for i in matching]
    return named


def _said(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes
