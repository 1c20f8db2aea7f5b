"""`Session`: all processes of one life of a cluster's workers, and calls that all answer. It ends as a whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autopar.errors import ClusterError, WorkerLostError
from autopar.lower.pipeline.exported import ExportedProgram
from autopar.runtime.ray.beacon import Monitor
from autopar.runtime.ray.connections import StepLines
from autopar.runtime.ray.deployment import Function, Launcher, ProcessLayout
from autopar.runtime.ray.exchanges import planned_exchanges
from autopar.runtime.ray.lost import Loss, Scene, lost_error
from autopar.runtime.ray.messages import Failure, Handshake, Load, StepResult, WorkerInfo, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.tls import credentials_of, new_identity
from autopar.runtime.ray.worker_group import WorkerGroup
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.runtime.transport.tiles import ShardLayout

#: Methods of `WorkerHost` whose answers begin with a `StepResult`.
_FALLIBLE = ("step", "connect", "exchange")
#: Seconds to wait for the others once one was lost; and for the end of a process, where a collective failed.
_GRACE_S, _COLLECTIVE_GRACE_S = 0.5, 3.0
#: Seconds that processes have to give up a step in which another one failed.
_ABORT_S = 10.0


class Session:
    """Processes that know each other.

    Args:
        layout: processes and their devices.
        launch: starts processes.
        options: timeouts, recovery and transport of runs.
        programs: hashes of files of compiled programs by name, as workers of earlier sessions wrote them.

    Raises:
        ClusterError: processes do not start.
        WorkerLostError: one was lost meanwhile.
    """

    def __init__(
        self,
        layout: ProcessLayout,
        launch: Launcher,
        options: RunOptions,
        programs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self.groups: ProcessGroups = layout.groups
        self.loaded: set[int] = set()
        self._options = options
        self.programs = dict(programs)
        secret = secrets.token_bytes(16)
        identity = new_identity() if options.encrypted else None
        groups = self.groups
        if options.encrypted and not options.open_collectives and max(groups.sizes) > 1:
            raise ClusterError(
                f"a stage of {max(groups.sizes)} processes would send its collectives between machines in the clear",
                cause="neither gloo nor NCCL encrypts, and other connections between these machines are encrypted",
                remedy="hosts_per_stage=2 (or more) says that the network may be trusted; else a stage for each worker",
            )
        credentials = credentials_of(secret, identity)
        self.monitor = Monitor(credentials, options.listen, groups.num_processes)
        keys = None if identity is None else (identity.certificate, identity.key)
        known = self.programs if options.own_cache else None
        listen = "" if options.each_own else options.listen
        joined = ProcessGroups((groups.num_processes,)) if options.world else groups
        handshakes = [
            Handshake(
                p, secret, self.monitor.address, listen, options.cache or "", known, keys,
                rank=joined.rank(p), group_size=joined.sizes[joined.workers[p]], board=self.monitor.board,
            )
            for p in range(groups.num_processes)
        ]  # fmt: skip
        try:
            self.worker_group = launch(handshakes, layout.devices, layout.kinds)
        except BaseException:
            self.monitor.close()
            raise
        self._credentials = credentials
        self._lines: StepLines | None = None
        #: Number of the step that processes may be in; None where all have answered or were told to give it up.
        self._open_step: int | None = None
        #: Of a world the step that processes carry out though nobody takes its answers, and whether it never ends.
        self._left_step: tuple[int, bool] | None = None
        try:
            infos = [decode(a, WorkerInfo) for a in self.call("info", [()] * len(handshakes), options.load_s)]
            self.machines = tuple(i.machine for i in infos)
            self.addresses = {p: i.address for p, i in enumerate(infos)}
            if joined.num_processes > joined.num_workers:
                first = [infos[joined.members(w).start].coordinator for w in joined.workers]
                self.call("join", [(at, options.load_s) for at in first], options.load_s)
            self._open_lines()
        except BaseException:
            self.close()
            raise

    def load(self, function: Function) -> None:
        """Compiles the programs of a function, each on the worker of its stage, and connects the processes."""
        source, groups = function.source, self.groups
        loads = [
            tuple(p for p in function.exported if p.work.stage in source.stages(w)) for w in range(groups.num_workers)
        ]
        exchanges = planned_exchanges(source, groups) if self._options.world else (None,) * groups.num_workers
        layouts = {w: _layouts(loads[w], size) for w, size in enumerate(groups.sizes) if size > 1}
        messages = [
            encode(
                Load(
                    function.number, source.program.workers[w].instructions, loads[w], self.addresses, groups.sizes,
                    layouts, self._options.direct, function.x64, source.amp, exchanges[w],
                )
            )
            for w in range(groups.num_workers)
        ]  # fmt: skip
        for written in self.call("load", [(messages[w],) for w in groups.workers], self._options.load_s, source):
            self.programs.update(written)
        self.loaded.add(function.number)

    def unload(self, functions: Sequence[int]) -> None:
        """Frees the programs of functions."""
        loaded = [n for n in functions if n in self.loaded]
        if loaded:
            self.call("unload", [(loaded,)] * self.groups.num_processes, self._options.deadline_s)
            self.loaded.difference_update(loaded)

    def close(self) -> None:
        """Ends all processes; arrays on them are gone."""
        if self.monitor.ending():
            self.monitor.close()  # those that are to end do so by themselves
            time.sleep(_GRACE_S)
        self.worker_group.kill()
        if self._lines is not None:
            self._lines.close()
        self.monitor.close()

    def of_workers(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        limit_s: float,
        source: Pipelined | None = None,
        step: int = -1,
    ) -> list[list[Any]]:
        """Calls a method of the processes of every worker with the same arguments; their answers by worker."""
        by_process = self.call(method, [arguments[w] for w in self.groups.workers], limit_s, source, step)
        return [[by_process[p] for p in self.groups.members(w)] for w in range(self.groups.num_workers)]

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        limit_s: float,
        source: Pipelined | None = None,
        step: int = -1,
    ) -> list[Any]:
        """Calls a method of all processes.

        Args:
            method: of `WorkerHost`.
            arguments: for each process.
            limit_s: seconds that it may take.
            source: the pipeline that it is about, for the error.
            step: number of the step, for the error.

        Raises:
            WorkerLostError: one does not answer in time, or is gone.
            AutoparError: one failed by an error of its program.
        """
        # Steps come one after the other. Other threads call other methods meanwhile, as for checkpoints.
        is_step = method == "step"
        if self._left_step is not None and method != "settle":
            self._settle(*self._left_step)
        if is_step:
            self._abandon()
        caller = self._caller(method, arguments)
        if is_step:
            self._open_step = step
        tickets: dict[int, Any] = {}
        try:
            for p, a in enumerate(arguments):
                tickets[p] = caller.call(p, method, *a)
            answers, losses = self._answers(caller, method, tickets, limit_s)
        except BaseException:
            # Ctrl-C, or an argument that cannot be sent: some processes wait for what does not come.
            if is_step:
                self._abandon(some_wait=len(tickets) < len(arguments))
            raise
        if len(answers) == len(tickets):
            if is_step:
                self._open_step = None
            return [answers[p] for p in range(len(tickets))]
        # An answer that tells of the end of another may be faster than that end. In a group of several processes the
        # end of one is that of the others: the first is to blame.
        gone = [p for p in self.monitor.gone() if p not in answers]
        losses = {**dict.fromkeys(gone, Loss("its process ended", None)), **losses}
        silent = sorted(tickets.keys() - answers.keys() - losses.keys())
        last = {p: self.monitor.last(p) for p in tickets}
        try:
            raise lost_error(Scene(losses, silent, last, source, self.groups, limit_s), method, step)
        except WorkerLostError:
            raise
        except BaseException:
            # A program failed, and the processes live: what the others wait for does not come.
            self._abort(caller, method, step, {p: tickets[p] for p in silent})
            raise

    def _caller(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> WorkerGroup | StepLines:
        """Caller of a method: small steps go over the lines, which an interrupt may have closed."""
        if method != "step" or self._lines is None:
            return self.worker_group
        if self._lines.is_closed:
            self._open_lines()
        return self._lines if self._lines.takes(arguments) else self.worker_group

    def _open_lines(self) -> None:
        """Has all processes connect to the driver for steps; until they have, steps are calls of Ray."""
        if self.worker_group.has_lines:
            lines = self._lines = StepLines(self._credentials, self._options.listen)
            try:
                self.call("serve", [lines.address] * self.groups.num_processes, self._options.load_s)
            except BaseException:
                lines.close()
                raise

    def _abandon(self, *, some_wait: bool = False) -> None:
        """Tells all processes to give up the step that they may be in, whose answers nobody takes.

        The step stays open until all were told: whoever is interrupted here tells them before the next step. The
        programs of a world cannot be given up: its processes carry the step out, which the next call waits for.

        Args:
            some_wait: whether processes of a world wait for others that will not come.
        """
        if self._open_step is None:
            return
        if self._options.world:
            self._left_step = self._open_step, some_wait
        else:
            for process in range(self.groups.num_processes):
                self.worker_group.call(process, "abort", self._open_step)
        self._open_step = None

    def _settle(self, step: int, some_wait: bool) -> None:
        """Waits for the end of a step that was abandoned in a world. WorkerLostError where it has none."""
        limit_s = self._options.deadline_s
        asked = [(step, limit_s)] * self.groups.num_processes
        if some_wait or not all(self.call("settle", asked, limit_s)):
            raise WorkerLostError(
                f"processes wait in step {step} for others that did not begin it, or gave it up",
                cause="the driver was interrupted while it sent the step, or a program failed",
                remedy="recover=True starts workers again; transport='sockets' ends such a step and keeps the workers",
            )
        self._left_step = None

    def _answers(
        self, caller: WorkerGroup | StepLines, method: str, tickets: dict[int, Any], limit_s: float
    ) -> tuple[dict[int, Any], dict[int, Loss]]:
        """Answers and losses by process. Calls still pending when another has failed appear in neither."""
        answers: dict[int, Any] = {}
        losses: dict[int, Loss] = {}
        # Processes that wait for another one give up at the same limit: their answers say whom they waited for.
        until = time.monotonic() + limit_s + min(2.0, 0.5 * limit_s)
        while len(answers) + len(losses) < len(tickets) and time.monotonic() < until:
            unanswered = [p for p in tickets if p not in answers and p not in losses]
            for position, answer in caller.wait([tickets[p] for p in unanswered], 0.1).items():
                process = unanswered[position]
                failure = Failure(-1, "error", -1, answer.error) if answer.error and not answer.lost else None
                if method in _FALLIBLE and not answer.error:
                    failure = decode(answer.value[0], StepResult).failure
                if answer.lost or failure is not None:
                    losses[process] = Loss(answer.error if answer.lost else "", failure)
                else:
                    answers[process] = answer.value
            for process in sorted(set(self.monitor.gone()) & set(unanswered) - answers.keys() - losses.keys()):
                losses[process] = Loss("its process ended", None)
            for process in self.monitor.silent(self._options.silence_s):
                if process in unanswered and process not in answers and process not in losses:
                    losses[process] = Loss(f"nothing was heard of it for {self._options.silence_s:g} s", None)
            if losses:
                until = min(until, time.monotonic() + _GRACE_S)
        # A collective fails where another process of its group ended, which shows at once, or by a mistake.
        until = time.monotonic() + _COLLECTIVE_GRACE_S
        while any(x.is_collective for x in losses.values()) and not self.monitor.gone() and time.monotonic() < until:
            time.sleep(0.01)
        return answers, losses

    def _abort(self, caller: WorkerGroup | StepLines, method: str, step: int, tickets: dict[int, Any]) -> None:
        """Has all processes give up a step; waits for those of ``tickets``. WorkerLostError where they do not."""
        if method == "step":
            self._abandon(some_wait=bool(tickets))
            if self._options.world:
                return
        left = dict(tickets)
        until = time.monotonic() + _ABORT_S
        while left and time.monotonic() < until:
            unanswered = list(left)
            for position in caller.wait([left[p] for p in unanswered], 0.1):
                del left[unanswered[position]]
        if left:
            raise WorkerLostError(
                f"worker {self.groups.workers[min(left)]} did not give up step {step}, in which another worker failed",
                cause="its program does not end",
                worker=self.groups.workers[min(left)],
            )


def _layouts(programs: Sequence[ExportedProgram], processes: int) -> dict[str, ShardLayout]:
    """Layouts of values that the programs read, or else make, by name."""
    layouts: dict[str, ShardLayout] = {}
    for ports in ([(p, r) for p in programs for r in p.reads], [(p, r) for p in programs for r in p.results]):
        for program, port in ports:
            layouts.setdefault(port.name, ShardLayout(program.axes, port.dims, processes))
    return layouts
