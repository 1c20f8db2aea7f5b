"""A pytest plugin that puts autopar in the place of `jax.jit` before a suite is imported, and counts calls.

Loaded by ``-p tests.public.suites.replace``. ``AUTOPAR_SUITE`` is "jit" (nothing is replaced) or "autopar"; the counts
and the outcome of every test go to the file that ``AUTOPAR_SUITE_OUT`` names, as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar import Cluster
from autopar._compat.context import under_trace
from autopar.cluster import Device, LinkSpec, NodeGroup

#: Options of `jax.jit` that autopar has too.
_SHARED = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
#: Options that change nothing in the result, and are left out.
_WITHOUT_EFFECT = ("inline", "keep_unused")
#: Module of jax that its own tests call functions by.
_TESTS_OF_JAX = "jax._src.test_util"


def slow_devices(count: int) -> Cluster:
    """Devices so slow, with links so fast, that tiny arrays are split."""
    rates = tuple((name, 1e6) for name in ("f64", "f32", "bf16", "f16", "c64", "c128", "s32"))
    link = LinkSpec(1e12, 0.0)
    return Cluster("slow", (NodeGroup(1, count, Device("slow", 10**11, 1e6, rates), link, link),))


class Counts:
    """What went through autopar."""

    def __init__(self) -> None:
        self.functions = self.calls = self.split = self.left_out = 0
        self._plain_jit = jax.jit

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster that is planned for, of the devices that a suite asks for before its first function."""
        return slow_devices(jax.device_count())

    def jit(self, fun: Any = None, /, **options: Any) -> Any:
        """Stands for `jax.jit`, but for jax and autopar themselves."""
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] in ("jax", "autopar") and caller != _TESTS_OF_JAX:
            return self._plain_jit(fun, **options) if fun is not None else self._plain_jit(**options)
        if fun is None:
            return functools.partial(self.jit, **options)
        given = {k: v for k, v in options.items() if v is not None and k not in _WITHOUT_EFFECT}
        if set(given) - set(_SHARED):
            self.left_out += 1
            return self._plain_jit(fun, **options)
        self.functions += 1
        return _Counted(autopar.parallelize(fun, cluster=self.cluster, progress=False, **given), self)


class _Counted:
    """A decorated function whose calls are counted; an object, since wrappers of jax copy attributes of functions.

    Args:
        step: the decorated function.
        counts: where its calls are counted.
    """

    def __init__(self, step: Any, counts: Counts) -> None:
        functools.update_wrapper(self, step.function, updated=())
        self._step, self._counts = step, counts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, counts = self._step, self._counts
        if under_trace():
            return step(*args, **kwargs)
        plans = len(step.plans())
        result = step(*args, **kwargs)
        counts.calls += 1
        if len(step.plans()) > plans:
            layouts = [r.layout for r in (*step.plans()[-1].content.inputs, *step.plans()[-1].content.outputs)]
            counts.split += any("x" in text or "y" in text for text in layouts)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


_COUNTS = Counts()
_OUTCOMES: dict[str, str] = {}
#: Outcomes after which what was found is written.
_EACH = 20
if os.environ.get("AUTOPAR_SUITE") == "autopar":
    autopar.parallelize  # noqa: B018 (its modules are imported before)
    jax.jit = _COUNTS.jit  # type: ignore[assignment]


def pytest_collection_finish() -> None:
    """Puts autopar into the helpers of jax's own tests, as `_CompileAndCheck`, which have jit by another name."""
    helpers = sys.modules.get(_TESTS_OF_JAX)
    if helpers is not None and os.environ.get("AUTOPAR_SUITE") == "autopar":
        api = types.ModuleType("api")
        vars(api).update(vars(helpers.api), jit=_COUNTS.jit)
        vars(helpers)["api"] = api


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the outcome of a test; of a failure the last line of its error."""
    if report.when == "call" or report.failed:
        text = str(report.longreprtext).strip().splitlines() if report.failed else []
        errors = [line[1:].strip() for line in text if line.startswith("E  ")]
        _OUTCOMES[report.nodeid] = f"failed: {errors[0] if errors else text[-1:]}" if report.failed else report.outcome
        if len(_OUTCOMES) % _EACH == 0:  # a process that ends leaves what it found
            _write()


def pytest_sessionfinish() -> None:
    """Writes what was found."""
    _write()


def _write() -> None:
    counts = {n: getattr(_COUNTS, n) for n in ("functions", "calls", "split", "left_out")}
    Path(os.environ["AUTOPAR_SUITE_OUT"]).write_text(json.dumps({**counts, "outcomes": _OUTCOMES}, indent=1))
