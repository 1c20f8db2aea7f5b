"""Machine code on disk: for its owner alone, whole or not there, found again by the next process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar._compat.files import CACHE_VARIABLE, cache_root, write_private
from autopar.solver import kernel_cache
from autopar.solver.kernel_cache import KernelCache, is_kept, kernel_folder
from autopar.solver.plain import is_worth_loading

ROOT = Path(__file__).resolve().parents[2]

#: Runs one small loop, for numbers that none is compiled for ahead, and prints its result and whether it was compiled.
ONE_LOOP = (
    "import numpy as np\n"
    "from autopar.solver.compiled import is_no_sum\n"
    "from numba.core import event\n"
    "with event.install_recorder('numba:compile') as compiled:\n"
    "    found = is_no_sum(np.array([[0, 1], [1, 0]], dtype=np.float32), 1e-9)\n"
    "print(found, len(compiled.buffer) > 0)\n"
)


#: As `ONE_LOOP`, and prints what progress says while it compiles, and when it is done.
TOLD = (
    "import numpy as np\n"
    "from autopar._compat.reminders import ACTIVITY\n"
    "from autopar.solver.compiled import is_no_sum\n"
    "from numba.core import event, dispatcher\n"
    "class Listener(event.Listener):\n"
    "    def on_start(self, event): print(ACTIVITY.or_phase('planning'))\n"
    "    def on_end(self, event): pass\n"
    "event.register('numba:compile', Listener())\n"
    "is_no_sum(np.array([[0, 1], [1, 0]], dtype=np.float32), 1e-9)\n"
    "print(ACTIVITY.or_phase('planning'))\n"
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


class Leaves:
    """Makes a folder when it is read by pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


class Codegen:
    """As much of numba's context as a file's name depends on."""

    def refresh(self) -> None:
        pass

    def codegen(self) -> Codegen:
        return self

    def magic_tuple(self) -> tuple[str, ...]:
        return ("processor",)


STRANGER = 65534


def give(path: Path) -> None:
    """Gives a file to another user, which only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def others_may_write_above(root: Path) -> None:
    root.chmod(0o777)


def a_group_may_write_above(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(root, -1, STRANGER)
    root.chmod(0o775)


def others_may_write_further_above(root: Path) -> None:
    root.parent.chmod(0o777)


def another_user_owns_what_is_above(root: Path) -> None:
    give(root)


def another_user_owns_the_folder(root: Path) -> None:
    give(root / "kernels")
    (root / "kernels").chmod(0o777)


def another_user_owns_the_file(root: Path) -> None:
    for file in (root / "kernels").iterdir():
        give(file)


def others_may_write_to_the_file(root: Path) -> None:
    for file in (root / "kernels").iterdir():
        file.chmod(0o666)


def the_file_is_a_link(root: Path) -> None:
    for file in (root / "kernels").iterdir():
        file.rename(root / "file")
        file.symlink_to(root / "file")


def the_folder_is_a_link(root: Path) -> None:
    (root / "kernels").rename(root / "elsewhere")
    (root / "kernels").symlink_to(root / "elsewhere")


def another_users_link_leads_there(root: Path) -> None:
    root.rename(root.parent / "elsewhere")
    root.symlink_to(root.parent / "elsewhere")
    give(root)


def others_may_write_where_a_link_leads(root: Path) -> None:
    (root.parent / "open" / "in").mkdir(parents=True)
    root.rename(root.parent / "open" / "in" / "cache")
    root.symlink_to("open/in/cache")
    (root.parent / "open").chmod(0o777)


@pytest.mark.parametrize(
    "spoil",
    [
        others_may_write_above,
        others_may_write_further_above,
        a_group_may_write_above,
        another_user_owns_what_is_above,
        another_user_owns_the_folder,
        another_user_owns_the_file,
        others_may_write_to_the_file,
        the_file_is_a_link,
        the_folder_is_a_link,
        another_users_link_leads_there,
        others_may_write_where_a_link_leads,
    ],
)
def test_nothing_is_run_that_another_user_may_have_left(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Folders are looked at when code is loaded: they may have changed since this module was imported."""
    root, ran = tmp_path / "above" / "cache", tmp_path / "ran"
    cache = KernelCache("function", kernel_folder({CACHE_VARIABLE: str(root)}), "source")
    root.mkdir(parents=True, mode=0o755)
    cache.folder.mkdir(mode=0o700)
    path = cache._path("signature", Codegen())
    write_private(path, pickle.dumps(Leaves(ran)))
    assert cache.load_overload("signature", Codegen()) is None and ran.exists()  # a file of one's own is run
    ran.rmdir()
    spoil(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.load_overload("signature", Codegen()) is None and not ran.exists()


@pytest.mark.slow
def test_where_others_may_write_each_process_compiles_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    process = start(tmp_path / "open")
    out, err = process.communicate(timeout=200)
    assert out.strip() == "True True" and "can be replaced by others" in err and CACHE_VARIABLE in err
    assert not list((tmp_path / "open" / "kernels").iterdir())


@pytest.mark.slow
def test_an_own_folder_that_others_can_enter_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    assert finish(start(tmp_path)) == "True True"
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir())


def test_where_nothing_is_kept_of_programs_code_lies_with_the_package() -> None:
    assert cache_root({CACHE_VARIABLE: "off"}) is None
    assert "__pycache__" in kernel_folder({CACHE_VARIABLE: "off"}).parts


@pytest.mark.slow
def test_processes_share_what_one_compiled(tmp_path: Path) -> None:
    together = [start(tmp_path), start(tmp_path)]
    assert {finish(process) for process in together} <= {"True True", "True False"}  # one may come after the other
    (kept,) = (tmp_path / "kernels").glob("*.kernel")
    assert finish(start(tmp_path)) == "True False"
    kept.write_bytes(kept.read_bytes()[:100])  # cut short
    assert finish(start(tmp_path)) == "True True"
    assert len(kept.read_bytes()) > 100  # written again, for the next one


@pytest.mark.slow
def test_small_problems_and_the_command_line_load_no_compiler() -> None:
    program = (
        "import sys, autopar.cli, autopar.solver\n"
        "from tests.solver.problems import random_problem\n"
        "print(autopar.solver.solve(random_problem(0)).found, 'numba' in sys.modules)\n"
    )
    assert finish(start(Path("off"), program)) == "True False"


@pytest.mark.parametrize("value", ["", "0", "none", "off", " OFF "])
def test_words_for_nothing_kept(value: str) -> None:
    assert cache_root({CACHE_VARIABLE: value}) is None


def test_code_compiled_ahead_is_read_and_never_written(tmp_path: Path) -> None:
    numba = pytest.importorskip("numba")
    event = pytest.importorskip("numba.core.event")

    def compiled_in(cache: KernelCache) -> bool:
        loop = numba.njit(_twice)
        loop._cache = cache
        with event.install_recorder("numba:compile") as seen:
            assert loop(3) == 6
        return bool(seen.buffer)

    ahead, own = tmp_path / "ahead", tmp_path / "own"
    assert compiled_in(KernelCache("twice", ahead, "source"))
    before = {p.name: p.read_bytes() for p in ahead.iterdir()}
    assert not compiled_in(KernelCache("twice", own, "source", ahead)) and not own.exists()
    assert compiled_in(KernelCache("twice", own, "another source", ahead)) and len(list(own.glob("*.kernel"))) == 1
    assert {p.name: p.read_bytes() for p in ahead.iterdir()} == before
    for file in ahead.iterdir():
        file.chmod(0o666)
    assert compiled_in(KernelCache("twice", tmp_path / "third", "source", ahead))


def _twice(x: int) -> int:
    return 2 * x


def test_kept_code_decides_which_loops_small_problems_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(kernel_cache, "package_folder", lambda: tmp_path / "of the package")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delitem(sys.modules, "autopar.solver.compiled", raising=False)
    assert not is_kept(os.environ) and not is_worth_loading(600, 10_000) and is_worth_loading(10_000, 10_000)
    loop = numba.njit(_twice)
    loop._cache = KernelCache("twice", kernel_folder(os.environ), "source")
    assert loop(3) == 6
    assert is_kept(os.environ) and is_worth_loading(600, 10_000) and not is_worth_loading(60, 10_000)
    assert all(path.stat().st_mode & 0o077 == 0 for path in kernel_folder(os.environ).iterdir())


def test_code_that_is_loaded_stays_known_as_kept_and_what_is_not_loaded_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(kernel_cache, "package_folder", lambda: tmp_path / "of the package")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    folder = kernel_folder(os.environ)

    def compiled(source: str) -> None:
        loop = numba.njit(_twice)
        loop._cache = KernelCache("twice", folder, source)
        assert loop(3) == 6

    compiled("first")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    compiled("first")  # a load refreshes the code
    with monkeypatch.context() as another_version:
        another_version.setattr(kernel_cache, "source_hash", lambda: "second")
        compiled("second")
    assert is_kept(os.environ) and len(list(folder.glob("*.kernel"))) == 2
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    KernelCache("twice", folder, "third")._drop_unused()
    assert not is_kept(os.environ) and not list(folder.iterdir())


@pytest.mark.slow
def test_all_loops_that_a_plan_of_many_operators_runs_are_compiled_ahead(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "autopar.solver.prepare"], cwd=ROOT, check=True)
    program = (
        "import autopar\n"
        "from examples import gpt\n"
        "step, args = gpt.build(abstract=True)\n"
        "cluster = autopar.Cluster.load('dgx-a100', nodes=1)\n"
        "autopar.parallelize(step, cluster=cluster, donate_argnums=0).plan(*args)\n"
    )
    finish(start(tmp_path, program))
    assert not (tmp_path / "kernels").exists()


def test_progress_says_that_a_loop_is_compiled_and_not_that_it_is_loaded(tmp_path: Path) -> None:
    said = "compiling loops of the solver for their first use"
    first = finish(start(tmp_path / "kept", TOLD)).splitlines()
    assert first[-1] == "planning" and set(first[:-1]) == {said}
    assert finish(start(tmp_path / "kept", TOLD)).splitlines() == ["planning"]
