"""Offers to a part of autopar by parts that it does not know, or by other packages: by name, or by role.

`NamedRegistry` has named things: built-in ones, those of installed packages, and what users register. Schedules and
search strategies are such things; `autopar.schedule.registry` and `autopar.search.registry` say which.
`tables_of` joins tables in the files of a package, as rules of primitives.

`HOOKS` has functions by role. A floor knows only those below. Where a lower one has the name that users call
(`Cluster.ray`), and a higher one does the work, the package's root says here which function that is; it is loaded when
it is first called.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from autopar.errors.offers import Interface

T = TypeVar("T")


def tables_of(package: str, folder: Iterable[str], name: str, besides: Container[str] = ()) -> Mapping[str, Any]:
    """Entries of the tables in all files of a package.

    Args:
        package: name of the package.
        folder: its folders.
        name: of the table in each file.
        besides: files that have none.

    Raises:
        ValueError: two files have an entry of one name.
    """
    table: dict[str, Any] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(folder) if module.name not in besides):
        of_file: Mapping[str, Any] = getattr(import_module(f"{package}.{file}"), name)
        twice = sorted(table.keys() & of_file.keys())
        if twice:
            raise ValueError(f"{name} of {', '.join(twice)} are in two files; the second is {file}")
        table.update(of_file)
    return MappingProxyType(table)


class NamedRegistry(Generic[T]):
    """Things by name; registered ones hide built-in ones of the same name, and these those of entry points.

    Args:
        built_in: those that autopar has.
        group: of the entry points under which other packages offer more.
        interface: what each of them has to be; built-in ones are not checked.
    """

    def __init__(self, built_in: Mapping[str, T], group: str, interface: Interface) -> None:
        self._built_in, self._group, self._interface = built_in, group, interface
        self._added: dict[str, T] = {}

    def add(self, name: str, thing: T) -> None:
        """Use ``thing`` for ``name`` from now on. Raises the interface's error where it is no such thing."""
        self._interface.check(name, thing)
        self._added[name] = thing

    @property
    def registered(self) -> tuple[str, ...]:
        """Names of what users registered, sorted."""
        return tuple(sorted(self._added))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted({*(p.name for p in entry_points(group=self._group)), *self._built_in, *self._added}))

    def find(self, name: str) -> T | None:
        """The thing of a name, an entry point loaded; None where there is none. Entry points, 5 ms, are read last."""
        for things in (self._added, self._built_in):
            if name in things:
                return things[name]
        points = [p for p in entry_points(group=self._group) if p.name == name]
        if not points:
            return None
        thing: T = self._interface.load(points[-1])
        self._interface.check(name, thing)
        return thing


class Hooks:
    """Functions that a higher floor offers to lower ones, by role."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], Callable[..., Any]]] = {}

    def offer(self, role: str, load: Callable[[], Callable[..., Any]]) -> None:
        """Says how the function for ``role`` is loaded; the last offer counts."""
        self._loaders[role] = load

    def function(self, role: str) -> Callable[..., Any]:
        """The function for ``role``.

        Raises:
            KeyError: nothing was offered for it.
        """
        return self._loaders[role]()


HOOKS = Hooks()
