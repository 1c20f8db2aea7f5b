"""`Driver`: all arrays and functions of a cluster, on one group of workers that is replaced as a whole when it is lost.

Operations come one after the other, whichever threads ask for them. How losses are answered is decided by
`autopar.runtime.ray.recovery`; which arrays there are is in `autopar.runtime.ray.ledger`. `WorkerWatch` looks after
workers while nobody calls them: what is lost then is reported at once.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError, ClusterError, WorkerLostError
from autopar.runtime.ray.beacon import HEARTBEAT_S
from autopar.runtime.ray.calls import fetch_arrays, hold_arrays, host_bytes, lost_array, read_arrays, run_step
from autopar.runtime.ray.deployment import Deployment, Function, Launcher, Nodes, Replanner
from autopar.runtime.ray.ledger import Ledger
from autopar.runtime.ray.lost import given_up
from autopar.runtime.ray.metrics import Metrics, record
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.recovery import (
    End,
    Event,
    Finish,
    GiveUp,
    Instruction,
    Launch,
    Lost,
    Operate,
    Recovery,
    RecoveryPlace,
    Replay,
    Requested,
    Succeeded,
)
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.values import ArrayOwner, RemoteArray, Writing
from autopar.runtime.shards import Leaf

_T = TypeVar("_T")
#: Seconds between two looks at whether there is a machine.
_POLL_S = 0.5
#: Heartbeats that may be missed before a process counts as not heard of.
_MISSED = 3


class Driver(ArrayOwner):
    """The driver of a cluster.

    Args:
        launch: starts processes.
        options: timeouts, recovery and transport of runs.
        room: how many nodes of each kind there are now; None where that does not change.
    """

    def __init__(self, launch: Launcher, options: RunOptions, room: Callable[[], Nodes] | None = None) -> None:
        self.options = options
        self.ledger = Ledger()
        self.recoveries = 0
        self.metrics = Metrics()
        self.lock = threading.RLock()
        self._launch = launch
        self.room = room
        self._functions: dict[int, Function] = {}
        self._dropped: deque[int] = deque()
        self._dropping: set[int] = set()
        self._session: Session | None = None
        self._nodes: Nodes | None = None
        self._programs: Mapping[str, str] = {}
        self._checked_at_s = 0.0
        self._closed = False
        self._was_asked_to_end = False
        self._has_run = False
        self._watch = WorkerWatch(self, lambda driver: driver._session, self.metrics)

    # -- life ----------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The workers' processes. AutoparError where none run."""
        if self._session is None:
            raise AutoparError("the cluster has no workers", cause="none were started yet", remedy="run a step")
        return self._session

    @property
    def is_ending(self) -> bool:
        """Whether a worker was asked to end (SIGTERM), now or before it was replaced."""
        session = self._session
        return self._was_asked_to_end or (session is not None and bool(session.monitor.ending()))

    def close(self) -> None:
        """Ends the workers for good; arrays on them are gone, and handles to them are errors."""
        self._closed = True
        self._watch.close()
        # Not under the lock: what waits for the workers ends with them.
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def end_session(self) -> None:
        """Ends the workers; what is in the driver's memory can be had again."""
        session, self._session = self._session, None
        self.ledger.workers_lost()
        if session is not None:
            self._programs = session.programs
            session.close()

    def check(self, array: RemoteArray) -> None:
        """Raises ClusterError where an array is not one of this cluster, or of a closed one."""
        if array.owner is not self:
            raise ClusterError(
                f"{array!r} is a handle of another cluster",
                cause="handles stand for arrays on the workers of the cluster that made them",
                remedy="fetch it with np.asarray(...) first, or use one Cluster.ray(...) for both functions",
            )
        self.check_open()

    def check_open(self) -> None:
        """Raises ClusterError where the cluster was closed."""
        if self._closed:
            raise ClusterError(
                "the cluster was closed, and what lay on its workers is gone",
                cause="`with` was left, or close() was called",
                remedy="fetch arrays or write a checkpoint before",
            )

    # -- functions -----------------------------------------------------------------------------

    def add(
        self,
        deployment: Deployment,
        replanner: weakref.ref[Replanner] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Function:
        """A function that the workers are to run; they load it when it is first called.

        Args:
            deployment: what runs, and where.
            replanner: plans for fewer nodes when some are lost; None where the function has one deployment.
            progress: called with a line of text for each thing that is done.
        """
        with self.lock:
            x64 = bool(jax.config.read("jax_enable_x64"))
            number = max(self._functions, default=0) + 1
            say = progress or (lambda text: None)
            function = Function(number, deployment, replanner, self.options.platform, x64, say)
            self._functions[number] = function
            return function

    def drop(self, number: int) -> None:
        """Nobody calls a function any more; may be called at any moment, workers forget it with the next operation."""
        self._dropped.append(number)

    def _forget_functions(self) -> None:
        while self._dropped:
            self._dropping.add(self._dropped.popleft())
        if not self._dropping:
            return
        if not self._dropping.isdisjoint(c.function for c in self.ledger.log):
            self._copy()
        for number in sorted(self._dropping):
            self._functions.pop(number, None)
        if self._session is not None:
            self._session.unload(sorted(self._dropping))
        self._dropping.clear()

    # -- operations ----------------------------------------------------------------------------

    def perform(self, function: Function | None, work: Callable[[], _T], step: int = -1) -> _T:
        """The result of ``work``, which is called once workers exist and have loaded the function.

        With ``recover``, workers that are lost are replaced and it is called again.

        Args:
            function: that the workers need; None where they need none.
            work: calls workers.
            step: number of the step that it runs; -1 where it runs none.

        Raises:
            ClusterError: the cluster was closed, or workers do not start.
            WorkerLostError: workers were lost, and recovery is off or did not help.
        """
        with self.lock:
            self.check_open()
            self._prepare(function)
            machine = Recovery(self.options.retry)
            outcomes: list[_T] = []
            event: Event = Requested(self._session is not None, self.ledger.pending)
            while not isinstance(instruction := machine.handle(event), Finish):
                self.check_open()
                at = self.ledger.log[self.ledger.position].number if isinstance(instruction, Replay) else step
                try:
                    if isinstance(instruction, Operate):
                        self._ensure(function)
                        outcomes.append(work())
                    else:
                        self._carry_out(instruction, function, machine.losses)
                    event = Succeeded(self.ledger.pending)
                except WorkerLostError as error:
                    if isinstance(instruction, GiveUp):
                        raise
                    record("loss", error.fact, logging.WARNING, worker=error.worker, step=at)
                    place = RecoveryPlace(type(instruction).__name__.lower(), at, error.worker, error.instruction)
                    event = Lost(error, place)
            return outcomes[-1]

    def _prepare(self, function: Function | None) -> None:
        """Before an operation: functions nobody calls go, workers that are to end too, nodes that came back join."""
        try:
            self._forget_functions()
            ending = self._session.monitor.ending() if self._session is not None else ()
            if ending and self.options.recover:
                self._was_asked_to_end = True
                record("drain", "a worker is to end; starting others with what was copied", processes=ending)
                self._copy()
                self.end_session()
            elif function is not None and self._has_grown(function):
                function.progress("nodes came back; starting workers on all of them")
                record("growth", "nodes came back; starting workers on all of them")
                self._copy()
                self.end_session()
        except WorkerLostError:
            self.end_session()

    def _carry_out(self, instruction: Instruction, function: Function | None, losses: int) -> None:
        match instruction:
            case Launch():
                self._start(function, restarts=losses > 0)
            case Replay():
                call = self.ledger.log[self.ledger.position]
                repeated = self._functions[call.function]
                self._ensure(repeated)
                run_step(self.session, self.ledger, repeated, call, self.options)
                self.ledger.replayed()
            case End(wait_s=wait_s):
                self.recoveries += 1
                self.metrics.recoveries.inc()
                text = f"workers were lost, all are started again (recovery {self.recoveries})"
                record("recovery", text, logging.WARNING, recoveries=self.recoveries, wait_s=wait_s)
                self.end_session()
                time.sleep(wait_s)
            case GiveUp(error=error, why=why):
                self.end_session()
                raise error if not why else given_up(error, why)

    def _start(self, function: Function | None, restarts: bool) -> None:
        """Starts workers on the nodes that there are."""
        wanted = function or self._any_function()
        self._nodes = self._nodes_there(wanted)
        self._checked_at_s = time.monotonic()
        wanted.fit(self._nodes)
        layout = wanted.deployment.layout
        text = f"starting {layout.groups.num_processes} processes of {layout.groups.num_workers} workers"
        record("start", text, processes=layout.groups.num_processes, workers=layout.groups.num_workers)
        wanted.progress(text)
        try:
            self._session = Session(layout, self._launch, self.options, self._programs)
            self._has_run = True
        except ClusterError as error:
            if not restarts and not (self._has_run and self.options.recover):
                raise
            # A machine that is gone may be counted for a while. It is a loss of the workers that were to be there.
            raise WorkerLostError(error.fact, cause=error.cause, remedy=error.remedy) from error

    def _nodes_there(self, wanted: Function) -> Nodes | None:
        """The nodes that there are; waits for one where there are none. None where that does not change."""
        if self.room is None or not self.options.recover:
            return None
        nodes, until = self.room(), time.monotonic() + self.options.start_s
        if not any(nodes):
            text = f"no machine is there; waiting up to {self.options.start_s:g} s for one (start_s)"
            record("no nodes", text, logging.WARNING, start_s=self.options.start_s)
            wanted.progress(text)
        while not any(nodes) and time.monotonic() < until:
            self.check_open()
            time.sleep(min(_POLL_S, self.options.start_s))
            nodes = self.room()
        return nodes

    def _any_function(self) -> Function:
        log = self.ledger.log
        number = log[self.ledger.position].function if self.ledger.pending else max(self._functions, default=0)
        if number not in self._functions:
            raise AutoparError("the cluster has no functions", remedy="keep the function whose results are asked for")
        return self._functions[number]

    def _ensure(self, function: Function | None) -> None:
        """The workers are grouped as a function wants it, and have loaded it."""
        if function is None:
            return
        function.fit(self._nodes)
        if self.session.layout != function.deployment.layout:
            function.progress("grouping the workers' processes in another way")
            self._copy()
            self.end_session()
            self._start(function, restarts=True)
        if function.number not in self.session.loaded:
            function.progress("compiling")
            self.session.load(function)
            function.progress("ready")

    def _has_grown(self, function: Function) -> bool:
        """Whether there are nodes again that were lost."""
        if not self.options.recover or self._session is None or self._nodes is None or self.room is None:
            return False
        due = time.monotonic() - self._checked_at_s >= self.options.growth_check_s
        now = function.at_most(self._nodes)
        if now == function.nodes or not due:
            return False
        self._checked_at_s = time.monotonic()
        return any(a > b for a, b in zip(function.at_most(self.room()), now, strict=True))

    # -- arrays --------------------------------------------------------------------------------

    def handle(self, id: int, shape: tuple[int, ...], dtype: Any, placement: str = "") -> RemoteArray:
        """A handle to an array; the array is kept as long as there is one."""
        self.ledger.keep(id)
        where = placement or _workers_text(self.ledger.holders.get(id, ()))
        return RemoteArray(id, shape, dtype, where, self, self.ledger.release)

    def copy_if_due(self) -> None:
        """Copies what lies on workers where enough steps were run since the last copy; workers may be lost."""
        if self.options.recover and len(self.ledger.log) >= self.options.copy_every:
            self.perform(None, self._copy)

    def copy(self, ids: Iterable[int]) -> None:
        """Copies arrays to the driver if ``recover`` is set: replaying logged calls cannot make them again."""
        if self.options.recover:
            self.ledger.copies.update(self._fetch(ids))

    def _copy(self) -> None:
        """Copies what lies on the workers and is needed; steps before are not run again."""
        if self._session is not None:
            self.ledger.copied(self._fetch(self.ledger.needed()))

    def fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        """Copies of arrays on the host, by number. WorkerLostError where they are lost."""
        wanted = list(ids)
        with self.lock:
            self.check_open()
            if not all(map(self.ledger.can_be_had, wanted)):
                raise lost_array()
            if not any(id in self.ledger.holders for id in wanted) and all(id in self.ledger.copies for id in wanted):
                return {id: self.ledger.copies[id] for id in wanted}
            return self.perform(None, lambda: self._fetch(wanted))

    def _fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        arrays = fetch_arrays(self.session, self.ledger, ids, self.options)
        self.metrics.copied_bytes.inc(sum(host_bytes(a) for a in arrays.values()))
        return arrays

    def has(self, id: int) -> bool:
        """Whether the array of a handle's number is still on workers; False once it was given up or lost."""
        return self._session is not None and bool(self.ledger.holders.get(id))

    def hold(self, names: Mapping[int, str]) -> Writing:
        """Keeps arrays for a checkpoint. WorkerLostError where workers are lost."""
        return self.perform(None, lambda: hold_arrays(self.session, self.ledger, names, self.options))

    def read(self, folder: Path, leaves: Mapping[int, Leaf]) -> dict[int, RemoteArray]:
        """Reads arrays of a checkpoint, each process those of its devices. WorkerLostError where workers are lost."""

        def work() -> dict[int, RemoteArray]:
            ids = read_arrays(self.session, self.ledger, folder, leaves, self.options)
            self.copy(ids.values())
            return {like: self._handle_of(id, leaves[like]) for like, id in ids.items()}

        return self.perform(None, work)

    def _handle_of(self, id: int, leaf: Leaf) -> RemoteArray:
        shape = leaf.shape[:-1] if leaf.key else leaf.shape
        dtype = jax.random.key(0, impl=leaf.key).dtype if leaf.key else jnp.dtype(leaf.dtype)
        return self.handle(id, shape, dtype)


def _workers_text(held: Iterable[int]) -> str:
    workers: Sequence[int] = sorted(held)
    return ("workers " if len(workers) > 1 else "worker ") + " and ".join(map(str, workers))


class WorkerWatch:
    """A thread that logs worker processes that ended, fell silent or were told to end, and counts the others.

    Args:
        owner: the driver; the thread ends with it.
        session: gives the owner's current session of workers, or None.
        metrics: the gauges that the thread sets.
        every_s: seconds between two checks.
    """

    def __init__(
        self, owner: Any, session: Callable[[Any], Session | None], metrics: Metrics, every_s: float = HEARTBEAT_S
    ) -> None:
        self._owner = weakref.ref(owner)
        self._session = session
        self._metrics = metrics
        self._every_s = every_s
        self._over = threading.Event()
        self._seen: tuple[Session | None, set[tuple[str, int]]] = (None, set())
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            owner = self._owner()
            if owner is None:
                return
            self.check(self._session(owner))
            del owner

    def check(self, session: Session | None) -> None:
        """Tells of processes that ended, that are to end, or of which nothing is heard, each once."""
        if session is None:
            self._metrics.processes.set(0)
            return
        if self._seen[0] is not session:
            self._seen = (session, set())
        monitor, count = session.monitor, session.groups.num_processes
        gone, silent = monitor.gone(), monitor.silent(_MISSED * self._every_s)
        self._metrics.processes.set(count - len({*gone, *silent}))
        for event, processes, text in (
            ("worker gone", gone, "ended"),
            ("worker silent", silent, f"was not heard of for {_MISSED * self._every_s:g} s"),
            ("worker ending", monitor.ending(), "was asked to end (SIGTERM)"),
        ):
            for process in processes:
                if (event, process) not in self._seen[1]:
                    self._seen[1].add((event, process))
                    worker = session.groups.workers[process]
                    text_of = f"process {process} of worker {worker} {text}"
                    record(event, text_of, logging.WARNING, process=process, worker=worker)
