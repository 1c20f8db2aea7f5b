"""What holds for the repository as a whole: sizes, state, who imports what, no traces of one machine."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import autopar
import autopar.errors
import autopar.search.job
from tests.sizes import warnings

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "autopar").rglob("*.py"))
TEXT_SUFFIXES = (".cfg", ".css", ".html", ".j2", ".js", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml")

#: Rooms that plan without a device: importing all of them loads none of `DEVICE_LIBRARIES`.
PLANNER = (
    "cluster", "cost", "errors", "hooks", "ir", "microbatch", "plan", "recompute", "report", "schedule", "search",
    "sharding", "simulate", "solver", "stages",
)  # fmt: skip
#: Commands, which say what they take and read their options before they load what they run.
COMMANDS = sorted(f"autopar.cli.{path.stem}" for path in (ROOT / "autopar/cli").glob("*.py") if path.stem != "planning")
#: Rooms that need a device library, or start what does.
WITH_DEVICES = ("_compat", "api", "cli", "frontend", "lower", "precision", "runtime", "transforms")
DEVICE_LIBRARIES = ("jax", "jaxlib", "ray", "flax", "optax")

#: Modules below which a library may be imported at all; one that is not named here may be imported anywhere.
MAY_IMPORT = {
    "jax": (
        "autopar._compat",
        "autopar.api",
        "autopar.frontend",
        "autopar.lower",
        "autopar.precision",
        "autopar.runtime",
        "autopar.transforms",
    ),
    "jaxlib": ("autopar._compat",),
    "ray": ("autopar.runtime.ray",),
    "pulp": ("autopar.solver",),
    "highspy": ("autopar.solver",),
    "orbax": ("autopar.runtime",),
    "flax": (),
    "optax": (),
}

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_MAKERS = ("Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file, which most tests look at."""
    return tuple(ast.walk(tree))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those in ``if`` and ``try`` blocks too."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from top_level(getattr(statement, block, []))


def makes_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in MUTABLE_MAKERS
    return isinstance(value, MUTABLE_DISPLAYS)


def mutable_state(tree: ast.Module) -> list[str]:
    """Module-level names of mutable containers, but for constants (ALL_CAPS, ``Final``) and ``__all__``."""
    found = []
    for statement in top_level(tree.body):
        if isinstance(statement, ast.AnnAssign):
            targets, value = [statement.target], statement.value
            if "Final" in ast.unparse(statement.annotation):
                continue
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        if makes_mutable(value):
            found += [n for n in names if n != "__all__" and not re.fullmatch(r"_*[A-Z][A-Z0-9_]*", n)]
    return found


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of all libraries that are imported anywhere in a file."""
    names = {a.name for n in nodes(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in nodes(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return {name.partition(".")[0] for name in names}


def text_files() -> list[Path]:
    """Text of the repository; folders whose name starts with a dot hold environments and caches."""
    paths = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".")]
        paths += [Path(folder, name) for name in names if name.endswith(TEXT_SUFFIXES) or name == "Makefile"]
    return sorted(paths)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("class A: pass\n", []),
        ("\n" * 501, ["m: 501 lines"]),
        ("def f():\n" + "    x = 1\n" * 60, ["m.f: 61 lines"]),
        ("class A:\n    def f(self, a, b, c, d, e, *, f, g, h): pass\n", []),
        ("class A:\n    def f(self, a, b, c, d, e, *, f, g, h, i): pass\n", ["m.f: 9 parameters"]),
        ("class A: pass\nclass A: pass\n", ["class A: in m, m"]),
    ],
)
def test_sizes_and_names_are_warnings(source: str, lines: list[str]) -> None:
    assert [*warnings([("m", source)])] == lines


#: Numbers at the top of modules of `search` that decide nothing about a plan, with what they are.
NUMBERS_OF_SEARCH = {
    "autopar.search.stored_values._MOST_DEPTH": "guard against deep recursion: less is a lower bound too",
    "autopar.search.bound._EACH": "speed of a bound: fewer make it lower",
    "autopar.search.cache._EFFORT": "compression of files",
    "autopar.search.cache._GZIP": "zlib's name of a format",
    "autopar.search.cache._LEFT_S": "files that an ended writer left",
    "autopar.search.trail.MOST_ROWS": "rows that a plan keeps of its trail",
    "autopar.search.trail._MOST_CHARACTERS": "length of a reason in the trail",
    "autopar.search.clock.UNIT_S": "a definition: seconds that a work unit stands for",
    "autopar.search.cache._MOST_UNPACKED_BYTES": "guard against a file that unpacks to any size",
    "autopar.search.constraints.FREE": "a mark",
    "autopar.search.constraints.SPLIT": "a mark",
    "autopar.search.problem_data._VERSION": "of a file format",
    "autopar.search.garbage.THRESHOLDS": "Python's collector of garbage",
    "autopar.search.intra.timeline.MOST_OPERATORS": "size of a picture",
    "autopar.search.intra.timeline.MOST_POINTS": "size of a picture",
    "autopar.search.intra.sharding_problem._NUMBERS_OF_DRAFT": "memory of what is computed once",
    "autopar.search.store._MOST_ENTRIES": "memory of what is computed once",
    "autopar.search.store._NUMBERS_OF_RECORD": "memory of what is computed once",
    "autopar.search.pipeline.partition._MOST_SUMS": "memory of sums that are made at a time",
    "autopar.search.pipeline.partition._ROUNDING": "of sums",
    "autopar.search.intra.extract._SHOWN_OPERATORS": "length of a text",
    "autopar.search.intra.program._UNFUSED_SOFTMAX": "kernels of a published program",
    "autopar.search.intra.fusion.CPU_GROWTH": "what a compiler fuses: a fact",
    "autopar.search.intra.fusion.GROWTH": "likewise",
    "autopar.search.intra.fusion.CONSTANT_BYTES": "likewise",
}


def numeric_constants(tree: ast.Module) -> list[str]:
    """Names at the top of a module whose values are numbers, or displays and formulas of numbers alone."""
    names: list[str] = []
    for statement in top_level(tree.body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or value is None:
            continue
        leaves = [n for n in ast.walk(value) if isinstance(n, ast.Constant | ast.Name | ast.Call)]
        numbers = [n for n in leaves if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
        texts = [n for n in leaves if isinstance(n, ast.Constant) and not isinstance(n.value, int | float)]
        if numbers and not texts and not any(isinstance(n, ast.Call) for n in leaves):
            names += [n.id for target in targets for n in ast.walk(target or ast.Pass()) if isinstance(n, ast.Name)]
    return names


def test_thresholds_of_the_search_are_fields_of_its_policy() -> None:
    found = {
        f"{module_name(p)}.{name}"
        for p in SOURCES
        if module_name(p).startswith("autopar.search.")
        for name in numeric_constants(parse(p))
    }
    assert found == set(NUMBERS_OF_SEARCH)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("MOST = 60", ["MOST"]),
        ("_NEAR: float = 1.25\nA, B = 2, 1 << 3", ["_NEAR", "A", "B"]),
        ("EXCESSES = (1.0, math.inf)", ["EXCESSES"]),
        ("NAME = 'x'\nKINDS = ('a', 'b')\nTABLE = {'a': 1}\nLOCK = Lock(1)", []),
        ("def f(n=3):\n    most = 4\nclass C:\n    field: int = 3", []),
    ],
)
def test_the_check_for_thresholds_finds_them(source: str, names: list[str]) -> None:
    assert numeric_constants(ast.parse(source)) == names


#: Calls that read a clock, and the option by which a caller of the solver lets one decide.
CLOCKS = ("time", "perf_counter", "monotonic", "process_time")


def clock_reads(tree: ast.Module) -> list[str]:
    """Clocks that a file reads, and time limits that it gives."""
    calls = [n for n in nodes(tree) if isinstance(n, ast.Call)]
    read = [ast.unparse(c.func) for c in calls if ast.unparse(c.func).rpartition(".")[2] in CLOCKS]
    return read + [k.arg for c in calls for k in c.keywords if k.arg == "time_limit_s"]


def test_no_clock_decides_in_the_search_of_pipelines() -> None:
    files = [p for p in SOURCES if module_name(p).startswith("autopar.search.pipeline.")]
    assert len(files) > 10
    assert {module_name(p): clock_reads(parse(p)) for p in files if clock_reads(parse(p))} == {}
    assert clock_reads(ast.parse("solve(p, time_limit_s=10.0)\nbegan = time.monotonic()")) == [
        "time.monotonic",
        "time_limit_s",
    ]


def test_a_clock_ends_a_solve_only_where_the_user_says_so() -> None:
    assert autopar.search.job.Solving().time_limit_s is None
    calls = [n for n in nodes(parse(ROOT / "autopar" / "search" / "mesh_search.py")) if isinstance(n, ast.Call)]
    limits = [ast.unparse(k.value) for c in calls for k in c.keywords if k.arg == "time_limit_s"]
    assert limits == ["problem.solving.time_limit_s"]


#: Words that are not the field's, with what to say instead: no name of a function, class, argument, field, variable or
#: module has one as a part.
NOT_THE_FIELDS_WORDS = {
    "alike": "isomorphic, equal",
    "anew": "recompute",
    "announced": "broadcast",
    "apart": "separate, stagewise",
    "behind": "after",
    "beside": "parallel, next to",
    "crew": "worker group",
    "dear": "expensive",
    "fences": "collective barriers",
    "hello": "handshake",
    "home": "placement",
    "look": "relaxation, poll",
    "looks": "relaxations",
    "mates": "peers",
    "meet": "connect",
    "pieces": "shards",
    "promising": "ranked",
    "slack": "overlappable, imbalance, tolerance",
    "stated": "problem, program",
    "teams": "process groups",
    "told": "given, reported",
    "turns": "iterations, rounds",
    "waiting": "in flight, blocked, queue",
    "waits": "in flight, stall",
    "ways": "shards, configurations",
}
#: Names that say nothing of the thing they are for.
NOT_FOR_VARIABLES = ("chosen", "found", "made", "own", "stated")
#: Words of the first table that no comment, docstring or page has; a page that is made from names of tests is left out.
NOT_IN_PROSE = ("alike", "anew", "beside", "crew", "slack")


def names_given(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives: of functions, classes, arguments, attributes and variables."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    """``worker_groups`` and ``WorkerGroups`` are both ``{"worker", "groups"}``."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def variables(tree: ast.AST) -> Iterator[str]:
    """Names of arguments and variables that a file binds, and of fields that its classes declare."""
    for node in nodes(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def uses(tree: ast.AST) -> Iterator[str]:
    """Names that a file reads, imports, or has as a text."""
    for node in nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_code_has_a_caller_or_a_page() -> None:
    """Functions and classes that tests or benchmarks alone use lie with them."""
    used = {name for path in SOURCES for name in uses(parse(path))}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    alone = [
        f"{module_name(path)}.{node.name}"
        for path in SOURCES
        for node in parse(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list
        if node.name not in used and not re.search(rf"\b{node.name}\b", pages)
    ]
    assert [name for name in alone if not name.startswith("autopar.__")] == []
    assert {"f", "g"} <= set(uses(ast.parse("from m import f\nx.g")))


def test_names_are_the_fields_own() -> None:
    wrong = [
        f"{module_name(path)}: {name}"
        for path in SOURCES
        for name in (*names_given(parse(path)), path.stem)
        if words(name) & NOT_THE_FIELDS_WORDS.keys()
    ]
    assert wrong == []
    assert words("WorkerCrew") & NOT_THE_FIELDS_WORDS.keys() == {"crew"}
    assert [*names_given(ast.parse("def f(mates):\n    x.anew = y = 1"))] == ["f", "mates", "anew", "y"]


def test_variables_are_named_for_the_thing() -> None:
    assert [f"{module_name(p)}: {n}" for p in SOURCES for n in variables(parse(p)) if n in NOT_FOR_VARIABLES] == []
    bound = variables(ast.parse("class C:\n    made: int\ndef f(own):\n    x.a = found = 1"))
    assert sorted(bound) == ["found", "made", "own"]


def test_prose_has_the_fields_words() -> None:
    word = re.compile(rf"(?<![\w`])({'|'.join(NOT_IN_PROSE)})(?![\w`])", re.IGNORECASE)
    pages = [*SOURCES, *sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"} - {ROOT / "docs" / "coverage.md"})]
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {match.group()}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        for match in word.finditer(line)
    ]
    assert len(pages) > 500
    assert wrong == []
    assert word.search("Computed anew.") and not word.search("`beside`") and not word.search("besides")


#: First words of a docstring that have no noun of the field behind them (a sentence without a subject).
WITHOUT_A_SUBJECT = ("that", "those", "what", "who")


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and functions."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def test_docstrings_have_a_subject() -> None:
    texts = [(module_name(path), text) for path in SOURCES for text in docstrings(parse(path))]
    assert len(texts) > 5000
    assert [(m, t) for m, t in texts if re.match(r"\w*", t)[0].lower() in WITHOUT_A_SUBJECT] == []


def test_no_module_level_mutable_state() -> None:
    found = {module_name(p): mutable_state(parse(p)) for p in SOURCES}
    assert {name: names for name, names in found.items() if names} == {}


def test_no_global_statements() -> None:
    assert [module_name(p) for p in SOURCES if any(isinstance(n, ast.Global) for n in nodes(parse(p)))] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("cache = {}", ["cache"]),
        ("cache: dict[str, int] = dict()", ["cache"]),
        ("import collections\nif True:\n    seen = collections.defaultdict(list)", ["seen"]),
        ("try:\n    a = b = [1]\nfinally:\n    pass", ["a", "b"]),
        ("TABLE = {'f32': 4}\n_TABLE: dict[str, int] = {}\n__all__ = ['x']", []),
        ("from typing import Final\nnames: Final = ['x']\npair = (1, 2)", []),
        ("def f():\n    local = {}\nclass C:\n    slots = []", []),
    ],
)
def test_the_check_for_state_finds_state(source: str, names: list[str]) -> None:
    assert mutable_state(ast.parse(source)) == names


def test_libraries_are_imported_only_where_they_may() -> None:
    wrong = [
        f"{name} imports {library}"
        for name, tree in ((module_name(p), parse(p)) for p in SOURCES)
        for library in sorted(imported(tree) & MAY_IMPORT.keys())
        if not f"{name}.".startswith(tuple(f"{place}." for place in MAY_IMPORT[library]))
    ]
    assert wrong == []


def test_every_floor_is_known() -> None:
    floors = {module_name(p).split(".")[1] for p in SOURCES if "." in module_name(p)}
    assert floors == {*PLANNER, *WITH_DEVICES, "__main__"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (planner,) = (c for c in contracts["contracts"] if c["id"] == "planner-without-devices")
    assert set(planner["source_modules"]) == {f"autopar.{floor}" for floor in PLANNER}


def loaded_by_name(tree: ast.Module) -> set[str]:
    """Modules that a file imports by a name in text."""
    calls = (n for n in nodes(tree) if isinstance(n, ast.Call) and n.args)
    named = (c for c in calls if ast.unparse(c.func).rpartition(".")[2] in ("import_module", "__import__"))
    return {c.args[0].value for c in named if isinstance(c.args[0], ast.Constant)}


def drawing() -> dict[str, set[str]]:
    """By module those of autopar that it imports, anywhere and in any way; the root is no part of it."""
    names = {module_name(p) for p in SOURCES} - {"autopar"}
    arrows: dict[str, set[str]] = {}
    for path in SOURCES:
        tree = parse(path)
        wanted = loaded_by_name(tree)
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        arrows[module_name(path)] = (wanted & names) - {module_name(path)}
    del arrows["autopar"]
    return arrows


def test_imports_have_no_circle() -> None:
    arrows = nx.DiGraph([(a, b) for a, targets in drawing().items() for b in targets if not a.startswith(f"{b}.")])
    assert arrows.number_of_edges() > 1000
    assert [sorted(group) for group in nx.strongly_connected_components(arrows) if len(group) > 1] == []


def test_imports_by_name_go_down_too() -> None:
    """What import-linter cannot see: a name in text leads to the same floor or one below."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (floors,) = (c for c in tomllib.loads(text)["tool"]["importlinter"]["contracts"] if c["id"] == "floors")
    height = {room: -n for n, layer in enumerate(floors["layers"]) for room in re.findall(r"\w+", layer)}
    wrong = [
        f"{name} loads {target}"
        for name, tree in ((module_name(p), parse(p)) for p in SOURCES)
        for target in sorted(loaded_by_name(tree))
        if name.startswith("autopar.") and target.startswith("autopar.")
        if height[target.split(".")[1]] > height[name.split(".")[1]]
    ]
    assert wrong == []


def test_planning_loads_no_device_library() -> None:
    modules = [m for m in map(module_name, SOURCES) if m.startswith(tuple(f"autopar.{room}" for room in PLANNER))]
    assert modules and len(COMMANDS) > 15
    modules += COMMANDS
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [n for n in {DEVICE_LIBRARIES!r} if n in sys.modules]\n"
        "    if loaded: sys.exit(f'importing {name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_no_paths_of_one_machine() -> None:
    machine = re.compile(r"(?<![\w.~-])/(?:work|root|opt/pypi|home/\w+)/")
    files = text_files()
    assert ROOT / "README.md" in files
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if machine.search(line)
    ]
    assert found == []


#: What names of values begin with: `ValueRef` and `StageValue` write it, and nobody reads it back. Saved plans of the
#: first format are read by what they begin with.
PREFIXES = ("in/", "out/", "held/", "piece/", "from/", "late/", "send/", "batch/", "sum/", "copy of ", "@stage")


def prefixes_read(tree: ast.Module) -> list[str]:
    """Prefixes of names that a file looks for in text, or writes itself."""
    texts = (n.value for n in nodes(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [text for text in texts if text in PREFIXES]


def test_names_of_values_are_not_parsed() -> None:
    found = {module_name(p): prefixes_read(parse(p)) for p in SOURCES}
    assert {name for name, texts in found.items() if texts} <= {"autopar.plan.versions", "autopar.search.intra.connect"}
    assert prefixes_read(ast.parse("x.removeprefix('in/')\nf'piece/{name}'")) == ["in/", "piece/"]


#: Questions that one file answers, in whatever page and words.
QUESTIONS = (
    "point-to-point time",
    "FLOPs of a region",
    "memory of a stage",
    "number of microbatches that is chosen",
    "the bound of a plan",
)


def test_pages_name_one_file_for_each_question() -> None:
    named: dict[str, set[str]] = {question: set() for question in QUESTIONS}
    for page in ("architecture", "planner", "cost-model"):
        for row in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines():
            for question in QUESTIONS:
                if row.startswith(f"| {question}"):
                    named[question] |= {
                        f"autopar/{f.removeprefix('autopar/')}" for f in re.findall(r"`([\w/]+\.py)`", row)[:1]
                    }
    assert {question: len(files) for question, files in named.items()} == dict.fromkeys(QUESTIONS, 1)
    assert all((ROOT / file).is_file() for files in named.values() for file in files)


def test_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == autopar.__version__
    assert f"## {autopar.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("py*.txt")), ids=lambda p: p.stem)
def test_locks_pin_all_dependencies_and_name_no_index(lock: Path) -> None:
    lines = [k for k in lock.read_text(encoding="utf-8").splitlines() if not k.startswith("#")]
    assert [k for k in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", k)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tools = (ROOT / "requirements" / "dev.in").read_text(encoding="utf-8").splitlines()
    run = [line for extra in ("checkpoint", "examples", "metrics", "tls") for line in extras[extra]]
    wanted = [*project["dependencies"], *run, *(line for line in tools if not line.startswith("#"))]
    names = {match.group() for match in (re.match(r"[a-z0-9-]+", w) for w in wanted) if match}
    assert names - {k.partition("==")[0] for k in lines} == set()


def test_every_error_has_its_place_in_the_docs() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", text, flags=re.MULTILINE)) == set(autopar.errors.__all__)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
