"""Statements of the documentation that can be checked: links, files, folders, commands, options, targets."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib

import click
import pytest

import autopar
from autopar.cli import main
from autopar.runtime.hosts import agree, watch
from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import main as bench
from tests.docs.pages import PAGES, ROOT, anchors, command_lines, links, name, spans

every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@every_page
def test_links_lead_somewhere(page) -> None:
    broken = []
    for target in links(page):
        file, _, anchor = target.partition("#")
        to = (page.parent / file).resolve() if file else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(target)
    assert broken == []


@every_page
def test_files_that_are_named_exist(page) -> None:
    missing = []
    for span in spans(page):
        found = re.match(
            r"((?:autopar|benchmarks|cost_models|docs|examples|requirements|tests)/[\w./-]*)(::\w+)?", span
        )
        if not found or "*" in span or "{" in span or "NAME" in span or "XY" in span:
            continue
        file = ROOT / found[1].rstrip("/.")
        if not file.exists():
            missing.append(span)
        elif found[2]:
            names = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
            missing += [span] * (found[2][2:] not in names)
    assert missing == []


@every_page
def test_commands_and_their_options_exist(page) -> None:
    assert [problem for words in command_lines(page) if (problem := wrong_with(words))] == []


def wrong_with(words: list[str]) -> str:
    """Why a command line would not be understood; "" where it would."""
    program, *rest = words
    if program == "autopar":
        return _options(main, rest)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        unknown = [w for w in rest if re.fullmatch("[a-z-]+", w) and not w.startswith("-") and w not in targets]
        return f"make: {unknown}" if unknown else ""
    if program == "python" and rest[:2] == ["-m", "benchmarks"]:
        named = [w for w in rest[2:] if re.fullmatch("[a-z_]+", w) and w not in BENCHMARKS]
        return _unknown(bench, rest[2:]) or (f"benchmarks: {named}" if named and rest[2] in named else "")
    if (
        program == "python"
        and rest[:1] == ["-m"]
        and rest[1].split(".")[0] in ("benchmarks", "examples", "tests", "docs")
    ):
        file = ROOT / rest[1].replace(".", "/")
        exists = file.with_suffix(".py").exists() or (file / "__main__.py").exists()
        return "" if exists else f"no module {rest[1]}"
    if program == "pytest":
        gone = [w for w in rest if w.startswith("tests/") and not (ROOT / w.partition("::")[0]).exists()]
        return f"pytest: {gone}" if gone else ""
    return ""


def _options(group: click.Group, words: list[str]) -> str:
    if not words or words[0].startswith("-"):
        return _unknown(group, words)
    if not re.fullmatch(r"[a-z-]+", words[0]):
        return ""  # a place for a name, as in `autopar COMMAND`
    command = group.get_command(click.Context(group), words[0])
    return f"no command {words[0]}" if command is None else _unknown(command, words[1:])


def _unknown(command: click.Command, words: list[str]) -> str:
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    unknown = [w for w in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", w) and w.partition("=")[0] not in known]
    return f"{command.name}: {unknown}" if unknown else ""


@pytest.mark.parametrize(
    "words",
    [
        ["autopar", "plan", "x.py:f", "--no-such-option"],
        ["autopar", "no-such-command"],
        ["make", "no-such-target"],
        ["pytest", "tests/no_such_folder"],
        ["python", "-m", "benchmarks", "no_such_benchmark"],
        ["python", "-m", "examples.no_such_example"],
    ],
    ids=" ".join,
)
def test_the_check_of_commands_finds_what_is_wrong(words) -> None:
    assert wrong_with(words)


def test_the_table_of_folders_names_every_folder_on_its_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    table = {folder: int(floor) for floor, cell in rows for folder in re.findall(r"`autopar/(\w+)`", cell)}
    folders = {p.parent.name for p in (ROOT / "autopar").glob("*/__init__.py")}
    assert set(table) == folders
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    floors = [set(re.findall(r"\w+", layer)) for layer in reversed(contract["layers"])]
    rooms = {room: n for n, layer in enumerate(floors) for room in layer}
    assert table == {room: n for room, n in rooms.items() if room in folders}  # others are single files


def test_every_command_and_every_page_is_named() -> None:
    commands = main.list_commands(click.Context(main))
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [c for c in commands if f"autopar {c}" not in page] == []
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [p for p in PAGES if ROOT / "docs" in p.parents and p.name != "index.md"]
    assert [name(p) for p in pages if p.relative_to(ROOT / "docs").as_posix() not in index] == []


def test_defaults_of_variables_are_those_of_the_code() -> None:
    """``AUTOPAR_WAIT_S`` was 300 on one page and 120 on another."""
    written = {
        (variable, float(seconds))
        for page in PAGES
        for variable, seconds in re.findall(
            r"`(AUTOPAR_\w+)`(?: seconds)?\s*\((\d+) unless set\)", page.read_text(encoding="utf-8")
        )
    }
    known = {(agree.WAIT_VARIABLE, agree._WAIT_S), (watch.HEARTBEAT_VARIABLE, watch._HEARTBEAT_S)}
    assert written == known


def test_the_reference_has_every_public_name() -> None:
    """An entry for each name of ``autopar.__all__``; errors are on the page of their module."""
    entries = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), flags=re.M)
    for entry in entries:
        module, _, attribute = entry.rpartition(".")
        assert importlib.util.find_spec(module) and (
            hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(entry)
        ), entry
    errors = {e for e in autopar.__all__ if e.endswith("Error")}
    assert errors <= set(vars(autopar.errors))
    assert set(autopar.__all__) - errors <= {entry.rpartition(".")[2] for entry in entries}
