"""The commands that need no jax: what they print, and that they do not load it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

import autopar
from autopar.cli import main
from autopar.cli.group import COMMANDS
from autopar.cluster import Cluster, available
from autopar.search import strategies
from autopar.search.cache import PlanCache
from tests.cli.conftest import ROOT, Run
from tests.report.plans import make_plan


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    """Files of two plans that differ."""
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    make_plan().save(a)
    make_plan(axes=(("x", 8),), step_time=3e-3).save(b)
    return a, b


@pytest.mark.slow
def test_no_light_command_loads_a_device_library(plans: tuple[str, str]) -> None:
    a, b = plans
    commands = [["--version"], ["--help"], ["plan", "--help"], ["clusters"], ["explain", a], ["diff", a, b],
                ["strategies"], ["cache"], ["solve", "--help"]]  # fmt: skip
    program = (
        "import sys\nfrom autopar.cli import main\n"
        f"for args in {commands!r}:\n"
        "    main(args, standalone_mode=False)\n"
        "    loaded = sorted({'jax', 'jaxlib', 'ray', 'jinja2', 'rich'} & set(sys.modules))\n"
        "    assert not loaded, (args, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_help_lists_what_the_commands_say(run: Run) -> None:
    shown = run("--help").stdout
    context = click.Context(main)
    for name, line in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None and command.name == name
        assert (command.help or "").partition("\n")[0] == line
        assert line in shown
        assert run(name, "--help").exit_code == 0


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"autopar {autopar.__version__}\n"


def test_clusters(run: Run) -> None:
    text, data = run("clusters"), json.loads(run("clusters", "--format", "json").stdout)
    assert text.exit_code == 0
    assert [c["name"] for c in data] == list(available())
    for name, plain in zip(available(), data, strict=True):
        (line,) = (row for row in text.stdout.splitlines() if row.split()[:1] == [name])
        cluster = Cluster.load(name)
        assert cluster.groups[0].device.kind in line
        assert plain.pop("num_devices") == cluster.num_devices
        assert Cluster.from_dict(plain) == cluster


def test_strategies(run: Run) -> None:
    text, data = run("strategies"), json.loads(run("strategies", "--format", "json").stdout)
    assert len({row["description"] for row in data}) == len(data), "each strategy is described"
    assert [s["name"] for s in data] == list(strategies())
    assert all(s["description"] and s["description"] in " ".join(text.stdout.split()) for s in data)


def test_cache(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("cache").stdout == "no plans are kept: AUTOPAR_CACHE_DIR turns it off\n"
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert run("cache").stdout == f"{tmp_path}/plans: 0 plans, 0 B of 268 MB\n"
    PlanCache(tmp_path / "plans").put("k" * 64, make_plan().content)
    assert run("cache").stdout.startswith(f"{tmp_path}/plans: 1 plan, ")
    assert run("cache", "--clear").stdout == f"{tmp_path}/plans: 1 files removed\n"
    assert list((tmp_path / "plans").iterdir()) == []


def test_explain(run: Run, plans: tuple[str, str]) -> None:
    one, top = run("explain", plans[0], "dot_general.1"), run("explain", plans[0])
    assert one.exit_code == top.exit_code == 0
    assert "runner-up:  [.,x],[x,.] -> [.,.]" in one.stdout and "dot_general.2" not in one.stdout
    assert "dot_general.2" in top.stdout
    missing = run("explain", plans[0], "dot_genral.1")
    assert missing.exit_code == 1 and "dot_general.1" in missing.stderr


def test_diff(run: Run, plans: tuple[str, str]) -> None:
    a, b = plans
    assert run("diff", a, a).stdout == "the plans are equal\n"
    text, data = run("diff", a, b), json.loads(run("diff", a, b, "--format", "json").stdout)
    assert text.exit_code == 0
    assert "+50.0%" in text.stdout and "f32[64@x=8,32]" in text.stdout
    assert data["identical"] is False
    assert {"name": "step time", "before": 2e-3, "after": 3e-3, "unit": "s"} in data["figures"]
    assert json.loads(run("diff", a, a, "--format", "json").stdout)["identical"] is True
