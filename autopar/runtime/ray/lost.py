"""Who is to blame when a step does not end: from what the workers answered, and what they reported last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError, WorkerLostError
from autopar.runtime.ray.messages import Failure
from autopar.runtime.ray.source import Pipelined, doing
from autopar.schedule import Recv


@dataclass(frozen=True)
class Loss:
    """What came of a call to a worker that did not do what it was to.

    Args:
        error: why nothing came back; empty where something did.
        failure: what it answered.
    """

    error: str
    failure: Failure | None


def who_is_lost(
    losses: Mapping[int, Loss], silent: Sequence[int], last: Mapping[int, tuple[int, int]], source: Pipelined,
    limit_s: float,
) -> tuple[int, str]:  # fmt: skip
    """The worker that is the reason, and why.

    Args:
        losses: workers that answered with an error, or whose process ended.
        silent: workers that did not answer.
        last: what each worker reported last.
        source: the pipeline.
        limit_s: seconds that there were.

    Raises:
        AutoparError: a worker failed by an error of its program, which would come again.
    """
    for worker, loss in sorted(losses.items()):
        if loss.error:
            return worker, loss.error
    for worker, loss in sorted(losses.items()):
        if loss.failure is not None and loss.failure.kind == "error":
            at, _ = doing(source.instruction(worker, loss.failure.index))
            raise AutoparError(
                f"worker {worker} failed at {at or 'its beginning'}: {loss.failure.text}",
                cause="the program needs more memory than there is, or autopar has a mistake",
                remedy="a smaller batch or more microbatches; else report it",
            )
    stuck = [w for w in silent if not isinstance(source.instruction(w, last[w][1]), Recv)]
    for worker in (*stuck, *silent):
        return worker, f"it did not answer within {limit_s:g} s"
    waiting = sorted(losses.items())
    for _, loss in waiting:
        if loss.failure is not None and loss.failure.kind == "broken":
            return loss.failure.peer, "its connections broke"
    # All answered that they waited in vain: the one that others wait for and that computes is slow.
    peers = {loss.failure.peer for _, loss in waiting if loss.failure is not None}
    slow = sorted(p for p in peers if not isinstance(source.instruction(p, last[p][1]), Recv)) or sorted(peers)
    return slow[0], f"others waited for it for {limit_s:g} s"


def lost_error(worker: int, reason: str, method: str, last: tuple[int, int], source: Pipelined) -> WorkerLostError:
    """The error for people.

    Args:
        worker: who is lost.
        reason: why.
        method: what it was to do.
        last: (step, instruction) that it reported last.
        source: the pipeline.
    """
    stages = source.stages(worker)
    names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    step, index = last
    text, microbatch = doing(source.instruction(worker, index)) if method == "step" else (None, None)
    where = {"load": "while it was loading", "get": "while arrays were fetched", "put": "while arrays were sent"}.get(
        method, f"in step {step}"
    )
    if text is not None:
        where += f" at {text}"
        if microbatch is not None and "microbatch" not in text:
            where += f" (microbatch {microbatch})"
    return WorkerLostError(
        f"worker {worker} ({names}) was lost {where}: {reason}",
        cause="its process was killed, ran out of memory, or its machine is gone",
        remedy="recover=True starts lost workers again; a longer deadline_s gives slow ones more time",
        worker=worker,
        stages=stages,
        instruction=text,
        microbatch=microbatch,
    )
