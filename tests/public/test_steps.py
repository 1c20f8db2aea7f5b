"""Train steps made of code that other people released train to the same values on eight devices as on one.

Needs the extra ``public``; `make test-public` makes an environment with it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.public.case import Case
from tests.public.compare import outcome
from tests.public.registry import CASES

MESHES = [(8,), (2, 4)]


def parameter(case):
    failing = [pytest.mark.xfail(reason=case.fails, strict=True)] if case.fails else []
    return pytest.param(case, id=case.id, marks=failing)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # those of other people's code are theirs
@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_same_as_on_one_device(case: Case, mesh_shape):
    try:
        found = outcome(case, mesh_shape)
    except ModuleNotFoundError as error:
        if (error.name or "autopar").split(".")[0] in ("autopar", "tests"):
            raise
        pytest.skip(f"{error.name} is not installed; it comes with requirements/public.in")
    assert found.apart <= found.allowed, f"{found.where} differs by {found.apart:.1e} of its norm"
    assert found.split[0] > 0 or not case.split, "the plan splits nothing"


def test_every_function_of_a_family_is_a_case():
    listed = {(case.family, case.name) for case in CASES}
    assert len(listed) == len(CASES)
    written = set()
    for path in sorted(Path(__file__).parent.glob("*_steps.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.args.args and not path.name.startswith("test_"):
                written.add((path.stem, node.name))
    assert listed == written


def test_the_list_names_the_versions_that_are_installed_for_it():
    lines = (Path(__file__).parents[2] / "requirements" / "public.in").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {case.distribution: case.version for case in CASES}.items() <= pinned.items()


def test_the_list_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "public-steps.md").read_text()
    missing = [
        case.id for case in CASES if f"`{case.id}`" not in text or f"{case.distribution} {case.version}" not in text
    ]
    assert not missing
