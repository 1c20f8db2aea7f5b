"""Builds the wheel, installs it into a new environment as a stranger would, and walks all visits.

    python -m tests.visitors [FOLDER] [--python PYTHON] [--show]

FOLDER keeps the environment and is taken again; without it one is made and removed. PYTHON is an interpreter that has
autopar already. --show prints what each command printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from tests.visitors.walk import VISITS, Place, walked

ROOT = Path(__file__).resolve().parents[2]


def installed(folder: Path) -> Path:
    """A Python with the wheel and what it depends on, and nothing else."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", wheel], check=True)
    return python


def walk(folder: Path, python: str | None, show: bool) -> int:
    """Walks all visits; the number of those with something wrong."""
    python = python or str(installed(folder))
    (folder / "walk").mkdir(exist_ok=True)
    place = Place(folder / "walk", (python,))
    place.prepare()
    failed = 0
    for visit in VISITS:
        wrong, printed = walked(visit, place)
        failed += bool(wrong)
        print(f"{visit.point:2} {'; '.join(wrong) or 'as expected'}: {visit}", flush=True)
        if show or wrong:
            print("   | " + "\n   | ".join(printed.splitlines()))
    print(f"{len(VISITS) - failed} of {len(VISITS)} as expected")
    return failed


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--python")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(exist_ok=True, parents=True)
        sys.exit(walk(given.folder.resolve(), given.python, given.show) > 0)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(walk(Path(folder), given.python, given.show) > 0)


if __name__ == "__main__":
    main()
