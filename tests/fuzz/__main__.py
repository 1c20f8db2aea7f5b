"""``python -m tests.fuzz``: runs programs in a worker process, restarts it where it hangs or dies, keeps what failed.

In the folder given by ``--out``: ``results.jsonl`` with a line for each program (``--resume`` goes on after them) and
``test_SEED_NUMBER.py`` for each that failed, made small.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.precision import PRECISIONS
from tests.fuzz.worker import ENVIRONMENT

_ROOT = Path(__file__).parents[2]
# A worker's memory grows with what jax keeps of each program.
_PROGRAMS_A_WORKER = 400


_WORKER = ("-m", "tests.fuzz.worker")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500, help="how many, those of earlier runs counted in")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no program after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the programs")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="folder of results")
    parser.add_argument("--resume", action="store_true", help="go on after the results in the folder")
    parser.add_argument("--plans", type=int, choices=(1, 2, 4), default=2, help="plans to run each program with")
    parser.add_argument("--dtype", choices=sorted(PRECISIONS), default="float64", help="of floats")
    parser.add_argument("--hang", type=float, default=180.0, help="seconds without a sign of life that are a hang")
    parser.add_argument("--shrink", type=int, default=60, help="smaller programs to try for each that fails")
    return parser.parse_args(arguments)


class Supervisor:
    """Runs workers one after another until all programs are done or time is up."""

    def __init__(self, options: argparse.Namespace, worker: Sequence[str] = _WORKER) -> None:
        self.options = options
        self.worker = worker
        self.records: list[dict[str, Any]] = []
        self.deadline = time.monotonic() + options.seconds
        self.file = options.out / "results.jsonl"

    def run(self) -> list[dict[str, Any]]:
        """All records, those of earlier runs first."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        if self.options.resume and self.file.exists():
            self.records = [json.loads(line) for line in self.file.read_text().splitlines()]
        else:
            self.file.unlink(missing_ok=True)
        done = [r["number"] for r in self.records]
        number = max(done, default=self.options.first - 1) + 1
        stop = self.options.first + self.options.programs
        while number < stop and time.monotonic() < self.deadline:
            number = self._worker(number, min(stop, number + _PROGRAMS_A_WORKER))
        return self.records

    def _worker(self, first: int, stop: int) -> int:
        """Runs one worker; the number to go on with."""
        given = (self.options.seed, first, stop, self.options.plans, self.options.shrink, self.options.dtype)
        process = subprocess.Popen(
            [sys.executable, *self.worker, *map(str, given)],
            cwd=_ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=_copy, args=(process.stdout, lines), daemon=True),
            threading.Thread(target=_keep, args=(process.stderr, errors), daemon=True),
        ]
        for reader in readers:
            reader.start()
        number, broken, in_plain = first, "", False
        try:
            while time.monotonic() < self.deadline:
                line = lines.get(timeout=self.options.hang)
                if line is None:
                    broken = "" if number >= stop else "died"
                    break
                record = json.loads(line) if line.startswith("{") else {}
                in_plain = "start" in record or (in_plain and not {"plain", "kind"} & record.keys())
                if "kind" in record:
                    self._note(record)
                    number = record["number"] + 1
        except queue.Empty:
            broken = "hang"
        finally:
            process.kill()
            process.wait()
            for reader in readers:
                reader.join(5)
            process.stdout.close()
            process.stderr.close()
        if broken:
            detail = f"{broken}, exit status {process.returncode}: {''.join(errors)[-1500:]}"
            # XLA ends the process at some programs; where it does so at the plain one there is nothing to compare.
            kind = "invalid" if in_plain else broken
            self._note({"number": number, "kind": kind, "detail": detail})
            number += 1
        return number

    def _note(self, record: dict[str, Any]) -> None:
        test = record.pop("test", None)
        self.records.append(record)
        with self.file.open("a") as out:
            out.write(json.dumps(record) + "\n")
        if test:
            (self.options.out / f"test_{self.options.seed}_{record['number']}.py").write_text(test)
        if record["kind"] not in ("ok", "unstable", "invalid", "miscompiled"):
            print(f"{record['number']}: {record['kind']}: {record['detail'].splitlines()[0][:160]}", flush=True)


def _copy(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _keep(stream: Any, errors: list[str]) -> None:
    for line in stream:
        errors.append(line)
        del errors[:-50]


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Counts: programs by outcome, primitives."""
    kinds = Counter(r["kind"] for r in records)
    primitives = Counter(p for r in records for p in r.get("primitives", ()))
    lines = [f"{len(records)} programs: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))]
    lines.append(f"{len(primitives)} primitives: " + ", ".join(f"{p} {n}" for p, n in sorted(primitives.items())))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """1 where a program failed, else 0."""
    options = _options(arguments)
    records = Supervisor(options).run()
    print(summary(records))
    bad = [r for r in records if r["kind"] in ("wrong", "crash", "hang", "died")]
    if bad:
        print(f"{len(bad)} failed; see {options.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
