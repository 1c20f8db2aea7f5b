"""Machine code on disk: for its owner alone, whole or not there, found again by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.solver.kernel_cache import CACHE_VARIABLE, cache_root, kernel_folder

ROOT = Path(__file__).resolve().parents[2]

#: Runs one small loop and prints its result and how often it was compiled.
ONE_LOOP = (
    "import numpy as np\n"
    "from autopar.solver.compiled import is_no_sum\n"
    "from numba.core import event\n"
    "with event.install_recorder('numba:compile') as compiled:\n"
    "    found = is_no_sum(np.array([[0.0, 1.0], [1.0, 0.0]]), 1e-9)\n"
    "print(found, len(compiled.buffer) > 0)\n"
)


def start(folder: Path, program: str = ONE_LOOP) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, CACHE_VARIABLE: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out.strip()


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = kernel_folder({CACHE_VARIABLE: str(tmp_path)})
    assert folder == tmp_path / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert kernel_folder({CACHE_VARIABLE: str(tmp_path)}) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_or_a_file_in_its_place_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    assert kernel_folder({CACHE_VARIABLE: str(tmp_path)}) is None
    (tmp_path / "kernels").unlink()
    (tmp_path / "kernels").write_text("")
    assert kernel_folder({CACHE_VARIABLE: str(tmp_path)}) is None


def test_where_nothing_is_kept_of_programs_code_lies_with_the_package() -> None:
    assert cache_root({CACHE_VARIABLE: "off"}) is None
    folder = kernel_folder({CACHE_VARIABLE: "off"})
    assert folder is None or "__pycache__" in folder.parts


def test_processes_share_what_one_compiled(tmp_path: Path) -> None:
    together = [start(tmp_path), start(tmp_path)]
    assert {finish(process) for process in together} <= {"True True", "True False"}  # one may come after the other
    (kept,) = (tmp_path / "kernels").iterdir()
    assert finish(start(tmp_path)) == "True False"
    kept.write_bytes(kept.read_bytes()[:100])  # cut short
    assert finish(start(tmp_path)) == "True True"
    assert finish(start(tmp_path)) == "True False"


def test_small_problems_and_the_command_line_load_no_compiler() -> None:
    program = (
        "import sys, autopar.cli, autopar.solver\n"
        "from tests.solver.problems import random_problem\n"
        "print(autopar.solver.solve(random_problem(0)).found, 'numba' in sys.modules)\n"
    )
    assert finish(start(Path("off"), program)) == "True False"


def test_the_fallback_says_what_it_costs() -> None:
    program = (
        "import sys, warnings; sys.modules['numba'] = None\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    import autopar.solver.compiled\n"
        "print(seen[0].message)\n"
    )
    said = finish(start(Path("off"), program))
    assert "hundred times as slow" in said and "pip install numba" in said


@pytest.mark.parametrize("value", ["", "0", "none", "off", " OFF "])
def test_words_for_nothing_kept(value: str) -> None:
    assert cache_root({CACHE_VARIABLE: value}) is None
