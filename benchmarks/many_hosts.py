"""Planning in many processes: what they compare and share costs, next to the search of process 0.

    agree   the comparison of versions, options and programs, until the verdict is there
    share   process 0 hands its plan on

``python -m benchmarks.many_hosts MODEL`` is one of the processes.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax
from jax.experimental import multihost_utils

import autopar
from benchmarks.report import Report, Row, Say
from benchmarks.together import measured_together
from examples import gpt

PROCESS_COUNTS = (1, 2, 4)
MOST_S = 1.0
_DEVICES = 8
_LIMIT_S = 500.0


def run(quick: bool, say: Say) -> Report:
    """The table; ``quick`` takes one and two processes."""
    rows: list[Row] = []
    for count in PROCESS_COUNTS[:2] if quick else PROCESS_COUNTS:
        say(f"many_hosts: {count} processes")
        rows.append({"processes": count, **_started(count)})
    most_s = max(row["agree_s"] + row["share_s"] for row in rows)
    return Report(
        "many_hosts",
        f"comparing and sharing take less than {MOST_S:g} s",
        tuple(rows),
        most_s < MOST_S,
        measured=("plan_s", "agree_s", "share_s", "compile_s"),
    )


def _started(count: int) -> Row:
    """What process 0 of a world measured."""
    return measured_together(__name__, (), count, _DEVICES, _LIMIT_S)


def main() -> None:
    """One process: its phases as JSON."""
    autopar.initialize()
    step, args = gpt.build("tiny")
    function = autopar.parallelize(step)
    function.trace(*args)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("traced")  # who traces late is not what is measured
    plan = function.compile(*args).plan
    seconds: dict[str, Any] = dict(plan.phases)
    others = ("agree", "share", "lower", "compile")
    row = {
        "operators": sum(len(s.operators) for s in plan.stages),
        "plan_s": sum(s for name, s in seconds.items() if name not in others),
        "agree_s": seconds.get("agree", 0.0),
        "share_s": seconds.get("share", 0.0),
        "compile_s": seconds["lower"] + seconds["compile"],
        "plan": f"{zlib.crc32(plan.to_json().encode()):08x}",
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
