"""`Session`: all processes of one life of a pipeline, and calls that all of them answer. It ends as a whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.lower.pipeline.exported import ExportedProgram
from autopar.runtime.ray.beacon import Monitor
from autopar.runtime.ray.lost import Loss, Scene, lost_error
from autopar.runtime.ray.messages import Failure, Handshake, Load, StepResult, WorkerInfo, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.worker_group import WorkerGroup
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.runtime.transport.shards import ShardLayout

#: Methods of `WorkerHost` whose answers begin with a `StepResult`.
_FALLIBLE = ("step", "connect", "exchange")


class Session:
    """Processes that know each other.

    Args:
        source: the pipeline that they carry out; None where they only measure.
        groups: the processes of its workers.
        start: starts processes.
        options: see `RunOptions`.
        x64: whether 64-bit types are enabled.

    Raises:
        ClusterError: processes do not start.
        WorkerLostError: one was lost meanwhile.
    """

    def __init__(
        self,
        source: Pipelined | None,
        groups: ProcessGroups,
        start: Callable[[Sequence[Handshake]], WorkerGroup],
        options: RunOptions,
        x64: bool,
    ) -> None:
        self.source = source
        self.groups = groups
        self._options = options
        secret = secrets.token_bytes(16)
        self.monitor = Monitor(secret, options.listen)
        handshakes = [
            Handshake(
                p, secret, self.monitor.address, "" if options.each_own else options.listen, x64, options.cache,
                rank=groups.rank(p), group_size=groups.sizes[groups.workers[p]],
            )
            for p in range(groups.num_processes)
        ]  # fmt: skip
        try:
            self.worker_group = start(handshakes)
        except BaseException:
            self.monitor.close()
            raise
        try:
            here = [decode(a, WorkerInfo) for a in self.call("info", [()] * len(handshakes), options.load_s)]
            self.machines = tuple(h.machine for h in here)
            self.addresses = {p: h.address for p, h in enumerate(here)}
            if groups.num_processes > groups.num_workers:
                first = [here[groups.members(w).start].coordinator for w in groups.workers]
                self.call("join", [(at, options.load_s) for at in first], options.load_s)
        except BaseException:
            self.close()
            raise

    def load(self, programs: Sequence[ExportedProgram]) -> None:
        """Compiles the programs, each on the worker of its stage, and connects the processes."""
        source, groups = self.source, self.groups
        assert source is not None
        own = [tuple(p for p in programs if p.work.stage in source.stages(w)) for w in range(groups.num_workers)]
        layouts = {w: _layouts(own[w], size) for w, size in enumerate(groups.sizes) if size > 1}
        direct = self._options.direct
        messages = [
            encode(Load(source.program.workers[w].instructions, own[w], self.addresses, groups.sizes, layouts, direct))
            for w in range(groups.num_workers)
        ]
        self.call("load", [(messages[w],) for w in groups.workers], self._options.load_s)

    def close(self) -> None:
        """Ends all processes; arrays on them are gone."""
        self.worker_group.kill()
        self.monitor.close()

    def of_workers(
        self, method: str, arguments: Sequence[tuple[Any, ...]], limit_s: float, step: int = -1
    ) -> list[list[Any]]:
        """Calls a method of the processes of every worker with the same arguments; their answers by worker."""
        found = self.call(method, [arguments[w] for w in self.groups.workers], limit_s, step)
        return [[found[p] for p in self.groups.members(w)] for w in range(self.groups.num_workers)]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], limit_s: float, step: int = -1) -> list[Any]:
        """Calls a method of all processes.

        Args:
            method: of `WorkerHost`.
            arguments: for each process.
            limit_s: seconds that it may take.
            step: number of the step, for the error.

        Raises:
            WorkerLostError: one does not answer in time, or is gone.
            AutoparError: one failed by an error of its program.
        """
        worker_group = self.worker_group
        tickets = {p: worker_group.call(p, method, *a) for p, a in enumerate(arguments)}
        answers: dict[int, Any] = {}
        losses: dict[int, Loss] = {}
        # Processes that wait for another one give up at the same limit: their answers say whom they waited for.
        until = time.monotonic() + limit_s + min(2.0, 0.5 * limit_s)
        while len(answers) + len(losses) < len(tickets) and time.monotonic() < until:
            waiting = [p for p in tickets if p not in answers and p not in losses]
            for position, answer in worker_group.wait([tickets[p] for p in waiting], 0.1).items():
                process = waiting[position]
                failure = (
                    decode(answer.value[0], StepResult).failure if method in _FALLIBLE and not answer.error else None
                )
                if answer.error and not answer.lost:
                    failure = Failure(-1, "error", -1, answer.error)
                if answer.lost or failure is not None:
                    losses[process] = Loss(answer.error if answer.lost else "", failure)
                else:
                    answers[process] = answer.value
            for process in sorted(set(self.monitor.gone()) & set(waiting) - answers.keys() - losses.keys()):
                losses[process] = Loss("its process ended", None)
            if losses:
                until = min(until, time.monotonic() + 0.5)
        if len(answers) == len(tickets):
            return [answers[p] for p in range(len(tickets))]
        # An answer that tells of the end of another may be faster than that end. In a session of several processes the
        # end of one is that of the others: the first is to blame.
        gone = [p for p in self.monitor.gone() if p not in answers]
        losses = {**dict.fromkeys(gone, Loss("its process ended", None)), **losses}
        silent = sorted(tickets.keys() - answers.keys() - losses.keys())
        last = {p: self.monitor.last(p) for p in tickets}
        raise lost_error(Scene(losses, silent, last, self.source, self.groups, limit_s), method, step)


def _layouts(programs: Sequence[ExportedProgram], processes: int) -> dict[str, ShardLayout]:
    """How values lie that the programs read, or else make, by name."""
    found: dict[str, ShardLayout] = {}
    for ports in ([(p, r) for p in programs for r in p.reads], [(p, r) for p in programs for r in p.results]):
        for program, port in ports:
            found.setdefault(port.name, ShardLayout(program.axes, port.dims, processes))
    return found
