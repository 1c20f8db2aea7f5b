"""``FILE.py:FUNC`` and ``module:func``: what the user named, imported without running into their mistakes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from autopar.cli.output import stdout_to_stderr
from autopar.errors import AutoparError
from autopar.errors.names import known_names, near_names


@dataclass(frozen=True)
class StepTarget:
    """The function that a user named.

    Args:
        place: the file or module, as the user wrote it.
        path: the file, absolute; None for a module.
        attribute: dotted name of the function in it; "" where the user named none.
    """

    place: str
    path: Path | None
    attribute: str


def parse_target(text: str) -> StepTarget:
    """`StepTarget` of ``FILE.py:FUNC``, ``FILE.py``, ``module:func`` or ``module``.

    Raises:
        click.UsageError: there is no such file, or the text is none of these.
    """
    place, colon, attribute = text.rpartition(":")
    # A drive letter is no file: C:\\train.py names no function.
    if not colon or attribute.endswith(".py"):
        place, attribute = text, ""
    if not place or (colon and place != text and not attribute):
        raise click.UsageError(f"{text!r} names no function; write FILE.py:FUNC or module:func")
    if not place.endswith(".py"):
        if "/" in place or not all(part.isidentifier() for part in place.split(".")):
            raise click.UsageError(f"{place!r} is neither a Python file (FILE.py:FUNC) nor a module (module:func)")
        return StepTarget(place, None, attribute)
    path = Path(place)
    if not path.is_file():
        here = [p.name for p in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise click.UsageError("; ".join(filter(None, (f"there is no file {place!r}", near_names(path.name, here)))))
    return StepTarget(place, path.resolve(), attribute)


@contextlib.contextmanager
def user_code(target: StepTarget) -> Iterator[None]:
    """A context in which the user's code runs; it restores the process's state at its end.

    Standard output goes to standard error, imports find modules next to the file and in the working directory, and
    ``sys.argv`` holds the file alone.

    Raises:
        AutoparError: the code raised something that is no `AutoparError`; the message has the user's line.
    """
    argv, search_path = sys.argv, list(sys.path)
    sys.argv = [target.place]
    sys.path[:0] = [str(p) for p in ([_root(target.path)] if target.path else [])] + [str(Path.cwd())]
    try:
        with stdout_to_stderr():
            yield
    except (AutoparError, click.ClickException):
        raise
    except (Exception, SystemExit) as error:
        source = user_line(error)
        if not source:  # nothing of the user's: a mistake of autopar, whose traceback is wanted
            raise
        raise _failed(target, error, source) from error
    finally:
        sys.argv, sys.path[:] = argv, search_path


def _root(path: Path) -> Path:
    """The folder from which the module of a file is imported: above all packages that it lies in."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def load(target: StepTarget) -> ModuleType:
    """Imports the file or module, inside of `user_code`.

    Raises:
        click.UsageError: there is no such module.
        AutoparError: the code cannot be imported.
    """
    if target.path is None:
        return _load_module(target)
    parts = target.path.relative_to(_root(target.path)).with_suffix("").parts
    if len(parts) > 1:  # a file in a package may use relative imports
        module = _load_module(StepTarget(".".join(parts), None, target.attribute))
        if module.__file__ and Path(module.__file__).resolve() == target.path:
            return module
    # A name of its own where the file's is taken, so that a file train.py does not get another train.
    name = parts[-1]
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"_autopar_target_{name}"
    spec = importlib.util.spec_from_file_location(name, target.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise _failed(target, error, _syntax_line(error)) from error
        raise
    return module


def _load_module(target: StepTarget) -> ModuleType:
    try:
        return importlib.import_module(target.place)
    except ModuleNotFoundError as error:
        # Of the module itself or a package above it; else the user's code imports something that is missing.
        if error.name and f"{target.place}.".startswith(f"{error.name}."):
            installed = f"autopar.{target.place}"  # examples lie inside the package where it is installed from a wheel
            if target.place.startswith("examples.") and _exists(installed):
                return importlib.import_module(installed)
            raise click.UsageError(_no_module(target.place, error.name)) from error
        raise
    except SyntaxError as error:
        raise _failed(target, error, _syntax_line(error)) from error


def _no_module(place: str, missing: str) -> str:
    """A message about a module that is not there; of an example with the names of those that are."""
    folder = Path(__file__).resolve().parents[1] / "examples"
    if place.split(".")[0] == "examples" and folder.is_dir():
        names = [f"examples.{p.stem}" for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")]
        return f"there is no module {place!r}; {known_names(place, names)}"
    return f"there is no module {missing!r} (the name of a file ends in .py)"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def find(module: ModuleType, name: str, place: str) -> Any:
    """The attribute of a module, dots allowed.

    Raises:
        click.UsageError: there is none; the message lists near names.
    """
    value: Any = module
    for i, part in enumerate(name.split(".")):
        if not hasattr(value, part):
            names = _public(value)
            inside = ".".join([place, *name.split(".")[:i]]) if i else place
            hint = near_names(part, names) or "it defines nothing that can be called"
            raise click.UsageError(f"{inside} has no {part!r}; {hint}")
        value = getattr(value, part)
    return value


def _public(value: Any) -> list[str]:
    """Names that may be meant: what can be called, those that the module defines itself first."""
    names = [n for n, v in sorted(vars(value).items()) if not n.startswith("_") and callable(v)]
    module_name = getattr(value, "__name__", None)
    return sorted(names, key=lambda n: (getattr(vars(value)[n], "__module__", module_name) != module_name, n))


def user_line(error: BaseException) -> str:
    """The innermost line, as ``file.py:12 (function)``, that is not autopar's, Python's or a package's; or "".

    Examples that were installed with autopar are read as a user's files.
    """
    package = Path(__file__).resolve().parents[1]
    ours = (*(f"{folder}{os.sep}" for folder in (package, sysconfig.get_path("stdlib"))), "<")
    examples = f"{package / 'examples'}{os.sep}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = "site-packages" in frame.filename or "dist-packages" in frame.filename
        if frame.filename.startswith(examples) or (not installed and not frame.filename.startswith(ours)):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
    return ""


def _syntax_line(error: SyntaxError) -> str:
    return f"{Path(error.filename or '?').name}:{error.lineno}"


def _failed(target: StepTarget, error: BaseException, source: str) -> AutoparError:
    what = str(error).strip().split("\n")[0]
    if isinstance(error, SyntaxError):
        what = error.msg
    if isinstance(error, SystemExit):
        return AutoparError(
            f"{target.place} stops the program: SystemExit({error.code!r})",
            source=source,
            cause="the file runs a script when it is imported",
            remedy='put the script under if __name__ == "__main__":',
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        remedy = f"pip install {package}, or the package that has this module"
        if target.place.removeprefix("autopar.").startswith("examples."):
            remedy = f"pip install 'autopar[examples]', or {package} alone"
        return AutoparError(
            f"{target.place} imports {error.name}, which is not installed", source=source, remedy=remedy
        )
    return AutoparError(
        f"{target.place} raises {type(error).__name__}" + (f": {what}" if what else ""),
        source=source,
        remedy="--debug shows the traceback",
    )
