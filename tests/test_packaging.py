"""What an installed autopar brings: in a wheel examples and cluster files, in an editable install the package alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent


def contents(version: str, folder: Path) -> tuple[Path, set[str]]:
    """A wheel, and its files."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=[version])
    with zipfile.ZipFile(path) as wheel:
        return Path(path), set(wheel.namelist())


def test_an_editable_install_shows_no_other_folder(tmp_path) -> None:
    path, names = contents("editable", tmp_path)
    assert not any(name.startswith(("autopar/", "examples/", "tests/", "benchmarks/")) for name in names)
    with zipfile.ZipFile(path) as wheel:
        paths = [wheel.read(name).decode() for name in names if name.endswith(".pth")]
    assert paths and not any(str(ROOT) == line.strip() for text in paths for line in text.splitlines())


@pytest.mark.parametrize("home", ["", "https://example.org/autopar/blob/main"])
def test_the_description_has_no_link_that_leads_nowhere(home, monkeypatch) -> None:
    """A package index shows the README next to no file of the repository."""
    monkeypatch.setenv("AUTOPAR_HOME", home)
    core = WheelBuilder(str(ROOT)).metadata.core
    links = re.findall(r"\]\(([^)\s]+)\)", core.readme)
    assert all(re.match(r"https?:|#", link) for link in links)
    assert f"{home}/docs/index.md" in links if home else "docs/index.md" in core.readme
    assert set(core.urls) == ({"Changelog", "Documentation", "Source"} if home else set())
    assert all(address.startswith(home) for address in core.urls.values())


@pytest.mark.slow
def test_examples_of_a_wheel_can_be_planned(tmp_path) -> None:
    path, names = contents("standard", tmp_path)
    assert {"autopar/examples/gpt.py", "autopar/_cost_models/dgx-a100.toml", "autopar/py.typed"} <= names
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "autopar", "plan", "examples.mlp", "--cluster", "dgx-a100", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "AUTOPAR_CACHE_DIR": "off"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "dgx-a100" in done.stdout
