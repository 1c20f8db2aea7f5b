"""What strangers tried, and what they are told: a row for each command.

`VISITS` is the table; the numbers of points are those of the list of visitors (names of plans, first use, figures that
agree, width, degrees and prices, mistakes, packages that are not installed). `walked` runs a row.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Packages that a plain install has not.
EXTRAS = ("chex", "cryptography", "equinox", "flax", "optax", "orbax", "prometheus_client")

FILES = {
    "train.py": """
import jax
import jax.numpy as jnp


def loss(w, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["y"]) ** 2)


def train_step(w, batch):
    value, grad = jax.value_and_grad(loss)(w, batch)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grad), value


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def example_args():
    return {"a": f(512, 2048), "b": f(2048, 512)}, {"x": f(256, 512), "y": f(256, 512)}
""",
    "use.py": """
import sys

import jax
import jax.numpy as jnp
from train import example_args, train_step

import autopar

options = eval("dict(" + sys.argv[1] + ")")
arguments = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), example_args())
step = autopar.parallelize(train_step, **options)
state, _ = step(*arguments)
if len(sys.argv) > 2:
    exec(sys.argv[2])
""",
}


@dataclass(frozen=True)
class Visit:
    """A command and what it shows.

    Args:
        point: number on the list of visitors.
        command: its words; the first is ``autopar`` or ``python``.
        says: texts that standard output and error together have, in any order, with spaces for line breaks.
        hides: texts that they have not.
        code: its exit code.
        columns: width of the terminal, which no line of standard output is wider than; None where it has none.
        writes: files that it writes, which everybody may read.
    """

    point: int
    command: tuple[str, ...]
    says: tuple[str, ...]
    hides: tuple[str, ...] = ()
    code: int = 0
    columns: int | None = None
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(w if " " not in w else f"'{w}'" for w in self.command)


def _plan(*words: str) -> tuple[str, ...]:
    return ("autopar", "plan", "train.py:train_step", "--cluster", "dgx-a100", "-q", *words)


def _named(*words: str) -> tuple[str, ...]:
    return _plan("--no-alternatives", *words)


def _staged(*words: str) -> tuple[str, ...]:
    return _named("--pp", "2", "--dp", "4", "--microbatches", "4", *words)


def _compare(*words: str) -> tuple[str, ...]:
    return ("autopar", "compare", "train.py:train_step", "-q", "--cluster", *words)


def _use(options: str, program: str = "") -> tuple[str, ...]:
    return ("python", "use.py", options, *((program,) if program else ()))


VISITS: tuple[Visit, ...] = (
    Visit(6, _named("--tp", "4", "--dp", "2"), ("2-way data parallel", "4-way tensor parallel by columns and rows")),
    Visit(
        6,
        _named("--tp", "2", "--dp", "4", "--zero", "3"),
        ("4-way data parallel, 2-way tensor parallel", "parameters, gradients and optimizer state split 4 ways (ZeRO"),
    ),
    Visit(6, _named("--mesh", "2x4"), ("-way tensor parallel", "repeated on")),
    Visit(7, ("autopar", "plan", "examples.mlp", "-q", "--cluster", "dgx-a100"), ("step time:",)),
    Visit(7, ("autopar", "plan", "examples.gpt"), ("imports optax", "pip install 'autopar[examples]'"), code=1),
    Visit(7, ("autopar", "plan", "examples.mlp", "--set", "nolayers=4"), ("unknown override nolayers",), code=1),
    Visit(7, ("autopar", "plan", "examples.mlp", "--set", "layers=abc"), ("layers='abc' is no value of",), code=1),
    Visit(7, _named("--memory-limit", "20MB"), ("step time:",), hides=("HiGHS",)),
    Visit(7, _named("-o", "plan.json"), ("plan:",), writes=("plan.json",)),
    Visit(7, ("autopar", "report", "plan.json", "-o", "plan.html"), (), writes=("plan.html",)),
    Visit(8, _named("--tp", "2", "--dp", "4", "--zero", "3"), ("in total", "exposed", "collectives of")),
    Visit(8, _staged("-o", "stages.json"), ("stages 0, 1:", "role sharding stages"), writes=("stages.json",)),
    Visit(8, ("autopar", "explain", "stages.json"), ("on: stage", "at: train.py:")),
    Visit(8, _named("--dp", "8", "--zero", "2"), ("zero=2 splits nothing", "no optimizer state")),
    Visit(8, ("autopar", "explain", "plan.json"), ("everything else as it is",)),
    Visit(10, _plan(), ("against alternatives",), columns=80),
    Visit(10, _plan(), ("against alternatives",), columns=120),
    Visit(10, ("autopar", "schedules"), ("1f1b",), columns=80),
    Visit(10, ("autopar", "strategies"), ("alpa",), columns=80),
    Visit(10, ("autopar", "explain", "plan.json"), ("cost:",), columns=80),
    Visit(10, ("autopar", "clusters"), ("dgx-a100",), columns=80),
    Visit(10, ("autopar", "explain", "plan.json", "stages"), ("chosen, a step of",), columns=80),
    Visit(10, ("autopar", "simulate", "plan.json"), ("bubble",), columns=80),
    Visit(10, ("autopar", "diff", "plan.json", "plan.json"), ("the plans are equal",), columns=80),
    Visit(13, _compare("dgx-a100", "--degrees", "--tp", "4"), ("tp=4 pp=1 dp=2 zero=0", "tp=4 pp=2 dp=1")),
    Visit(13, _compare("mine.toml", "--search", "zero3"), ("a million examples", "$")),
    Visit(
        13,
        ("autopar", "plan", "train.py:train_step", "--cluster", "mine.toml", "-q", "--search", "zero3"),
        ("examples/s", "model FLOPs utilization", "$20.00 an hour", "a million examples"),
    ),
    Visit(14, _plan("--stages", "99"), ("cannot be cut into 99 stages", "--stages 8 or fewer"), code=1),
    Visit(14, _plan("--memory-limit", "1kB"), ("the least that would do is 3.08 MB (3080196 bytes)",), code=1),
    Visit(14, _plan("--mesh", "3"), ("shapes that do: 8, 2x4, 4x2",), code=1),
    Visit(14, _plan("--tp", "3"), ("dgx-a100 has 8 devices",), code=1),
    Visit(14, _plan("--zero", "5"), ("0<=x<=3",), code=2),
    Visit(14, _plan("-o", "missing/plan.json"), ("there is no folder 'missing'",), code=2),
    Visit(14, _plan("--search", "aplha"), ("did you mean 'alpa'?",), code=2),
    Visit(14, ("autopar", "schedules", "gpip"), ("did you mean 'gpipe'?",), code=2),
    Visit(14, ("autopar", "plan", "examples.gtp"), ("no module 'examples.gtp'; did you mean 'examples.gpt'?",), code=2),
    Visit(14, _plan("-o", "."), ("'.' is a folder, not a file",), code=2),
    Visit(14, ("autopar", "plna"), ("did you mean 'plan'?",), code=2),
    Visit(14, ("autopar", "explain", "plan.json", "w['A']"), ("near names: w['a']",), code=1),
    Visit(
        14,
        ("python", "-c", "import autopar; autopar.search.register('mine')(3)"),
        ("search strategy 'mine' is 3, which cannot be called", "takes a Problem and returns a Plan"),
        code=1,
    ),
    Visit(14, _use("mesh_shape=8"), ("mesh_shape=(8,) for one axis",), code=1),
    Visit(14, _use("search='aplha'"), ("did you mean 'alpa'?",), code=1),
    Visit(14, _use("memory_limit='lots'"), ("memory_limit='lots' is not a size",), code=1),
    Visit(14, _use("num_stages=99"), ("num_stages=8 or fewer",), code=1),
    Visit(15, _use("", "step.save('folder', state)"), ("orbax", "pip install 'autopar[checkpoint]'"), code=1),
    Visit(
        15,
        ("python", "-c", "from autopar.runtime.ray.metrics import Metrics; Metrics().registry"),
        ("prometheus-client", "pip install 'autopar[metrics]'"),
        code=1,
    ),
    Visit(
        15,
        ("python", "-c", "from autopar.runtime.ray.tls import new_identity; new_identity()"),
        ("need cryptography", "pip install 'autopar[tls]'"),
        code=1,
    ),
    Visit(
        15, ("python", "-c", "import autopar; print(dir(autopar))"), ("'parallelize'",), hides=("import_module", "Any")
    ),
)


@dataclass(frozen=True)
class Place:
    """A folder with `FILES`, and the Python that a visitor has.

    Args:
        folder: where commands run.
        python: the interpreter, as its command.
        environment: further variables.
    """

    folder: Path
    python: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Writes the files, a cluster file with a price, and the plans that visits read, in whatever order they run."""
        for name, text in FILES.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        cluster = "pathlib.Path(autopar.__file__).parent / '_cost_models' / 'dgx-a100.toml'"
        found = self.run(("python", "-c", f"import autopar, pathlib; print(({cluster}).read_text())"))
        text = found.stdout.replace('"dgx-a100"', '"mine"')
        priced = text.replace("devices_per_node = 8", "devices_per_node = 8\ndevice_dollars_per_hour = 2.5")
        (self.folder / "mine.toml").write_text(priced, encoding="utf-8")
        self.run(_named("-o", "plan.json"))
        self.run(_staged("-o", "stages.json"))

    def run(self, command: tuple[str, ...], columns: int | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command."""
        program = (*self.python, *(("-m", "autopar") if command[0] == "autopar" else ()))
        variables = {n: v for n, v in os.environ.items() if n in ("PATH", "HOME", "LANG", "AUTOPAR_CACHE_DIR")}
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", **self.environment}
        variables |= {} if columns is None else {"COLUMNS": str(columns)}
        return subprocess.run(
            [*program, *command[1:]],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=280,
            umask=0o022,
        )


def walked(visit: Visit, place: Place) -> tuple[list[str], str]:
    """What is wrong with the answer to a command, and all that it printed."""
    done = place.run(visit.command, visit.columns)
    printed = done.stdout + done.stderr
    text = re.sub(r"\s+", " ", printed)
    wrong = [] if done.returncode == visit.code else [f"exit code {done.returncode}, not {visit.code}"]
    wrong += [f"does not say {says!r}" for says in visit.says if says not in text]
    hides = visit.hides if visit.command[0] == "python" else (*visit.hides, "Traceback")
    wrong += [f"says {hides!r}" for hides in hides if hides in text]
    if visit.columns is not None:
        wrong += [f"a line of {len(line)}" for line in done.stdout.splitlines() if len(line) > visit.columns][:1]
    for name in visit.writes:
        mode = (place.folder / name).stat().st_mode & 0o777
        wrong += [] if mode == 0o644 else [f"{name} has mode {mode:o}"]
    return wrong, printed
