"""Schedules by name: the built-in ones, entry points, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from autopar.errors import AutoparError, ScheduleError
from autopar.errors.names import known_names
from autopar.errors.offers import Call, Interface
from autopar.hooks import NamedRegistry
from autopar.schedule.base import Schedule
from autopar.schedule.branches import Branches
from autopar.schedule.chimera import Chimera
from autopar.schedule.eager_1f1b import EagerOneFOneB
from autopar.schedule.gpipe import GPipe
from autopar.schedule.inference import Inference
from autopar.schedule.interleaved import Interleaved
from autopar.schedule.one_f_one_b import OneFOneB
from autopar.schedule.table import Table
from autopar.schedule.user_table import UserTable
from autopar.schedule.without_flush.ampnet import AmpNet
from autopar.schedule.without_flush.schedules import PipeDream, PipeDreamVertical, TwoBuffered
from autopar.schedule.zero_bubble import ZbH1, ZbH2, ZbV

#: Makes a schedule; options such as ``chunks`` are keyword arguments.
Factory: TypeAlias = Callable[..., Schedule]

_F = TypeVar("_F", bound=Factory)

_REMEDY = '@autopar.schedule.register("mine") above class Mine(autopar.schedule.Schedule)'
_FACTORY = Interface(
    "schedule",
    rule="it is registered as a subclass of autopar.schedule.Schedule with a name and a table, or as a function",
    remedy=_REMEDY,
    base=Schedule,
    error=ScheduleError,
)
_SCHEDULE = Interface(
    "schedule",
    rule="a schedule has a name, chunks (stages a worker) and table(num_stages, num_microbatches) -> Table",
    remedy=_REMEDY,
    fields={"name": str, "chunks": int},
    methods={"table": Call(("num_stages", "num_microbatches"))},
    error=ScheduleError,
)
# No ScheduleError, which says that other numbers of stages and microbatches may do.
_TABLE = replace(_SCHEDULE, error=AutoparError)

#: Group of entry points under which other packages offer schedules.
ENTRY_POINTS = "autopar.schedules"

_BUILT_IN: Mapping[str, Factory] = MappingProxyType(
    {
        "1f1b": OneFOneB,
        "2bw": TwoBuffered,
        "ampnet": AmpNet,
        "branches": Branches,
        "chimera": Chimera,
        "eager-1f1b": EagerOneFOneB,
        "gpipe": GPipe,
        "inference": Inference,
        "interleaved": Interleaved,
        "pipedream": PipeDream,
        "pipedream-vertical": PipeDreamVertical,
        "table": UserTable,
        "zb-h1": ZbH1,
        "zb-h2": ZbH2,
        "zb-v": ZbV,
    }
)

#: Other names of the same schedules.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "dapple": "1f1b",
        "interleaved-1f1b": "interleaved",
        "pipedream-2bw": "2bw",
        "pipedream-flush": "1f1b",
        "zbh1": "zb-h1",
        "zbh2": "zb-h2",
        "zbv": "zb-v",
    }
)


def built_in() -> NamedRegistry[Factory]:
    """A registry in which nothing is registered yet."""
    return NamedRegistry(_BUILT_IN, ENTRY_POINTS, _FACTORY)


_REGISTRY = built_in()


def register(name: str) -> Callable[[_F], _F]:
    """Decorator: offers a class of schedules under ``name``, as ``@autopar.schedule.register("mine")``."""

    def add(factory: _F) -> _F:
        _REGISTRY.add(name, factory)
        return factory

    return add


def registered_schedules() -> tuple[str, ...]:
    """Names of the schedules that users registered, sorted."""
    return _REGISTRY.registered


def schedules() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return _REGISTRY.names


def get(name: str, **options: Any) -> Schedule:
    """The schedule called ``name``.

    Args:
        name: a name of `schedules`; underscores are taken for hyphens, and other common names are known
            ("pipedream-flush", "dapple").
        options: of that schedule: ``chunks`` of "interleaved", ``text`` of "table".

    Raises:
        ScheduleError: there is none of that name, or it does not take the options; the message lists near names.
    """
    factory = factory_named(name)
    try:
        schedule = factory(**options)
    except TypeError as error:
        raise ScheduleError(f"schedule {name} does not take {options}: {error}") from error
    check_schedule(schedule, name)
    return schedule


def check_schedule(schedule: Any, name: str) -> None:
    """Raises ScheduleError unless ``schedule``, which ``name`` has made, is a `Schedule` with all that it needs."""
    _FACTORY.check_answer(name, schedule, Schedule)
    _SCHEDULE.check(name, schedule)


def table_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> Table:
    """The table of a schedule.

    Raises:
        ScheduleError: the schedule does not exist for these numbers.
        AutoparError: the schedule returned another thing than a table.
    """
    table = schedule.table(num_stages, num_microbatches)
    _TABLE.check_answer(schedule.name, table, Table)
    return table


def factory_named(name: str) -> Factory:
    """The class, or other maker, of the schedule ``name``. ScheduleError, with near names, if there is none."""
    hyphened = name.lower().replace("_", "-")
    for wanted in dict.fromkeys((name, hyphened, _ALIASES.get(hyphened, hyphened))):
        if (factory := _REGISTRY.find(wanted)) is not None:
            return factory
    wanted = _ALIASES.get(hyphened, hyphened)
    raise ScheduleError(f"no schedule is called {name!r}", remedy=known_names(wanted, _REGISTRY.names))
