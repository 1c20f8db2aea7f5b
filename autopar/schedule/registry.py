"""Schedules by name: the built-in ones, entry points, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from autopar.errors import ScheduleError
from autopar.errors.names import known_names
from autopar.schedule.ampnet import AmpNet
from autopar.schedule.base import Schedule
from autopar.schedule.branches import Branches
from autopar.schedule.chimera import Chimera
from autopar.schedule.eager_1f1b import EagerOneFOneB
from autopar.schedule.gpipe import GPipe
from autopar.schedule.inference import Inference
from autopar.schedule.interleaved import Interleaved
from autopar.schedule.one_f_one_b import OneFOneB
from autopar.schedule.user_table import UserTable
from autopar.schedule.without_flush import PipeDream, PipeDreamVertical, TwoBuffered
from autopar.schedule.zb_h1 import ZbH1
from autopar.schedule.zb_h2 import ZbH2
from autopar.schedule.zb_v import ZbV

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


class ScheduleRegistry:
    """Schedules that users add; they hide built-in ones of the same name."""

    def __init__(self) -> None:
        self._added: dict[str, Factory] = {}

    def add(self, name: str, factory: Factory) -> None:
        """Use ``factory`` for ``name`` from now on."""
        self._added[name] = factory

    @property
    def names(self) -> tuple[str, ...]:
        """Added names, sorted."""
        return tuple(sorted(self._added))

    def known(self) -> Mapping[str, Factory]:
        """Names that need no look at installed packages, which takes 5 ms."""
        return {**_BUILT_IN, **self._added}

    def table(self) -> dict[str, Factory | None]:
        """Every name; None where an entry point is not loaded yet."""
        installed: dict[str, Factory | None] = {p.name: None for p in entry_points(group=ENTRY_POINTS)}
        return dict(sorted({**installed, **self.known()}.items()))


_REGISTRY = ScheduleRegistry()


def register(name: str) -> Callable[[_F], _F]:
    """Decorator: offers a class of schedules under ``name``, as ``@autopar.schedule.register("mine")``."""

    def add(factory: _F) -> _F:
        _REGISTRY.add(name, factory)
        return factory

    return add


def registered_schedules() -> tuple[str, ...]:
    """Names of the schedules that users registered, sorted."""
    return _REGISTRY.names


def schedules() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(_REGISTRY.table())


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
    if name in (known := _REGISTRY.known()):
        return known[name]
    table = _REGISTRY.table()
    wanted = name if name in table else name.lower().replace("_", "-")
    wanted = wanted if wanted in table else _ALIASES.get(wanted, wanted)
    if wanted not in table:
        raise ScheduleError(f"no schedule is called {name!r}", remedy=known_names(wanted, table))
    factory = table[wanted]
    if factory is None:
        (point,) = (p for p in entry_points(group=ENTRY_POINTS) if p.name == wanted)
        factory = point.load()
    return factory
