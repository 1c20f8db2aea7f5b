"""Fits the constants of the transformer model to the fitted part of the published runs.

``python -m benchmarks.published.fit`` minimizes the logarithm of predicted over measured step time, with a loss that
grows linearly for outliers; every dataset has a weight of its own so that the large ones do not decide alone. It is
deterministic, and writes what it finds into ``cost_models/training/constants.toml``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost.transformer import Constants, load_constants
from autopar.cost.transformer.constants import constants_file
from benchmarks.published.collectives import reductions
from benchmarks.published.dataset import Run, load
from benchmarks.published.layers import layer_rows
from benchmarks.published.score import score


@dataclass(frozen=True)
class Free:
    """A constant that is fitted.

    Args:
        table: its table in the file.
        key: its key there.
        low, high: bounds that physics gives.
        also: other tables whose key has the same value.
    """

    table: str
    key: str
    low: float
    high: float
    also: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables that hold it."""
        return (self.table, *self.also)


#: Weight of each of the ten layer times: as a dataset of ten runs.
_LAYERS = math.sqrt(10**0.5 / 10)
_EAGER = ("stacks.megatron",)
FREE = (
    Free("kernels", "product_share", 0.8, 0.97),
    Free("kernels", "half_waves", 0.1, 3.0),
    Free("kernels", "half_depth", 16.0, 512.0),
    Free("kernels", "memory_share", 0.5, 0.85),
    Free("kernels", "misaligned_share", 0.1, 1.0),
    Free("stacks.megatron-deepspeed", "layer_forward_s", 2e-4, 3e-3, _EAGER),
    Free("stacks.megatron-deepspeed", "layer_backward_s", 2e-4, 5e-3, _EAGER),
    Free("stacks.megatron-deepspeed", "collective_s", 1e-6, 1e-3, _EAGER),
    Free("stacks.megatron-deepspeed", "step_s", 1e-4, 5e-2, _EAGER),
    Free("stacks.megatron-deepspeed", "wait_s", 1e-6, 1e-3),
    Free("stacks.megatron-deepspeed", "link_share", 0.1, 1.0),
    Free("stacks.megatron-deepspeed", "core_traffic", 0.7, 3.0),
    Free("stacks.megatron-deepspeed", "partition_bytes", 2.0, 100.0),
    Free("stacks.megatron", "wait_s", 1e-6, 1e-3),
    Free("stacks.megatron", "core_traffic", 0.7, 3.0),
    Free("stacks.xla", "core_traffic", 0.7, 6.0),
)


def fitted_runs(every: int = 2) -> tuple[Run, ...]:
    """Timed runs of the fitted part; of datasets of more than 100, one in ``every``."""
    runs = [r for r in load() if r.fitted and r.measured_s is not None]
    sizes = {d: sum(r.dataset == d for r in runs) for d in {r.dataset for r in runs}}
    return tuple(r for i, r in enumerate(runs) if sizes[r.dataset] <= 100 or i % every == 0)


def weight(run: Run, sizes: dict[str, int]) -> float:
    """The square root of a dataset's share: those of more runs count more, though not in proportion."""
    return math.sqrt(sizes[run.dataset] ** 0.5 / sizes[run.dataset])


def with_values(constants: Constants, free: Sequence[Free], values: Sequence[float]) -> Constants:
    """``constants`` with other values."""
    plain: dict[str, Any] = msgspec.to_builtins(constants)
    for f, value in zip(free, values, strict=True):
        for name in f.tables:
            table = plain
            for part in name.split("."):
                table = table[part]
            table[f.key] = float(value)
    return msgspec.convert(plain, Constants)


def value_of(constants: Constants, free: Free) -> float:
    """The present value of a constant."""
    found: Any = msgspec.to_builtins(constants)
    for part in (*free.table.split("."), free.key):
        found = found[part]
    return float(found)


NETWORK = (Free("network", "level_s", 1e-6, 2e-4), Free("network", "ramp", 0.01, 3.0))


def fit_network(constants: Constants, free: Sequence[Free]) -> Constants:
    """The constants that are nearest to the measured all-reduces."""
    rows = [r for r in reductions() if r.fitted]

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = with_values(constants, free, np.exp(x).tolist())
        return np.array([math.log(1 + r.error(changed)) for r in rows])

    return _least(residuals, constants, free)


def fit(constants: Constants, runs: Sequence[Run], free: Sequence[Free]) -> Constants:
    """The constants that are nearest to the runs and to the layer times of the recomputation paper's table 4."""
    sizes = {d: sum(r.dataset == d for r in runs) for d in sorted({r.dataset for r in runs})}
    weights = np.array([weight(r, sizes) for r in runs])

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = with_values(constants, free, np.exp(x).tolist())
        scored = score(runs, changed)
        runs_off = weights * np.array([math.log(1 + s.error) for s in scored])
        layers = layer_rows(changed)
        off = [(r.forward_s / r.measured_forward_s, r.backward_s / r.measured_backward_s) for r in layers]
        return np.concatenate([runs_off, _LAYERS * np.log(np.array(off).ravel())])

    return _least(residuals, constants, free)


def _least(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], constants: Constants, free: Sequence[Free]
) -> Constants:
    """The constants of least residuals, which are functions of their logarithms."""
    low, high = np.log([f.low for f in free]), np.log([f.high for f in free])
    start = (low + high) / 2  # whatever the file says now: the result does not depend on what was fitted before
    found = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.03, diff_step=1e-3, max_nfev=80, xtol=1e-6
    )
    return with_values(constants, free, [float(f"{v:.3g}") for v in np.exp(found.x)])


def write(constants: Constants, free: Sequence[Free]) -> None:
    """Writes the fitted constants into the file, leaving comments and other keys as they are."""
    path = constants_file()
    lines, table = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[([\w.-]+)\]", line.strip())
        table = header.group(1) if header else table
        key = line.partition("=")[0].strip()
        for f in free:
            if table in f.tables and f.key == key:
                line = f"{key} = {value_of(constants, f):.3g}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@click.command()
@click.option("--dry", is_flag=True, help="Print the constants, do not write them.")
def main(dry: bool) -> None:
    """Fits and writes the constants."""
    constants = fit(fit_network(load_constants(), NETWORK), fitted_runs(), FREE)
    for f in (*NETWORK, *FREE):
        click.echo(f"{f.table}.{f.key} = {value_of(constants, f):.4g}")
    if not dry:
        write(constants, (*NETWORK, *FREE))


if __name__ == "__main__":
    main()
