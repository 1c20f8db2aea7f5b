"""Schedules by name: the built-in ones, entry points, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from autopar.errors import ScheduleError
from autopar.errors.names import known_names
from autopar.hooks import NamedRegistry
from autopar.schedule.base import Schedule
from autopar.schedule.branches import Branches
from autopar.schedule.chimera import Chimera
from autopar.schedule.eager_1f1b import EagerOneFOneB
from autopar.schedule.gpipe import GPipe
from autopar.schedule.inference import Inference
from autopar.schedule.interleaved import Interleaved
from autopar.schedule.one_f_one_b import OneFOneB
from autopar.schedule.user_table import UserTable
from autopar.schedule.without_flush.ampnet import AmpNet
from autopar.schedule.without_flush.schedules import PipeDream, PipeDreamVertical, TwoBuffered
from autopar.schedule.zero_bubble import ZbH1, ZbH2, ZbV

#: Makes a schedule; options such as ``chunks`` are keyword arguments.
Factory: TypeAlias = Callable[..., Schedule]

_F = TypeVar("_F", bound=Factory)

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
    return NamedRegistry(_BUILT_IN, ENTRY_POINTS)


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
        return factory(**options)
    except TypeError as error:
        raise ScheduleError(f"schedule {name} does not take {options}: {error}") from error


def factory_named(name: str) -> Factory:
    """The class, or other maker, of the schedule ``name``. ScheduleError, with near names, if there is none."""
    hyphened = name.lower().replace("_", "-")
    for wanted in dict.fromkeys((name, hyphened, _ALIASES.get(hyphened, hyphened))):
        if (factory := _REGISTRY.find(wanted)) is not None:
            return factory
    wanted = _ALIASES.get(hyphened, hyphened)
    raise ScheduleError(f"no schedule is called {name!r}", remedy=known_names(wanted, _REGISTRY.names))
