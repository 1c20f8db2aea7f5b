"""The walk of a stranger on the package of a wheel; packages of extras cannot be imported."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.visitors.walk import EXTRAS, VISITS, Place, walked

ROOT = Path(__file__).resolve().parents[2]

#: Takes the place of an environment without the extras.
WITHOUT_EXTRAS = f"""
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder and a Python that sees the files of a wheel."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("walk")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(site), versions=["standard"])
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    (site / "sitecustomize.py").write_text(WITHOUT_EXTRAS, encoding="utf-8")
    path = {"PYTHONPATH": f"{site}:{folder}", "AUTOPAR_CACHE_DIR": str(site / "cache")}
    made = Place(folder, (sys.executable,), path)
    made.prepare()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("visit", VISITS, ids=lambda v: f"{v.point} {v}")
def test_visit(visit, place) -> None:
    wrong, printed = walked(visit, place)
    assert not wrong, printed
