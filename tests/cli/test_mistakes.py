"""Exit codes and messages for what users get wrong."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import pty
import queue
import re
import struct
import subprocess
import sys
import termios
import threading
from importlib import import_module
from pathlib import Path

import pytest

import autopar.cli.cache
import autopar.cli.plan
import autopar.cli.planning
from autopar._compat.reminders import ACTIVITY
from autopar.cli import output
from autopar.cli.group import in_options
from autopar.cli.output import progress
from autopar.cli.target import StepTarget, user_code
from autopar.errors import AutoparError
from tests.cli.conftest import ROOT, TRAIN, Run, Spawn

TARGET = "train.py:train_step"
CLUSTER = ("--cluster", "dgx-a100")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plna",), "plan"),
        (("plan",), "FILE.py:FUNC"),
        (("plan", TARGET, "--clutser", "x"), "--cluster"),
        (("plan", "trian.py:train_step"), "train.py"),
        (("plan", "nothing.at.all:f"), "no module 'nothing'"),
        (("plan", "train.txt:f"), "a file ends in .py"),
        (("plan", "./train:f"), "neither a Python file"),
        (("plan", "a b:f"), "neither a Python file"),
        (("plan", "train.py:"), "names no function"),
        (("plan", "train.py"), "no function build"),
        (("plan", "train.py:trian_step"), "near names: train_step"),
        (("plan", "train.py:loss.nothing"), "no 'nothing'"),
        (("plan", TARGET, "--args", "exampel_args"), "near names: example_args"),
        (("plan", TARGET, "--args", "SHAPES"), "tuple of all arguments, not dict"),
        (("plan", "train.py:SHAPES"), "not a function"),
        (("plan", TARGET, "--cluster", "dgx-a101"), "dgx-a100"),
        (("plan", TARGET, "--cluster", "none.toml"), "no cluster file"),
        (("plan", TARGET, "--nodes", "2"), "needs --cluster"),
        (("plan", TARGET, *CLUSTER, "--nodes", "0"), "--nodes"),
        (("plan", TARGET, "--search", "aplha"), "did you mean 'alpa'? known: alpa, beam,"),
        (("plan", TARGET, "--schedule", "1f1"), "did you mean '1f1b'? known: 1f1b,"),
        (("plan", TARGET, "--memory-limit", "40XB"), "'40XB' is not a size; give bytes a device, or text such as"),
        (("compare", TARGET, "--time-limit", "-1"), "-1.0 is not in the range x>=0"),
        (("plan", TARGET, "--microbatches", "0"), "--microbatches"),
        (("plan", TARGET, "--time-limit", "nan"), "'nan' is not a number of seconds"),
        (("compare", TARGET, "--time-limit", "inf"), "'inf' is not a number of seconds"),
        (("plan", TARGET, *CLUSTER, "-o", "."), "'.' is a folder, not a file"),
        (("schedules", "1f1b", "-o", "."), "'.' is a folder, not a file"),
        (("schedules", "1f1b", "-o", "nowhere/table.json"), "no folder 'nowhere'"),
        (("plan", TARGET, *CLUSTER, "--verify", "gpu"), "Invalid value for --verify: no target is called 'gpu'"),
        (("verify", TARGET, "--target", "gpu"), "Invalid value for --target: no target is called 'gpu'"),
        (("solve", "train.py", "--solver", "hihgs"), "did you mean 'highs'? known: exhaustive, highs, lagrange"),
        (("plan", TARGET, "--mesh", "2*4"), "2x4"),
        (("plan", TARGET, "--donate", "first"), "0,1"),
        (("plan", TARGET, "--format", "xml"), "json"),
        (("plan", TARGET, "-o", "nowhere/plan.json"), "no folder 'nowhere'"),
        (("plan", TARGET, "--preset", "tiny"), "--preset"),
        (("plan", "train.py", "--set", "layers"), "NAME=VALUE"),
        (("explain", "nothing.json"), "nothing.json"),
        (("diff", "nothing.json", "train.py"), "nothing.json"),
        (("clusters", "all"), "unexpected extra argument"),
        (("simulate", "train.py", "-o", "step.png"), "a trace ends in .json, a picture in .svg"),
        (("simulate", "train.py", "-o", "nowhere/step.json"), "no folder 'nowhere'"),
        (("report", "train.py", "-o", "nowhere/plan.html"), "no folder 'nowhere'"),
        (("report", "train.py", "-o", "plan.txt"), "neither a page (.html) nor a graph (.dot)"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_2(run: Run, args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def write(folder: Path, text: str) -> str:
    (folder / "broken.py").write_text(text, encoding="utf-8")
    return "broken.py:train_step"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("import jax\nx = undefined\n", ("NameError", "broken.py:2")),
        ("def f(:\n    pass\n", ("SyntaxError", "broken.py:1")),
        ("import no_such_library\n", ("imports no_such_library, which is not installed", "broken.py:1")),
        ("import sys\nsys.exit(3)\n", ("SystemExit(3)", "__main__")),
        (TRAIN + "def example_args():\n    raise ValueError('no data')\n", ("ValueError: no data", "(example_args)")),
        (TRAIN.replace("value, grad =", "value, grad = 1 / 0,"), ("ZeroDivisionError", "(train_step)")),
        (TRAIN.replace("batch[\"x\"] @ w", "batch[\"x\"].T @ w"), ("TypeError", "(loss)")),
        (TRAIN.replace("    value,", "    if batch['x'][0, 0] > 0: pass\n    value,"), ("TraceError", "(train_step)")),
    ],
    ids=["import", "syntax", "library", "script", "arguments", "function", "shapes", "trace"],
)  # fmt: skip
def test_broken_files_are_1(run: Run, folder: Path, text: str, messages: tuple[str, ...]) -> None:
    result = run("plan", write(folder, text), *CLUSTER)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    for message in messages:
        assert message in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory-limit", "4kB", *CLUSTER), "the least that would do is"),
        (("--mesh", "3x3", *CLUSTER), "shapes that do"),
        (("--stages", "99", *CLUSTER), "remedy: --stages 8 or fewer"),
        (("--search", "data-parallel", "--cluster", "tpu-v4", "--nodes", "7"), "do not divide"),
        (("--cluster", "own.toml"), "groups"),
    ],
    ids=["memory", "mesh", "stages", "batch", "cluster-file"],
)
def test_what_cannot_be_met_is_1(run: Run, options: tuple[str, ...], message: str) -> None:
    Path("own.toml").write_text('name = "own"\n', encoding="utf-8")
    result = run("plan", TARGET, *options, "--format", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*CLUSTER, "--nodes", "99999999999"), "is more than the 65536 that a cluster may have"),
        ((*CLUSTER, "--batch", "7"), "--batch has 7; there are 2 positional arguments: state, batch"),
    ],
)
def test_what_no_cluster_or_function_has(run: Run, options: tuple[str, ...], message: str) -> None:
    result = run("plan", TARGET, *options)
    assert result.exit_code in (1, 2) and message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


def test_json_that_is_nested_too_deep_is_1(run: Run, folder: Path) -> None:
    (folder / "plan.json").write_text('{"autopar_plan": ' + "[" * 100_000 + "]" * 100_000 + "}", encoding="utf-8")
    result = run("explain", "plan.json")
    assert result.exit_code == 1 and "plan.json" in result.stderr and "Traceback" not in result.stderr


def test_a_plan_that_is_none_is_1(run: Run, folder: Path) -> None:
    (folder / "plan.json").write_text('{"autopar_plan": 1, "plan": ', encoding="utf-8")
    for args in (("explain", "plan.json"), ("diff", "plan.json", "plan.json")):
        result = run(*args)
        assert result.exit_code == 1 and "PlanMismatchError" in result.stderr


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(run: Run, folder: Path, place: str) -> None:
    plan = ("plan", write(folder, "x = undefined\n"), *CLUSTER)
    result = run("--debug", *plan) if place == "before" else run(*plan, "--debug")
    assert isinstance(result.exception, AutoparError)
    assert isinstance(result.exception.__cause__, NameError)


def test_tracebacks_of_a_process(spawn: Spawn, folder: Path) -> None:
    (folder / "plan.json").write_text("{}", encoding="utf-8")
    plain, debug = spawn("explain", "plan.json"), spawn("explain", "plan.json", "--debug")
    assert (plain.returncode, debug.returncode) == (1, 1)
    assert "Traceback" not in plain.stderr and "Traceback" in debug.stderr
    assert (plain.stdout, debug.stdout) == ("", "")


@pytest.mark.usefixtures("folder")
def test_mistakes_of_autopar_are_not_blamed_on_the_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar.cli.planning, "make_plan", math.sqrt)
    assert isinstance(run("plan", TARGET, *CLUSTER).exception, TypeError)


def test_a_folder_in_place_of_a_file_is_2(run: Run, folder: Path) -> None:
    (folder / "taken.json").mkdir()
    result = run("plan", TARGET, *CLUSTER, "--search", "replicated", "-o", "taken.json")
    assert result.exit_code == 2 and "'taken.json' is a folder, not a file" in result.stderr


def test_forms_of_a_step_that_are_planned_alike_are_said_once(capsys):
    with progress(False) as say:
        for text in ("tracing", "planning 914 operators for a", "planning 915 operators for a", "stage 1", "stage 2"):
            say(text)
    assert capsys.readouterr().err.splitlines() == ["tracing", "planning 914 operators for a", "stage 1", "stage 2"]


def test_what_takes_long_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("click.echo", lambda text, err: lines.put(text))
    monkeypatch.setattr(output, "AFTER_S", 0.01)
    with progress(False) as say:
        say("planning 914 operators for a")
        assert lines.get() == "planning 914 operators for a"
        assert re.fullmatch(r"planning 914 operators for a \(\d+ s so far\)", lines.get())
        ACTIVITY.begin("compiling")
        try:
            assert any(re.fullmatch(r"compiling \(\d+ s so far\)", lines.get()) for _ in range(100))
        finally:
            ACTIVITY.end()


def test_a_spinner_names_what_begins_inside_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr("sys.stderr", drawn)
    monkeypatch.setattr(drawn, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress(False) as say:
        say("planning [914] operators")
        drawn_once(drawn, "planning [914] operators")
        ACTIVITY.begin("compiling [loops]")
        try:
            drawn_once(drawn, "compiling [loops]")
        finally:
            ACTIVITY.end()


def drawn_once(stream: io.StringIO, text: str) -> None:
    for _ in range(2000):
        if text in stream.getvalue():
            return
        threading.Event().wait(0.005)
    raise AssertionError(stream.getvalue())


@pytest.mark.parametrize(
    ("line", "says", "remedy"),
    [
        ("import a_missing_package.part", "imports a_missing_package, which is not installed", "autopar[examples]"),
        ("raise TypeError('unknown override nolayers')", "raises TypeError: unknown override nolayers", "--debug"),
    ],
)
def test_mistakes_in_examples_of_a_wheel_are_messages(line: str, says: str, remedy: str) -> None:
    """Examples lie in autopar's own folder there."""
    place = Path(autopar.cli.planning.__file__).parents[1] / "examples" / "gpt.py"
    target = StepTarget("examples.gpt", None, "build")
    with pytest.raises(AutoparError, match=says) as caught, user_code(target):
        exec(compile(line, str(place), "exec"))
    assert caught.value.source == "gpt.py:1 (<module>)" and remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("num_microbatches=2, 4, 8", "--microbatches 2, 4, 8"),
        ("mesh_shape=(2, 4), or mesh_shape=(8,)", "--mesh 2x4, or --mesh 8"),
        ("leave out schedule='1f1b' or remat=\"full\"", "leave out --schedule 1f1b or --remat full"),
        ("effort='high', num_stages=None, my_schedule='x'", "effort='high', num_stages=None, my_schedule='x'"),
    ],
)
def test_remedies_are_typed_as_options(text: str, typed: str) -> None:
    assert in_options(text, autopar.cli.plan.command) == typed
    assert in_options(text, autopar.cli.cache.command) == text


def test_names_of_arguments_in_sentences_are_typed_as_options() -> None:
    text = in_options(
        "raise memory_limit, use donate_argnums=(0, 1), the schedule or search",
        import_module("autopar.cli.plan").command,
    )
    assert text == "raise --memory-limit, use --donate 0x1, the schedule or search"


@pytest.mark.parametrize("width", [60, 80])
def test_errors_on_a_terminal_keep_to_its_width(width: int, folder: Path) -> None:
    """A pseudo-terminal; words are as they are in a file."""
    command = ("plan", TARGET, *CLUSTER, "--memory-limit", "1kB", "-q")
    lines = on_terminal(width, *command)
    assert "Error: InfeasiblePlanError: train_step does not fit 1 kB" in " ".join(lines)
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("  remedy: raise --memory-limit, ")]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_tables_of_schedules_on_a_terminal_go_on_in_blocks(schedule: str, run: Run) -> None:
    lines = on_terminal(80, "schedules", schedule)
    assert max(map(len, lines)) <= 80
    tasks = re.findall(r"[FBW]\d+\.\d+", " ".join(lines))
    assert sorted(tasks) == sorted(re.findall(r"[FBW]\d+\.\d+", run("schedules", schedule).stdout))


def on_terminal(width: int, *command: str) -> list[str]:
    """Lines that a command writes to a terminal of some width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {n: v for n, v in os.environ.items() if n != "COLUMNS"} | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    words = [sys.executable, "-m", "autopar", *command]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    process.wait()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).splitlines()
