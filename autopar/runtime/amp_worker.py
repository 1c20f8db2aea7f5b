"""AMPNet on one worker of several: its stage takes what has arrived from the others, over a link.

What another stage sends comes in the order in which it was sent, so that the receiver knows each value without a
name. Each stage counts its own keys under way, which bounds how old its gradients are (see `autopar.schedule.ampnet`).
Where backward passes go through all stages, the keys of stage 0 are those of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from jax.sharding import NamedSharding

from autopar.errors import ScheduleError
from autopar.runtime.amp_stage import AmpStage, choice
from autopar.runtime.transport.base import WorkerLink
from autopar.schedule import Buffer, Kind
from autopar.schedule.ampnet import AmpFlow

#: Letters of passes in the text of an order.
LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B"}
#: Passes by their letters.
KINDS: Mapping[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


def expected(flow: AmpFlow, stage: int) -> dict[int, deque[Buffer]]:
    """Buffers of a call that come from each stage, in order.

    Args:
        flow: what is carried out.
        stage: that receives.

    Raises:
        ScheduleError: another stage sends in its forward and in its backward passes: their order is made while they
            run.
    """
    came: dict[int, deque[Buffer]] = {}
    for source in range(flow.stages):
        by_kind = {kind: _sent(flow, kind, source, stage) for kind in LETTERS if source != stage}
        kinds = [kind for kind, names in by_kind.items() if names]
        if len(kinds) > 1:
            raise ScheduleError(
                f"stage {source} sends {by_kind['forward'][0]} to stage {stage} in forward passes and "
                f"{by_kind['backward'][0]} in backward passes",
                cause="AMPNet on workers of their own makes the order of passes while it runs",
                remedy="run it in one process, or use schedule='pipedream'",
            )
        for kind in kinds:
            came[source] = deque(Buffer(n, key) for key in range(flow.microbatches) for n in by_kind[kind])
    return came


def check_workers(flow: AmpFlow) -> None:
    """Raises ScheduleError where stages on workers of their own could not know what comes; see `expected`."""
    for stage in range(flow.stages):
        expected(flow, stage)


def run_stage(
    stage: AmpStage,
    link: WorkerLink,
    placements: Mapping[str, NamedSharding],
    before: Callable[[int], None],
    order: str = "",
) -> str:
    """Runs a call of one stage.

    Args:
        stage: with its inputs.
        link: to the other stages.
        placements: how values that come from them are to lie, by name.
        before: called with the number of passes so far before each.
        order: letters of passes in the order that they are to have; empty takes what arrives, backward passes first.

    Returns:
        The order that they had.

    Raises:
        ScheduleError: the order is of other numbers.
        PeerLostError, SilentPeerError: see `WorkerLink.receive`.
    """
    coming, flow = expected(stage.flow, stage.number), stage.flow
    numbers = {letter: order.count(letter) for letter in KINDS}
    if order and (len(order) != 2 * flow.microbatches or set(numbers.values()) != {flow.microbatches}):
        raise ScheduleError(f"the order has passes {numbers}; stage {stage.number} has {flow.microbatches} of each")
    while stage.done < flow.microbatches:
        for source, buffers in coming.items():
            while buffers and link.ready(source):
                _take(stage, link, placements, source, buffers)
        kind = _next(stage, order)
        if kind is None:
            source = link.wait_any([s for s, buffers in coming.items() if buffers])
            _take(stage, link, placements, source, coming[source])
            continue
        before(len(stage.passes))
        for to, buffer, array in stage.run(kind):
            link.send(to, buffer.microbatch, array, buffer.value)
        stage.count(kind)
    stage.finish()
    return "".join(LETTERS[task.kind] for task in stage.passes)


def _next(stage: AmpStage, order: str) -> Kind | None:
    if not order:
        return choice(stage.flow, [stage], stage)
    kind = KINDS[order[len(stage.passes)]]
    return kind if stage.has(kind) else None


def _take(
    stage: AmpStage,
    link: WorkerLink,
    placements: Mapping[str, NamedSharding],
    source: int,
    buffers: deque[Buffer],
) -> None:
    buffer = buffers.popleft()
    stage.inbox[buffer] = link.receive(source, buffer.microbatch, placements.get(buffer.value))


def _sent(flow: AmpFlow, kind: str, source: int, stage: int) -> list[str]:
    """Values of a microbatch that a pass of a stage sends to another, in order."""
    spec = flow.spec(kind, source)
    readers = flow.dataflow.readers
    return [n for n in spec.writes if any(w.stage == stage for w in readers.get(n, ()))] if spec else []
