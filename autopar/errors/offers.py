"""Checks of things that users and other packages offer under a name: strategies, schedules, solvers, sharding rules.

`Interface` has the conditions of one kind. Its methods raise one error for each mistake, when the thing is
registered or first taken, rather than where the search calls it. They do not judge whether its answers are right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from autopar.errors.base import AutoparError


@dataclass(frozen=True)
class Call:
    """Arguments with which autopar calls a function of a user.

    Args:
        arguments: names of those by position, for messages.
        keywords: names of those by keyword.
    """

    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()

    def fits(self, function: Callable[..., Any]) -> bool:
        """Whether ``function`` can be called so; True where Python does not know its arguments."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return True
        try:
            signature.bind(*self.arguments, **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        return f"({', '.join((*self.arguments, *(f'{name}=' for name in self.keywords)))})"


@dataclass(frozen=True)
class Interface:
    """Conditions of all things of a kind.

    Args:
        kind: its noun, as ``"solver"``.
        rule: a clause that says what such a thing is: the usual cause of an error.
        remedy: code to paste.
        call: arguments of the thing itself; None where it is not called, or with arguments of its own.
        base: class of which a registered class has to be a subclass without abstract methods; None for no class.
        fields: types of its attributes.
        methods: arguments of its methods.
        error: class of the errors.
    """

    kind: str
    rule: str
    remedy: str
    call: Call | None = None
    base: type | None = None
    fields: Mapping[str, type] = field(default_factory=dict)
    methods: Mapping[str, Call] = field(default_factory=dict)
    error: type[AutoparError] = AutoparError

    def wrong(self, fact: str) -> AutoparError:
        """An error with the rule and the remedy of this kind."""
        return self.error(fact, cause=self.rule, remedy=self.remedy)

    def check(self, name: Any, thing: Any) -> None:
        """Raises an error unless ``name`` is a text and ``thing`` has all that is asked for."""
        if not isinstance(name, str) or not name:
            raise self.wrong(f"{name!r} is no name of a {self.kind}")
        if self.base is not None:
            self._check_maker(name, thing, self.base)
        if self.call is not None:
            self._check_call(f"{self.kind} {name!r}", thing, self.call)
        missing = sorted(n for n in (*self.fields, *self.methods) if not hasattr(thing, n))
        if missing:
            raise self.wrong(f"{self.kind} {name!r}, {_shown(thing)}, has no {', no '.join(missing)}")
        for attribute, kind in self.fields.items():
            value = getattr(thing, attribute)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise self.wrong(f"{attribute} of {self.kind} {name!r} is {_shown(value)}, not of type {kind.__name__}")
        for method, call in self.methods.items():
            self._check_call(f"{method} of {self.kind} {name!r}", getattr(thing, method), call)

    def _check_maker(self, name: str, maker: Any, base: type) -> None:
        if not callable(maker):
            raise self.wrong(f"{self.kind} {name!r} is {_shown(maker)}, which cannot be called")
        if isinstance(maker, type):
            if not issubclass(maker, base):
                raise self.wrong(f"{self.kind} {name!r} is the class {maker.__name__}, no subclass of {base.__name__}")
            if missing := sorted(getattr(maker, "__abstractmethods__", ())):
                raise self.wrong(f"{self.kind} {name!r}, the class {maker.__name__}, has no {', no '.join(missing)}")

    def _check_call(self, title: str, function: Any, call: Call) -> None:
        if not callable(function):
            raise self.wrong(f"{title} is {_shown(function)}, which cannot be called")
        if not call.fits(function):
            raise self.wrong(f"{title} cannot be called with {call}")

    def check_answer(self, name: str, answer: Any, *kinds: type) -> None:
        """Raises an error unless ``answer``, of the thing ``name``, is of one of ``kinds``."""
        if not isinstance(answer, kinds):
            raise self.wrong(f"{self.kind} {name!r} returned {_shown(answer)}, not a {kinds[0].__name__}")

    def load(self, point: EntryPoint) -> Any:
        """The object of an entry point. An error says which package cannot be imported."""
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            package = "another package" if point.dist is None else f"the package {point.dist.name}"
            raise self.error(
                f"{self.kind} {point.name!r} of {package} cannot be loaded: {type(error).__name__}: {error}",
                cause=f"its entry point is {point.value}, in the group {point.group}",
                remedy="update or remove that package",
            ) from error


def _shown(thing: Any) -> str:
    """A short text of a thing, on one line."""
    text = " ".join(repr(thing).split())
    return text if len(text) <= 60 else f"an object of type {type(thing).__name__}"
