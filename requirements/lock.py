"""Writes the exact versions that pip chooses for autopar on the running Python: ``python lock.py OUT [bound ...]``.

Only pip is used: its own report of what it would install (``pip install --dry-run --report``). The file has no
hashes, since pip reports the hash of the one archive for this machine and not those of other platforms, and no
addresses, so that it works with every index and mirror.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("checkpoint", "examples", "metrics", "tls")
TOOLS = ROOT / "requirements" / "dev.in"


def requirements(pyproject: Path) -> list[str]:
    """Requirements of autopar, of the extras in `EXTRAS`, of its build and of the tools in `TOOLS`."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = table["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return sorted({*project["dependencies"], *extras, *table["build-system"]["requires"], *listed(TOOLS)})


def listed(file: Path) -> list[str]:
    """The requirements in a file, one a line."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def resolve(wanted: list[str]) -> list[str]:
    """One ``name==version`` for each package that pip would install into an empty environment, sorted."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    report = subprocess.run([*command, "--report", "-", *wanted], check=True, stdout=subprocess.PIPE, text=True).stdout
    chosen = [item["metadata"] for item in json.loads(report)["install"]]
    names = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in chosen}
    # A local version ("2.1+cpu") exists on some mirrors only.
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(names.items())]


def main(out: Path, bounds: list[str]) -> None:
    """Resolves for the running Python under ``bounds`` (as ``jax<0.13``) and writes ``out``."""
    pins = resolve([*requirements(ROOT / "pyproject.toml"), *bounds])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    head = (
        f"# Exact versions for CPython {version} on {sys.platform}: autopar with the extras {', '.join(EXTRAS)}.",
        "# Written by `make lock`; do not edit.",
    )
    out.write_text("\n".join([*head, *pins]) + "\n", encoding="utf-8")
    print(f"{out.name}: {len(pins)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
