"""Every Python block of the documentation runs, in the order of its page, and uses names that a reader can find."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from autopar.schedule import registry as schedule_registry
from autopar.search import registry as search_registry
from autopar.sharding.registry import registered_rules, unregister_rule
from tests.docs.pages import PAGES, ROOT, Block, blocks, name

#: Marks of blocks: run on Ray, among the slow tests; not run, for it needs a running cluster at an address; run where
#: equinox is installed.
ON_RAY, ADDRESS, EQUINOX = "ray", "address", "equinox"
#: The exercises are run by `tests/docs/test_exercises.py`, each as a test.
PYTHON = {name(p): [b for b in blocks(p) if b.language == "python"] for p in PAGES if p.name != "exercises.md"}
#: Where the names are made that blocks of a page take for granted, and what such a page says.
START, LINK = "docs/index.md", "index.md#the-step-of-the-pages"
SETUP = next(b.text for b in PYTHON[START] if "def train_step_args" in b.text)


#: Pages that cost 0.7 references of CPU time or more, but for those that a newcomer reads first: their blocks confirm
#: what tests of each feature find.
LONG = (
    "docs/constraints.md", "docs/schedules.md", "docs/strategies.md", "docs/transforms.md",
    "docs/tutorial/another-cluster.md", "docs/tutorial/constrain.md", "docs/tutorial/decorate.md",
    "docs/tutorial/train-evaluate-generate.md", "docs/tutorial/verify.md",
)  # fmt: skip
IN_PROCESS = [
    pytest.param(page, marks=pytest.mark.slow) if page in LONG else page
    for page, found in PYTHON.items()
    if any(not b.mark for b in found)
]


def text_of(chosen: list[Block]) -> str:
    """A program of blocks, one after another."""
    assert chosen
    return "\n".join([SETUP, *("\n" * 2 + b.text for b in chosen)])


def run(page: str, chosen: list[Block], folder: Path, site: Path = ROOT) -> None:
    """Runs blocks in a process of their own with eight devices; ``site`` has the package."""
    program = text_of(chosen)
    script = folder / "blocks.py"
    script.write_text(
        f"if __name__ == '__main__':\n    exec(compile({program!r}, {page!r}, 'exec'))\n", encoding="utf-8"
    )
    python = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(site), "HOME": str(folder)}
    environment |= {"AUTOPAR_CACHE_DIR": "off", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(python, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def names(found: Sequence[Block]) -> tuple[set[str], set[str]]:
    """Names that blocks use, and those that they make."""
    used, made = set[str](), set(dir(builtins))
    for node in (n for b in found for n in ast.walk(ast.parse(b.text))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return used, made


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if found])
def test_names_come_from_the_page_or_from_the_one_that_it_names(page: str) -> None:
    used, made = names(PYTHON[page])
    missing = used - made
    assert missing <= names([b for b in PYTHON[START] if b.text == SETUP])[1], "nothing defines them"
    assert not missing or LINK in (ROOT / page).read_text(encoding="utf-8"), f"{sorted(missing)}: say where they are"


@pytest.fixture
def registered_for_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drops the strategies, schedules and rules that a page registers."""
    monkeypatch.setattr(search_registry, "_REGISTRY", search_registry.built_in())
    monkeypatch.setattr(schedule_registry, "_REGISTRY", schedule_registry.built_in())
    before = set(registered_rules())
    yield
    for primitive in set(registered_rules()) - before:
        unregister_rule(primitive)


@pytest.mark.usefixtures("registered_for_one_test")
@pytest.mark.parametrize("page", IN_PROCESS)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of the tests; a process of their own is a slow test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    module = types.ModuleType("page_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=DeprecationWarning, module=module.__name__)
        program = text_of([b for b in PYTHON[page] if not b.mark])
        exec(compile(program, page, "exec", dont_inherit=True), vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(b.mark == ON_RAY for b in found)])
def test_blocks_run_on_ray(page, tmp_path) -> None:
    run(page, [b for b in PYTHON[page] if b.mark == ON_RAY], tmp_path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel installs, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(not b.mark for b in found)])
def test_blocks_run_with_an_installed_wheel(page: str, site: Path, tmp_path: Path) -> None:
    assert sorted(os.listdir(site))[0] == "autopar" and not (site / "examples").exists()
    run(page, [b for b in PYTHON[page] if not b.mark], tmp_path, site)


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(b.mark == EQUINOX for b in found)])
def test_blocks_run_with_equinox(page: str) -> None:
    pytest.importorskip("equinox")
    program = text_of([b for b in PYTHON[page] if b.mark == EQUINOX])
    exec(compile(program, page, "exec", dont_inherit=True), {"__name__": page})


def test_marks_and_pages_are_known() -> None:
    assert set(LONG) <= set(PYTHON)
    assert {b.mark for found in PYTHON.values() for b in found} <= {"", ON_RAY, ADDRESS, EQUINOX}
