"""What is said of a first call: to a logger, to a function, on a line of a terminal."""

from __future__ import annotations

import inspect
import io
import logging
import threading
from types import SimpleNamespace

import pytest

import autopar
from autopar._compat import reminders
from autopar.api import progress
from autopar.api.parallelize import ParallelizeOptions
from autopar.api.progress import Reporter, reporter_of
from tests.api.steps import CLUSTER, batch, params, sgd


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_logger_is_told_of_every_phase(caplog):
    caplog.set_level(logging.INFO, logger="autopar")
    autopar.parallelize(sgd, cluster=CLUSTER, progress=False)(params(), batch())
    said = [r.getMessage() for r in caplog.records if r.name == "autopar"]
    for phase in ("tracing", "planning", "compiling"):
        assert any(text.startswith(phase) for text in said), (phase, said)


def test_a_function_is_told_of_every_phase():
    said = []
    autopar.parallelize(sgd, cluster=CLUSTER, progress=said.append)(params(), batch())
    assert said[0] == "tracing" and "compiling" in said


@pytest.mark.parametrize(("given", "live"), [(None, True), (True, True), (False, False)])
def test_a_line_on_a_terminal(monkeypatch, given, live):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    reporter = reporter_of(given)
    reporter.after_s = 0.001
    with reporter.shown(), reporter.shown():
        reporter("planning")
        for _ in range(2000):
            if "planning" in terminal.getvalue():
                break
            threading.Event().wait(0.005)
    written = terminal.getvalue()
    assert ("autopar: planning (" in written) == live
    assert not live or written.endswith(" \r"), "the line is wiped when the phase is over"


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_no_line_before_its_time(monkeypatch, stream):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    with Reporter(live=True, after_s=1000.0).shown():
        pass
    assert written.getvalue() == ""


def test_lines_of_a_log_say_what_takes_long_and_get_rarer(monkeypatch):
    log, waits, begin = io.StringIO(), [], threading.Event()
    monkeypatch.setattr("sys.stderr", log)

    class Over(threading.Event):
        def wait(self, timeout=None):
            begin.wait()
            waits.append(timeout)
            return len(waits) > 3

    over, reporter = Over(), Reporter(live=True, after_s=2.0)
    passed = iter((0.0, 2.0, 4.0, 8.0))
    monkeypatch.setattr(reminders, "time", SimpleNamespace(monotonic=lambda: next(passed)))
    monkeypatch.setattr(reminders, "threading", SimpleNamespace(Event=lambda: over, Thread=threading.Thread))
    with reporter.shown():
        reporter("planning 914 operators")
        begin.set()
    assert waits == [2.0, 2.0, 4.0, 8.0]
    assert log.getvalue().splitlines() == [f"autopar: planning 914 operators ({s} s)" for s in (2, 4, 8)]


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_what_begins_inside_of_a_phase_is_named_instead_of_it(monkeypatch, stream):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)

    def wait_for(text):
        for _ in range(2000):
            if text in written.getvalue():
                return
            threading.Event().wait(0.005)
        raise AssertionError(written.getvalue())

    reporter = Reporter(live=True, after_s=0.001)
    with reporter.shown():
        reporter("planning")
        reminders.ACTIVITY.begin("compiling")
        try:
            wait_for("autopar: compiling (")
        finally:
            reminders.ACTIVITY.end()
        wait_for("autopar: planning (")


def test_a_file_gets_lines_of_its_own(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    with Reporter(live=True, after_s=0.0).shown():
        for _ in range(2000):
            if log.getvalue():
                break
            threading.Event().wait(0.005)
    assert log.getvalue().startswith("autopar: working (0 s)\n") and "\r" not in log.getvalue()


def test_type_checkers_know_every_option():
    options = set(inspect.signature(autopar.parallelize).parameters) - {"fn"}
    assert options == set(ParallelizeOptions.__annotations__)
