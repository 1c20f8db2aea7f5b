"""The cause of a step that does not end: from the workers' answers, and from their last reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import AutoparError, WorkerLostError
from autopar.runtime.ray.messages import Failure
from autopar.runtime.ray.source import Pipelined, doing
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.schedule import Instruction, Recv, Send

_WHERE: Mapping[str, str] = MappingProxyType(
    {
        "info": "while it was starting", "join": "while it was starting",
        "serve": "while it was starting", "load": "while it was loading",
        "get": "while arrays were fetched", "put": "while arrays were sent", "make": "while arrays were made",
        "facts": "while it was starting", "measure": "while it measured its devices",
        "connect": "while it was connecting",
        "exchange": "while transfers between workers were measured",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """The failure of a call to a process.

    Args:
        error: why nothing came back; empty where something did.
        failure: what it answered.
    """

    error: str
    failure: Failure | None

    @property
    def is_collective(self) -> bool:
        """Whether a program of several processes failed."""
        return self.failure is not None and self.failure.kind == "collective"


@dataclass(frozen=True)
class Scene:
    """Facts about a call that did not succeed everywhere.

    Args:
        losses: processes that answered with an error, or that ended, the first one first.
        silent: processes that did not answer.
        last: what each process reported last.
        source: the pipeline; None of processes that have none.
        groups: the processes of its workers.
        limit_s: seconds that there were.
    """

    losses: Mapping[int, Loss]
    silent: Sequence[int]
    last: Mapping[int, tuple[int, int]]
    source: Pipelined | None
    groups: ProcessGroups
    limit_s: float

    def at(self, process: int, index: int | None = None) -> Instruction | None:
        """An instruction of a process; that which it reported last without an index."""
        if self.source is None:
            return None
        index_there = self.last[process][1] if index is None else index
        return self.source.instruction(self.groups.workers[process], index_there)

    def name(self, process: int) -> str:
        """Name of the process in messages."""
        worker = self.groups.workers[process]
        return f"worker {worker}" + (f", host {self.groups.rank(process)}" if self.groups.sizes[worker] > 1 else "")


def who_is_lost(scene: Scene) -> tuple[int, str]:
    """The process that is the reason, and why.

    Raises:
        AutoparError: one failed by an error of its program, which would come again.
    """
    losses, limit_s = scene.losses, scene.limit_s
    for process, loss in losses.items():
        if loss.error:
            return process, loss.error
    for process, loss in sorted(losses.items()):
        if loss.failure is not None and loss.failure.kind in ("error", "collective"):
            at, _ = doing(scene.at(process, loss.failure.index))
            smaller = "a smaller batch or more microbatches" if scene.source else "smaller sizes in Effort"
            raise AutoparError(
                f"{scene.name(process)} failed at {at or 'its beginning'}: {loss.failure.text}",
                cause="the program needs more memory than there is, or autopar has a mistake",
                remedy=f"{smaller}; else report it",
            )
    # In a world whoever sends waits for the receiver; elsewhere no process reports that it sends.
    stuck = [p for p in scene.silent if not isinstance(scene.at(p), Recv | Send)]
    for process in (*stuck, *scene.silent):
        return process, f"it did not answer within {limit_s:g} s"
    by_process = sorted(losses.items())
    for process, loss in by_process:
        if loss.failure is not None and loss.failure.kind == "broken":
            return (loss.failure.peer if loss.failure.peer >= 0 else process), "its connections broke"
    # All answered that they waited in vain: the one that others wait for and that computes is slow.
    awaited = {loss.failure.peer for _, loss in by_process if loss.failure is not None}
    slow = sorted(p for p in awaited if not isinstance(scene.at(p), Recv)) or sorted(awaited)
    return slow[0], f"others waited for it for {limit_s:g} s"


def lost_error(scene: Scene, method: str, step: int) -> WorkerLostError:
    """The error for people.

    Args:
        scene: what is known.
        method: what the processes were to do.
        step: number of the step.

    Raises:
        AutoparError: a worker failed by an error of its program, which would come again.
    """
    process, reason = who_is_lost(scene)
    worker = scene.groups.workers[process]
    stages = scene.source.stages(worker) if scene.source else ()
    names = f" (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})" if stages else ""
    text, microbatch = doing(scene.at(process)) if method == "step" else (None, None)
    where = _WHERE.get(method, f"in step {step}")
    if text is not None:
        where += f" at {text}"
        if microbatch is not None and "microbatch" not in text:
            where += f" (microbatch {microbatch})"
    remedy_again = (
        "recover=True starts lost workers again" if scene.source else "calibrate again with the workers that are left"
    )
    return WorkerLostError(
        f"{scene.name(process)}{names} was lost {where}: {reason}",
        cause="its process was killed, ran out of memory, or its machine is gone",
        remedy=f"{remedy_again}; a longer deadline_s gives slow ones more time",
        worker=worker,
        stages=stages,
        instruction=text,
        microbatch=microbatch,
    )


def given_up(error: WorkerLostError, why: str) -> WorkerLostError:
    """``error`` of an operation that is not tried again, with the reason."""
    return WorkerLostError(
        f"{error.fact}; {why}",
        cause=error.cause,
        remedy="the arrays of the last copy are kept, and the next call tries again; look at the logs of the workers",
        worker=error.worker,
        stages=error.stages,
        instruction=error.instruction,
        microbatch=error.microbatch,
    )
