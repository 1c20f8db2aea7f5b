"""Settings of all tests: eight virtual CPU devices, no plans on disk, hypothesis profiles, 64-bit floats on request.

The variables are set before anything imports jax, which reads them once. Worker processes of xdist import
this file too, and inherit the variables.
"""

from __future__ import annotations

import collections
import gc
import importlib.metadata
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from tests.few import settings, spread
from tests.turned import turned

_DEVICES = "--xla_force_host_platform_device_count"
_other_flags = re.sub(rf"{_DEVICES}=\S*", "", os.environ.get("XLA_FLAGS", "")).strip()
# Programs run once or twice here. LLVM's optimizations and the fusion emitters take three quarters of the time in which
# they are compiled, and find no fault of autopar; machine code in one part takes half of the CPU seconds of 32 parts.
# AUTOPAR_TEST_XLA="" compiles as users do. XLA ends a process that names a flag it does not know: the last two are
# given to the releases whose flags were read.
_known = importlib.metadata.version("jaxlib").startswith("0.10.")
_quick = "--xla_backend_optimization_level=0"
if _known:
    _quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_flags = os.environ.get("AUTOPAR_TEST_XLA", _quick)
os.environ["XLA_FLAGS"] = f"{_other_flags} {_DEVICES}=8 {_flags}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# jax keeps compiled programs by content: a changed program is compiled. They are shared by the processes of a run and
# by runs. AUTOPAR_TEST_COMPILED names another folder, or is "" where nothing is to be kept.
_compiled = os.environ.get("AUTOPAR_TEST_COMPILED", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
if _compiled:
    _first = "PYTEST_XDIST_WORKER" not in os.environ
    if _first and sum(p.stat().st_size for p in Path(_compiled).glob("*")) > 1 << 30:
        shutil.rmtree(_compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["AUTOPAR_CACHE_DIR"] = "off"
# A parent that loads readline hands its children COLUMNS=80 where there is no terminal; lines are as long as they are
# without it.
os.environ.pop("COLUMNS", None)

# "ci" makes the same examples on every run, so that a change of the code is the only reason for a change of the
# result. "dev" looks for new ones: HYPOTHESIS_PROFILE=dev. Times on shared machines mean nothing: no deadline.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


#: Resident bytes of a test process from which on compiled programs of the tests so far are given back: a process of
#: many GB cannot fork where others run in parallel with it, and Ray forks.
_MOST_RESIDENT = int(os.environ.get("AUTOPAR_TEST_RESIDENT", 3 << 30))


#: Of the collector of garbage. Graphs and programs are many small objects that stay: with Python's own thresholds a
#: tenth of the suite's CPU seconds is the collector, and what hypothesis notes of it.
_COLLECTED_AFTER = (20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Garbage is collected rarely from here on, and never among modules and tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED_AFTER)


#: Times the resident bytes after compiled programs were given back from which on they are given back again: what stays
#: then would stay another time, and every file after it would compile anew.
_GROWN = 1.25
_RESIDENT_FROM = pytest.StashKey[float]()


def _resident_bytes() -> int:
    """Resident bytes of this process; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drops jax's caches after a file whose process has become large, or larger than they left it."""
    yield
    stash = request.config.stash
    if _resident_bytes() > stash.get(_RESIDENT_FROM, _MOST_RESIDENT) and "jax" in sys.modules:
        gc.collect()
        sys.modules["jax"].clear_caches()
        stash[_RESIDENT_FROM] = max(_MOST_RESIDENT, _GROWN * _resident_bytes())


@pytest.fixture
def x64() -> Iterator[None]:
    """Turns on 64-bit floats and integers of jax for one test.

    Under hypothesis write ``with jax.enable_x64(True):`` in the body instead, since a fixture covers all examples.
    """
    import jax  # the planner's tests run without it

    with jax.enable_x64(True):
        yield


T = TypeVar("T")
_CPU = "cpu_s"
_BEGIN = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cpu N`` and ``--cpu-json FILE``."""
    parser.addoption("--cpu", type=int, default=0, help="So many tests and files with the most CPU seconds are shown.")
    parser.addoption("--write-work", action="store_true", help="Keeps the work units of plans, in place of comparing.")
    parser.addoption("--cpu-json", default="", help="A file that gets the CPU seconds of every test.")


def pytest_configure(config: pytest.Config) -> None:
    """Each process of a whole run begins at another folder, unless the order of tests is the one they are found in."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    whole = config.args == config.getini("testpaths") and not config.getoption("ignore")
    if count > 1 and whole and config.getoption("randomly_reorganize", False):
        config.args = turned(Path(__file__).parent, int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), count)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses ids that differ by process; marks as slow what `tests.few` leaves out of functions with ``few``."""
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"ids of tests with an address, which differs by process: {', '.join(addresses)}")
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few") is not None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        family.sort(key=lambda item: item.callspec.id)  # tests are in random order here
        marker = family[0].get_closest_marker("few")
        count = int(marker.args[0]) if marker is not None else 1
        taken = spread(settings([item.callspec.id for item in family]), count)
        for place, item in enumerate(family):
            if place not in taken:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, T, T]:
    """Notes where the CPU seconds of a test begin; a shared fixture counts for the test that needs it first."""
    item.stash[_BEGIN] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, T, T]:
    """The last report of a test carries its CPU seconds to the process that prints."""
    if call.when == "teardown":
        item.user_properties.append((_CPU, round(_cpu_seconds() - item.stash[_BEGIN], 3)))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the tests and files that took the most CPU seconds: wall seconds say little on a shared machine."""
    reports = [r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport)]
    tests = {r.nodeid: dict(r.user_properties)[_CPU] for r in reports if r.when == "teardown"}
    if config.option.cpu_json:
        Path(config.option.cpu_json).write_text(json.dumps(tests, indent=0), encoding="utf-8")
    if not config.option.cpu:
        return
    files: collections.Counter[str] = collections.Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    for title, sums in (("tests", tests), ("files", files)):
        terminalreporter.section(f"CPU seconds of {title}: {sum(sums.values()):.0f}")
        for name, seconds in sorted(sums.items(), key=lambda entry: -entry[1])[: config.option.cpu]:
            terminalreporter.line(f"{seconds:8.2f}  {name}")
